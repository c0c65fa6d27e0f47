//! The reader of the guide, run as it is printed there.
//!
//! What lives here: docs/sinks/rabbitmq.md's program for streams against the real sink and server.
//! What does not: its consumer of queues.
//! Invariant: the program uses the client that people use, unchanged.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use postrider_conformance::samples::{event_with_id, fresh_id, record};
use postrider_conformance::sink::reader::{APPENDED_AT_MS, Names, SOURCE, Shape, told_event};
use postrider_servers::rabbitmq::virtual_environment;
use postrider_sink_rabbitmq::RabbitMqStreamConfig;

use super::{Broker, confirm, sink};

/// A reader with RabbitMQ's own client for Python, which speaks the stream protocol and reads
/// messages of AMQP 1.0.
const READER: &str = r#"
import asyncio, sys

from rstream import Consumer, amqp_decoder


async def main(address, stream):
    host, port = address.rsplit(":", 1)
    login = {"username": "guest", "password": "guest"}
    consumer = Consumer(host, int(port), load_balancer_mode=True, **login)

    async def handle(message, context):
        of, more = message.properties, message.application_properties
        print(repr((of.message_id, of.subject, of.content_type, of.creation_time)), flush=True)
        print(repr(sorted(more.items())), flush=True)
        print(repr(message.body), flush=True)

    await consumer.start()
    await consumer.subscribe(stream, handle, decoder=amqp_decoder)
    await consumer.run()


asyncio.run(main(*sys.argv[1:3]))
"#;
use crate::guide::{Running, encoding, python_program, read_and_compare};

/// As the client of AMQP 0-9-1 names what stands in a message of AMQP 1.0.
const NAMES: Names = Names {
    id: "message_id",
    key: "postrider-key",
    topic: "postrider-topic",
    event_type: "postrider-type",
    content_type: "content_type",
    header_prefix: "",
    attribute_prefix: "cloudEvents:",
};

#[tokio::test(flavor = "multi_thread")]
async fn the_python_reader_reads_the_stream_from_its_beginning() {
    let broker = Broker::shared().await;
    let sink = sink(&broker.config());
    let ids = [fresh_id(), fresh_id(), fresh_id()];
    let sent: Vec<_> =
        ids.into_iter().zip(1..).map(|(id, n)| record(event_with_id(id, "Zoë 42", n), n)).collect();
    confirm(&sink, &sent[..2]).await;
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("read.py");
    std::fs::write(&path, python_program("## Streams")).expect("written");
    let mut child = Command::new(virtual_environment().join("bin").join("python3"))
        .arg(&path)
        .args([broker.amqp.as_str(), broker.stream.as_str()])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("the client's environment is installed");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let _running = Running(child);
    let mut next = || lines.next().expect("a line").expect("text");
    for (n, id) in ids.iter().enumerate() {
        if n == 2 {
            confirm(&sink, &sent[2..]).await;
        }
        let expected = format!("{n} {id} OrderPlaced 'Zo\u{eb} 42' b'{}'", n + 1);
        assert_eq!(next(), expected);
    }
}

/// The content type is a symbol, as AMQP 1.0 has it; a text would be none of it to a strict reader.
#[tokio::test(flavor = "multi_thread")]
async fn rabbitmqs_own_stream_client_reads_every_property() {
    let broker = Broker::shared().await;
    let id = fresh_id();
    let sent = record(event_with_id(id, "Zo\u{eb} 42", 7), 7);
    confirm(&sink(&broker.config()), std::slice::from_ref(&sent)).await;
    let mut child = Command::new(virtual_environment().join("bin").join("python3"))
        .args(["-c", READER, broker.address(), &broker.stream])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("the client's environment is installed");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let _running = Running(child);
    let mut next = || lines.next().expect("a line").expect("text");
    let (content_type, time) = (sent.event.content_type(), sent.appended_at.as_millis());
    // The client gives a text as bytes, and a symbol too, where it is one.
    let expected = format!("(b'{id}', b'OrderPlaced', b'{content_type}', {time})");
    assert_eq!(next(), expected);
    let more = next();
    assert!(more.contains("(b'postrider-key', b'Zo\\xc3\\xab 42')"), "{more}");
    assert!(next().contains("b'7'"));
}

/// In each encoding, as the guide says.
#[tokio::test(flavor = "multi_thread")]
async fn a_python_reader_gets_all_that_the_guide_promises() {
    let broker = Broker::shared().await;
    let mut sent = Vec::new();
    for shape in Shape::ALL {
        let settings = RabbitMqStreamConfig {
            encoding: encoding(shape),
            source: Some(SOURCE.into()),
            ..broker.config()
        };
        let event = told_event("orders");
        confirm(&sink(&settings), std::slice::from_ref(&event)).await;
        sent.push((shape, event.event));
    }
    for told in read_and_compare(&broker.amqp, [&broker.stream, "stream"], &NAMES, &sent).await {
        assert_eq!(told["timestamp"], APPENDED_AT_MS / 1_000);
    }
}
