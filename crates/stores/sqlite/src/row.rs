//! An event's columns: written from an event, read back as an entry.
//!
//! What lives here: the order of the columns, headers as JSON, and the decoder that shares equal
//! names within a page. What does not: any statement.
//! Invariant: what cannot be read becomes `Malformed` with the bytes as found, never an error that
//! would stop the feed.

use std::fmt;

use bytes::Bytes;
use postrider_core::{
    ContentType, Entry, Error, EventId, EventType, Headers, Key, Malformed, NewEvent, Position,
    Record, Result, Timestamp, Topic,
};
use rusqlite::Row;
use rusqlite::types::ValueRef;
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde::ser::Serializer as _;
use uuid::Uuid;

/// Headers as the column holds them.
pub(crate) fn headers_text(headers: &Headers) -> Option<String> {
    if headers.is_empty() {
        return None;
    }
    let mut text = Vec::new();
    serde_json::Serializer::new(&mut text)
        .collect_map(headers.iter())
        .expect("texts always serialise");
    Some(String::from_utf8(text).expect("JSON is UTF-8"))
}

/// Headers in the order in which the JSON object has them.
struct HeaderObject(Headers);

impl<'de> Deserialize<'de> for HeaderObject {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = HeaderObject;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of texts")
            }

            fn visit_map<A: MapAccess<'de>>(
                self,
                mut map: A,
            ) -> std::result::Result<Self::Value, A::Error> {
                let mut headers = Headers::new();
                while let Some((name, value)) = map.next_entry::<String, String>()? {
                    headers.insert(&name, &value).map_err(serde::de::Error::custom)?;
                }
                Ok(HeaderObject(headers))
            }
        }
        deserializer.deserialize_map(Object)
    }
}

/// Reads entries and lets those of a page share their names.
#[derive(Default)]
pub(crate) struct Decoder {
    keys: Shared<Key>,
    topics: Shared<Topic>,
    types: Shared<EventType>,
    content_types: Shared<ContentType>,
}

/// The values met lately; a page has few, so a short search beats a map.
struct Shared<T>(Vec<T>);

/// Above this many distinct values sharing costs more than it saves.
const SHARED: usize = 8;

impl<T> Default for Shared<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: Clone> Shared<T> {
    fn get(
        &mut self,
        text: &str,
        as_str: impl Fn(&T) -> &str,
        make: impl FnOnce(&str) -> Result<T>,
    ) -> Result<T> {
        if let Some(known) = self.0.iter().find(|known| as_str(known) == text) {
            return Ok(known.clone());
        }
        let value = make(text)?;
        if self.0.len() == SHARED {
            self.0.remove(0);
        }
        self.0.push(value.clone());
        Ok(value)
    }
}

fn text<'a>(what: &str, value: ValueRef<'a>) -> Result<&'a str> {
    let bytes = match value {
        ValueRef::Text(bytes) => bytes,
        ValueRef::Null | ValueRef::Integer(_) | ValueRef::Real(_) | ValueRef::Blob(_) => {
            return Err(Error::corrupt(format!("{what} is no text")));
        }
    };
    std::str::from_utf8(bytes).map_err(|_| Error::corrupt(format!("{what} is not UTF-8")))
}

fn bytes(value: ValueRef<'_>) -> &[u8] {
    match value {
        ValueRef::Text(bytes) | ValueRef::Blob(bytes) => bytes,
        ValueRef::Null | ValueRef::Integer(_) | ValueRef::Real(_) => &[],
    }
}

impl Decoder {
    /// Reads `id, key, topic, type, content_type, headers, payload`, which begin at column `first`.
    pub(crate) fn entry(
        &mut self,
        row: &Row<'_>,
        first: usize,
        position: Position,
        appended_at: Timestamp,
    ) -> rusqlite::Result<Entry> {
        let key = text("key", row.get_ref(first + 1)?)
            .and_then(|text| self.keys.get(text, Key::as_str, |text| Key::new(text)));
        let payload = Bytes::copy_from_slice(bytes(row.get_ref(first + 6)?));
        let (key, why) = match key {
            Ok(key) => match self.event(row, first, &key, &payload)? {
                Ok(new) => {
                    let (id, new) = new;
                    let event = new.identified(|| id);
                    return Ok(Entry::Record(Record { position, appended_at, event }));
                }
                Err(why) => (Some(key), why),
            },
            Err(why) => (None, why),
        };
        let reason = why.chain();
        Ok(Entry::Malformed(Malformed { position, appended_at, key, reason, raw: payload }))
    }

    fn event(
        &mut self,
        row: &Row<'_>,
        first: usize,
        key: &Key,
        payload: &Bytes,
    ) -> rusqlite::Result<Result<(EventId, NewEvent)>> {
        let id = row.get_ref(first)?;
        let topic = row.get_ref(first + 2)?;
        let event_type = row.get_ref(first + 3)?;
        let content_type = row.get_ref(first + 4)?;
        let headers = row.get_ref(first + 5)?;
        Ok((|| {
            let id = Uuid::from_slice(bytes(id))
                .map_err(|error| Error::corrupt("id is no UUID").with_source(error))?;
            let id = EventId::from_uuid(id);
            let topic =
                self.topics.get(text("topic", topic)?, Topic::as_str, |text| Topic::new(text))?;
            let event_type =
                self.types.get(text("type", event_type)?, EventType::as_str, |text| {
                    EventType::new(text)
                })?;
            let content_type = self.content_types.get(
                text("content_type", content_type)?,
                ContentType::as_str,
                |text| ContentType::new(text),
            )?;
            let mut builder = NewEvent::builder(key.clone(), topic, event_type)
                .id(id)
                .payload(content_type, payload.clone());
            if headers != ValueRef::Null {
                let HeaderObject(headers) = serde_json::from_str(text("headers", headers)?)
                    .map_err(|error| Error::corrupt("headers").with_source(error))?;
                builder = builder.headers(headers);
            }
            Ok((id, builder.build()?))
        })())
    }
}
