//! The consumer of the guide, run as it is printed there, and what it promises of a record.
//!
//! What lives here: docs/sinks/kafka.md's Python program, and another one that prints all of a
//! record, against the real sink and broker. What does not: other guides.
//! Invariant: the programs use the client that people use, unchanged.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use postrider_conformance::samples::{event_with_id, fresh_id, record};
use postrider_core::{
    ContentType, EventType, Headers, Key, NewEvent, Position, Record, Timestamp, Topic,
    TraceContext,
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

/// Prints the key, the value and the headers of each record, a line for each.
const PRINT: &str = r"
import json, sys
from confluent_kafka import Consumer, TopicPartition
reader = Consumer({'bootstrap.servers': sys.argv[1], 'group.id': 'test'})
reader.assign([TopicPartition(sys.argv[2], 0, 0)])
for _ in range(int(sys.argv[3])):
    record = reader.poll(20)
    headers = {name: value.decode() for name, value in record.headers()}
    print(json.dumps([record.key().decode(), record.value().decode(), headers]))
reader.close()
";
const SPAN: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
const ENCODINGS: [Encoding; 3] =
    [Encoding::Plain, Encoding::CloudEventsBinary, Encoding::CloudEventsStructured];

fn full_event() -> Record {
    let mut headers = Headers::new();
    headers.insert("tenant", "Zürich").expect("valid");
    let event = NewEvent::builder(
        Key::new("Zoë 42").expect("valid"),
        Topic::new(TOPIC).expect("valid"),
        EventType::new("OrderPlaced").expect("valid"),
    )
    .headers(headers)
    .trace(&TraceContext::new(SPAN, Some("vendor=1".into())).expect("valid"))
    .expect("valid")
    .payload(ContentType::new("application/json").expect("valid"), "{\"order\":42}")
    .build()
    .expect("valid")
    .identified(fresh_id);
    let appended_at = Timestamp::from_millis(1_672_671_845_678);
    Record { position: Position::START, appended_at, event }
}

/// In each encoding, as the guide says.
#[tokio::test(flavor = "multi_thread")]
async fn a_python_reader_gets_all_that_the_guide_promises() {
    let broker = broker().await;
    let brokers = brokers(&broker);
    let event = full_event();
    for encoding in ENCODINGS {
        let settings = KafkaConfig { encoding, source: Some("/shop".into()), ..config(&*brokers) };
        confirm(&sink(&settings), &event).await;
    }
    let printed = blocking(move || {
        let python = virtual_environment().join("bin").join("python3");
        let count = ENCODINGS.len().to_string();
        let mut command = Command::new(python);
        command.args(["-c", PRINT, &brokers, TOPIC, &count]).output().expect("it is installed")
    });
    let printed = printed.await;
    assert!(printed.status.success(), "{}", String::from_utf8_lossy(&printed.stderr));
    let printed = String::from_utf8(printed.stdout).expect("text");
    let id = event.event.id().to_string();
    for (encoding, line) in ENCODINGS.into_iter().zip(printed.lines()) {
        let found: serde_json::Value = serde_json::from_str(line).expect("JSON");
        assert_eq!(found[0], "Zoë 42");
        let header = |name: &str| found[2][name].as_str().map(str::to_owned);
        for (name, value) in [
            ("postrider-id", id.as_str()),
            ("postrider-topic", TOPIC),
            ("postrider-type", "OrderPlaced"),
            ("postrider-time", "2023-01-02T15:04:05.678Z"),
            ("traceparent", SPAN),
            ("tracestate", "vendor=1"),
            ("tenant", "Zürich"),
        ] {
            assert_eq!(header(name).as_deref(), Some(value), "{encoding:?} {name}");
        }
        let attributes = ["specversion", "id", "source", "type", "time"];
        let expected = ["1.0", &id, "/shop", "OrderPlaced", "2023-01-02T15:04:05.678Z"];
        let body: serde_json::Value =
            serde_json::from_str(found[1].as_str().expect("text")).expect("JSON");
        let payload = serde_json::json!({"order": 42});
        let (content_type, data) = match encoding {
            Encoding::CloudEventsStructured => ("application/cloudevents+json", &body["data"]),
            Encoding::Plain | Encoding::CloudEventsBinary => ("application/json", &body),
        };
        assert_eq!(header("content-type").as_deref(), Some(content_type), "{encoding:?}");
        assert_eq!(*data, payload, "{encoding:?}");
        for (name, value) in attributes.into_iter().zip(expected) {
            let told = match encoding {
                Encoding::Plain => continue,
                Encoding::CloudEventsBinary => header(&format!("ce_{name}")),
                Encoding::CloudEventsStructured => body[name].as_str().map(str::to_owned),
            };
            assert_eq!(told.as_deref(), Some(value), "{encoding:?} {name}");
        }
    }
}
