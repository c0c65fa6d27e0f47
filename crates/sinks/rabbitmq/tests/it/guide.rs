//! The consumer of the guide, run as it is printed there, and what it promises of a message.
//!
//! What lives here: docs/sinks/rabbitmq.md's Python program, and another one that prints all of a
//! message, against the real sink and server. What does not: other guides.
//! Invariant: the programs use the client that people use, unchanged.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use postrider_conformance::samples::{event_with_id, fresh_id, record};
use postrider_conformance::sink::reader::{
    APPENDED_AT_MS, Names, SOURCE, Shape, Told, assert_told, told_event,
};
use postrider_core::Event;
use postrider_encoding::Encoding;
use postrider_servers::rabbitmq::virtual_environment;
use postrider_sink_rabbitmq::RabbitMqConfig;

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

/// Prints the body, the properties and the headers of each message, a line for each, reading from
/// a queue, or from the beginning of a stream.
const PRINT: &str = r#"
import json, sys

import pika

url, queue, count, is_stream = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "stream"
channel = pika.BlockingConnection(pika.URLParameters(url)).channel()
channel.basic_qos(prefetch_count=100)
arguments = {"x-stream-offset": "first"} if is_stream else {}
for method, of, body in channel.consume(queue, arguments=arguments, inactivity_timeout=30):
    if method is None:
        break
    told = {name: of.headers[name] for name in of.headers}
    told |= {"message_id": of.message_id, "type": of.type, "content_type": of.content_type}
    told |= {"timestamp": of.timestamp, "delivery_mode": of.delivery_mode}
    print(json.dumps([body.decode(), told]))
    channel.basic_ack(method.delivery_tag)
    count -= 1
    if count == 0:
        break
"#;
const NAMES: Names = Names {
    id: "message_id",
    key: "postrider-key",
    topic: "postrider-topic",
    event_type: "type",
    content_type: "content_type",
    header_prefix: "",
    attribute_prefix: "cloudEvents:",
};

pub(crate) fn encoding(shape: Shape) -> Encoding {
    match shape {
        Shape::Plain => Encoding::Plain,
        Shape::Binary => Encoding::CloudEventsBinary,
        Shape::Structured => Encoding::CloudEventsStructured,
    }
}

/// Reads as many messages as were sent with pika, and compares; what else it told of each.
pub(crate) async fn read_and_compare(
    url: &str,
    from: [&str; 2],
    names: &Names,
    sent: &[(Shape, Event)],
) -> Vec<Told> {
    let [queue, kind] = from;
    let mut command = Command::new(virtual_environment().join("bin").join("python3"));
    command.args(["-c", PRINT, url, queue, &sent.len().to_string(), kind]);
    let printed = tokio::task::spawn_blocking(move || command.output()).await;
    let printed = printed.expect("no panic").expect("the client is installed");
    assert!(printed.status.success(), "{}", String::from_utf8_lossy(&printed.stderr));
    let printed = String::from_utf8(printed.stdout).expect("text");
    assert_eq!(printed.lines().count(), sent.len(), "{printed}");
    let pairs = sent.iter().zip(printed.lines());
    pairs.map(|((shape, event), line)| assert_told(event, names, *shape, line)).collect()
}

/// In each encoding, as the guide says.
#[tokio::test(flavor = "multi_thread")]
async fn a_python_reader_gets_all_that_the_guide_promises() {
    let broker = Broker::bound().await;
    let mut sent = Vec::new();
    for shape in Shape::ALL {
        let settings = RabbitMqConfig {
            encoding: encoding(shape),
            source: Some(SOURCE.into()),
            ..broker.config()
        };
        let event = told_event("orders");
        confirm(&sink(&settings), &event).await;
        sent.push((shape, event.event));
    }
    for told in read_and_compare(&broker.url, [&broker.queue, "queue"], &NAMES, &sent).await {
        assert_eq!(told["timestamp"], APPENDED_AT_MS / 1_000);
        assert_eq!(told["delivery_mode"], 2);
    }
}
