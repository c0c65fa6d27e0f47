//! What an entity holds, for tests.
//!
//! What lives here: messages as they are stored, and what was counted. What does not: changing
//! them.
//! Invariant: looking changes nothing; what is due is not done by it.

use std::collections::BTreeMap;
use std::time::Duration;

use fe2o3_amqp_types::messaging::annotations::OwnedKey;
use fe2o3_amqp_types::primitives::SimpleValue;
use serde_amqp::Value;
use serde_amqp::primitives::Symbol;

use crate::broker::key;
use crate::broker::message::{Message, id_text};
use crate::broker::queue::{State, Stored};
use crate::shared::{Counts, Shared};

/// Where a message stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MessageState {
    /// It waits for a receiver.
    Active,
    /// A receiver holds it.
    Locked,
    /// It can be had by its number alone.
    Deferred,
    /// It is to appear later.
    Scheduled,
}

/// A property's or an annotation's value.
#[derive(Debug, Clone, PartialEq)]
pub enum PropertyValue {
    /// Nothing.
    Null,
    /// A string.
    Text(String),
    /// A symbol.
    Symbol(String),
    /// A boolean.
    Boolean(bool),
    /// A number of any whole type.
    Integer(i128),
    /// A number with a fraction.
    Float(f64),
    /// Milliseconds since 1970.
    Timestamp(i64),
    /// A UUID.
    Uuid(uuid::Uuid),
    /// Bytes.
    Binary(Vec<u8>),
    /// Anything else, as text.
    Other(String),
}

/// A message as it is stored.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct StoredMessage {
    /// Its number in its entity.
    pub sequence_number: i64,
    /// Where it stands.
    pub state: MessageState,
    /// How often it was delivered without success.
    pub delivery_count: u32,
    /// As text, whatever its type.
    pub message_id: Option<String>,
    /// The group-id.
    pub session_id: Option<String>,
    /// The label.
    pub subject: Option<String>,
    /// Its type of content.
    pub content_type: Option<String>,
    /// As text, whatever its type.
    pub correlation_id: Option<String>,
    /// Where answers are wanted.
    pub reply_to: Option<String>,
    /// Where it is for.
    pub to: Option<String>,
    /// How long it lives by its own header.
    pub time_to_live: Option<Duration>,
    /// Whether its header says so.
    pub durable: bool,
    /// Application properties.
    pub application_properties: BTreeMap<String, PropertyValue>,
    /// Message annotations as they were sent.
    pub annotations: BTreeMap<String, PropertyValue>,
    /// The bytes of its data sections.
    pub body: Vec<u8>,
    /// All of it on the wire, as it was sent.
    pub wire_bytes: usize,
    /// Why it is a dead letter.
    pub dead_letter_reason: Option<String>,
    /// What is said beside the reason.
    pub dead_letter_description: Option<String>,
}

/// A queue, topic, subscription or dead-letter queue, looked at from outside.
#[derive(Debug, Clone)]
pub struct EntityView<'a> {
    pub(crate) shared: &'a Shared,
    pub(crate) path: String,
}

impl EntityView<'_> {
    /// Everything in it, by sequence number; none for an entity that does not exist.
    #[must_use]
    pub fn messages(&self) -> Vec<StoredMessage> {
        let all = self
            .shared
            .broker
            .look(&self.path, |queue| queue.messages().map(StoredMessage::of).collect());
        all.unwrap_or_default()
    }

    /// Everything in its dead-letter queue.
    #[must_use]
    pub fn dead_letters(&self) -> Vec<StoredMessage> {
        let path = format!("{}/$DeadLetterQueue", self.path);
        EntityView { shared: self.shared, path }.messages()
    }

    /// What it has seen so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.shared.counts(&key(&self.path))
    }
}

impl StoredMessage {
    fn of(stored: &Stored) -> Self {
        let message: &Message = &stored.message;
        let properties = &message.properties;
        let letter = stored.letter.as_ref();
        Self {
            sequence_number: stored.sequence_number,
            state: match stored.state {
                State::Ready => MessageState::Active,
                State::Locked { .. } => MessageState::Locked,
                State::Deferred => MessageState::Deferred,
                State::Scheduled { .. } => MessageState::Scheduled,
            },
            delivery_count: stored.delivery_count,
            message_id: message.message_id(),
            session_id: message.session_id().map(str::to_owned),
            subject: properties.subject.clone(),
            content_type: properties.content_type.as_ref().map(|symbol| symbol.0.clone()),
            correlation_id: properties.correlation_id.as_ref().map(id_text),
            reply_to: properties.reply_to.clone(),
            to: properties.to.clone(),
            time_to_live: message.header.ttl.map(|ms| Duration::from_millis(u64::from(ms))),
            durable: message.header.durable,
            application_properties: application_properties(message),
            annotations: annotations(message),
            body: message.data(),
            wire_bytes: message.size,
            dead_letter_reason: letter.and_then(|letter| letter.reason.clone()),
            dead_letter_description: letter.and_then(|letter| letter.description.clone()),
        }
    }
}

fn application_properties(message: &Message) -> BTreeMap<String, PropertyValue> {
    let properties = message.application_properties().unwrap_or_default();
    let values = properties.iter().map(|(name, value)| (name.clone(), simple_value(value)));
    values.collect()
}

fn annotations(message: &Message) -> BTreeMap<String, PropertyValue> {
    let named = message.annotations.iter().map(|(name, value)| match name {
        OwnedKey::Symbol(Symbol(name)) => (name.clone(), any_value(value)),
        OwnedKey::Ulong(number) => (number.to_string(), any_value(value)),
    });
    named.collect()
}

fn simple_value(value: &SimpleValue) -> PropertyValue {
    match value {
        SimpleValue::Null => PropertyValue::Null,
        SimpleValue::Bool(value) => PropertyValue::Boolean(*value),
        SimpleValue::Ubyte(value) => PropertyValue::Integer(i128::from(*value)),
        SimpleValue::Ushort(value) => PropertyValue::Integer(i128::from(*value)),
        SimpleValue::Uint(value) => PropertyValue::Integer(i128::from(*value)),
        SimpleValue::Ulong(value) => PropertyValue::Integer(i128::from(*value)),
        SimpleValue::Byte(value) => PropertyValue::Integer(i128::from(*value)),
        SimpleValue::Short(value) => PropertyValue::Integer(i128::from(*value)),
        SimpleValue::Int(value) => PropertyValue::Integer(i128::from(*value)),
        SimpleValue::Long(value) => PropertyValue::Integer(i128::from(*value)),
        SimpleValue::Float(value) => PropertyValue::Float(f64::from(value.0)),
        SimpleValue::Double(value) => PropertyValue::Float(value.0),
        SimpleValue::Timestamp(value) => PropertyValue::Timestamp(value.milliseconds()),
        SimpleValue::Uuid(value) => PropertyValue::Uuid(uuid::Uuid::from_bytes(*value.as_inner())),
        SimpleValue::Binary(value) => PropertyValue::Binary(value.to_vec()),
        SimpleValue::String(value) => PropertyValue::Text(value.clone()),
        SimpleValue::Symbol(value) => PropertyValue::Symbol(value.0.clone()),
        other => PropertyValue::Other(format!("{other:?}")),
    }
}

fn any_value(value: &Value) -> PropertyValue {
    match crate::connection::simple(value) {
        Some(simple) => simple_value(&simple),
        None => PropertyValue::Other(format!("{value:?}")),
    }
}
