//! From an event to a NATS message: its subject and headers.
//!
//! What lives here: names, and how texts are made fit for them. What does not: the body
//! (`postrider-encoding`) and sending.
//! Invariant: every text from an event is percent-encoded, so that it arrives as it was appended,
//! can neither end a header nor start another, and adds no wildcard or level to a subject.

use async_nats::header::{HeaderMap, HeaderName, HeaderValue};
use postrider_core::{Error, Record, Result, TRACEPARENT, TRACESTATE};
use postrider_encoding::{CLOUD_EVENTS_PREFIX, Message, encode_header_value};

/// Prefix of the headers that carry an event's own ones.
const EVENT_HEADER_PREFIX: &str = "postrider-header-";
/// By which the stream tells repetitions.
const MESSAGE_ID: &str = "Nats-Msg-Id";
/// The stream that has to take it.
const EXPECTED_STREAM: &str = "Nats-Expected-Stream";

/// The headers of an event's message.
///
/// # Errors
/// `Permanent` if a text cannot stand in a header, which no event's can after its encoding.
pub(crate) fn headers(
    record: &Record,
    message: &Message,
    stream: Option<&str>,
) -> Result<HeaderMap> {
    let event = &record.event;
    let mut map = HeaderMap::new();
    map.insert(name(MESSAGE_ID)?, raw(&event.id().to_string())?);
    if let Some(stream) = stream {
        map.insert(name(EXPECTED_STREAM)?, raw(stream)?);
    }
    map.insert(name("content-type")?, raw(&message.content_type)?);
    for (key, value) in [
        ("postrider-topic", event.topic().as_str()),
        ("postrider-key", event.key().as_str()),
        ("postrider-type", event.event_type().as_str()),
    ] {
        map.insert(name(key)?, encoded(value)?);
    }
    for (attribute, value) in &message.attributes {
        map.insert(name(&format!("{CLOUD_EVENTS_PREFIX}{attribute}"))?, encoded(value)?);
    }
    if let Some(trace) = event.trace() {
        map.insert(name(TRACEPARENT)?, raw(&trace.traceparent)?);
        if let Some(state) = &trace.tracestate {
            map.insert(name(TRACESTATE)?, raw(state)?);
        }
    }
    for (header, value) in event.headers().iter() {
        if !header.eq_ignore_ascii_case(TRACEPARENT) && !header.eq_ignore_ascii_case(TRACESTATE) {
            map.insert(name(&format!("{EVENT_HEADER_PREFIX}{header}"))?, encoded(value)?);
        }
    }
    Ok(map)
}

fn name(text: &str) -> Result<HeaderName> {
    text.parse()
        .map_err(|_| Error::permanent(format!("{text:?} cannot be the name of a NATS header")))
}

fn encoded(text: &str) -> Result<HeaderValue> {
    raw(&encode_header_value(text))
}

fn raw(text: &str) -> Result<HeaderValue> {
    text.parse().map_err(|_| Error::permanent("a value of the event cannot stand in a NATS header"))
}
