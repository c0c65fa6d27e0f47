//! From a row of an application's table, as the log has it, to an event.
//!
//! What lives here: values as texts, by a mapping that fits (`mapping.rs`). What does not: the
//! outbox's own rows (`events.rs`).
//! Invariant: bytes in are bytes out, and a row is the event that the table's view shows; one that
//! can't be read is handed out as what it is.

use std::borrow::Cow;

use md5::{Digest as _, Md5};
use postrider_core::{Position, Timestamp};
use serde::ser::Serializer as _;
use uuid::Uuid;

use super::events::Found;
use super::mapping::{At, Fitted, Form, HeadersOf, Part, Payload};
use super::tuple::{Tuple, Value};
use crate::row::{Columns, Decoder};

/// A UUID's text, with its hyphens; it has other ones that the view does not take.
const UUID_BYTES: usize = 36;
/// Later than any time that the view takes, in milliseconds.
const MAX_MILLIS: u64 = 100_000_000_000_000;

/// A mapping that fits a table's columns, and the name under which its numbers are ids.
#[derive(Debug)]
pub(super) struct Mapped {
    pub(super) fitted: Fitted,
    pub(super) identity: String,
}

/// A row's values as texts.
struct Texts<'a>(Vec<Option<&'a [u8]>>);

impl<'a> Texts<'a> {
    fn raw(&self, index: usize) -> Option<&'a [u8]> {
        self.0.get(index).copied().flatten()
    }

    fn column(&self, index: usize) -> Option<&'a str> {
        std::str::from_utf8(self.raw(index)?).ok()
    }

    fn text(&self, part: &'a Part) -> Option<Cow<'a, str>> {
        match part {
            Part::Constant(text) => Some(Cow::Borrowed(text)),
            Part::Column { index, form } => Some(shown(*form, self.column(*index)?)),
        }
    }
}

/// An inserted row has no unchanged column, and binary was not asked for.
fn text(value: Value<'_>) -> Option<&[u8]> {
    match value {
        Value::Text(text) => Some(text),
        Value::Null | Value::Unchanged | Value::Binary(_) => None,
    }
}

/// A value as a cast to text shows it.
fn shown(form: Form, text: &str) -> Cow<'_, str> {
    match (form, text) {
        (Form::Bool, "t") => Cow::Borrowed("true"),
        (Form::Bool, "f") => Cow::Borrowed("false"),
        (Form::Padded, _) => Cow::Borrowed(text.trim_end_matches(' ')),
        (Form::Inet, _) if !text.contains('/') => {
            Cow::Owned(format!("{text}/{}", if text.contains(':') { 128 } else { 32 }))
        }
        (Form::Same | Form::Bool | Form::Inet, _) => Cow::Borrowed(text),
    }
}

/// The bytes that `\x…` stands for.
fn bytes(hex: &[u8]) -> Option<Vec<u8>> {
    let digits = hex.strip_prefix(b"\\x")?;
    let (pairs, rest) = digits.as_chunks::<2>();
    let nibble = |digit: u8| char::from(digit).to_digit(16);
    let byte = |[high, low]: &[u8; 2]| u8::try_from(nibble(*high)? << 4 | nibble(*low)?).ok();
    if rest.is_empty() { pairs.iter().map(byte).collect() } else { None }
}

fn millis(text: &str, zoned: bool) -> Option<u64> {
    let at: jiff::Timestamp = match zoned {
        true => text.parse().ok()?,
        false => {
            let at: jiff::civil::DateTime = text.parse().ok()?;
            jiff::tz::Offset::UTC.to_timestamp(at).ok()?
        }
    };
    // What is older than 1970 counts as that.
    Some(u64::try_from(at.as_millisecond()).unwrap_or(0))
}

/// Names and values as a JSON object, in their order.
fn object(headers: Vec<(&String, Cow<'_, str>)>) -> String {
    let mut text = Vec::new();
    let mut serializer = serde_json::Serializer::new(&mut text);
    serializer.collect_map(headers).expect("texts always serialise");
    String::from_utf8(text).expect("JSON is UTF-8")
}

impl Mapped {
    fn id(&self, text: &str) -> Option<Uuid> {
        if self.fitted.id_is_number {
            let named = Md5::digest(format!("{}/{text}", self.identity));
            return Some(Uuid::from_bytes(named.into()));
        }
        (text.len() == UUID_BYTES).then(|| Uuid::try_parse(text).ok()).flatten()
    }

    fn at(&self, texts: &Texts<'_>) -> Option<Timestamp> {
        let found = match self.fitted.at {
            At::Zoned(index) => millis(texts.column(index)?, true),
            At::Utc(index) => millis(texts.column(index)?, false),
            At::Millis(index) => texts.column(index)?.parse().ok().filter(|ms| *ms <= MAX_MILLIS),
            At::Unknown => None,
        };
        found.map(Timestamp::from_millis)
    }

    fn headers<'a>(&'a self, texts: &Texts<'a>) -> Option<Cow<'a, str>> {
        match &self.fitted.headers {
            HeadersOf::Nothing => None,
            HeadersOf::Json(part) => {
                let text = texts.text(part)?;
                text.trim_start().starts_with('{').then_some(text)
            }
            HeadersOf::Text(part) => texts.text(part).filter(|text| !text.is_empty()),
            HeadersOf::Columns(columns) => {
                let value = |(name, part): &'a (String, Part)| Some((name, texts.text(part)?));
                let found: Vec<_> = columns.iter().filter_map(value).collect();
                (!found.is_empty()).then(|| Cow::Owned(object(found)))
            }
        }
    }

    /// Reads one row. `committed_at` is its time if it has none of its own.
    pub(super) fn read(
        &self,
        decoder: &mut Decoder,
        tuple: &Tuple,
        position: Position,
        committed_at: Timestamp,
    ) -> Found {
        let texts = Texts(tuple.values().map(text).collect());
        let fitted = &self.fitted;
        let part = |part| texts.text(part);
        let (id, key, topic) = (part(&fitted.id), part(&fitted.key), part(&fitted.topic));
        let (event_type, headers) = (part(&fitted.event_type), self.headers(&texts));
        let content_type = fitted.content_type.as_ref().and_then(part);
        let payload: Option<Cow<'_, [u8]>> = match &fitted.payload {
            Payload::Bytes(index) => texts.raw(*index).and_then(bytes).map(Cow::Owned),
            Payload::Text(part) => texts.text(part).map(|text| match text {
                Cow::Borrowed(text) => Cow::Borrowed(text.as_bytes()),
                Cow::Owned(text) => Cow::Owned(text.into_bytes()),
            }),
        };
        let columns = Columns {
            id: id.and_then(|text| self.id(&text)),
            key: key.as_deref(),
            topic: topic.as_deref(),
            event_type: event_type.as_deref(),
            content_type: Some(content_type.as_deref().unwrap_or(fitted.usual_content_type)),
            headers: headers.as_deref(),
            payload: payload.as_deref(),
        };
        let number = |column: Option<usize>| texts.column(column?);
        let at = self.at(&texts).unwrap_or(committed_at);
        Found {
            xid: number(fitted.xid).and_then(|text| text.parse().ok()),
            seq: number(fitted.seq).and_then(|text| text.parse().ok()).unwrap_or(0),
            entry: decoder.entry_of(&columns, position, at),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_what_a_cast_to_text_makes_of_them() {
        assert_eq!(shown(Form::Bool, "t"), "true");
        assert_eq!(shown(Form::Bool, "f"), "false");
        assert_eq!(shown(Form::Padded, "ab  "), "ab");
        assert_eq!(shown(Form::Same, "ab  "), "ab  ");
        assert_eq!(shown(Form::Inet, "10.0.0.1"), "10.0.0.1/32");
        assert_eq!(shown(Form::Inet, "::1"), "::1/128");
        assert_eq!(shown(Form::Inet, "10.0.0.0/8"), "10.0.0.0/8");
    }

    #[test]
    fn bytes_are_read_to_the_last() {
        let all: Vec<u8> = (0..=255).collect();
        let hex: String = all.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(bytes(format!("\\x{hex}").as_bytes()), Some(all));
        assert_eq!(bytes(b"\\x"), Some(Vec::new()));
        for odd in [&b"\\x0"[..], b"00", b"\\x0g", b""] {
            assert_eq!(bytes(odd), None);
        }
    }

    #[test]
    fn times_are_read_as_the_server_writes_them() {
        assert_eq!(millis("1970-01-01 01:00:00.0015+01", true), Some(1));
        assert_eq!(millis("2024-02-29 12:00:00+05:30", true), Some(1_709_188_200_000));
        assert_eq!(millis("1970-01-01 00:00:01", false), Some(1_000));
        assert_eq!(millis("1950-01-01 00:00:00+00", true), Some(0));
        for none in ["infinity", "-infinity", "", "0044-03-15 00:00:00+00 BC"] {
            assert_eq!((millis(none, true), millis(none, false)), (None, None), "{none}");
        }
    }
}
