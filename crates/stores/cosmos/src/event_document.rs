//! An event as a document: the article's JSON, and what it has no place for.
//!
//! What lives here: the document of an event, made from an event and read back as an entry. What
//! does not: the business document beside it (`documents.rs`), reading the change feed (`feed.rs`).
//! Invariant: what looks like an event and can't be read becomes `Malformed` with its JSON as
//! found, never an error that would stop the feed.

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use postrider_core::{
    ContentType, Entry, Error, Event, EventId, EventType, Headers, Key, Malformed, NewEvent,
    Position, Record, Result, Timestamp, Topic,
};
use serde_json::{Map, Value, json};
use uuid::Uuid;

/// The document type that marks an event.
pub(crate) const EVENT_TYPE: &str = "domainEvent";
const JSON: &str = "application/json";
/// Below 2^53 every whole number is a float of 64 bits, and no other is rounded to it.
const EXACT: f64 = 9_007_199_254_740_992.0;
/// The property of an event's content that the article names it by.
const ACTION: &str = "action";

/// How payloads and documents differ.
///
/// A payload that is a JSON object, its numbers below 2^53, is the document's `data` itself, so
/// that every client of the database reads it as such; it comes back as an equal object, with its
/// properties in alphabetical order and without white space. Any other payload is kept byte for
/// byte: as text in `dataText` or, where it is none, in `dataBase64`.
pub(crate) fn document(event: &Event, ttl_seconds: i64, seq: u64, default_topic: &str) -> Value {
    let mut document = Map::new();
    let id = event.id().to_string();
    document.insert("id".to_owned(), json!(id));
    document.insert("partitionKey".to_owned(), json!(event.key().as_str()));
    document.insert("type".to_owned(), json!(EVENT_TYPE));
    let named = content(&mut document, event.payload());
    if named.as_deref() != Some(event.event_type().as_str()) {
        document.insert("eventType".to_owned(), json!(event.event_type().as_str()));
    }
    if event.content_type().as_str() != JSON {
        document.insert("contentType".to_owned(), json!(event.content_type().as_str()));
    }
    if event.topic().as_str() != default_topic {
        document.insert("topic".to_owned(), json!(event.topic().as_str()));
    }
    if !event.headers().is_empty() {
        let headers = event.headers().iter().map(|(name, value)| json!([name, value]));
        document.insert("headers".to_owned(), Value::Array(headers.collect()));
    }
    document.insert("ttl".to_owned(), json!(ttl_seconds));
    document.insert("seq".to_owned(), json!(seq));
    Value::Object(document)
}

/// Puts the payload in; the event's name, where the content has it.
fn content(document: &mut Map<String, Value>, payload: &Bytes) -> Option<String> {
    if let Ok(object @ Value::Object(_)) = serde_json::from_slice::<Value>(payload)
        && keeps_numbers(&object)
        && is_shallow(&object, MAX_DEPTH)
    {
        let action = object.get(ACTION).and_then(Value::as_str).map(str::to_owned);
        document.insert("data".to_owned(), object);
        return action;
    }
    match std::str::from_utf8(payload) {
        Ok(text) => document.insert("dataText".to_owned(), json!(text)),
        Err(_) => document.insert("dataBase64".to_owned(), json!(BASE64.encode(payload))),
    };
    // The article's own mark of a document that is worth reading.
    document.insert("data".to_owned(), Value::Null);
    None
}

/// How deep a payload's JSON may be nested to stand in the document as such: the service and its
/// clients read documents up to about 120 levels, and one that they can't read stops its range.
const MAX_DEPTH: usize = 64;

fn is_shallow(value: &Value, levels: usize) -> bool {
    match value {
        Value::Array(values) => levels > 0 && values.iter().all(|one| is_shallow(one, levels - 1)),
        Value::Object(members) => {
            levels > 0 && members.values().all(|one| is_shallow(one, levels - 1))
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => true,
    }
}

/// Whether the service keeps every number of a value as it is: it has 64-bit floats alone.
pub(crate) fn keeps_numbers(value: &Value) -> bool {
    match value {
        Value::Number(number) => number.as_f64().is_some_and(|float| float.abs() < EXACT),
        Value::Array(values) => values.iter().all(keeps_numbers),
        Value::Object(members) => members.values().all(keeps_numbers),
        Value::Null | Value::Bool(_) | Value::String(_) => true,
    }
}

/// Whether a document is an event, or was meant to be one.
pub(crate) fn is_event(document: &Value) -> bool {
    document.get("type").and_then(Value::as_str) == Some(EVENT_TYPE)
}

/// The number of an event within its logical partition, where it has one; below zero, where no
/// entity counts it, and then of its batch alone.
pub(crate) fn seq(document: &Value) -> Option<i64> {
    document.get("seq").and_then(Value::as_i64)
}

/// When the database wrote a document: seconds since 1970.
pub(crate) fn written_seconds(document: &Value) -> u64 {
    document.get("_ts").and_then(Value::as_u64).unwrap_or(0)
}

/// A text of a document; nothing where it is missing or no text.
pub(crate) fn text<'a>(document: &'a Value, name: &str) -> Option<&'a str> {
    document.get(name).and_then(Value::as_str)
}

/// Reads an event's document.
pub(crate) fn entry(document: &Value, position: Position, default_topic: &Topic) -> Entry {
    let appended_at = Timestamp::from_millis(written_seconds(document).saturating_mul(1_000));
    let key = text(document, "partitionKey").map(Key::new).transpose();
    let (key, why) = match key {
        Ok(Some(key)) => match event(document, &key, default_topic) {
            Ok(event) => return Entry::Record(Record { position, appended_at, event }),
            Err(why) => (Some(key), why),
        },
        Ok(None) => (None, Error::corrupt("partitionKey is missing or no text")),
        Err(why) => (None, why),
    };
    let raw = Bytes::from(document.to_string());
    Entry::Malformed(Malformed { position, appended_at, key, reason: why.chain(), raw })
}

fn event(document: &Value, key: &Key, default_topic: &Topic) -> Result<Event> {
    let id = text(document, "id").unwrap_or_default();
    let id = Uuid::parse_str(id).map_err(|_| {
        Error::corrupt("id is no UUID; the writer has to give each event one of its own")
    })?;
    let payload = payload(document)?;
    let action = document.get("data").and_then(|data| text(data, ACTION));
    let event_type = text(document, "eventType")
        .or(action)
        .ok_or_else(|| Error::corrupt("neither eventType nor data.action names the event"))?;
    let topic = match document.get("topic") {
        None | Some(Value::Null) => default_topic.clone(),
        Some(Value::String(topic)) => Topic::new(topic.as_str())?,
        Some(_) => return Err(Error::corrupt("topic is no text")),
    };
    let content_type = ContentType::new(text(document, "contentType").unwrap_or(JSON))?;
    let new = NewEvent::builder(key.clone(), topic, EventType::new(event_type)?)
        .id(EventId::from_uuid(id))
        .headers(headers(document)?)
        .payload(content_type, payload)
        .build()?;
    Ok(new.identified(|| EventId::from_uuid(id)))
}

fn payload(document: &Value) -> Result<Bytes> {
    if let Some(text) = text(document, "dataText") {
        return Ok(Bytes::copy_from_slice(text.as_bytes()));
    }
    if let Some(text) = text(document, "dataBase64") {
        let bytes = BASE64.decode(text);
        return bytes.map(Bytes::from).map_err(|_| Error::corrupt("dataBase64 is no base64"));
    }
    match document.get("data") {
        None | Some(Value::Null) => Err(Error::corrupt("data is missing")),
        Some(data) => Ok(Bytes::from(data.to_string())),
    }
}

/// Pairs in their order, or an object, as another writer may find easier.
fn headers(document: &Value) -> Result<Headers> {
    let mut headers = Headers::new();
    let bad = || Error::corrupt("headers are no object of texts");
    match document.get("headers") {
        None | Some(Value::Null) => {}
        Some(Value::Object(object)) => {
            for (name, value) in object {
                headers.insert(name, value.as_str().ok_or_else(bad)?)?;
            }
        }
        Some(Value::Array(pairs)) => {
            for pair in pairs {
                let (name, value) = match pair.as_array().map(Vec::as_slice) {
                    Some([Value::String(name), Value::String(value)]) => (name, value),
                    _ => return Err(bad()),
                };
                headers.insert(name, value)?;
            }
        }
        Some(_) => return Err(bad()),
    }
    Ok(headers)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEFAULT_TOPIC: &str = "events";

    fn topic() -> Topic {
        Topic::new(DEFAULT_TOPIC).expect("a valid name")
    }

    fn made(payload: &'static [u8], content_type: &str, topic: &str) -> Event {
        let mut headers = Headers::new();
        headers.insert("Tenant", "t \"1\"").expect("valid");
        let valid = "a valid name";
        NewEvent::builder(
            Key::new("k").expect(valid),
            Topic::new(topic).expect(valid),
            EventType::new("Renamed").expect(valid),
        )
        .headers(headers)
        .payload(ContentType::new(content_type).expect(valid), payload)
        .build()
        .expect("within the limits")
        .identified(|| EventId::from_uuid(Uuid::nil()))
    }

    fn read(document: &Value) -> Entry {
        entry(document, Position::START, &topic())
    }

    #[test]
    fn every_event_reads_back_as_it_was() {
        for (payload, content_type, topic) in [
            (&br#"{"action":"Renamed","b":[1,2.5]}"#[..], JSON, DEFAULT_TOPIC),
            (br#"{"action":"SomethingElse"}"#, JSON, "orders"),
            (b"7   ", JSON, "orders"),
            (br#"{"action": "Renamed", "n": 9007199254740993}"#, JSON, "orders"),
            (br#"{"action":"Renamed","n":[-1,18446744073709551616]}"#, JSON, "orders"),
            (b"[1, 2]", JSON, "orders"),
            (b"gr\xc3\xbcezi", "text/plain", "orders"),
            (b"\x00\xff", "application/octet-stream", "orders"),
            (b"", "text/plain", DEFAULT_TOPIC),
        ] {
            let event = made(payload, content_type, topic);
            match read(&document(&event, 60, 3, DEFAULT_TOPIC)) {
                Entry::Record(record) => assert!(record.event == event, "{payload:?}"),
                Entry::Malformed(malformed) => panic!("{}", malformed.reason),
            }
        }
    }

    #[test]
    fn a_deeply_nested_payload_is_kept_as_text() {
        for (levels, as_text) in [(60, false), (64, false), (65, true), (120, true)] {
            let nested = format!(
                "{{\"action\":\"A\",\"b\":{}{}}}",
                "[".repeat(levels - 1),
                "]".repeat(levels - 1)
            );
            let payload: &'static [u8] = nested.into_bytes().leak();
            let event = made(payload, JSON, DEFAULT_TOPIC);
            let document = document(&event, 60, 3, DEFAULT_TOPIC);
            assert_eq!(document.get("dataText").is_some(), as_text, "{levels}");
            assert!(matches!(read(&document), Entry::Record(record) if record.event == event));
        }
    }

    #[test]
    fn the_articles_document_is_read_as_it_stands() {
        let found = json!({
            "id": "d6a5f4b2-84c3-4ac7-ae22-6f4025ba9ca0",
            "partitionKey": "b5e2e7aa-4982-4735-9422-c39a7c4af5c2",
            "type": "domainEvent",
            "data": { "action": "ContactNameUpdatedEvent", "name": { "firstName": "Jane" } },
            "ttl": 120,
            "_etag": "\"18005bce-0000-1500-0000-614456b80000\"",
            "_ts": 1_632_303_457,
        });
        let Entry::Record(record) = read(&found) else { panic!("it is an event") };
        assert_eq!(record.appended_at.as_millis(), 1_632_303_457_000);
        assert_eq!(record.event.event_type().as_str(), "ContactNameUpdatedEvent");
        assert_eq!(record.event.key().as_str(), "b5e2e7aa-4982-4735-9422-c39a7c4af5c2");
        let body = r#"{"action":"ContactNameUpdatedEvent","name":{"firstName":"Jane"}}"#;
        assert_eq!(record.event.payload(), body);
    }

    #[test]
    fn what_only_looks_like_an_event_is_kept_as_found() {
        let id = "d6a5f4b2-84c3-4ac7-ae22-6f4025ba9ca0";
        let good = json!({ "id": id, "partitionKey": "k", "data": { "action": "A" } });
        for (name, value, reason) in [
            ("id", json!("7"), "no UUID"),
            ("id", json!(7), "no UUID"),
            ("partitionKey", json!(7), "partitionKey is missing"),
            ("partitionKey", json!(""), "empty"),
            ("data", Value::Null, "data is missing"),
            ("data", json!({}), "neither eventType nor data.action"),
            ("data", json!("text"), "neither eventType nor data.action"),
            ("dataBase64", json!("?"), "no base64"),
            ("topic", json!(1), "topic is no text"),
            ("headers", json!(1), "no object of texts"),
            ("headers", json!({ "a": 1 }), "no object of texts"),
            ("headers", json!([["a"]]), "no object of texts"),
            ("headers", json!({ "a b": "" }), "illegal character"),
        ] {
            let mut bad = good.clone();
            bad[name] = value;
            let Entry::Malformed(malformed) = read(&bad) else { panic!("{bad} is refused") };
            assert!(malformed.reason.contains(reason), "{name}: {}", malformed.reason);
            assert_eq!(malformed.raw, bad.to_string());
            assert_eq!(malformed.key.is_some(), name != "partitionKey", "{bad}");
        }
    }
}
