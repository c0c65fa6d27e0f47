//! What a queue is made of: messages, the states that they are in, claims on them.
//!
//! What lives here: the types, and what a state is called on the wire. What does not: the ways
//! between states (`queue.rs`).
//! Invariant: a message's state has all that belongs to it, and nothing of another state.

use std::sync::Arc;

use bytes::Bytes;
use fe2o3_amqp_types::primitives::SimpleValue;
use uuid::Uuid;

use super::Letter;
use super::message::{Envelope, Message};

/// The application properties that a receiver wants to change.
pub(crate) type Changes = Vec<(String, SimpleValue)>;

/// What an entity is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Queue,
    Topic,
    Subscription,
    DeadLetters,
}

/// Where a message stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Scheduled { due_ms: i64 },
    Ready,
    Locked { token: Uuid },
    Deferred,
}

/// A message in a queue.
#[derive(Debug, Clone)]
pub(crate) struct Stored {
    pub sequence_number: i64,
    pub message: Arc<Message>,
    pub enqueued_ms: i64,
    pub expires_ms: Option<i64>,
    pub delivery_count: u32,
    pub state: State,
    pub letter: Option<Letter>,
}

/// A receiver's claim on a message.
#[derive(Debug)]
pub(crate) struct Lock {
    pub sequence_number: i64,
    pub until_ms: i64,
    /// With a session, the session's lock decides.
    pub session: Option<String>,
    /// Without success it goes back there.
    pub was_deferred: bool,
}

/// How a receiver takes messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    PeekLock,
    Delete,
}

/// What a receiver wants to become of a message.
#[derive(Debug, Clone)]
pub(crate) enum Settlement {
    Complete,
    Abandon(Changes),
    Defer(Changes),
    DeadLetter {
        reason: Option<String>,
        description: Option<String>,
        changes: Changes,
    },
    /// As if it had never been delivered.
    Release,
}

/// A message on its way to a receiver.
#[derive(Debug)]
pub(crate) struct Delivery {
    pub token: Uuid,
    pub bytes: Bytes,
}

/// What leaves this queue for another.
#[derive(Debug)]
pub(crate) enum Leaving {
    DeadLetter(Box<Stored>),
    /// To all subscriptions.
    Publish(Arc<Message>),
}

impl Stored {
    pub(super) fn envelope(&self, locked_until_ms: Option<i64>) -> Envelope<'_> {
        Envelope {
            sequence_number: self.sequence_number,
            enqueued_ms: self.enqueued_ms,
            delivery_count: self.delivery_count,
            locked_until_ms,
            state: match self.state {
                State::Ready | State::Locked { .. } => 0,
                State::Deferred => 1,
                State::Scheduled { .. } => 2,
            },
            letter: self.letter.as_ref(),
        }
    }
}
