//! From an event to a stream's entry: the names and texts of its fields.
//!
//! What lives here: the fields. What does not: the payload's form (`postrider-encoding`) and
//! sending.
//! Invariant: texts and bytes stand as they were appended, unescaped: Redis takes them all.

use bytes::Bytes;
use postrider_core::{Record, TRACEPARENT, TRACESTATE};
use postrider_encoding::{CLOUD_EVENTS_PREFIX, Message};

/// Prefix of the fields that carry an event's own headers.
const EVENT_HEADER_PREFIX: &str = "header-";

/// Names and values of an entry, one after the other.
pub(crate) fn fields(record: &Record, message: Message) -> Vec<Bytes> {
    let event = &record.event;
    let mut fields = Vec::with_capacity(2 * (8 + event.headers().iter().len()));
    let mut field = |name: &str, value: Bytes| {
        fields.push(Bytes::copy_from_slice(name.as_bytes()));
        fields.push(value);
    };
    let text = |text: &str| Bytes::copy_from_slice(text.as_bytes());
    field("id", event.id().to_string().into());
    field("key", text(event.key().as_str()));
    field("topic", text(event.topic().as_str()));
    field("type", text(event.event_type().as_str()));
    field("content-type", message.content_type.into());
    field("payload", message.body);
    if let Some(trace) = event.trace() {
        field(TRACEPARENT, trace.traceparent.into());
        if let Some(state) = trace.tracestate {
            field(TRACESTATE, state.into());
        }
    }
    for (header, value) in event.headers().iter() {
        if !header.eq_ignore_ascii_case(TRACEPARENT) && !header.eq_ignore_ascii_case(TRACESTATE) {
            field(&format!("{EVENT_HEADER_PREFIX}{header}"), text(value));
        }
    }
    for (attribute, value) in message.attributes {
        field(&format!("{CLOUD_EVENTS_PREFIX}{attribute}"), value.into());
    }
    fields
}
