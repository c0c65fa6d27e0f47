//! Requests to a node, and answers to them.
//!
//! What lives here: taking a request apart and putting an answer together. What does not: what is
//! asked for (`cbs.rs`, `management/`).
//! Invariant: an answer's correlation-id is the request's message-id, of the same type.

use bytes::Bytes;
use fe2o3_amqp_types::messaging::{ApplicationProperties, MessageId, Properties};
use fe2o3_amqp_types::primitives::SimpleValue;
use serde_amqp::Value;
use serde_amqp::primitives::{OrderedMap, Symbol};
use serde_bytes::ByteBuf;

use crate::broker::message::{Message, text};
use crate::refusal::{Refusal, condition};
use crate::wire::{self, Malformed, scan};

/// The descriptor of a body that is one value.
const VALUE_SECTION: [u8; 3] = [0x00, 0x53, 0x77];
const VALUE_CODE: u64 = 0x77;

/// A request.
pub(crate) struct Request {
    pub id: Option<MessageId>,
    pub reply_to: Option<String>,
    properties: ApplicationProperties,
    pub body: Value,
}

impl Request {
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Refusal> {
        let malformed = |error: Malformed| Refusal::new(condition::DECODE_ERROR, error.to_string());
        let message = Message::decode(bytes).map_err(malformed)?;
        let properties = message.application_properties().map_err(malformed)?;
        let sections = scan::sections(&message.body).map_err(malformed)?;
        let body = sections.into_iter().find(|section| section.code == VALUE_CODE);
        let body = match body {
            Some(section) => {
                let value = message.body.get(section.value).unwrap_or_default();
                wire::decode(value).map_err(malformed)?
            }
            None => Value::Null,
        };
        let Properties { message_id, reply_to, .. } = message.properties;
        Ok(Self { id: message_id, reply_to, properties, body })
    }

    pub(crate) fn property(&self, name: &str) -> Option<&SimpleValue> {
        self.properties.get(name)
    }

    pub(crate) fn text_property(&self, name: &str) -> Option<&str> {
        match self.property(name)? {
            SimpleValue::String(text) | SimpleValue::Symbol(Symbol(text)) => Some(text),
            _ => None,
        }
    }

    /// A field of a body that is a map.
    pub(crate) fn field(&self, name: &str) -> Option<&Value> {
        let Value::Map(map) = &self.body else { return None };
        field(map, name)
    }

    /// Puts the answer together.
    pub(crate) fn answer(
        &self,
        properties: ApplicationProperties,
        body: Option<&Value>,
    ) -> Result<Bytes, Refusal> {
        let correlation = Properties { correlation_id: self.id.clone(), ..Properties::default() };
        self.parts(&correlation, &properties, body)
            .map_err(|error| Refusal::new(condition::INTERNAL_ERROR, error.to_string()))
    }

    fn parts(
        &self,
        correlation: &Properties,
        properties: &ApplicationProperties,
        body: Option<&Value>,
    ) -> Result<Bytes, Malformed> {
        let mut bytes = wire::encode(correlation)?;
        bytes.extend(wire::encode(properties)?);
        bytes.extend(VALUE_SECTION);
        bytes.extend(wire::encode(body.unwrap_or(&Value::Null))?);
        Ok(bytes.into())
    }
}

/// A field of a map, whose keys may be strings or symbols.
pub(crate) fn field<'a>(map: &'a OrderedMap<Value, Value>, name: &str) -> Option<&'a Value> {
    map.iter().find(|(key, _)| text(key) == Some(name)).map(|(_, value)| value)
}

/// A whole number of any type.
pub(crate) fn integer(value: &Value) -> Option<i64> {
    match value {
        Value::Ubyte(number) => Some(i64::from(*number)),
        Value::Ushort(number) => Some(i64::from(*number)),
        Value::Uint(number) => Some(i64::from(*number)),
        Value::Ulong(number) => i64::try_from(*number).ok(),
        Value::Byte(number) => Some(i64::from(*number)),
        Value::Short(number) => Some(i64::from(*number)),
        Value::Int(number) => Some(i64::from(*number)),
        Value::Long(number) => Some(*number),
        _ => None,
    }
}

/// The elements of a list or an array.
pub(crate) fn elements(value: &Value) -> Option<&[Value]> {
    match value {
        Value::List(elements) => Some(elements),
        Value::Array(elements) => Some(&elements.0),
        _ => None,
    }
}

/// A map with strings as keys.
pub(crate) fn map<const N: usize>(fields: [(&str, Value); N]) -> Value {
    let pairs = fields.into_iter().map(|(name, value)| (Value::String(name.to_owned()), value));
    Value::Map(OrderedMap::from_iter(pairs))
}

pub(crate) fn binary(bytes: &[u8]) -> Value {
    Value::Binary(ByteBuf::from(bytes))
}
