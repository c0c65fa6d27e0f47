//! The consumer of the guide, run as it is printed there.
//!
//! What lives here: docs/sinks/kafka.md's Python program against the real sink and broker. What
//! does not: other guides.
//! Invariant: the program uses the client that people use, unchanged.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use postrider_conformance::samples::{event_with_id, fresh_id, record};
use postrider_servers::kafka::virtual_environment;

use crate::{TOPIC, broker, brokers, config, confirm, sink};

const GUIDE: &str = include_str!("../../../../../docs/sinks/kafka.md");

struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    fn start(
        program: &std::path::Path,
        brokers: &str,
    ) -> (Self, impl Iterator<Item = String> + use<>) {
        let mut child = Command::new(virtual_environment().join("bin").join("python3"))
            .arg(program)
            .args([brokers, TOPIC])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("the client's environment is installed");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        (Self(child), lines.map(|line| line.expect("text")))
    }

    /// As by Ctrl-C.
    fn interrupt(mut self) {
        let pid = self.0.id().to_string();
        let sent = Command::new("kill").args(["-INT", &pid]).status().expect("kill is there");
        assert!(sent.success() && self.0.wait().expect("it ends").success());
    }
}

fn python_program() -> &'static str {
    let (_, rest) = GUIDE.split_once("```python\n").expect("the guide has a Python program");
    rest.split_once("```").expect("its end").0
}

#[tokio::test(flavor = "multi_thread")]
async fn the_python_consumer_reads_what_was_sent_in_order_and_goes_on_after_its_end() {
    let broker = broker().await;
    let brokers = brokers(&broker);
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("consume.py");
    std::fs::write(&path, python_program()).expect("written");
    let sink = sink(&config(&*brokers));
    for round in 0..2 {
        let (running, mut lines) = Running::start(&path, &brokers);
        assert_eq!(lines.next().expect("a line"), "ready");
        for n in 1..=3 {
            let id = fresh_id();
            confirm(&sink, &record(event_with_id(id, "Zoë 42", n), n)).await;
            let expected = format!("{id} OrderPlaced 'Zo\u{eb} 42' b'{n}'");
            assert_eq!(lines.next().expect("a line"), expected, "round {round}");
        }
        running.interrupt();
    }
}
