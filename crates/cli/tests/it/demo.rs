//! demo: what a newcomer sees first.

use rustix::process::Signal;

use crate::harness::{Home, address_in, http};

#[test]
fn a_contact_is_created_and_its_event_arrives() {
    let home = Home::new();
    let demo = home.start(&["demo", "--listen", "127.0.0.1:0"]);
    let address = address_in(&demo.line_with("http://"));
    // The body of the curl line that it prints, so that a newcomer's first try works.
    let curl = demo.line_with("-d '");
    let body = curl.split('\'').nth(1).expect("a body in quotes");
    let (status, answer) = http(address, "POST /api/contacts", body);
    assert_eq!(status, 201, "{answer}");
    demo.line_with("ContactCreatedEvent");
    let folder = demo
        .seen()
        .lines()
        .find_map(|line| line.trim().strip_prefix("data").map(|rest| rest.trim().to_owned()))
        .expect("the data folder is told");
    demo.signal(Signal::INT);
    assert_eq!(demo.ended(), Some(0));
    assert!(!std::path::Path::new(&folder).exists(), "the temporary folder is removed");
}

#[test]
fn a_given_folder_is_kept_and_can_be_looked_into() {
    let home = Home::new();
    let demo = home.start(&["demo", "--listen", "127.0.0.1:0", "--data", "kept"]);
    let address = address_in(&demo.line_with("http://"));
    let contact = r#"{"firstName":"Ada","lastName":"Lovelace","companyName":"Engines"}"#;
    assert_eq!(http(address, "POST /api/contacts", contact).0, 201);
    demo.line_with("ContactCreatedEvent");
    demo.signal(Signal::TERM);
    assert_eq!(demo.ended(), Some(0));
    let tail = ["tail", "--source", "kept/contacts.db", "--from", "oldest", "--no-follow"];
    assert!(home.postrider(&tail).expect(0).out.contains("ContactCreatedEvent"));
}

#[test]
fn a_taken_port_is_an_error_when_it_was_asked_for() {
    let home = Home::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("bound");
    let address = taken.local_addr().expect("bound").to_string();
    home.postrider(&["demo", "--listen", &address]).expect(1).err_has(&["listen on 127.0.0.1:"]);
}

#[test]
fn two_demos_side_by_side_find_a_port_each() {
    let home = Home::new();
    let first = home.start(&["demo", "--json"]);
    let second = home.start(&["demo", "--json"]);
    let addresses = [&first, &second].map(|demo| address_in(&demo.line_with("\"url\"")));
    assert_ne!(addresses[0], addresses[1]);
    for (demo, address) in [first, second].into_iter().zip(addresses) {
        assert_eq!(http(address, "GET /healthz", "").0, 200);
        demo.signal(Signal::INT);
        assert_eq!(demo.ended(), Some(0));
    }
}

/// Contacts, relay, the local Service Bus and receivers of its sessions, all in one process.
#[test]
fn events_go_through_sessions_exactly_once_and_in_order() {
    let home = Home::new();
    let demo = home.start(&["--json", "demo", "--servicebus", "--listen", "127.0.0.1:0"]);
    let greeting = demo.line_with("\"url\"");
    let greeting: serde_json::Value = serde_json::from_str(&greeting).expect("JSON");
    let address = address_in(greeting["url"].as_str().expect("a URL"));
    let created: Vec<String> = (0..4)
        .map(|n| {
            let contact = format!(
                r#"{{"firstName":"Ada {n}","lastName":"Lovelace","companyName":"Engines"}}"#
            );
            let (status, answer) = http(address, "POST /api/contacts", &contact);
            assert_eq!(status, 201, "{answer}");
            // A contact's id is the key of its events, and so its session.
            let arrived = demo.line_with("\"number\":1");
            let arrived: serde_json::Value = serde_json::from_str(&arrived).expect("JSON");
            arrived["contact"].as_str().expect("a contact").to_owned()
        })
        .collect();
    for turn in 0..5 {
        for id in &created {
            let name = format!(r#"{{"firstName":"Ada {turn}","lastName":"King"}}"#);
            let request = format!("POST /api/contacts/{id}/update-name");
            let (status, answer) = http(address, &request, &name);
            assert_eq!(status, 204, "{answer}");
        }
    }
    // Stopped amid deliveries: the rest is received before the end.
    demo.line_with("\"number\":3");
    demo.signal(Signal::TERM);
    let verdict = demo.line_with("exactlyOnceInOrder");
    let verdict: serde_json::Value = serde_json::from_str(&verdict).expect("JSON");
    assert_eq!(verdict["contacts"], 4);
    let seen = demo.seen();
    assert_eq!(demo.ended(), Some(0));
    let mut told = std::collections::BTreeMap::<String, Vec<u64>>::new();
    for line in seen.lines().filter(|line| line.contains("\"number\"")) {
        let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
        let contact = line["contact"].as_str().expect("a contact").to_owned();
        told.entry(contact).or_default().push(line["number"].as_u64().expect("a number"));
    }
    assert!(created.iter().all(|id| told.contains_key(id)), "{told:?}");
    let received = told.values().map(Vec::len).sum::<usize>();
    assert_eq!(verdict["received"], received);
    for numbers in told.values() {
        assert_eq!(*numbers, (1..=numbers.len() as u64).collect::<Vec<_>>());
    }
}

#[test]
fn the_demonstration_of_the_bus_speaks_to_people() {
    let home = Home::new();
    let demo = home.start(&["demo", "--servicebus", "--listen", "127.0.0.1:0"]);
    let address = address_in(&demo.line_with("http://"));
    assert!(demo.line_with("bus ").contains("UseDevelopmentEmulator=true"));
    let contact = r#"{"firstName":"Ada","lastName":"Lovelace","companyName":"Engines"}"#;
    assert_eq!(http(address, "POST /api/contacts", contact).0, 201);
    demo.line_with("number 1");
    demo.signal(Signal::INT);
    demo.line_with("each exactly once");
    assert_eq!(demo.ended(), Some(0));
}
