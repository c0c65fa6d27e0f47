//! Events that were written to the log alone, by the SQL function `emit`.
//!
//! What lives here: reading the content of such a message. What does not: where it stands in the
//! log (`assembly.rs`), and writing it (`migrations/0002_emit.sql`).
//! Invariant: a message that can't be read as an event is handed out as what it is.

use postrider_core::{Entry, Position, Timestamp};
use serde::Deserialize;
use serde_json::value::RawValue;
use uuid::Uuid;

use crate::row::{Columns, Decoder};

/// What stands before the payload. All may be missing: whoever calls `pg_logical_emit_message`
/// himself may write what he likes.
#[derive(Deserialize, Default)]
struct Head<'a> {
    id: Option<Uuid>,
    key: Option<String>,
    topic: Option<String>,
    #[serde(rename = "type")]
    event_type: Option<String>,
    content_type: Option<String>,
    #[serde(borrow)]
    headers: Option<&'a RawValue>,
    at: Option<u64>,
}

/// The head's bytes and the payload's.
fn split(content: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = content.split_first_chunk()?;
    rest.split_at_checked(usize::try_from(u32::from_be_bytes(*length)).ok()?)
}

/// Reads one message.
pub(super) fn read(decoder: &mut Decoder, content: &[u8], position: Position) -> Entry {
    let (head, payload) = split(content).unwrap_or((&[], content));
    let head: Head<'_> = serde_json::from_slice(head).unwrap_or_default();
    let headers = head.headers.map(RawValue::get).filter(|text| *text != "null");
    let columns = Columns {
        id: head.id,
        key: head.key.as_deref(),
        topic: head.topic.as_deref(),
        event_type: head.event_type.as_deref(),
        content_type: head.content_type.as_deref(),
        headers,
        payload: Some(payload),
    };
    let at = head.at.map(Timestamp::from_millis).unwrap_or_default();
    decoder.entry_of(&columns, position, at)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content(head: &str, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(head.len()).expect("short").to_be_bytes();
        [&length[..], head.as_bytes(), payload].concat()
    }

    #[test]
    fn a_message_is_an_event_with_the_payload_as_it_was() {
        let head = r#"{"id" : "018f0000-0000-7000-8000-000000000001", "key" : "k", "topic" : "t",
            "type" : "T", "content_type" : "a/b", "headers" : {"x":"1"}, "at" : 5}"#;
        let bytes = content(head, &[0, 255]);
        let Entry::Record(record) = read(&mut Decoder::default(), &bytes, Position::START) else {
            panic!("it is readable");
        };
        assert_eq!(&record.event.payload()[..], [0, 255]);
        assert_eq!(record.event.headers().get("x"), Some("1"));
        assert_eq!(record.appended_at, Timestamp::from_millis(5));
        assert_eq!(record.event.key().as_str(), "k");
    }

    #[test]
    fn anything_else_is_handed_out_as_what_it_is() {
        let long = u32::MAX.to_be_bytes();
        let odd = [&b""[..], b"abc", &long, b"\0\0\0\x02{}rest", b"\0\0\0\x01{", b"\0\0\0\x04null"];
        for bytes in odd {
            let entry = read(&mut Decoder::default(), bytes, Position::START);
            assert!(matches!(entry, Entry::Malformed(_)), "{bytes:?}");
        }
    }
}
