//! An event's columns: written from an event, read back as an entry.
//!
//! What lives here: headers as JSON, and the decoder that shares equal names within a page. What
//! does not: any statement.
//! Invariant: what cannot be read becomes `Malformed` with the bytes as found, never an error that
//! would stop the feed.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;

use bytes::Bytes;
use postrider_core::{
    ContentType, Entry, Error, EventId, EventType, Headers, Key, Malformed, NewEvent, Position,
    Record, Result, Timestamp, Topic,
};
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
use serde::ser::Serializer as _;
use serde_json::value::RawValue;
use tokio_postgres::Row;
use uuid::Uuid;

/// Headers as the column holds them.
pub(crate) fn headers_text(headers: &Headers) -> Option<String> {
    if headers.is_empty() {
        return None;
    }
    let mut text = Vec::new();
    let mut serializer = serde_json::Serializer::new(&mut text);
    serializer.collect_map(headers.iter()).expect("texts always serialise");
    Some(String::from_utf8(text).expect("JSON is UTF-8"))
}

/// Headers in the order in which the JSON object has them.
struct HeaderObject(Headers);

impl<'de> Deserialize<'de> for HeaderObject {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor).map(Self)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Headers;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of texts")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Headers, A::Error> {
        let mut headers = Headers::new();
        while let Some((name, value)) = map.next_entry::<String, &RawValue>()? {
            // An application's table may have other values: they count as their JSON.
            let value = match value.get().as_bytes().first() {
                Some(b'"' | b'n') => {
                    Cow::Owned(serde_json::from_str(value.get()).map_err(A::Error::custom)?)
                }
                _ => Cow::Borrowed(value.get()),
            };
            headers.insert(&name, &value).map_err(A::Error::custom)?;
        }
        Ok(headers)
    }
}

/// Reads entries and lets those of a page share their names.
#[derive(Default)]
pub(crate) struct Decoder {
    topics: HashSet<Topic>,
    types: HashSet<EventType>,
    content_types: HashSet<ContentType>,
}

/// Above this many distinct names in a page they are not worth remembering.
const MAX_SHARED: usize = 256;

/// The columns of an event, in the order of every statement that reads one: `id, key, topic, type,
/// content_type, headers, payload`. `id`, `headers` and, when unreadable, any other may be NULL.
#[derive(Default)]
pub(crate) struct Columns<'a> {
    pub(crate) id: Option<Uuid>,
    pub(crate) key: Option<&'a str>,
    pub(crate) topic: Option<&'a str>,
    pub(crate) event_type: Option<&'a str>,
    pub(crate) content_type: Option<&'a str>,
    pub(crate) headers: Option<&'a str>,
    pub(crate) payload: Option<&'a [u8]>,
}

impl<'a> Columns<'a> {
    fn read(row: &'a Row, first: usize) -> std::result::Result<Self, tokio_postgres::Error> {
        Ok(Self {
            id: row.try_get(first)?,
            key: row.try_get(first + 1)?,
            topic: row.try_get(first + 2)?,
            event_type: row.try_get(first + 3)?,
            content_type: row.try_get(first + 4)?,
            headers: row.try_get(first + 5)?,
            payload: row.try_get(first + 6)?,
        })
    }
}

fn given<'a, T: ?Sized>(what: &str, value: Option<&'a T>) -> Result<&'a T> {
    value.ok_or_else(|| Error::corrupt(format!("{what} is missing")))
}

impl Decoder {
    /// Reads an event's columns, which begin at column `first`; headers are a text there.
    pub(crate) fn entry(
        &mut self,
        row: &Row,
        first: usize,
        position: Position,
        appended_at: Timestamp,
    ) -> std::result::Result<Entry, tokio_postgres::Error> {
        Ok(self.entry_of(&Columns::read(row, first)?, position, appended_at))
    }

    /// The event that the columns hold, or what of it could be read.
    pub(crate) fn entry_of(
        &mut self,
        columns: &Columns<'_>,
        position: Position,
        appended_at: Timestamp,
    ) -> Entry {
        let raw = Bytes::copy_from_slice(columns.payload.unwrap_or_default());
        let key = given("key", columns.key).and_then(Key::new);
        let (key, why) = match key {
            Ok(key) => match self.event(columns, key.clone(), raw.clone()) {
                Ok((id, new)) => {
                    let event = new.identified(|| id);
                    return Entry::Record(Record { position, appended_at, event });
                }
                Err(why) => (Some(key), why),
            },
            Err(why) => (None, why),
        };
        let reason = why.chain();
        Entry::Malformed(Malformed { position, appended_at, key, reason, raw })
    }

    fn event(
        &mut self,
        columns: &Columns<'_>,
        key: Key,
        payload: Bytes,
    ) -> Result<(EventId, NewEvent)> {
        given("payload", columns.payload)?;
        let id = columns.id.ok_or_else(|| Error::corrupt("id is missing"))?;
        let id = EventId::from_uuid(id);
        let topic = given("topic", columns.topic)?;
        let topic = shared(&mut self.topics, topic, Topic::as_str, Topic::new)?;
        let event_type = given("type", columns.event_type)?;
        let event_type = shared(&mut self.types, event_type, EventType::as_str, EventType::new)?;
        let content_type = given("content_type", columns.content_type)?;
        let content_type =
            shared(&mut self.content_types, content_type, ContentType::as_str, ContentType::new)?;
        let mut builder =
            NewEvent::builder(key, topic, event_type).id(id).payload(content_type, payload);
        if let Some(headers) = columns.headers {
            let HeaderObject(headers) = serde_json::from_str(headers)
                .map_err(|error| Error::corrupt("headers").with_source(error))?;
            builder = builder.headers(headers);
        }
        Ok((id, builder.build()?))
    }
}

/// The value met before for the same text, or a new one.
fn shared<'a, T: Clone + Eq + std::hash::Hash>(
    known: &mut HashSet<T>,
    text: &'a str,
    as_str: impl Fn(&T) -> &str,
    make: impl FnOnce(&'a str) -> Result<T>,
) -> Result<T> {
    // A page has few names: the first ones looked at are nearly always the right ones.
    if let Some(value) = known.iter().take(8).find(|value| as_str(value) == text) {
        return Ok(value.clone());
    }
    let value = make(text)?;
    if known.len() == MAX_SHARED {
        known.clear();
    }
    if let Some(earlier) = known.get(&value) {
        return Ok(earlier.clone());
    }
    known.insert(value.clone());
    Ok(value)
}
