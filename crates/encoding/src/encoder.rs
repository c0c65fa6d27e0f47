//! From a record to a message.
//!
//! What lives here: `Encoding`, the encoder and its `Message`. What does not: how attributes are
//! named on a medium (`ce-` in HTTP, `ce_` in Kafka, `cloudEvents:` in AMQP), which is its sink's.
//! Invariant: with `plain` and `cloudevents-binary` the body is the payload itself, not a copy.

use bytes::Bytes;
use postrider_core::{Record, TRACEPARENT, TRACESTATE};

use crate::cloud_events::{SPEC_VERSION, STRUCTURED_CONTENT_TYPE, write_structured};
use crate::source::EventSource;
use crate::time::format_rfc3339;

/// How an event becomes a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Deserialize)]
pub enum Encoding {
    /// The payload as body; the rest in the medium's own fields and headers.
    #[default]
    #[serde(rename = "plain")]
    Plain,
    /// CloudEvents 1.0, binary mode: the payload as body, attributes as headers.
    #[serde(rename = "cloudevents-binary")]
    CloudEventsBinary,
    /// CloudEvents 1.0, structured mode: one JSON document with the payload inside.
    #[serde(rename = "cloudevents-structured")]
    CloudEventsStructured,
}

/// An encoded event.
#[derive(Clone, PartialEq, Eq)]
pub struct Message {
    /// Media type of the body.
    pub content_type: String,
    /// CloudEvents attributes by their names without prefix; empty unless the mode is binary.
    pub attributes: Vec<(&'static str, String)>,
    /// The body.
    pub body: Bytes,
}

impl std::fmt::Debug for Message {
    /// Without the body: it never reaches a log.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Message {{ {}, {} bytes }}", self.content_type, self.body.len())
    }
}

/// Encodes records one way.
#[derive(Debug, Clone)]
pub struct Encoder {
    encoding: Encoding,
    source: EventSource,
}

impl Encoder {
    /// An encoder; `source` is used by the CloudEvents encodings only.
    pub fn new(encoding: Encoding, source: EventSource) -> Self {
        Self { encoding, source }
    }

    /// The way it encodes.
    pub fn encoding(&self) -> Encoding {
        self.encoding
    }

    /// Encodes one record. The event's headers, save the trace context, are not part of a
    /// CloudEvent (most names are no legal attribute names): sinks send them beside it.
    pub fn encode(&self, record: &Record) -> Message {
        let event = &record.event;
        let plain = |attributes| Message {
            content_type: event.content_type().as_str().to_owned(),
            attributes,
            body: event.payload().clone(),
        };
        match self.encoding {
            Encoding::Plain => plain(Vec::new()),
            Encoding::CloudEventsBinary => plain(attributes(record, &self.source)),
            Encoding::CloudEventsStructured => Message {
                content_type: STRUCTURED_CONTENT_TYPE.to_owned(),
                attributes: Vec::new(),
                body: write_structured(record, &attributes(record, &self.source)),
            },
        }
    }
}

/// All context attributes save `datacontenttype`, whose place depends on the mode.
fn attributes(record: &Record, source: &EventSource) -> Vec<(&'static str, String)> {
    let event = &record.event;
    let key = event.key().as_str();
    let mut attributes = vec![
        ("specversion", SPEC_VERSION.to_owned()),
        ("id", event.id().to_string()),
        ("source", source.as_str().to_owned()),
        ("type", event.event_type().as_str().to_owned()),
        ("subject", key.to_owned()),
        ("time", format_rfc3339(record.appended_at)),
        ("partitionkey", key.to_owned()),
    ];
    if let Some(trace) = event.trace() {
        attributes.push((TRACEPARENT, trace.traceparent));
        attributes.extend(trace.tracestate.map(|state| (TRACESTATE, state)));
    }
    attributes
}
