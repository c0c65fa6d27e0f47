//! The consumer of the guide, run as it is printed there.
//!
//! What lives here: docs/sinks/rabbitmq.md's Python program against the real sink and server. What
//! does not: other guides.
//! Invariant: the program uses the client that people use, unchanged.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use postrider_conformance::samples::{event_with_id, fresh_id, record};
use postrider_servers::rabbitmq::virtual_environment;

use crate::{Broker, confirm, sink};

const GUIDE: &str = include_str!("../../../../../docs/sinks/rabbitmq.md");

pub(crate) struct Running(pub(crate) Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The first program behind a heading.
pub(crate) fn python_program(heading: &str) -> &'static str {
    let (_, rest) = GUIDE.split_once(&format!("\n{heading}\n")).expect("the guide has the heading");
    let (_, rest) = rest.split_once("```python\n").expect("the guide has a Python program");
    rest.split_once("```").expect("its end").0
}

#[tokio::test(flavor = "multi_thread")]
async fn the_python_consumer_reads_what_was_sent_in_order() {
    let broker = Broker::bound().await;
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("consume.py");
    std::fs::write(&path, python_program("## A consumer")).expect("written");
    let mut child = Command::new(virtual_environment().join("bin").join("python3"))
        .arg(&path)
        .args([broker.url.as_str(), broker.queue.as_str()])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("the client's environment is installed");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let _running = Running(child);
    let mut next = || lines.next().expect("a line").expect("text");
    assert_eq!(next(), "ready");
    let sink = sink(&broker.config());
    for n in 1..=3 {
        let id = fresh_id();
        confirm(&sink, &record(event_with_id(id, "Zoë 42", n), n)).await;
        assert_eq!(next(), format!("{id} OrderPlaced 'Zo\u{eb} 42' b'{n}'"));
    }
}
