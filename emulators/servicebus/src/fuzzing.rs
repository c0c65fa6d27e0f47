//! A connection as a fuzzer feeds it, and the invariants that it looks for.
//!
//! What lives here: a connection with a link of every kind, and random bytes after that; and the
//! service's side of a connection, for fuzzing a client. What does not: who calls it (`fuzz/`, and
//! the tests on random bytes).
//! Invariant: for no bytes whatever does a connection panic, loop, or write what is no frame.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use fe2o3_amqp_types::definitions::{Handle, Role};
use fe2o3_amqp_types::performatives::{Close, Detach, Disposition, End};
use serde::Serialize;
use serde_amqp::Value;
use serde_amqp::primitives::{OrderedMap, Symbol};
use tokio::time::Instant;

use crate::config::{Config, Entity, Topic};
use crate::connection::Connection;
use crate::connection::client::{begin, credit, data, greeting, link, message, open, transfer};
use crate::refusal::Refusal;
use crate::shared::Shared;
use crate::wire::frame::{self, Kind};

/// What every input begins with: a link of every kind, each with credit.
#[must_use]
pub fn prelude() -> Vec<Bytes> {
    fn amqp<T: Serialize>(performative: &T) -> Bytes {
        frame::write(Kind::Amqp, 0, performative, &[]).expect("it is well formed")
    }
    let mut frames = vec![Bytes::from(greeting()), amqp(&open(512)), amqp(&begin())];
    for (handle, address) in [(0, "orders"), (1, "$cbs"), (2, "orders/$management"), (3, "topic")] {
        frames.push(amqp(&link("s", handle, Role::Sender, "me", address)));
    }
    let write = |transfer, payload: &[u8]| {
        frame::write(Kind::Amqp, 0, &transfer, payload).expect("it is well formed")
    };
    let single = message("1", b"x");
    let batch = [data(&message("2", b"y")), data(&message("3", b"z"))].concat();
    frames.push(write(transfer(0, 0, 0, false), &single));
    frames.push(write(transfer(3, 1, 0x8001_3700, false), &batch));
    let sources = ["orders", "$cbs", "orders/$management", "topic/subscriptions/all", "sessions"];
    for (handle, address) in (10..).zip(sources) {
        let mut attach = link("r", handle, Role::Receiver, address, "me");
        if let Some(source) = attach.source.as_mut().filter(|_| address == "sessions") {
            let any = (Symbol::from("com.microsoft:session-filter"), Value::Null);
            source.filter = Some(OrderedMap::from_iter([any]));
        }
        frames.push(amqp(&attach));
        frames.push(amqp(&credit(handle, 10, false)));
    }
    frames
}

/// Feeds bytes, as they are, to a connection that has come so far.
///
/// # Panics
/// If an invariant does not hold: that is what a fuzzer looks for.
pub fn connection(bytes: &[u8]) {
    let sessions = Entity { requires_session: true, ..Entity::default() };
    let config = Config::default()
        .with_queue("orders", Entity::default())
        .with_queue("sessions", sessions)
        .with_topic("topic", Topic::default().with_subscription("all", Entity::default()));
    let shared = Arc::new(Shared::new(config));
    let mut connection = Connection::new(Arc::clone(&shared));
    for frame in prelude() {
        feed(&mut connection, &frame);
    }
    assert!(!connection.is_over(), "what comes first is right");
    written(&mut connection, true);
    feed(&mut connection, bytes);
    shared.broker.clock.advance(Duration::from_secs(61));
    shared.broker.advance();
    connection.tick();
    written(&mut connection, false);
    connection.release();
}

/// The service's side of one connection without a socket, with a queue `orders`: what a client that
/// is to be fuzzed is answered, until it is answered something else.
pub struct Service {
    connection: Connection,
    input: BytesMut,
}

impl Service {
    /// One that nobody has spoken to.
    #[must_use]
    pub fn new() -> Self {
        let config = Config::default().with_queue("orders", Entity::default());
        let connection = Connection::new(Arc::new(Shared::new(config)));
        Self { connection, input: BytesMut::new() }
    }

    /// What a client is answered to these bytes.
    pub fn answer(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.input.extend_from_slice(bytes);
        self.connection.receive(&mut self.input);
        let mut output = Vec::new();
        while let Some(bytes) = self.connection.pop_due(Instant::now()) {
            output.extend_from_slice(&bytes);
        }
        output
    }
}

impl Default for Service {
    fn default() -> Self {
        Self::new()
    }
}

/// A frame that refuses something, with a condition and a text of the caller's choice.
#[must_use]
pub fn refusal(what: Refused, condition: &str, description: &str) -> Bytes {
    let refusal = Refusal::new(condition, description);
    let error = Some(refusal.error());
    let frame = match what {
        Refused::Transfers(up_to) => {
            let rejected = Disposition {
                role: Role::Receiver,
                first: 0,
                last: Some(up_to),
                settled: true,
                state: Some(refusal.rejected()),
                batchable: false,
            };
            frame::write(Kind::Amqp, 0, &rejected, &[])
        }
        Refused::Link(handle) => {
            let detach = Detach { handle: Handle(handle), closed: true, error };
            frame::write(Kind::Amqp, 0, &detach, &[])
        }
        Refused::Session => frame::write(Kind::Amqp, 0, &End { error }, &[]),
        Refused::Connection => frame::write(Kind::Amqp, 0, &Close { error }, &[]),
    };
    frame.unwrap_or_default()
}

/// What [`refusal`] is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// All transfers up to this number.
    Transfers(u32),
    /// The link of this handle.
    Link(u32),
    /// The session.
    Session,
    /// The connection.
    Connection,
}

fn feed(connection: &mut Connection, bytes: &[u8]) {
    let mut input = BytesMut::from(bytes);
    connection.receive(&mut input);
}

/// Everything that is written is frames that the peer takes.
fn written(connection: &mut Connection, greeted: bool) {
    let mut output = BytesMut::new();
    while let Some(bytes) = connection.pop_due(Instant::now()) {
        // The headers and the frames of SASL, which come first.
        if greeted && output.is_empty() && (bytes.starts_with(b"AMQP") || bytes.get(5) == Some(&1))
        {
            continue;
        }
        output.extend_from_slice(&bytes);
    }
    while let Some(raw) = frame::next(&mut output).expect("frames are well formed") {
        if !raw.body.is_empty() {
            frame::performative(raw.body).expect("frames can be decoded");
        }
    }
    assert!(output.is_empty(), "frames are whole");
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn random_bytes_do_no_harm(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            connection(&bytes);
        }

        #[test]
        fn broken_frames_do_no_harm(
            which in 2_usize..100,
            at in any::<proptest::sample::Index>(),
            to in any::<u8>(),
            cut in any::<proptest::sample::Index>(),
        ) {
            let frames = prelude();
            let mut frame = frames[which % frames.len()].to_vec();
            let at = at.index(frame.len());
            frame[at] = to;
            connection(&frame);
            connection(&frame[..cut.index(frame.len())]);
        }
    }
}
