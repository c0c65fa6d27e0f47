//! The reader of the guide, run as it is printed there.
//!
//! What lives here: docs/sinks/rabbitmq.md's program for streams against the real sink and server.
//! What does not: its consumer of queues.
//! Invariant: the program uses the client that people use, unchanged.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use postrider_conformance::samples::{event_with_id, fresh_id, record};
use postrider_servers::rabbitmq::virtual_environment;

use super::{Broker, confirm, sink};
use crate::guide::{Running, python_program};

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
