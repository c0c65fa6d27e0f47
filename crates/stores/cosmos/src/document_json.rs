//! A business document as JSON: the article's members, and the number of its last event.
//!
//! What lives here: both directions, and what a document may be here. What does not: events
//! (`event_document.rs`).
//! Invariant: a member is written only where the article has it, but for `lastSeq`, and for
//! `deleted` where the document's own `data` does not say the same.

use bytes::Bytes;
use postrider_core::{Document, ETag, Error, Result, Timestamp};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use crate::event_document::keeps_numbers;

/// What the service refuses in an id.
const ILLEGAL_IN_ID: [char; 4] = ['/', '\\', '?', '#'];
/// Longest id: 1,023 bytes, as the service counts them.
const MAX_ID_BYTES: usize = 1_023;

/// A document as it is kept, with the number of its last event.
#[derive(Debug)]
pub(crate) struct Stored {
    pub(crate) document: Document,
    pub(crate) last_seq: Option<u64>,
}

#[derive(serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Wire {
    id: String,
    partition_key: String,
    #[serde(rename = "type")]
    document_type: String,
    data: Box<RawValue>,
    ttl: Option<i64>,
    deleted: Option<bool>,
    last_seq: Option<u64>,
    #[serde(rename = "_etag")]
    etag: String,
    #[serde(rename = "_ts")]
    ts_seconds: u64,
}

/// What a document's own content says of its deletion.
#[derive(serde::Deserialize)]
struct Deletion {
    #[serde(default)]
    deleted: Value,
}

/// Whether the content itself has `"deleted": true`, as the article's has.
fn says_deleted(data: &[u8]) -> bool {
    serde_json::from_slice::<Deletion>(data).is_ok_and(|said| said.deleted == Value::Bool(true))
}

impl From<Wire> for Stored {
    fn from(wire: Wire) -> Self {
        let data = Bytes::from(String::from(Box::<str>::from(wire.data)));
        let document = Document {
            id: wire.id,
            partition_key: wire.partition_key,
            document_type: wire.document_type,
            deleted: wire.deleted.unwrap_or_else(|| says_deleted(&data)),
            data,
            ttl_seconds: wire.ttl.unwrap_or(-1),
            etag: ETag::new(wire.etag),
            written_at: Timestamp::from_millis(wire.ts_seconds.saturating_mul(1_000)),
        };
        Self { document, last_seq: wire.last_seq }
    }
}

impl Stored {
    /// Whether this is what `written` asked for.
    pub(crate) fn is(&self, written: &Document) -> bool {
        let content = |data| serde_json::from_slice::<Value>(data).ok();
        let now = &self.document;
        now.document_type == written.document_type
            && now.ttl_seconds == written.ttl_seconds
            && now.deleted == written.deleted
            && content(&now.data) == content(&written.data)
    }
}

/// The JSON to be written.
///
/// # Errors
/// `Permanent` for an id, a time to live or a content that the service can't keep.
pub(crate) fn to_json(document: &Document, last_seq: Option<u64>) -> Result<Value> {
    let id = &document.id;
    check_id(id)?;
    let ttl = document.ttl_seconds;
    if ttl != -1 && !(1..=i64::from(i32::MAX)).contains(&ttl) {
        return Err(Error::permanent(format!(
            "document {id} has a time to live of {ttl} s; give -1 (for ever) or 1 to {}",
            i32::MAX
        )));
    }
    let data: Value = serde_json::from_slice(&document.data).map_err(|error| {
        Error::permanent(format!("the data of document {id} is no JSON")).with_source(error)
    })?;
    if !keeps_numbers(&data) {
        return Err(Error::permanent(format!(
            "the data of document {id} has a number of 2^53 or more, which the service would \
             round; keep it as a text"
        )));
    }
    let mut json = Map::new();
    json.insert("id".to_owned(), json!(id));
    json.insert("partitionKey".to_owned(), json!(document.partition_key));
    json.insert("type".to_owned(), json!(document.document_type));
    if document.deleted != (data.get("deleted") == Some(&Value::Bool(true))) {
        json.insert("deleted".to_owned(), json!(document.deleted));
    }
    json.insert("data".to_owned(), data);
    json.insert("ttl".to_owned(), json!(ttl));
    if let Some(last_seq) = last_seq {
        json.insert("lastSeq".to_owned(), json!(last_seq));
    }
    Ok(Value::Object(json))
}

/// Refuses an id that no path to the document could have.
pub(crate) fn check_id(id: &str) -> Result<()> {
    if id.is_empty() || id.len() > MAX_ID_BYTES || id.contains(ILLEGAL_IN_ID) {
        return Err(Error::permanent(format!(
            "document id {id:?} is refused: give 1 to {MAX_ID_BYTES} bytes without / \\ ? #"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contact(data: &str, deleted: bool) -> Document {
        Document {
            id: "c1".to_owned(),
            partition_key: "c1".to_owned(),
            document_type: "contact".to_owned(),
            data: data.to_owned().into(),
            ttl_seconds: -1,
            deleted,
            etag: ETag::new("\"e\""),
            written_at: Timestamp::from_millis(7_000),
        }
    }

    fn back(mut json: Value) -> Stored {
        json["_etag"] = json!("\"e\"");
        json["_ts"] = json!(7);
        let wire: Wire = serde_json::from_str(&json.to_string()).expect("it is whole");
        wire.into()
    }

    #[test]
    fn a_document_reads_back_as_it_was_whatever_its_content_says_of_its_deletion() {
        for data in ["{\"n\":1}", "{\"deleted\":true}", "{\"deleted\":false}", "[1]", "\"text\""] {
            for deleted in [true, false] {
                let written = contact(data, deleted);
                let stored = back(to_json(&written, Some(3)).expect("valid"));
                assert_eq!(stored.document, written, "{data} {deleted}");
                assert_eq!(stored.last_seq, Some(3));
            }
        }
    }

    #[test]
    fn the_articles_members_are_all_there_is() {
        let members = |document| {
            let Value::Object(json) = to_json(&document, None).expect("valid") else { panic!() };
            let mut names: Vec<_> = json.keys().cloned().collect();
            names.sort();
            names.join(" ")
        };
        assert_eq!(members(contact("{\"deleted\":true}", true)), "data id partitionKey ttl type");
        assert_eq!(members(contact("{}", true)), "data deleted id partitionKey ttl type");
    }

    #[test]
    fn what_the_service_can_not_keep_is_refused() {
        let refused = |change: fn(&mut Document)| {
            let mut document = contact("{}", false);
            change(&mut document);
            to_json(&document, None).expect_err("it is refused").to_string()
        };
        assert!(refused(|d| d.id = "a/b".to_owned()).contains("without /"));
        assert!(refused(|d| d.id = String::new()).contains("1 to 1023"));
        assert!(refused(|d| d.id = "x".repeat(1_024)).contains("1 to 1023"));
        assert!(refused(|d| d.ttl_seconds = 0).contains("time to live"));
        assert!(refused(|d| d.data = Bytes::from_static(b"no")).contains("no JSON"));
        let large = |d: &mut Document| d.data = Bytes::from_static(b"[{\"n\":9007199254740993}]");
        assert!(refused(large).contains("2^53"));
    }
}
