//! One message: taken apart as far as the broker must look into it, and put together again.
//!
//! What lives here: sections, limits of single fields, batches. What does not: where messages wait.
//! Invariant: application properties, body and footer are never decoded on their way, so a receiver
//! gets the very bytes that were sent.

use bytes::Bytes;
use fe2o3_amqp_types::messaging::annotations::{Annotations, OwnedKey};
use fe2o3_amqp_types::messaging::{
    ApplicationProperties, Header, MessageAnnotations, MessageId, Properties,
};
use fe2o3_amqp_types::primitives::SimpleValue;
use serde_amqp::Value;
use serde_amqp::described::Described;
use serde_amqp::descriptor::Descriptor;
use serde_amqp::primitives::{Symbol, Timestamp};

use super::Letter;
use crate::refusal::{Refusal, condition};
use crate::wire::{self, Malformed, scan};

/// The longest id of a message, a session or a partition key.
const ID_CHARS_MAX: usize = 128;
/// The most messages of one batch.
pub(crate) const BATCH_MESSAGES_MAX: usize = 4_500;

const HEADER: u64 = 0x70;
const MESSAGE_ANNOTATIONS: u64 = 0x72;
const DELIVERY_ANNOTATIONS: u64 = 0x71;
const PROPERTIES: u64 = 0x73;
const APPLICATION_PROPERTIES: u64 = 0x74;
const DATA: u64 = 0x75;
const SEQUENCE: u64 = 0x76;
const VALUE: u64 = 0x77;
const FOOTER: u64 = 0x78;

pub(crate) const PARTITION_KEY: &str = "x-opt-partition-key";
pub(crate) const SCHEDULED_TIME: &str = "x-opt-scheduled-enqueue-time";

/// A message as it was sent.
#[derive(Debug, Clone, Default)]
pub(crate) struct Message {
    pub header: Header,
    pub annotations: Annotations,
    pub properties: Properties,
    /// The section, or nothing.
    pub application_properties: Bytes,
    /// The sections of the body and the footer.
    pub body: Bytes,
    /// What it takes.
    pub size: usize,
}

/// What a receiver is told of a message beside the message.
pub(crate) struct Envelope<'a> {
    pub sequence_number: i64,
    pub enqueued_ms: i64,
    pub delivery_count: u32,
    pub locked_until_ms: Option<i64>,
    /// 0 active, 1 deferred, 2 scheduled.
    pub state: i32,
    pub letter: Option<&'a Letter>,
}

impl Message {
    /// Takes one encoded message apart.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        // A copy, or one small message would keep all that was read along with it in memory.
        let bytes = Bytes::copy_from_slice(bytes);
        let mut message = Self { size: bytes.len(), ..Self::default() };
        let mut body: Option<(usize, usize)> = None;
        for section in scan::sections(&bytes)? {
            let whole = bytes.slice(section.whole.clone());
            match section.code {
                HEADER => message.header = wire::decode(&whole)?,
                DELIVERY_ANNOTATIONS => {}
                MESSAGE_ANNOTATIONS => {
                    message.annotations = wire::decode::<MessageAnnotations>(&whole)?.0;
                }
                PROPERTIES => message.properties = wire::decode(&whole)?,
                APPLICATION_PROPERTIES => message.application_properties = whole,
                DATA | SEQUENCE | VALUE | FOOTER => {
                    let start = body.map_or(section.whole.start, |(start, _)| start);
                    body = Some((start, section.whole.end));
                }
                _ => return Err(Malformed("a message has an unknown section")),
            }
        }
        if let Some((start, end)) = body {
            message.body = bytes.slice(start..end);
        }
        Ok(message)
    }

    /// Takes a batch apart: an envelope whose data sections hold one whole message each.
    pub(crate) fn decode_batch(bytes: &[u8]) -> Result<Vec<Self>, Refusal> {
        let malformed = |error: Malformed| Refusal::new(condition::DECODE_ERROR, error.to_string());
        let mut messages = Vec::new();
        for section in scan::sections(bytes).map_err(malformed)? {
            if section.code != DATA {
                continue;
            }
            if messages.len() == BATCH_MESSAGES_MAX {
                let description = format!("A batch has at most {BATCH_MESSAGES_MAX} messages.");
                return Err(Refusal::new(condition::NOT_ALLOWED, description));
            }
            let value = bytes.get(section.value).unwrap_or_default();
            let inner = scan::binary(value).and_then(|inner| value.get(inner));
            let inner = inner.ok_or(Malformed("a data section is not binary"));
            let inner = inner.map_err(malformed)?;
            messages.push(Self::decode(inner).map_err(malformed)?);
        }
        if messages.is_empty() {
            return Err(Refusal::new(condition::ARGUMENT_ERROR, "The batch has no messages."));
        }
        Ok(messages)
    }

    pub(crate) fn session_id(&self) -> Option<&str> {
        self.properties.group_id.as_deref()
    }

    /// As duplicate detection compares them.
    pub(crate) fn message_id(&self) -> Option<String> {
        self.properties.message_id.as_ref().map(id_text)
    }

    /// Clients expect one of every message that they receive.
    pub(crate) fn give_id(&mut self) {
        let id = &mut self.properties.message_id;
        if id.is_none() {
            *id = Some(MessageId::String(uuid::Uuid::new_v4().simple().to_string()));
        }
    }

    pub(crate) fn partition_key(&self) -> Option<&str> {
        match self.annotation(PARTITION_KEY)? {
            Value::String(key) => Some(key),
            _ => None,
        }
    }

    /// When it is to appear, in milliseconds since 1970.
    pub(crate) fn scheduled_ms(&self) -> Option<i64> {
        match self.annotation(SCHEDULED_TIME)? {
            Value::Timestamp(time) => Some(time.milliseconds()),
            _ => None,
        }
    }

    pub(crate) fn annotation(&self, name: &str) -> Option<&Value> {
        let key = OwnedKey::from(name);
        self.annotations.get(&key)
    }

    /// Whether an entity may take it.
    pub(crate) fn check(&self, requires_session: bool) -> Result<(), Refusal> {
        let argument = |text: String| Err(Refusal::new(condition::ARGUMENT_ERROR, text));
        let session = self.session_id().filter(|session| !session.is_empty());
        if requires_session && session.is_none() {
            let text = "The SessionId was not set on a message, and the entity requires sessions.";
            return Err(Refusal::new(condition::NOT_ALLOWED, text));
        }
        let message_id = self.message_id();
        let key = self.partition_key();
        for (name, id) in [
            ("SessionId", self.session_id()),
            ("MessageId", message_id.as_deref()),
            ("PartitionKey", key),
        ] {
            if id.is_some_and(|id| id.chars().count() > ID_CHARS_MAX) {
                return argument(format!("{name} has more than {ID_CHARS_MAX} characters."));
            }
        }
        if let (Some(session), Some(key)) = (session, key)
            && session != key
        {
            return argument("PartitionKey and SessionId must be the same.".to_owned());
        }
        Ok(())
    }

    /// Puts it together for a receiver.
    pub(crate) fn encode(&self, envelope: &Envelope<'_>) -> Result<Bytes, Malformed> {
        let mut bytes = wire::encode(&self.header_for(envelope))?;
        bytes.extend(wire::encode(&MessageAnnotations(self.annotations_for(envelope)))?);
        bytes.extend(wire::encode(&self.properties)?);
        match envelope.letter {
            Some(letter) => bytes.extend(wire::encode(&self.properties_with(letter)?)?),
            None => bytes.extend(&self.application_properties),
        }
        bytes.extend(&self.body);
        Ok(bytes.into())
    }

    /// As it is kept: what [`Self::decode`] makes the same message of.
    pub(crate) fn to_bytes(&self) -> Result<Vec<u8>, Malformed> {
        let mut bytes = wire::encode(&self.header)?;
        bytes.extend(wire::encode(&MessageAnnotations(self.annotations.clone()))?);
        bytes.extend(wire::encode(&self.properties)?);
        bytes.extend(&self.application_properties);
        bytes.extend(&self.body);
        Ok(bytes)
    }

    /// With every field: clients take one that is left out for unknown, not for its default.
    fn header_for(&self, envelope: &Envelope<'_>) -> Value {
        let fields = vec![
            Value::Bool(self.header.durable),
            Value::Ubyte(self.header.priority.0),
            self.header.ttl.map_or(Value::Null, Value::Uint),
            Value::Bool(envelope.delivery_count == 0),
            Value::Uint(envelope.delivery_count),
        ];
        let descriptor = Descriptor::Code(HEADER);
        Value::Described(Box::new(Described { descriptor, value: Value::List(fields) }))
    }

    fn annotations_for(&self, envelope: &Envelope<'_>) -> Annotations {
        let mut annotations = self.annotations.clone();
        let mut put = |name: &str, value: Value| annotations.insert(OwnedKey::from(name), value);
        put("x-opt-sequence-number", Value::Long(envelope.sequence_number));
        put("x-opt-enqueued-time", time(envelope.enqueued_ms));
        put("x-opt-message-state", Value::Int(envelope.state));
        if let Some(until) = envelope.locked_until_ms {
            put("x-opt-locked-until", time(until));
        }
        if let Some(letter) = envelope.letter {
            put("x-opt-deadletter-source", Value::String(letter.source.clone()));
        }
        annotations
    }

    fn properties_with(&self, letter: &Letter) -> Result<ApplicationProperties, Malformed> {
        let mut properties = self.application_properties()?;
        let mut put = |name: &str, text: &Option<String>| {
            if let Some(text) = text {
                properties.insert(name.to_owned(), SimpleValue::String(text.clone()));
            }
        };
        put("DeadLetterReason", &letter.reason);
        put("DeadLetterErrorDescription", &letter.description);
        Ok(properties)
    }

    pub(crate) fn application_properties(&self) -> Result<ApplicationProperties, Malformed> {
        if self.application_properties.is_empty() {
            return Ok(ApplicationProperties::default());
        }
        wire::decode(&self.application_properties)
    }

    /// The bytes of all data sections, one after the other; none if the body is something else.
    pub(crate) fn data(&self) -> Vec<u8> {
        let mut data = Vec::new();
        for section in scan::sections(&self.body).unwrap_or_default() {
            let value = self.body.get(section.value).unwrap_or_default();
            if section.code == DATA
                && let Some(inner) = scan::binary(value)
            {
                data.extend(value.get(inner).unwrap_or_default());
            }
        }
        data
    }

    /// Writes a receiver's changes into the application properties.
    pub(crate) fn change_properties(
        &mut self,
        changes: impl IntoIterator<Item = (String, SimpleValue)>,
    ) -> Result<(), Malformed> {
        let mut properties = self.application_properties()?;
        properties.0.as_inner_mut().extend(changes);
        self.application_properties = wire::encode(&properties)?.into();
        Ok(())
    }
}

/// An id as text, whatever its type.
pub(crate) fn id_text(id: &MessageId) -> String {
    match id {
        MessageId::String(text) => text.clone(),
        MessageId::Ulong(number) => number.to_string(),
        MessageId::Uuid(id) => uuid::Uuid::from_bytes(*id.as_inner()).to_string(),
        MessageId::Binary(bytes) => bytes.iter().map(|byte| format!("{byte:02x}")).collect(),
    }
}

/// A moment as it goes over the wire.
pub(crate) fn time(ms: i64) -> Value {
    Value::Timestamp(Timestamp::from_milliseconds(ms))
}

/// Text, as clients send it.
pub(crate) fn text(value: &Value) -> Option<&str> {
    match value {
        Value::String(text) | Value::Symbol(Symbol(text)) => Some(text),
        _ => None,
    }
}
