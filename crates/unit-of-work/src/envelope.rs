//! The document envelope: the JSON that documents and event documents have on a document store.
//!
//! What lives here: the envelope's members and those that an event's `data` gains. What does not:
//! writing it; SQL stores keep the members in columns.
//! Invariant: the members and their order are those of the article on the outbox with Azure
//! Cosmos DB, so that its readers understand ours.

use std::borrow::Cow;
use std::collections::BTreeMap;

use postrider_core::{Document, Error, Event, Result, Timestamp};
use serde::Serialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use crate::pending::Raised;

/// The document type of an event document.
pub const DOMAIN_EVENT: &str = "domainEvent";

/// Members that an event's `data` gains beside its own fields.
const ADDED_MEMBERS: [&str; 3] = ["action", "id", "createdAt"];

/// A document as a document store keeps it; serialise it with `serde_json`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Envelope<'a> {
    id: Cow<'a, str>,
    partition_key: &'a str,
    #[serde(rename = "type")]
    document_type: &'a str,
    data: &'a RawValue,
    ttl: i64,
    #[serde(rename = "_etag", skip_serializing_if = "Option::is_none")]
    etag: Option<&'a str>,
    #[serde(rename = "_ts", skip_serializing_if = "Option::is_none")]
    ts_seconds: Option<u64>,
}

impl<'a> Envelope<'a> {
    /// A document's envelope; `_etag` and `_ts` are left out of one that was never saved.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`](postrider_core::ErrorKind::Corrupt) if its data is no JSON.
    pub fn of_document(document: &'a Document) -> Result<Self> {
        let saved = document.written_at > Timestamp::default();
        Ok(Self {
            id: Cow::Borrowed(&document.id),
            partition_key: &document.partition_key,
            document_type: &document.document_type,
            data: raw(&document.id, &document.data)?,
            ttl: document.ttl_seconds,
            etag: saved.then_some(document.etag.as_str()),
            ts_seconds: saved.then_some(document.written_at.as_millis() / 1_000),
        })
    }

    /// An event document's envelope: its `data` is the event's payload. Event documents expire
    /// after `ttl_seconds`, which has to outlast every outage of relay and sink.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`](postrider_core::ErrorKind::Corrupt) if its payload is no JSON.
    pub fn of_event(event: &'a Event, ttl_seconds: i64) -> Result<Self> {
        let id = event.id().to_string();
        Ok(Self {
            data: raw(&id, event.payload())?,
            id: Cow::Owned(id),
            partition_key: event.key().as_str(),
            document_type: DOMAIN_EVENT,
            ttl: ttl_seconds,
            etag: None,
            ts_seconds: None,
        })
    }

    /// How many bytes of JSON it is.
    pub(crate) fn json_bytes(&self) -> Result<usize> {
        let json = serde_json::to_vec(self)
            .map_err(|e| Error::permanent("document has no JSON form").with_source(e))?;
        Ok(json.len())
    }
}

fn raw<'a>(id: &str, json: &'a [u8]) -> Result<&'a RawValue> {
    serde_json::from_slice(json)
        .map_err(|e| Error::corrupt(format!("data of document {id} is no JSON")).with_source(e))
}

/// An event's `data`: its own fields, then `action`, `id` and `createdAt`.
pub(crate) fn event_data(raised: &Raised, at: Timestamp) -> Result<Vec<u8>> {
    let action = raised.event.event_type();
    let mut json = raised.event.to_json()?;
    let members: BTreeMap<Cow<'_, str>, IgnoredAny> =
        serde_json::from_slice(&json).map_err(|e| {
            Error::permanent(format!("event {action} is no JSON object; give it named fields"))
                .with_source(e)
        })?;
    if let Some(taken) = ADDED_MEMBERS.iter().find(|name| members.contains_key(**name)) {
        return Err(Error::permanent(format!(
            "event {action} has a field {taken:?} of its own; rename it, because every event's \
             data gains one"
        )));
    }
    let comma = if members.is_empty() { "" } else { "," };
    let added = format!(
        "{comma}\"action\":{},\"id\":\"{}\",\"createdAt\":\"{}\"}}",
        serde_json::Value::from(action),
        raised.tag.id,
        rfc3339(at)?
    );
    let closing = json.pop();
    assert_eq!(closing, Some(b'}'), "compact JSON of an object ends with its brace");
    json.extend_from_slice(added.as_bytes());
    Ok(json)
}

fn rfc3339(at: Timestamp) -> Result<String> {
    let ms = i64::try_from(at.as_millis()).expect("a timestamp has 48 bits");
    let time = jiff::Timestamp::from_millisecond(ms)
        .map_err(|e| Error::permanent("the clock is beyond the year 9999").with_source(e))?;
    Ok(format!("{time:.3}"))
}
