//! Streams of a RabbitMQ server.
//!
//! What lives here: where clients of the stream protocol find it, and when its streams outlive its
//! sudden end. What does not: the server (`mod.rs`), and making streams, which is the tests' work.
//! Invariant: a kill after [`RabbitMq::wait_until_streams_last`] loses no stream.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Instant;

use super::{NODE, PATIENCE, POLL, RabbitMq};
use crate::error::{Error, Result};

/// The process that leads all streams, which a server starts with its first one.
const COORDINATOR: &str = "rabbit_stream_coordinator";

impl RabbitMq {
    /// What clients connect to for the stream protocol, with the same login.
    pub fn stream_url(&self) -> String {
        let login = self.url().replacen("amqp://", "rabbitmq-stream://", 1);
        login.replace(&format!(":{}", self.ports.amqp), &format!(":{}", self.ports.stream))
    }

    /// The same by TLS, without a login.
    pub fn stream_tls_url(&self) -> String {
        format!("rabbitmq-stream+tls://localhost:{}", self.ports.streams)
    }

    /// Its address for the stream protocol without TLS, for a proxy before it.
    pub fn stream_address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.ports.stream).into()
    }

    /// Waits until the server has noted on its disk that it has streams, which is a second after
    /// the first was made. Killed before, RabbitMQ 3.10 tells for ever that each stream's node is
    /// down.
    ///
    /// # Errors
    ///
    /// If it has not noted that in time, or notes it elsewhere; the text has its log.
    pub fn wait_until_streams_last(&self) -> Result<()> {
        let noted = self.folder.path().join("mnesia").join(NODE).join("coordination").join(NODE);
        let noted = noted.join("names.dets");
        let deadline = Instant::now() + PATIENCE;
        while !fs::read(&noted)
            .is_ok_and(|names| String::from_utf8_lossy(&names).contains(COORDINATOR))
        {
            if Instant::now() >= deadline {
                let what = format!("waiting for its streams in {}", noted.display());
                return Err(Error::failed(what, self.log()));
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }
}
