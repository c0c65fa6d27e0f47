//! The line of one event.
//!
//! What lives here: the JSON object and its members. What does not: files.
//! Invariant: a line holds no line break but its last byte, and the payload's bytes can be
//! recovered from it exactly: the raw text of `data`, or the decoded `dataBase64`.

use std::io::Write;

use base64::engine::general_purpose::STANDARD;
use postrider_core::{PartitionId, Record, Timestamp};
use postrider_encoding::{as_json, format_rfc3339};

/// Writes lines; keeps the last time's text, since most events of a batch share a millisecond.
#[derive(Debug, Default)]
pub(crate) struct LineEncoder {
    last_time: Option<(Timestamp, String)>,
}

const MEMORY: &str = "writing to memory does not fail";

impl LineEncoder {
    /// Appends the record's line to `out`.
    pub(crate) fn write(&mut self, out: &mut Vec<u8>, partition: &PartitionId, record: &Record) {
        let event = &record.event;
        write!(out, "{{\"id\":\"{}\",\"position\":\"{}\"", event.id(), record.position)
            .expect(MEMORY);
        for (name, value) in [
            ("partition", partition.as_str()),
            ("topic", event.topic().as_str()),
            ("key", event.key().as_str()),
            ("type", event.event_type().as_str()),
            ("contentType", event.content_type().as_str()),
            ("appendedAt", self.time_text(record.appended_at)),
        ] {
            out.extend_from_slice(b",\"");
            out.extend_from_slice(name.as_bytes());
            out.extend_from_slice(b"\":");
            write_text(out, value);
        }
        out.extend_from_slice(b",\"headers\":{");
        for (index, (name, value)) in event.headers().iter().enumerate() {
            if index > 0 {
                out.push(b',');
            }
            write_text(out, name);
            out.push(b':');
            write_text(out, value);
        }
        out.push(b'}');
        write_payload(out, record);
        out.extend_from_slice(b"}\n");
    }

    fn time_text(&mut self, time: Timestamp) -> &str {
        if self.last_time.as_ref().is_none_or(|(last, _)| *last != time) {
            self.last_time = None;
        }
        &self.last_time.get_or_insert_with(|| (time, format_rfc3339(time))).1
    }
}

fn write_payload(out: &mut Vec<u8>, record: &Record) {
    let one_line = |text: &str| !text.bytes().any(|byte| byte == b'\n' || byte == b'\r');
    match as_json(&record.event).filter(|raw| one_line(raw.get())) {
        Some(raw) => {
            out.extend_from_slice(b",\"data\":");
            out.extend_from_slice(raw.get().as_bytes());
        }
        None => {
            out.extend_from_slice(b",\"dataBase64\":\"");
            let encoder = base64::display::Base64Display::new(record.event.payload(), &STANDARD);
            write!(out, "{encoder}").expect(MEMORY);
            out.push(b'"');
        }
    }
}

fn write_text(out: &mut Vec<u8>, text: &str) {
    serde_json::to_writer(out, text).expect("a string serialises, and memory takes every write");
}
