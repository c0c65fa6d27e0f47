//! run: deliver, drain, replay, and who reads.

use rustix::process::Signal;

use crate::harness::{Home, eventually};

const CONFIG: &str = "[source]\nkind = \"sqlite\"\nurl = \"app.db\"\n\n\
                      [[sink]]\nkind = \"jsonl\"\npath = \"events.jsonl\"\n\n\
                      [admin]\nlisten = \"off\"\n";

fn lines(home: &Home) -> Vec<String> {
    let text = std::fs::read_to_string(home.path("events.jsonl")).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

fn deliver(home: &Home, count: usize) {
    let relay = home.start(&["run"]);
    eventually("everything is delivered", || (lines(home).len() >= count).then_some(()));
    relay.signal(Signal::TERM);
    assert_eq!(relay.ended(), Some(0));
}

#[test]
fn sigterm_drains_and_a_second_run_repeats_nothing() {
    let home = Home::with_outbox();
    home.write("postrider.toml", CONFIG);
    let events: Vec<_> =
        (0..500).map(|i| (format!("key-{}", i % 20), format!("Type{i}"))).collect();
    let events: Vec<_> = events.iter().map(|(k, t)| (k.as_str(), t.as_str())).collect();
    home.append(&events);
    deliver(&home, 500);
    home.append(&[("key-1", "Last")]);
    deliver(&home, 501);
    let lines = lines(&home);
    assert_eq!(lines.len(), 501, "a drained relay repeats nothing");
    assert!(lines[500].contains("Last"), "{}", lines[500]);

    let status = home.postrider(&["status", "--json"]).expect(0).json();
    let sink = &status["consumers"][0];
    assert_eq!((&sink["published"], &sink["pending"]), (&501.into(), &0.into()));
    assert_eq!(sink["appended"], 501);
    let held = status["partitions"].as_array().expect("a list").iter();
    for partition in held {
        assert_eq!(partition["lease"]["remainingMs"], 0, "leases are released: {partition}");
    }
}

#[cfg(feature = "webhook")]
#[test]
fn a_second_signal_ends_a_drain_that_hangs() {
    let home = Home::with_outbox();
    // Takes connections and never answers.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("bound");
    let address = silent.local_addr().expect("bound");
    home.write(
        "postrider.toml",
        format!(
            "[source]\nkind = \"sqlite\"\nurl = \"app.db\"\n\n[[sink]]\nkind = \"webhook\"\n\
             url = \"http://{address}/\"\nallow_private = true\nunsigned = true\n\
             timeout_ms = 600000\npublish_timeout = \"15m\"\n\n[relay]\n\
             drain_timeout = \"10m\"\n\n[admin]\nlisten = \"off\"\n"
        ),
    );
    home.append(&[("a", "First")]);
    let relay = home.start(&["run"]);
    // The first connection is the start's check or the delivery; both have begun after two.
    let first = silent.accept().expect("connected");
    let second = silent.accept().expect("connected");
    relay.signal(Signal::TERM);
    relay.line_with("stopping");
    relay.signal(Signal::INT);
    assert_eq!(relay.ended(), Some(130));
    drop((first, second));
    // Its fate is unknown, so it stays to be delivered.
    let status = home.postrider(&["status", "--json"]).expect(0).json();
    let sinks = status["consumers"].as_array().expect("a list");
    assert!(sinks.iter().all(|sink| sink["published"] == 0), "{sinks:?}");
}

/// `timeout` and some supervisors signal the process and its group: that is one wish, not two.
#[cfg(feature = "webhook")]
#[test]
fn a_signal_that_arrives_twice_at_once_still_drains() {
    let home = Home::with_outbox();
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("bound");
    let address = silent.local_addr().expect("bound");
    home.write(
        "postrider.toml",
        format!(
            "[source]\nkind = \"sqlite\"\nurl = \"app.db\"\n\n[[sink]]\nkind = \"webhook\"\n\
             url = \"http://{address}/\"\nallow_private = true\nunsigned = true\n\n[relay]\n\
             drain_timeout = \"1s\"\n\n[admin]\nlisten = \"off\"\n"
        ),
    );
    home.append(&[("a", "First")]);
    let relay = home.start(&["run"]);
    let held = (silent.accept().expect("connected"), silent.accept().expect("connected"));
    relay.signal(Signal::TERM);
    relay.line_with("stopping");
    relay.signal(Signal::TERM);
    assert_eq!(relay.ended(), Some(0), "it drained for as long as it may");
    drop(held);
}

#[test]
fn log_lines_are_json_for_programs_and_never_on_standard_output() {
    let home = Home::with_outbox();
    let config = CONFIG.replace("\"events.jsonl\"", "\"-\"");
    home.write("postrider.toml", format!("{config}\n[log]\nformat = \"json\"\n"));
    home.append(&[("a", "First")]);
    let relay = home.start(&["run"]);
    relay.line_with("\"type\":\"First\"");
    relay.signal(Signal::TERM);
    relay.line_with("drained and stopped");
    let seen = relay.seen();
    assert_eq!(relay.ended(), Some(0));
    for line in seen.lines() {
        let line: serde_json::Value = serde_json::from_str(line).expect("a JSON line");
        assert!(line.get("level").is_some() || line["id"].is_string(), "{line}");
    }
}

#[cfg(feature = "failpoints")]
#[test]
fn a_killed_relay_loses_nothing_and_repeats_under_the_same_id() {
    let home = Home::with_outbox();
    home.write("postrider.toml", format!("{CONFIG}\n[relay]\nlease_ttl = \"300ms\"\n"));
    home.append(&[("a", "First"), ("a", "Second")]);
    let killed = home
        .command(&["run"])
        .env("POSTRIDER_FAILPOINT", "relay::after_publish:1")
        .output()
        .expect("started");
    assert_eq!(killed.status.code(), None, "killed by a signal, not ended: {killed:?}");
    let before = lines(&home);
    assert!(!before.is_empty(), "it was killed after the sink had taken something");
    let relay = home.start(&["run"]);
    eventually("the next relay delivers", || {
        let lines = lines(&home);
        (lines.len() > before.len() && lines.iter().any(|line| line.contains("Second")))
            .then_some(())
    });
    relay.signal(Signal::TERM);
    assert_eq!(relay.ended(), Some(0));
    assert!(lines(&home)[before.len()..].contains(&before[0]), "the same line again");
    let wrong = home.command(&["run"]).env("POSTRIDER_FAILPOINT", "nonsense").output();
    assert_eq!(wrong.expect("started").status.code(), Some(2));
}

#[test]
fn a_new_sink_begins_where_it_is_told() {
    let home = Home::with_outbox();
    home.append(&[("a", "First")]);
    let tail = ["tail", "--source", "app.db", "--from", "oldest", "--no-follow", "--json"];
    let first = home.postrider(&tail).expect(0).json()["position"].clone();
    home.append(&[("a", "Second")]);
    let path = "path = \"events.jsonl\"";
    home.write("postrider.toml", CONFIG.replace(path, &format!("{path}\nfrom = {first}")));
    deliver(&home, 1);
    let lines = lines(&home);
    assert!(lines.len() == 1 && lines[0].contains("Second"), "{lines:?}");
}

#[test]
fn run_asks_for_init_or_does_it_when_told() {
    let home = Home::new();
    home.write("postrider.toml", CONFIG);
    home.postrider(&["run"]).expect(3).err_has(&["run postrider init"]);
    let relay = home.start(&["run", "--init"]);
    relay.line_with("delivering");
    relay.signal(Signal::INT);
    assert_eq!(relay.ended(), Some(0));
}

#[test]
fn replay_sends_a_part_again_in_order_and_counts_it_first() {
    let home = Home::with_outbox();
    home.write("postrider.toml", CONFIG);
    home.append(&[("a", "First"), ("b", "Other"), ("a", "Second")]);
    deliver(&home, 3);
    let before = lines(&home);

    let dry = ["replay", "--from", "oldest", "--key", "a", "--dry-run", "--json"];
    assert_eq!(home.postrider(&dry).expect(0).json()["matching"], 2);
    assert_eq!(lines(&home).len(), 3, "a dry run sends nothing");

    let done = home.postrider(&["replay", "--from", "oldest", "--key", "a", "--json"]).expect(0);
    assert_eq!(done.json()["published"], 2);
    let after = lines(&home);
    let of_a: Vec<_> = before.iter().filter(|line| line.contains("\"key\":\"a\"")).collect();
    assert_eq!(after[3..].iter().collect::<Vec<_>>(), of_a, "the same events, ids and order");

    let fresh = ["replay", "--from", "oldest", "--key", "a", "--new-ids", "--json"];
    home.postrider(&fresh).expect(0);
    let id = |line: &str| -> String {
        let line: serde_json::Value = serde_json::from_str(line).expect("a line");
        line["id"].to_string()
    };
    let last = lines(&home);
    assert_ne!(id(&last[5]), id(&last[3]), "new ids were asked for");
    home.postrider(&["replay", "--from", "oldest", "--sink", "absent"]).expect(2);
}

#[test]
fn a_consumer_that_is_no_sink_any_more_is_reported_and_can_be_removed() {
    let home = Home::with_outbox();
    home.write("postrider.toml", CONFIG);
    home.append(&[("a", "First")]);
    deliver(&home, 1);
    home.write("postrider.toml", CONFIG.replace("path", "name = \"other\"\npath"));
    let status = home.postrider(&["status"]).expect(0).out;
    assert!(status.contains("consumer \"jsonl\" is no sink of postrider.toml"), "{status}");
    assert!(status.contains("sink \"other\" has no checkpoint yet"), "{status}");

    let relay = home.start(&["run"]);
    relay.line_with("consumer \"jsonl\" is no sink of postrider.toml");
    relay.signal(Signal::TERM);
    assert_eq!(relay.ended(), Some(0));

    let listed = home.postrider(&["consumers", "list"]).expect(0).out;
    assert!(listed.contains("jsonl"), "{listed}");
    home.postrider(&["consumers", "remove", "jsonl", "--yes"]).expect(0);
    home.postrider(&["consumers", "remove", "jsonl", "--yes"]).expect(1);
    let listed = home.postrider(&["consumers", "list", "--json"]).expect(0).json();
    let left = listed["consumers"].as_array().expect("a list");
    assert!(left.iter().all(|one| one["consumer"] != "jsonl"), "{listed}");
}

#[test]
fn what_everyone_has_passed_can_be_pruned_and_the_start_still_works() {
    let home = Home::with_outbox();
    home.write("postrider.toml", CONFIG);
    home.append(&[("a", "First"), ("a", "Second"), ("a", "Third")]);
    deliver(&home, 3);
    let dry = home.postrider(&["prune", "--keep", "0s", "--dry-run", "--json"]).expect(0).json();
    let done = home.postrider(&["prune", "--keep", "0s", "--json"]).expect(0).json();
    assert_eq!(dry["events"], done["events"]);
    assert!(done["events"].as_u64().is_some_and(|events| events >= 2), "{done}");
    home.postrider(&["tail", "--from", "oldest", "--no-follow"]).expect(0);
}
