//! Columns of an answer, and headers as JSON.
//!
//! What lives here: reading one value as what it should be, and the decoder of events that shares
//! equal names within a page. What does not: any statement.
//! Invariant: what cannot be read as an event becomes `Malformed` with the bytes as found, never an
//! error that would stop the feed; what Postrider alone writes is `Corrupt` when it is otherwise.

use std::fmt;

use bytes::Bytes;
use postrider_core::{
    ContentType, Entry, Error, EventId, EventType, Headers, Key, Malformed, NewEvent, Position,
    Record, Result, Timestamp, Topic,
};
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde::ser::Serializer as _;
use tiberius::{ColumnData, Row};
use uuid::Uuid;

/// Milliseconds since 1970 as a time.
pub(crate) fn timestamp(ms: i64) -> Timestamp {
    Timestamp::from_millis(u64::try_from(ms).unwrap_or(0))
}

/// A time as milliseconds since 1970.
pub(crate) fn ms(time: Timestamp) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX)
}

/// A whole number as a column has it.
pub(crate) fn whole(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn not(what: &'static str, wanted: &str) -> Error {
    Error::corrupt(format!("the column {what} is no {wanted}; look at what wrote it"))
}

fn cell<'a>(row: &'a Row, at: usize, what: &'static str) -> Result<&'a ColumnData<'static>> {
    row.cells().nth(at).map(|(_, value)| value).ok_or_else(|| not(what, "column of the answer"))
}

/// A whole number of any width, or nothing for null.
pub(crate) fn maybe_number(row: &Row, at: usize, what: &'static str) -> Result<Option<i64>> {
    Ok(match cell(row, at, what)? {
        ColumnData::I64(number) => *number,
        ColumnData::I32(number) => number.map(i64::from),
        ColumnData::I16(number) => number.map(i64::from),
        ColumnData::U8(number) => number.map(i64::from),
        ColumnData::Bit(on) => on.map(i64::from),
        // A sum of whole numbers is one on some engines.
        ColumnData::Numeric(number) => match number {
            Some(number) => Some(i64::try_from(number.int_part()).map_err(|_| not(what, "count"))?),
            None => None,
        },
        _ => return Err(not(what, "whole number")),
    })
}

/// A whole number of any width.
pub(crate) fn number(row: &Row, at: usize, what: &'static str) -> Result<i64> {
    maybe_number(row, at, what)?.ok_or_else(|| not(what, "whole number"))
}

/// A text, or nothing for null.
pub(crate) fn maybe_text<'a>(
    row: &'a Row,
    at: usize,
    what: &'static str,
) -> Result<Option<&'a str>> {
    match cell(row, at, what)? {
        ColumnData::String(text) => Ok(text.as_deref()),
        _ => Err(not(what, "text")),
    }
}

/// A text.
pub(crate) fn text<'a>(row: &'a Row, at: usize, what: &'static str) -> Result<&'a str> {
    maybe_text(row, at, what)?.ok_or_else(|| not(what, "text"))
}

/// Bytes, or nothing for null.
pub(crate) fn maybe_bytes<'a>(
    row: &'a Row,
    at: usize,
    what: &'static str,
) -> Result<Option<&'a [u8]>> {
    match cell(row, at, what)? {
        ColumnData::Binary(bytes) => Ok(bytes.as_deref()),
        _ => Err(not(what, "binary")),
    }
}

/// Bytes.
pub(crate) fn bytes<'a>(row: &'a Row, at: usize, what: &'static str) -> Result<&'a [u8]> {
    maybe_bytes(row, at, what)?.ok_or_else(|| not(what, "binary"))
}

/// A place in a feed.
pub(crate) fn position(row: &Row, at: usize, what: &'static str) -> Result<Position> {
    let bytes = bytes(row, at, what)?;
    match bytes.len() {
        16 => Position::from_bytes(bytes),
        _ => Err(not(what, "binary of 16 bytes")),
    }
}

/// An id.
pub(crate) fn uuid(row: &Row, at: usize, what: &'static str) -> Result<Uuid> {
    match cell(row, at, what)? {
        ColumnData::Guid(Some(id)) => Ok(*id),
        _ => Err(not(what, "uniqueidentifier")),
    }
}

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

impl Decoder {
    /// Reads `id, key, topic, type, content_type, headers, payload`, which begin at column `first`.
    pub(crate) fn entry(
        &mut self,
        row: &Row,
        first: usize,
        position: Position,
        appended_at: Timestamp,
    ) -> Result<Entry> {
        let payload = Bytes::copy_from_slice(bytes(row, first + 6, "payload")?);
        let key = text(row, first + 1, "key")
            .and_then(|text| self.keys.get(text, Key::as_str, |text| Key::new(text)));
        let (key, why) = match key {
            Ok(key) => match self.event(row, first, &key, &payload) {
                Ok((id, new)) => {
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
        row: &Row,
        first: usize,
        key: &Key,
        payload: &Bytes,
    ) -> Result<(EventId, NewEvent)> {
        let id = EventId::from_uuid(uuid(row, first, "id")?);
        let topic = text(row, first + 2, "topic")?;
        let topic = self.topics.get(topic, Topic::as_str, |text| Topic::new(text))?;
        let event_type = text(row, first + 3, "type")?;
        let event_type =
            self.types.get(event_type, EventType::as_str, |text| EventType::new(text))?;
        let content_type = text(row, first + 4, "content_type")?;
        let content_type = self
            .content_types
            .get(content_type, ContentType::as_str, |text| ContentType::new(text))?;
        let mut builder = NewEvent::builder(key.clone(), topic, event_type)
            .id(id)
            .payload(content_type, payload.clone());
        if let Some(headers) = maybe_text(row, first + 5, "headers")? {
            let HeaderObject(headers) = serde_json::from_str(headers)
                .map_err(|error| Error::corrupt("headers").with_source(error))?;
            builder = builder.headers(headers);
        }
        Ok((id, builder.build()?))
    }
}
