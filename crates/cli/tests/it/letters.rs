//! What a sink refuses: seen, sent again, given up, dropped.

use rustix::process::Signal;

use crate::harness::{Home, Receiver, Running, eventually};

fn config(receiver: &Receiver) -> String {
    format!(
        "[source]\nkind = \"sqlite\"\nurl = \"app.db\"\n\n[[sink]]\nkind = \"webhook\"\n\
         url = \"http://{}/\"\nallow_private = true\nunsigned = true\n\n\
         [admin]\nlisten = \"off\"\n",
        receiver.address
    )
}

/// A relay whose receiver refused the second of key a's three events.
fn with_a_parked_key() -> (Home, Receiver, Running) {
    let home = Home::with_outbox();
    let receiver = Receiver::start();
    receiver.refuse_bodies_with(Some("Second"));
    home.write("postrider.toml", config(&receiver));
    let relay = home.start(&["run"]);
    home.append(&[("a", "First"), ("a", "Second"), ("a", "Third"), ("b", "Other")]);
    eventually("two letters and two deliveries", || {
        let letters = home.postrider(&["dead-letters", "list", "--json"]).expect(0).json_lines();
        (letters.len() == 2 && receiver.accepted().len() == 2).then_some(())
    });
    (home, receiver, relay)
}

#[test]
fn a_refused_event_holds_back_its_key_until_it_is_requeued() {
    let (home, receiver, relay) = with_a_parked_key();
    let letters = home.postrider(&["dead-letters", "list", "--json"]).expect(0).json_lines();
    assert_eq!((&letters[0]["state"], &letters[0]["type"]), (&"parked".into(), &"Second".into()));
    assert_eq!((&letters[1]["state"], &letters[1]["type"]), (&"waiting".into(), &"Third".into()));
    assert!(letters[0]["reason"].as_str().is_some_and(|reason| reason.contains("422")));
    let id = letters[0]["id"].to_string();

    let shown = home.postrider(&["dead-letters", "show", &id]).expect(0).out;
    assert!(shown.contains("Second") && !shown.contains("{\"of\""), "{shown}");
    let shown = home.postrider(&["dead-letters", "show", &id, "--payload"]).expect(0).out;
    assert!(shown.contains("{\"of\":\"Second\"}"), "{shown}");
    // The letters are counted once the first checkpoint has passed them.
    eventually("status asks for a person", || {
        let status = home.postrider(&["status"]).expect(0).out;
        let text = "attention: there are 2 dead letters, and parked ones need a person";
        status.contains(text).then_some(())
    });

    // What waits goes on by itself, and a consumer at work can't be forgotten.
    let none = home.postrider(&["dead-letters", "requeue", "--state", "waiting"]).expect(0).out;
    assert_eq!(none, "0 requeued: nothing that matches is parked or skipped\n");
    let args = ["consumers", "remove", "webhook", "--yes"];
    home.postrider(&args).expect(1).err_has(&["at work", "stop its relays"]);

    receiver.refuse_bodies_with(None);
    let done = home.postrider(&["dead-letters", "requeue", "--key", "a"]).expect(0);
    assert!(done.out.contains("1 requeued"), "{}", done.out);
    eventually("the key goes on", || (receiver.accepted().len() == 4).then_some(()));
    let accepted = receiver.accepted();
    let of_a: Vec<_> = accepted
        .iter()
        .map(|delivery| delivery.body.as_str())
        .filter(|body| !body.contains("Other"))
        .collect();
    assert_eq!(of_a, ["{\"of\":\"First\"}", "{\"of\":\"Second\"}", "{\"of\":\"Third\"}"]);
    let resent = accepted.iter().find(|delivery| delivery.body.contains("Second"));
    assert_eq!(resent.map(|d| d.id.as_str()), letters[0]["eventId"].as_str(), "the id is kept");
    eventually("the sum holds", || {
        let status = home.postrider(&["status", "--json"]).expect(0).json();
        let sink = &status["consumers"][0];
        (sink["published"] == 4 && sink["appended"] == 4 && sink["parked"] == 0).then_some(())
    });
    relay.signal(Signal::TERM);
    assert_eq!(relay.ended(), Some(0));
}

#[test]
fn a_skipped_event_stays_visible_and_a_dropped_one_is_counted() {
    let (home, receiver, relay) = with_a_parked_key();
    let done = home.postrider(&["dead-letters", "skip", "--state", "parked", "--yes"]).expect(0);
    assert!(done.out.contains("1 skipped"), "{}", done.out);
    eventually("the key goes on", || (receiver.accepted().len() == 3).then_some(()));
    let skipped = ["dead-letters", "list", "--state", "skipped", "--json"];
    let letters = home.postrider(&skipped).expect(0).json_lines();
    assert_eq!(letters.len(), 1);

    let id = letters[0]["id"].to_string();
    home.postrider(&["dead-letters", "drop", "--id", &id]).expect(2);
    home.postrider(&["dead-letters", "drop", "--id", &id, "--yes"]).expect(0);
    home.postrider(&["dead-letters", "drop", "--id", &id, "--yes"]).expect(1);
    home.postrider(&["dead-letters", "show", &id]).expect(1);
    eventually("the sum holds", || {
        let status = home.postrider(&["status", "--json"]).expect(0).json();
        let sink = &status["consumers"][0];
        (sink["published"] == 3 && sink["dropped"] == 1 && sink["appended"] == 4).then_some(())
    });
    relay.signal(Signal::TERM);
    assert_eq!(relay.ended(), Some(0));
}
