//! The consumer of the guide, run as it is printed there, and what it promises of a record.
//!
//! What lives here: docs/sinks/kafka.md's Python program, and another one that prints all of a
//! record, against the real sink and broker. What does not: other guides.
//! Invariant: the programs use the client that people use, unchanged.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use postrider_conformance::samples::{event_with_id, fresh_id, record};
use postrider_conformance::sink::reader::{
    APPENDED_AT, Names, SOURCE, Shape, assert_told, told_event,
};
use postrider_encoding::Encoding;
use postrider_servers::kafka::virtual_environment;
use postrider_sink_kafka::KafkaConfig;

use crate::{TOPIC, blocking, broker, brokers, config, confirm, sink};

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

/// Prints the value and, with the key among them, the headers of each record, a line for each.
const PRINT: &str = r"
import json, sys
from confluent_kafka import Consumer, TopicPartition
reader = Consumer({'bootstrap.servers': sys.argv[1], 'group.id': 'test'})
reader.assign([TopicPartition(sys.argv[2], 0, 0)])
for _ in range(int(sys.argv[3])):
    record = reader.poll(20)
    told = {name: value.decode() for name, value in record.headers()}
    print(json.dumps([record.value().decode(), told | {'key': record.key().decode()}]))
reader.close()
";
const NAMES: Names = Names {
    id: "postrider-id",
    key: "key",
    topic: "postrider-topic",
    event_type: "postrider-type",
    content_type: "content-type",
    header_prefix: "",
    attribute_prefix: "ce_",
};

/// In each encoding, as the guide says.
#[tokio::test(flavor = "multi_thread")]
async fn a_python_reader_gets_all_that_the_guide_promises() {
    let broker = broker().await;
    let brokers = brokers(&broker);
    let mut sent = Vec::new();
    for shape in Shape::ALL {
        let encoding = match shape {
            Shape::Plain => Encoding::Plain,
            Shape::Binary => Encoding::CloudEventsBinary,
            Shape::Structured => Encoding::CloudEventsStructured,
        };
        let settings = KafkaConfig { encoding, source: Some(SOURCE.into()), ..config(&*brokers) };
        let event = told_event(TOPIC);
        confirm(&sink(&settings), &event).await;
        sent.push((shape, event.event));
    }
    let printed = blocking(move || {
        let python = virtual_environment().join("bin").join("python3");
        let count = Shape::ALL.len().to_string();
        let mut command = Command::new(python);
        command.args(["-c", PRINT, &brokers, TOPIC, &count]).output().expect("it is installed")
    });
    let printed = printed.await;
    assert!(printed.status.success(), "{}", String::from_utf8_lossy(&printed.stderr));
    let printed = String::from_utf8(printed.stdout).expect("text");
    assert_eq!(printed.lines().count(), sent.len(), "{printed}");
    for ((shape, event), line) in sent.iter().zip(printed.lines()) {
        let told = assert_told(event, &NAMES, *shape, line);
        assert_eq!(told["postrider-time"], APPENDED_AT);
    }
}
