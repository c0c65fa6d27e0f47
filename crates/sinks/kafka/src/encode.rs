//! From an event to a Kafka record: its headers and its topic.
//!
//! What lives here: names. What does not: the value (`postrider-encoding`), the key, which is the
//! event's, and sending.
//! Invariant: texts stand as they were appended, unescaped; nothing of an event can stand for one
//! of the sink's own headers; a topic is one that a broker could have.

use postrider_core::{Error, Record, Result, TRACEPARENT, TRACESTATE, Timestamp};
use postrider_encoding::{Escape, Message, Template, format_rfc3339};
use rdkafka::message::{Header, OwnedHeaders};

/// Prefix of an event's own headers that have the name of one of the sink's.
const RENAMED: &str = "postrider-header-";
/// Prefix of CloudEvents attributes (Kafka protocol binding 1.0.2, 3.2.3.1).
const CLOUD_EVENTS_PREFIX: &str = "ce_";
/// What the sink's own headers begin with.
const OWN_PREFIX: &str = "postrider-";
const CONTENT_TYPE: &str = "content-type";
/// Longest name of a topic (Kafka: `Topic.java`).
const MAX_TOPIC_BYTES: usize = 249;

/// The headers of an event's record.
pub(crate) fn headers(record: &Record, message: &Message) -> OwnedHeaders {
    let event = &record.event;
    let capacity = 8 + message.attributes.len() + event.headers().iter().len();
    let mut headers = OwnedHeaders::new_with_capacity(capacity);
    let mut add = |key: &str, value: &str| {
        let taken = std::mem::take(&mut headers);
        headers = taken.insert(Header { key, value: Some(value) });
    };
    add("postrider-id", &event.id().to_string());
    add("postrider-topic", event.topic().as_str());
    add("postrider-type", event.event_type().as_str());
    add("postrider-time", &time(record.appended_at));
    add(CONTENT_TYPE, &message.content_type);
    for (attribute, value) in &message.attributes {
        add(&format!("{CLOUD_EVENTS_PREFIX}{attribute}"), value);
    }
    if let Some(trace) = event.trace() {
        add(TRACEPARENT, &trace.traceparent);
        if let Some(state) = &trace.tracestate {
            add(TRACESTATE, state);
        }
    }
    for (name, value) in event.headers().iter() {
        if name.eq_ignore_ascii_case(TRACEPARENT) || name.eq_ignore_ascii_case(TRACESTATE) {
            continue;
        }
        match is_own(name) {
            true => add(&format!("{RENAMED}{name}"), value),
            false => add(name, value),
        }
    }
    headers
}

fn is_own(name: &str) -> bool {
    let begins = |prefix: &str| {
        name.get(..prefix.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(prefix))
    };
    begins(OWN_PREFIX) || begins(CLOUD_EVENTS_PREFIX) || name.eq_ignore_ascii_case(CONTENT_TYPE)
}

fn time(at: Timestamp) -> String {
    format_rfc3339(at)
}

/// The topic of an event's record.
///
/// # Errors
/// `Permanent` if no broker could have a topic of that name.
pub(crate) fn topic(template: &Template, record: &Record) -> Result<String> {
    let topic = template.render(&record.event, Escape::None)?;
    match why_no_topic(&topic) {
        Some(why) => Err(Error::permanent(format!(
            "the event's topic {topic:?} {why}; let the sink's `topic` make another of it"
        ))),
        None => Ok(topic),
    }
}

/// Why a text is no topic's name, if it is none.
pub(crate) fn why_no_topic(text: &str) -> Option<String> {
    let legal = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if let Some(illegal) = text.chars().find(|c| !legal(*c)) {
        return Some(format!("has {illegal:?} in it; Kafka takes letters, digits, . _ and -"));
    }
    match text {
        "" | "." | ".." => Some("is no name that Kafka takes".to_owned()),
        _ if text.len() > MAX_TOPIC_BYTES => {
            Some(format!("has {} bytes; Kafka takes {MAX_TOPIC_BYTES}", text.len()))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_core::{
        ContentType, EventId, EventType, Headers, Key, NewEvent, Position, Topic, TraceContext,
    };
    use postrider_encoding::{Encoder, Encoding, EventSource};
    use rdkafka::message::Headers as _;

    const SPAN: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn made(encoding: Encoding, own: &[(&str, &str)]) -> Vec<(String, String)> {
        let mut headers = Headers::new();
        for (name, value) in own {
            headers.insert(name, value).expect("valid");
        }
        let event = NewEvent::builder(
            Key::new("Zoë 42").expect("valid"),
            Topic::new("orders").expect("valid"),
            EventType::new("OrderPlaced").expect("valid"),
        )
        .headers(headers)
        .trace(&TraceContext::new(SPAN, Some("vendor=1".into())).expect("valid"))
        .expect("valid")
        .payload(ContentType::new("application/json").expect("valid"), "{}")
        .build()
        .expect("valid")
        .identified(|| EventId::from_uuid(Default::default()));
        let appended_at = Timestamp::from_millis(1_672_671_845_678);
        let record = Record { position: Position::START, appended_at, event };
        let message = Encoder::new(encoding, EventSource::default()).encode(&record);
        let text = |value: Option<&[u8]>| String::from_utf8(value.expect("one").into()).unwrap();
        let headers = super::headers(&record, &message);
        headers.iter().map(|one| (one.key.to_owned(), text(one.value))).collect()
    }

    fn get<'a>(headers: &'a [(String, String)], name: &str) -> Vec<&'a str> {
        let found = headers.iter().filter(|(have, _)| have == name);
        found.map(|(_, value)| value.as_str()).collect()
    }

    #[test]
    fn headers_carry_all_that_the_record_itself_does_not() {
        let headers = made(Encoding::Plain, &[("tenant", "Zürich"), ("x-a", "1")]);
        for (name, value) in [
            ("postrider-id", "00000000-0000-0000-0000-000000000000"),
            ("postrider-topic", "orders"),
            ("postrider-type", "OrderPlaced"),
            ("postrider-time", "2023-01-02T15:04:05.678Z"),
            ("content-type", "application/json"),
            ("traceparent", SPAN),
            ("tracestate", "vendor=1"),
            ("tenant", "Zürich"),
            ("x-a", "1"),
        ] {
            assert_eq!(get(&headers, name), [value], "{name}");
        }
        assert_eq!(headers.len(), 9);
    }

    #[test]
    fn an_events_own_headers_never_stand_for_the_sinks() {
        let own = [("Postrider-Id", "x"), ("CE_id", "y"), ("Content-Type", "z")];
        let headers = made(Encoding::CloudEventsBinary, &own);
        assert_eq!(get(&headers, "postrider-header-Postrider-Id"), ["x"]);
        assert_eq!(get(&headers, "postrider-header-CE_id"), ["y"]);
        assert_eq!(get(&headers, "postrider-header-Content-Type"), ["z"]);
        assert_eq!(get(&headers, "ce_id").len(), 1);
        assert_eq!(get(&headers, "ce_specversion"), ["1.0"]);
    }

    #[test]
    fn a_name_that_is_no_topic_is_found() {
        for good in ["a", "orders.placed", "A_b-c.1", "..."] {
            assert_eq!(why_no_topic(good), None, "{good}");
        }
        let long = "a".repeat(250);
        for bad in ["", ".", "..", "a b", "a/b", "Zoë", "a:b", &long] {
            assert!(why_no_topic(bad).is_some(), "{bad}");
        }
    }
}
