//! Events and names that the suites use.
//!
//! What lives here: short constructors. What does not: anything a harness brings.
//! Invariant: an event's number stands in its payload, so that a test can tell events apart.

use bytes::Bytes;
use postrider_core::{
    BatchLimit, ConsumerName, ContentType, Event, EventId, EventType, GroupName, Headers, Key,
    NewEvent, Position, Record, RelayId, Timestamp, Topic,
};
use uuid::Uuid;

const VALID: &str = "the sample is within the limits";

/// A page larger than any test fills.
pub const WHOLE: BatchLimit = BatchLimit { records: 10_000, bytes: 256 * 1024 * 1024 };

/// A key.
pub fn key(text: &str) -> Key {
    Key::new(text).expect(VALID)
}

/// A consumer's name.
pub fn consumer(text: &str) -> ConsumerName {
    ConsumerName::new(text).expect(VALID)
}

/// A group's name.
pub fn group(text: &str) -> GroupName {
    GroupName::new(text).expect(VALID)
}

/// A relay's id.
pub fn relay(text: &str) -> RelayId {
    RelayId::new(text).expect(VALID)
}

/// An id that no other sample has.
pub fn fresh_id() -> EventId {
    EventId::from_uuid(Uuid::new_v4())
}

/// Event `number` of a key, without an id.
pub fn event(key_text: &str, number: u64) -> NewEvent {
    sized_event(key_text, number, 0)
}

/// Event `number` of a key, with at least `bytes` bytes of payload.
pub fn sized_event(key_text: &str, number: u64, bytes: usize) -> NewEvent {
    let mut payload = number.to_string().into_bytes();
    payload.resize(payload.len().max(bytes), b' ');
    with_payload(key_text, payload).build().expect(VALID)
}

/// Event `number` of a key under a given id.
pub fn event_with_id(id: EventId, key_text: &str, number: u64) -> NewEvent {
    with_payload(key_text, number.to_string()).id(id).build().expect(VALID)
}

fn with_payload(key_text: &str, payload: impl Into<Bytes>) -> postrider_core::NewEventBuilder {
    let topic = Topic::new("orders").expect(VALID);
    let json = ContentType::new("application/json").expect(VALID);
    NewEvent::builder(key(key_text), topic, EventType::new("OrderPlaced").expect(VALID))
        .payload(json, payload)
}

/// An event with something in every attribute, and bytes that are no text.
pub fn rich_event(id: EventId) -> NewEvent {
    let mut headers = Headers::new();
    for (name, value) in [("tenant", "t-1"), ("x-empty", ""), ("x-quote", "a\"b\\c, d=e")] {
        headers.insert(name, value).expect(VALID);
    }
    let payload: Vec<u8> = (0..=255).chain([0, 0, 13, 10, 255]).collect();
    NewEvent::builder(
        key("customer/42 a+b&c=d%20"),
        Topic::new("orders.eu-west").expect(VALID),
        EventType::new("com.example.OrderPlaced.v2").expect(VALID),
    )
    .id(id)
    .headers(headers)
    .payload(ContentType::new("application/vnd.x+proto; v=2").expect(VALID), payload)
    .build()
    .expect(VALID)
}

/// An event whose texts are not ASCII.
pub fn foreign_event(id: EventId) -> NewEvent {
    let mut headers = Headers::new();
    headers.insert("city", "Zürich 東京").expect(VALID);
    NewEvent::builder(
        key("Zoë-日本-🐎"),
        Topic::new("bestellungen-größe").expect(VALID),
        EventType::new("注文").expect(VALID),
    )
    .id(id)
    .headers(headers)
    .payload(ContentType::new("text/plain").expect(VALID), "grüezi")
    .build()
    .expect(VALID)
}

/// The number that the payload of [`event`] carries.
///
/// # Panics
/// If it carries none: the bytes were changed.
pub fn number(event: &Event) -> u64 {
    let text = std::str::from_utf8(event.payload()).expect("a sample's payload is text");
    text.trim_end().parse().expect("a sample's payload is a number")
}

/// A record for a sink, at an invented position that grows with `number`.
pub fn record(event: NewEvent, number: u64) -> Record {
    Record {
        position: Position::from_bytes(&u128::from(number + 1).to_be_bytes())
            .expect("16 bytes are a short position"),
        appended_at: Timestamp::from_millis(number + 1),
        event: event.identified(fresh_id),
    }
}
