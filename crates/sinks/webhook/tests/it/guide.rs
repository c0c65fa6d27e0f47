//! The consumer of the guide, run as it is printed there.
//!
//! What lives here: docs/sinks/webhook.md's Python program against the real sink. What does not:
//! other guides.
//! Invariant: the program needs nothing but Python's standard library.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use postrider_core::{ErrorKind, Secret};
use postrider_sink_webhook::Webhook;

use crate::{KEY, OTHER_KEY, Wall, config, confirm, fail, record};

const GUIDE: &str = include_str!("../../../../../docs/sinks/webhook.md");

struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn python_program() -> &'static str {
    let (_, rest) = GUIDE.split_once("```python\n").expect("the guide has a Python program");
    rest.split_once("```").expect("its end").0
}

#[tokio::test]
async fn the_python_consumer_takes_signed_events_once_and_refuses_others() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("receive.py");
    std::fs::write(&path, python_program()).expect("written");
    let mut child = Command::new("python3")
        .arg(&path)
        .arg("0")
        .env("WEBHOOK_KEYS", format!("{OTHER_KEY} {KEY}"))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("python3 is installed");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let _running = Running(child);
    let mut next = || lines.next().expect("a line").expect("text");
    let first = next();
    let url = first.strip_prefix("listening on ").expect("the address").to_owned();

    let good = Webhook::new(&config(url.as_str()), Arc::new(Wall)).expect("valid");
    confirm(&good, record(1, "Zoë 42", b"{\"a\": 1}")).await;
    assert_eq!(
        next(),
        "00000000-0000-0000-0000-000000000001 OrderPlaced 'Zo\u{eb} 42' b'{\"a\": 1}'"
    );
    confirm(&good, record(1, "Zoë 42", b"{\"a\": 1}")).await;
    confirm(&good, record(2, "k", b"{}")).await;
    // The repetition of the first event was answered and not handled again.
    assert_eq!(next(), "00000000-0000-0000-0000-000000000002 OrderPlaced 'k' b'{}'");

    let mut wrong = config(url.as_str());
    wrong.signing_keys = vec![Secret::new("whsec_ZmZmZmZmZmZmZmZmZmZmZmZmZmZmZmZm")];
    let wrong = Webhook::new(&wrong, Arc::new(Wall)).expect("valid");
    let error = fail(&wrong, record(3, "k", b"{}")).await;
    assert!(error.to_string().contains("401"), "{error}");
    let stale = Webhook::new(&config(url.as_str()), Arc::new(crate::Fixed)).expect("valid");
    let error = fail(&stale, record(4, "k", b"{}")).await;
    assert_eq!(error.kind(), ErrorKind::Transient);
    assert!(error.to_string().contains("401"), "{error}");
}
