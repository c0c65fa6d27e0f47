//! The admin listener.

use std::net::TcpListener;

use rustix::process::Signal;

use crate::harness::{Home, Receiver, address_in, eventually, http};

fn config(sink: &str, listen: &str) -> String {
    format!(
        "[source]\nkind = \"sqlite\"\nurl = \"app.db\"\n\n[[sink]]\n{sink}\n\n\
         [admin]\nlisten = \"{listen}\"\n"
    )
}

#[test]
fn metrics_and_readiness_tell_what_the_relay_does() {
    let home = Home::with_outbox();
    let receiver = Receiver::start();
    let sink = format!(
        "kind = \"webhook\"\nurl = \"http://{}/\"\nallow_private = true\nunsigned = true",
        receiver.address
    );
    home.write("postrider.toml", config(&sink, "127.0.0.1:0"));
    home.append(&[("a", "First")]);
    let relay = home.start(&["run"]);
    let address = address_in(&relay.line_with("/metrics"));
    assert_eq!(http(address, "GET /healthz", ""), (200, "ok\n".to_owned()));
    eventually("it is ready", || (http(address, "GET /readyz", "").0 == 200).then_some(()));
    eventually("the event is counted", || {
        let (status, text) = http(address, "GET /metrics", "");
        assert_eq!(status, 200);
        let counted = text
            .lines()
            .any(|line| line.starts_with("postrider_published_total{sink=\"webhook\"} 1"));
        (counted && receiver.accepted().len() == 1).then_some(())
    });
    assert_eq!(http(address, "GET /absent", "").0, 404);
    relay.signal(Signal::TERM);
    assert_eq!(relay.ended(), Some(0));
}

#[test]
fn a_halted_sink_makes_it_not_ready_with_the_reason_and_holds_up_no_other() {
    let home = Home::with_outbox();
    let receiver = Receiver::start();
    receiver.refuse_bodies_with(Some("First"));
    let sinks = format!(
        "kind = \"webhook\"\nurl = \"http://{}/\"\nallow_private = true\nunsigned = true\n\
         on_failure = \"halt\"\n\n[[sink]]\nkind = \"jsonl\"\npath = \"events.jsonl\"",
        receiver.address
    );
    home.write("postrider.toml", config(&sinks, "127.0.0.1:0"));
    let relay = home.start(&["run"]);
    let address = address_in(&relay.line_with("/metrics"));
    eventually("it is ready", || (http(address, "GET /readyz", "").0 == 200).then_some(()));
    home.append(&[("a", "First")]);
    let text = eventually("it is not ready any more", || {
        let (status, text) = http(address, "GET /readyz", "");
        (status == 503).then_some(text)
    });
    assert!(text.contains("webhook") && text.contains("422"), "{text}");
    assert_eq!(http(address, "GET /healthz", "").0, 200, "the process itself is well");
    eventually("the other sink goes on", || {
        let lines = std::fs::read_to_string(home.path("events.jsonl")).unwrap_or_default();
        (lines.lines().count() == 1).then_some(())
    });
    relay.signal(Signal::TERM);
    assert_eq!(relay.ended(), Some(0));
}

#[test]
fn an_address_that_is_taken_is_an_error_when_it_was_asked_for() {
    let home = Home::with_outbox();
    let taken = TcpListener::bind("127.0.0.1:0").expect("bound");
    let address = taken.local_addr().expect("bound").to_string();
    home.write("postrider.toml", config("kind = \"jsonl\"\npath = \"e.jsonl\"", &address));
    home.postrider(&["run"]).expect(1).err_has(&[
        "error: listen on 127.0.0.1:",
        "[admin] listen",
        "--admin",
    ]);
}
