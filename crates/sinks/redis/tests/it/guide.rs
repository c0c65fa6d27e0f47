//! The consumer of the guide, run as it is printed there, and what it promises of an entry.
//!
//! What lives here: docs/sinks/redis.md's Python program, and another one that prints all of an
//! entry, against the real sink and server. What does not: other guides.
//! Invariant: the programs use the client that people use, unchanged.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use postrider_conformance::samples::{event_with_id, fresh_id, record};
use postrider_conformance::sink::reader::{Names, SOURCE, Shape, assert_told, told_event};
use postrider_encoding::Encoding;
use postrider_servers::redis::virtual_environment;
use postrider_sink_redis::RedisConfig;

use crate::{STREAM, config, confirm, server, sink};

const GUIDE: &str = include_str!("../../../../../docs/sinks/redis.md");

struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    fn start(program: &std::path::Path, url: &str) -> (Self, impl Iterator<Item = String> + use<>) {
        let mut child = Command::new(virtual_environment().join("bin").join("python3"))
            .arg(program)
            .args([url, STREAM])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("the client's environment is installed");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        (Self(child), lines.map(|line| line.expect("text")))
    }
}

fn python_program() -> &'static str {
    let (_, rest) = GUIDE.split_once("```python\n").expect("the guide has a Python program");
    rest.split_once("```").expect("its end").0
}

#[tokio::test(flavor = "multi_thread")]
async fn the_python_consumer_reads_what_was_sent_in_order_and_goes_on_after_its_end() {
    let server = server("").await;
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("consume.py");
    std::fs::write(&path, python_program()).expect("written");
    let sink = sink(&config(server.url()));
    let mut last = String::new();
    for round in 0..2 {
        let (running, mut lines) = Running::start(&path, &server.url());
        assert_eq!(lines.next().expect("a line"), "ready");
        for n in 1..=3 {
            let id = fresh_id();
            confirm(&sink, &record(event_with_id(id, "Zoë 42", n), n)).await;
            let expected = format!("{id} OrderPlaced 'Zo\u{eb} 42' b'{n}'");
            let mut line = lines.next().expect("a line");
            if line == last {
                // It ended before it had acknowledged this one, which so comes once more.
                line = lines.next().expect("a line");
            }
            assert_eq!(line, expected, "round {round}");
            last = line;
        }
        drop(running);
    }
}

/// Prints the payload and the other fields of each entry, a line for each.
const PRINT: &str = r#"
import json, sys
import redis

for _, entry in redis.Redis.from_url(sys.argv[1]).xrange(sys.argv[2]):
    fields = {name.decode(): value.decode() for name, value in entry.items()}
    print(json.dumps([fields.pop("payload"), fields]))
"#;
const NAMES: Names = Names {
    id: "id",
    key: "key",
    topic: "topic",
    event_type: "type",
    content_type: "content-type",
    header_prefix: "header-",
    attribute_prefix: "ce-",
};

/// In each encoding, as the guide says.
#[tokio::test(flavor = "multi_thread")]
async fn a_python_reader_gets_all_that_the_guide_promises() {
    let server = server("").await;
    let mut sent = Vec::new();
    for shape in Shape::ALL {
        let encoding = match shape {
            Shape::Plain => Encoding::Plain,
            Shape::Binary => Encoding::CloudEventsBinary,
            Shape::Structured => Encoding::CloudEventsStructured,
        };
        let settings =
            RedisConfig { encoding, source: Some(SOURCE.into()), ..config(server.url()) };
        let event = told_event("orders");
        confirm(&sink(&settings), &event).await;
        sent.push((shape, event.event));
    }
    let url = server.url();
    let printed = tokio::task::spawn_blocking(move || {
        let python = virtual_environment().join("bin").join("python3");
        Command::new(python).args(["-c", PRINT, &url, STREAM]).output()
    });
    let printed = printed.await.expect("no panic").expect("the client is installed");
    assert!(printed.status.success(), "{}", String::from_utf8_lossy(&printed.stderr));
    let printed = String::from_utf8(printed.stdout).expect("text");
    assert_eq!(printed.lines().count(), sent.len(), "{printed}");
    for ((shape, event), line) in sent.iter().zip(printed.lines()) {
        assert_told(event, &NAMES, *shape, line);
    }
}
