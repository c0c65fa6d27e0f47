//! The consumer of the guide, run as it is printed there, and what it promises of a message.
//!
//! What lives here: docs/sinks/nats.md's Python program, and another one that prints all of a
//! message, against the real sink and server. What does not: other guides.
//! Invariant: the programs use the client that people use, unchanged.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use postrider_conformance::samples::{event_with_id, fresh_id, record};
use postrider_conformance::sink::reader::{Names, SOURCE, Shape, assert_told, told_event};
use postrider_encoding::Encoding;
use postrider_servers::nats::Version;
use postrider_sink_nats::NatsConfig;

use crate::{STREAM, admin, config, confirm, everything, server, sink};

const GUIDE: &str = include_str!("../../../../../docs/sinks/nats.md");

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

#[tokio::test(flavor = "multi_thread")]
async fn the_python_consumer_reads_what_was_sent_in_order() {
    let server = server(Version::New, "").await;
    let context = admin(&server.url()).await;
    context.create_stream(everything()).await.expect("a stream");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("consume.py");
    std::fs::write(&path, python_program()).expect("written");
    let mut child = Command::new(Version::virtual_environment().join("bin").join("python3"))
        .arg(&path)
        .args([server.url().as_str(), STREAM])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("the client's environment is installed");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let _running = Running(child);
    let mut next = || lines.next().expect("a line").expect("text");
    assert_eq!(next(), "ready");
    let sink = sink(&config(server.url()));
    for n in 1..=3 {
        let id = fresh_id();
        confirm(&sink, &record(event_with_id(id, "Zoë 42", n), n)).await;
        assert_eq!(next(), format!("{id} OrderPlaced 'Zo\u{eb} 42' b'{n}'"));
    }
}

/// Prints the data and the headers of each message, a line for each; decoded as the guide says.
const PRINT: &str = r#"
import asyncio, json, sys
from urllib.parse import unquote
import nats

async def main(url, stream, count):
    connection = await nats.connect(url)
    consumer = await connection.jetstream().pull_subscribe("", durable="printer", stream=stream)
    messages = []
    while len(messages) < count:
        messages += await consumer.fetch(count - len(messages), timeout=20)
    for message in messages:
        headers = {name: unquote(value) for name, value in message.headers.items()}
        print(json.dumps([message.data.decode(), headers]))
    await connection.close()

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"#;
const NAMES: Names = Names {
    id: "Nats-Msg-Id",
    key: "postrider-key",
    topic: "postrider-topic",
    event_type: "postrider-type",
    content_type: "content-type",
    header_prefix: "postrider-header-",
    attribute_prefix: "ce-",
};

/// In each encoding, as the guide says.
#[tokio::test(flavor = "multi_thread")]
async fn a_python_reader_gets_all_that_the_guide_promises() {
    let server = server(Version::New, "").await;
    let context = admin(&server.url()).await;
    context.create_stream(everything()).await.expect("a stream");
    let mut sent = Vec::new();
    for shape in Shape::ALL {
        let encoding = match shape {
            Shape::Plain => Encoding::Plain,
            Shape::Binary => Encoding::CloudEventsBinary,
            Shape::Structured => Encoding::CloudEventsStructured,
        };
        let settings = NatsConfig { encoding, source: Some(SOURCE.into()), ..config(server.url()) };
        let event = told_event("orders");
        confirm(&sink(&settings), &event).await;
        sent.push((shape, event.event));
    }
    let url = server.url();
    let printed = tokio::task::spawn_blocking(move || {
        let python = Version::virtual_environment().join("bin").join("python3");
        let count = Shape::ALL.len().to_string();
        Command::new(python).args(["-c", PRINT, &url, STREAM, &count]).output()
    });
    let printed = printed.await.expect("no panic").expect("the client is installed");
    assert!(printed.status.success(), "{}", String::from_utf8_lossy(&printed.stderr));
    let printed = String::from_utf8(printed.stdout).expect("text");
    assert_eq!(printed.lines().count(), sent.len(), "{printed}");
    for ((shape, event), line) in sent.iter().zip(printed.lines()) {
        assert_told(event, &NAMES, *shape, line);
    }
}
