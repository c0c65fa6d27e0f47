//! What a reader in another language has to get of an event, by the names that a guide promises.
//!
//! What lives here: an event with something in every attribute, and the comparison with what a
//! program of that language printed. What does not: the programs, which each sink's tests have.
//! Invariant: what is compared was read by a client that the sink's maker has no part in.

use bytes::Bytes;
use postrider_core::{
    ContentType, Event, EventType, Headers, NewEvent, Position, Record, Timestamp, Topic,
    TraceContext,
};
use serde_json::Value;

use crate::samples::{fresh_id, key};

const VALID: &str = "the sample is within the limits";
const SPAN: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
/// When the event was appended, in milliseconds.
pub const APPENDED_AT_MS: u64 = 1_672_671_845_678;
/// The same as a reader gets it.
pub const APPENDED_AT: &str = "2023-01-02T15:04:05.678Z";
/// The `source` that a sink has to be set to.
pub const SOURCE: &str = "/shop";

/// Where a guide says that an event's attributes stand in a message.
#[derive(Debug, Clone, Copy)]
pub struct Names {
    /// The event's id.
    pub id: &'static str,
    /// Its key.
    pub key: &'static str,
    /// Its topic.
    pub topic: &'static str,
    /// Its type.
    pub event_type: &'static str,
    /// Its media type.
    pub content_type: &'static str,
    /// What stands before the name of each of its own headers.
    pub header_prefix: &'static str,
    /// What stands before the name of each attribute of `cloudevents-binary`.
    pub attribute_prefix: &'static str,
}

/// How an event is encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// `plain`.
    Plain,
    /// `cloudevents-binary`.
    Binary,
    /// `cloudevents-structured`.
    Structured,
}

impl Shape {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Plain, Self::Binary, Self::Structured];
}

/// An event under a new id, with headers, a trace, a JSON payload, and texts that are not ASCII.
pub fn told_event(topic: &str) -> Record {
    let mut headers = Headers::new();
    for (name, value) in [("tenant", "Zürich"), ("x-quote", "50% \"a\" \\ b, c=d; e")] {
        headers.insert(name, value).expect(VALID);
    }
    let event = NewEvent::builder(
        key("Zoë 42"),
        Topic::new(topic).expect(VALID),
        EventType::new("OrderPlaced").expect(VALID),
    )
    .headers(headers)
    .trace(&TraceContext::new(SPAN, Some("vendor=1".into())).expect(VALID))
    .expect(VALID)
    .payload(ContentType::new("application/json").expect(VALID), Bytes::from("{\"order\":\"Ö\"}"))
    .build()
    .expect(VALID)
    .identified(fresh_id);
    Record { position: Position::START, appended_at: Timestamp::from_millis(APPENDED_AT_MS), event }
}

/// All that a program printed of an event beside its body.
pub type Told = Value;

/// Fails the test unless a program printed all of an event: one line of JSON, a list of the body as
/// a text and of all else as an object, decoded as the guide says. Returns that object.
#[track_caller]
pub fn assert_told(event: &Event, names: &Names, shape: Shape, line: &str) -> Told {
    let printed: Value = serde_json::from_str(line).expect("a line of JSON");
    let (body, told) = (&printed[0], &printed[1]);
    let own = event.headers().iter().map(|(name, value)| {
        let traced = name == "traceparent" || name == "tracestate";
        (if traced { name.to_owned() } else { format!("{}{name}", names.header_prefix) }, value)
    });
    let (content_type, id) = (event.content_type().as_str(), event.id().to_string());
    let expected_type = match shape {
        Shape::Structured => "application/cloudevents+json",
        Shape::Plain | Shape::Binary => content_type,
    };
    let mut expected: Vec<(String, &str)> = vec![
        (names.id.to_owned(), id.as_str()),
        (names.key.to_owned(), event.key().as_str()),
        (names.topic.to_owned(), event.topic().as_str()),
        (names.event_type.to_owned(), event.event_type().as_str()),
        (names.content_type.to_owned(), expected_type),
        ("traceparent".to_owned(), SPAN),
        ("tracestate".to_owned(), "vendor=1"),
    ];
    expected.extend(own);
    let attributes = [
        ("specversion", "1.0"),
        ("id", id.as_str()),
        ("source", SOURCE),
        ("type", event.event_type().as_str()),
        ("subject", event.key().as_str()),
        ("time", APPENDED_AT),
    ];
    let document: Value = serde_json::from_str(body.as_str().expect("a text")).expect("JSON");
    for (name, value) in attributes {
        match shape {
            Shape::Plain => {}
            Shape::Binary => expected.push((format!("{}{name}", names.attribute_prefix), value)),
            Shape::Structured => assert_eq!(document[name], value, "{name} in {document}"),
        }
    }
    for (name, value) in expected {
        assert_eq!(told[&name], value, "{shape:?}: {name} in {told}");
    }
    let payload: Value = serde_json::from_slice(event.payload()).expect("JSON");
    let data = match shape {
        Shape::Structured => &document["data"],
        Shape::Plain | Shape::Binary => &document,
    };
    assert_eq!(*data, payload, "{shape:?}");
    told.clone()
}
