//! The event: what an application appends and a sink delivers.
//!
//! What lives here: `NewEvent` (before append), `Event` (with its id), headers, and their checks.
//! What does not: serialisation, encodings, and the place in a feed (`record.rs`).
//! Invariant: an event that exists is within every limit of `limits.rs`; payload bytes are never
//! looked into or changed.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use uuid::Uuid;

use crate::limits::{
    MAX_HEADER_NAME_BYTES, MAX_HEADER_VALUE_BYTES, MAX_HEADERS, MAX_PAYLOAD_BYTES,
};
use crate::names::check_text;
use crate::trace::{TRACEPARENT, TRACESTATE};
use crate::{ContentType, Error, EventType, Key, Result, Topic, TraceContext};

/// Identifies an event for ever: the same on every delivery, so that brokers and inboxes can drop
/// repetitions.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EventId(Uuid);

impl EventId {
    /// Takes any UUID; stores that make ids make version 7.
    pub const fn from_uuid(id: Uuid) -> Self {
        Self(id)
    }

    /// The UUID.
    pub const fn as_uuid(&self) -> &Uuid {
        &self.0
    }
}

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Debug for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// Names and values that travel beside the payload, in the order given.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Headers(Vec<(Box<str>, Box<str>)>);

impl Headers {
    /// No headers.
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// Sets a header; the same name (in any case) replaces the value in its place.
    ///
    /// # Errors
    /// [`ErrorKind::Permanent`](crate::ErrorKind::Permanent) if the name is no token of RFC 9110
    /// (letters, digits and ``!#$%&'*+-.^_`|~``), the value has control characters, or a limit is
    /// passed.
    pub fn insert(&mut self, name: &str, value: &str) -> Result<()> {
        check_text("header name", name, MAX_HEADER_NAME_BYTES)?;
        let token = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
        if let Some(at) = name.bytes().position(|b| !token(b)) {
            return Err(Error::permanent(format!(
                "header name {name:?} has an illegal character at byte {}; use letters, digits \
                 and !#$%&'*+-.^_`|~",
                at + 1
            )));
        }
        if value.len() > MAX_HEADER_VALUE_BYTES {
            return Err(Error::permanent(format!(
                "value of header {name} has {} bytes; {MAX_HEADER_VALUE_BYTES} are allowed",
                value.len()
            )));
        }
        if value.chars().any(|c| c.is_control() && c != '\t') {
            return Err(Error::permanent(format!(
                "value of header {name} has a control character; encode or remove it"
            )));
        }
        if let Some(slot) = self.0.iter_mut().find(|(have, _)| have.eq_ignore_ascii_case(name)) {
            slot.1 = value.into();
            return Ok(());
        }
        if self.0.len() == MAX_HEADERS {
            return Err(Error::permanent(format!("more than {MAX_HEADERS} headers")));
        }
        self.0.push((name.into(), value.into()));
        Ok(())
    }

    /// The value of a header, its name in any case.
    pub fn get(&self, name: &str) -> Option<&str> {
        let found = self.0.iter().find(|(have, _)| have.eq_ignore_ascii_case(name));
        found.map(|(_, value)| &**value)
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (&**name, &**value))
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// An event as the application hands it to `append`; complete and within all limits.
#[derive(Clone, PartialEq, Eq)]
pub struct NewEvent {
    id: Option<EventId>,
    key: Key,
    topic: Topic,
    event_type: EventType,
    content_type: ContentType,
    headers: Headers,
    payload: Bytes,
}

impl NewEvent {
    /// Starts an event. Its key, topic and type have no default, on purpose.
    pub fn builder(key: Key, topic: Topic, event_type: EventType) -> NewEventBuilder {
        NewEventBuilder {
            id: None,
            key,
            topic,
            event_type,
            content_type: None,
            headers: Headers::new(),
            payload: Bytes::new(),
        }
    }

    /// The id that the caller gave, if any.
    pub fn id(&self) -> Option<EventId> {
        self.id
    }

    /// The event under the id that the caller gave, else under `fresh`'s.
    pub fn identified(self, fresh: impl FnOnce() -> EventId) -> Event {
        let id = self.id.unwrap_or_else(fresh);
        Event(Arc::new(Fields { id, new: Self { id: Some(id), ..self } }))
    }
}

impl fmt::Debug for NewEvent {
    /// Without payload and header values: they never reach a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewEvent")
            .field("id", &self.id)
            .field("key", &self.key)
            .field("topic", &self.topic)
            .field("type", &self.event_type)
            .field("payload_bytes", &self.payload.len())
            .finish_non_exhaustive()
    }
}

/// Collects the optional parts of a [`NewEvent`].
#[derive(Debug, Clone)]
#[must_use]
pub struct NewEventBuilder {
    id: Option<EventId>,
    key: Key,
    topic: Topic,
    event_type: EventType,
    content_type: Option<ContentType>,
    headers: Headers,
    payload: Bytes,
}

impl NewEventBuilder {
    /// The id; without one, `append` makes a UUIDv7.
    pub fn id(mut self, id: EventId) -> Self {
        self.id = Some(id);
        self
    }

    /// The payload and its media type.
    pub fn payload(mut self, content_type: ContentType, payload: impl Into<Bytes>) -> Self {
        self.content_type = Some(content_type);
        self.payload = payload.into();
        self
    }

    /// The headers, replacing those given before.
    pub fn headers(mut self, headers: Headers) -> Self {
        self.headers = headers;
        self
    }

    /// The caller's span, carried in the headers `traceparent` and `tracestate`.
    ///
    /// # Errors
    /// As [`Headers::insert`].
    pub fn trace(mut self, trace: &TraceContext) -> Result<Self> {
        self.headers.insert(TRACEPARENT, &trace.traceparent)?;
        if let Some(state) = &trace.tracestate {
            self.headers.insert(TRACESTATE, state)?;
        }
        Ok(self)
    }

    /// The event, if its payload is within [`MAX_PAYLOAD_BYTES`].
    ///
    /// # Errors
    /// [`ErrorKind::Permanent`](crate::ErrorKind::Permanent), before any input or output.
    pub fn build(self) -> Result<NewEvent> {
        if self.payload.len() > MAX_PAYLOAD_BYTES {
            return Err(Error::permanent(format!(
                "payload of {} (key {}) has {} bytes; {MAX_PAYLOAD_BYTES} are allowed: store the \
                 content elsewhere and send a reference",
                self.event_type,
                self.key,
                self.payload.len()
            )));
        }
        let content_type = match self.content_type {
            Some(content_type) => content_type,
            None => ContentType::new("application/octet-stream")?,
        };
        Ok(NewEvent {
            id: self.id,
            key: self.key,
            topic: self.topic,
            event_type: self.event_type,
            content_type,
            headers: self.headers,
            payload: self.payload,
        })
    }
}

/// An appended event. Cloning shares it.
#[derive(Clone, PartialEq, Eq)]
pub struct Event(Arc<Fields>);

#[derive(PartialEq, Eq)]
struct Fields {
    id: EventId,
    new: NewEvent,
}

impl Event {
    /// Its id, the same on every delivery.
    pub fn id(&self) -> EventId {
        self.0.id
    }

    /// The key that it keeps its order within.
    pub fn key(&self) -> &Key {
        &self.0.new.key
    }

    /// Where it goes.
    pub fn topic(&self) -> &Topic {
        &self.0.new.topic
    }

    /// What happened.
    pub fn event_type(&self) -> &EventType {
        &self.0.new.event_type
    }

    /// The payload's media type.
    pub fn content_type(&self) -> &ContentType {
        &self.0.new.content_type
    }

    /// Names and values beside the payload.
    pub fn headers(&self) -> &Headers {
        &self.0.new.headers
    }

    /// The payload, as it was appended.
    pub fn payload(&self) -> &Bytes {
        &self.0.new.payload
    }

    /// The caller's span, if the headers carry a well-formed one.
    pub fn trace(&self) -> Option<TraceContext> {
        let headers = self.headers();
        let state = headers.get(TRACESTATE).map(str::to_owned);
        TraceContext::new(headers.get(TRACEPARENT)?, state).ok()
    }

    /// The same content under another id: only for a replay that asks for new ids.
    #[must_use]
    pub fn with_id(&self, id: EventId) -> Self {
        Self(Arc::new(Fields { id, new: NewEvent { id: Some(id), ..self.0.new.clone() } }))
    }

    /// What one record of it costs of a byte budget: its texts, headers and payload, plus
    /// [`Event::OVERHEAD_BYTES`] for the relay's own bookkeeping.
    pub fn cost_bytes(&self) -> usize {
        let new = &self.0.new;
        let headers: usize = new.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
        Self::OVERHEAD_BYTES
            + new.payload.len()
            + headers
            + new.key.as_str().len()
            + new.topic.as_str().len()
            + new.event_type.as_str().len()
    }

    /// What a record in flight costs beside its bytes: event, record, lane and window entries
    /// are about 600 bytes by their sizes; resident memory grows by 1.9 kB for each (SQLite to JSON
    /// lines, 200-byte payloads, `cargo xtask bench relay`), because allocators do not share what
    /// one thread allocates and another frees. Rounded up to a power of two.
    pub const OVERHEAD_BYTES: usize = 2_048;
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0.new, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn builder() -> NewEventBuilder {
        NewEvent::builder(
            Key::new("k").expect("valid"),
            Topic::new("t").expect("valid"),
            EventType::new("E").expect("valid"),
        )
    }

    #[test]
    fn an_oversize_payload_is_refused_with_its_size_and_a_remedy() {
        let json = ContentType::new("application/json").expect("valid");
        let fits = builder().payload(json.clone(), vec![0; MAX_PAYLOAD_BYTES]).build();
        assert!(fits.is_ok());
        let error = builder().payload(json, vec![0; MAX_PAYLOAD_BYTES + 1]).build().map(drop);
        let text = error.map_err(|e| e.to_string()).expect_err("too large");
        assert!(text.contains("16777217 bytes") && text.contains("send a reference"), "{text}");
    }

    #[test]
    fn header_names_and_values_are_checked() {
        let mut headers = Headers::new();
        for name in ["", "a b", "a\nb", "é", "a:b"] {
            assert!(headers.insert(name, "v").is_err(), "{name:?}");
        }
        assert!(headers.insert("a", "x\r\ny").is_err());
        headers.insert("Trace", "1").expect("valid");
        headers.insert("trace", "2").expect("replaces");
        assert_eq!(headers.iter().collect::<Vec<_>>(), [("Trace", "2")]);
        assert_eq!(headers.get("TRACE"), Some("2"));
        for i in 1..MAX_HEADERS {
            headers.insert(&format!("h{i}"), "").expect("within the limit");
        }
        assert!(headers.insert("one-more", "").is_err());
    }

    #[test]
    fn debug_shows_neither_payload_nor_header_values() {
        let mut headers = Headers::new();
        headers.insert("authorization", "hunter2").expect("valid");
        let json = ContentType::new("application/json").expect("valid");
        let event = builder().headers(headers).payload(json, "s3cret").build().expect("valid");
        let event = event.identified(|| EventId::from_uuid(Uuid::nil()));
        let text = format!("{event:?}");
        assert!(!text.contains("s3cret") && !text.contains("hunter2"), "{text}");
    }

    #[test]
    fn trace_context_travels_in_the_headers() {
        let trace =
            TraceContext::new("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", None)
                .expect("W3C form");
        let event = builder().trace(&trace).expect("valid").build().expect("valid");
        let event = event.identified(|| EventId::from_uuid(Uuid::nil()));
        assert_eq!(event.trace(), Some(trace));
        assert!(TraceContext::new("00-zz-b7ad6b7169203331-01", None).is_err());
    }
}
