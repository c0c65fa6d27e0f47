//! From a record to an AMQP message.
//!
//! What lives here: which field of the message carries what of the event. What does not: batches
//! (`batch.rs`), and how a body is made (`postrider-encoding`).
//! Invariant: session id and partition key are the same text, since an entity with sessions refuses
//! anything else; equal keys give equal texts, and different ones different texts.

use fe2o3_amqp::types::messaging::{
    ApplicationProperties, Data, Message, MessageAnnotations, MessageId, Properties,
};
use fe2o3_amqp::types::primitives::{SimpleValue, Symbol, Value};
use postrider_core::{Error, Record, Result, TRACEPARENT, TRACESTATE};
use postrider_encoding::Encoder;
use sha2::{Digest, Sha256};

use crate::config::LongKeys;

/// Application property with the event's topic.
pub const TOPIC_PROPERTY: &str = "postrider-topic";
/// Application property with the event's key, where the session id is its hash.
pub const KEY_PROPERTY: &str = "postrider-key";
/// Annotation with the partition key.
const PARTITION_KEY: &str = "x-opt-partition-key";
/// Prefix of CloudEvents attributes in AMQP (CloudEvents 1.0.2, AMQP protocol binding, 3.1.3.1).
const CLOUD_EVENTS_PREFIX: &str = "cloudEvents:";
/// Where the official clients look for the caller's span.
const DIAGNOSTIC_ID: &str = "Diagnostic-Id";
/// Longest session id, partition key and message id, in characters as .NET counts them (UTF-16).
const MAX_KEY_CHARS: usize = 128;

/// Makes messages one way.
#[derive(Debug, Clone)]
pub(crate) struct MessageEncoder {
    pub(crate) encoder: Encoder,
    pub(crate) long_keys: LongKeys,
}

impl MessageEncoder {
    /// The whole message of a record.
    ///
    /// # Errors
    /// [`ErrorKind::Permanent`](postrider_core::ErrorKind::Permanent) if its key is too long and
    /// such keys are refused.
    pub(crate) fn message(&self, record: &Record) -> Result<Message<Data>> {
        let event = &record.event;
        let session = self.session_id(record)?;
        let encoded = self.encoder.encode(record);
        if !encoded.content_type.is_ascii() {
            return Err(Error::permanent(
                "the event's content type has characters beyond ASCII, which AMQP does not carry",
            ));
        }
        let mut properties = identity(record, &session);
        properties.subject = Some(event.event_type().as_str().to_owned());
        properties.content_type = Some(Symbol::from(encoded.content_type));
        let mut application = ApplicationProperties::default();
        for (name, value) in event.headers().iter() {
            application.insert(name.to_owned(), text(value));
        }
        for (name, value) in encoded.attributes {
            application.insert(format!("{CLOUD_EVENTS_PREFIX}{name}"), text(value));
        }
        if let Some(trace) = event.trace() {
            application.insert(DIAGNOSTIC_ID.to_owned(), text(trace.traceparent.as_str()));
            application.insert(TRACEPARENT.to_owned(), text(trace.traceparent));
            if let Some(state) = trace.tracestate {
                application.insert(TRACESTATE.to_owned(), text(state));
            }
        }
        application.insert(TOPIC_PROPERTY.to_owned(), text(event.topic().as_str()));
        if session != event.key().as_str() {
            application.insert(KEY_PROPERTY.to_owned(), text(event.key().as_str()));
        }
        Ok(Message {
            header: None,
            delivery_annotations: None,
            message_annotations: Some(annotations(&session)),
            properties: Some(properties),
            application_properties: Some(application),
            body: Data::from(encoded.body.as_ref()),
            footer: None,
        })
    }

    /// What stands around a batch: the first message's identity and nothing else of it.
    ///
    /// # Errors
    /// As [`message`](Self::message).
    pub(crate) fn envelope<B>(&self, first: &Record, body: B) -> Result<Message<B>> {
        let session = self.session_id(first)?;
        Ok(Message {
            header: None,
            delivery_annotations: None,
            message_annotations: Some(annotations(&session)),
            properties: Some(identity(first, &session)),
            application_properties: None,
            body,
            footer: None,
        })
    }

    fn session_id(&self, record: &Record) -> Result<String> {
        let key = record.event.key().as_str();
        let chars = key.encode_utf16().count();
        match self.long_keys {
            _ if chars <= MAX_KEY_CHARS => Ok(key.to_owned()),
            LongKeys::Refuse => Err(Error::permanent(format!(
                "the key has {chars} characters; Service Bus takes {MAX_KEY_CHARS} as a session \
                 id: use shorter keys, or say long_keys = \"hash\""
            ))),
            LongKeys::Hash => {
                let digest = Sha256::digest(key.as_bytes());
                let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
                Ok(format!("sha256:{hex}"))
            }
        }
    }
}

fn identity(record: &Record, session: &str) -> Properties {
    Properties {
        message_id: Some(MessageId::String(record.event.id().to_string())),
        group_id: Some(session.to_owned()),
        ..Properties::default()
    }
}

fn annotations(session: &str) -> MessageAnnotations {
    MessageAnnotations::builder().insert(PARTITION_KEY, Value::String(session.to_owned())).build()
}

fn text(value: impl Into<String>) -> SimpleValue {
    SimpleValue::String(value.into())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use postrider_core::{
        ContentType, EventId, EventType, Headers, Key, NewEvent, Position, Timestamp, Topic,
        TraceContext,
    };
    use postrider_encoding::{Encoding, EventSource};
    use uuid::Uuid;

    pub(crate) fn encoder(encoding: Encoding, long_keys: LongKeys) -> MessageEncoder {
        MessageEncoder { encoder: Encoder::new(encoding, EventSource::default()), long_keys }
    }

    pub(crate) fn record(number: u128, key: &str, payload: Vec<u8>) -> Record {
        let mut headers = Headers::new();
        headers.insert("Tenant", "50 % \"é\"").expect("valid");
        headers.insert(TOPIC_PROPERTY, "forged").expect("valid");
        let span = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let event = NewEvent::builder(
            Key::new(key).expect("valid"),
            Topic::new("orders").expect("valid"),
            EventType::new("OrderPlaced").expect("valid"),
        )
        .id(EventId::from_uuid(Uuid::from_u128(number)))
        .headers(headers)
        .trace(&TraceContext::new(span, Some("vendor=1".into())).expect("valid"))
        .expect("valid")
        .payload(ContentType::new("application/json").expect("valid"), payload)
        .build()
        .expect("valid")
        .identified(|| EventId::from_uuid(Uuid::nil()));
        let appended_at = Timestamp::from_millis(1_672_671_845_678);
        Record { position: Position::START, appended_at, event }
    }

    fn property(message: &Message<Data>, name: &str) -> Option<String> {
        match message.application_properties.as_ref()?.get(name)? {
            SimpleValue::String(text) => Some(text.clone()),
            other => panic!("{name} is {other:?}"),
        }
    }

    #[test]
    fn every_field_of_the_mapping() {
        let record = record(1, "Zoë 42", b"{\"a\": 1.0}\n\xff".to_vec());
        let plain = encoder(Encoding::Plain, LongKeys::Refuse).message(&record).expect("encoded");
        assert_eq!(&plain.body.0[..], b"{\"a\": 1.0}\n\xff");
        let properties = plain.properties.clone().expect("set");
        let id = "00000000-0000-0000-0000-000000000001";
        assert_eq!(properties.message_id, Some(MessageId::String(id.into())));
        assert_eq!(properties.group_id.as_deref(), Some("Zoë 42"));
        assert_eq!(properties.subject.as_deref(), Some("OrderPlaced"));
        assert_eq!(properties.content_type, Some(Symbol::from("application/json")));
        let annotations = plain.message_annotations.clone().expect("set");
        assert_eq!(annotations.0, super::annotations("Zoë 42").0);
        let span = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        for (name, value) in [
            ("Tenant", "50 % \"é\""),
            ("postrider-topic", "orders"),
            ("traceparent", span),
            ("tracestate", "vendor=1"),
            ("Diagnostic-Id", span),
        ] {
            assert_eq!(property(&plain, name).as_deref(), Some(value), "{name}");
        }
        assert_eq!(property(&plain, KEY_PROPERTY), None);
        assert_eq!(plain.application_properties.expect("set").len(), 5);
    }

    #[test]
    fn cloud_events_use_the_amqp_bindings_names() {
        let record = record(1, "k", b"{}".to_vec());
        let binary = encoder(Encoding::CloudEventsBinary, LongKeys::Refuse);
        let binary = binary.message(&record).expect("encoded");
        assert_eq!(property(&binary, "cloudEvents:specversion").as_deref(), Some("1.0"));
        assert_eq!(property(&binary, "cloudEvents:type").as_deref(), Some("OrderPlaced"));
        assert_eq!(&binary.body.0[..], b"{}");
        let structured = encoder(Encoding::CloudEventsStructured, LongKeys::Refuse);
        let structured = structured.message(&record).expect("encoded");
        let content_type = structured.properties.clone().expect("set").content_type;
        assert_eq!(content_type, Some(Symbol::from("application/cloudevents+json")));
        assert_eq!(property(&structured, "cloudEvents:type"), None);
        assert!(structured.body.0.starts_with(b"{\"specversion\":\"1.0\""));
    }

    #[test]
    fn long_keys_are_refused_or_hashed_and_short_ones_never() {
        let refuse = encoder(Encoding::Plain, LongKeys::Refuse);
        let hash = encoder(Encoding::Plain, LongKeys::Hash);
        let exact = record(1, &"é".repeat(128), Vec::new());
        for encoder in [&refuse, &hash] {
            let message = encoder.message(&exact).expect("128 characters pass");
            assert_eq!(message.properties.expect("set").group_id, Some("é".repeat(128)));
        }
        // Characters beyond the first plane count twice, as they do at the service.
        for key in ["x".repeat(129), "🐎".repeat(65)] {
            let long = record(1, &key, Vec::new());
            let error = refuse.message(&long).expect_err("too long");
            assert_eq!(error.kind(), postrider_core::ErrorKind::Permanent);
            assert!(error.to_string().contains("128"), "{error}");
            let message = hash.message(&long).expect("hashed");
            let session = message.properties.clone().expect("set").group_id.expect("set");
            assert!(session.starts_with("sha256:") && session.len() == 71, "{session}");
            assert_eq!(property(&message, KEY_PROPERTY), Some(key));
        }
    }
}
