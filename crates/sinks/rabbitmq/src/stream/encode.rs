//! From an event to a message of a stream: AMQP 1.0, as every client of streams writes it.
//!
//! What lives here: which field of the message carries what of the event, and finding a message's
//! id again. What does not: the body (`postrider-encoding`), frames (`wire.rs`).
//! Invariant: `id_of` finds in every message of ours the event's id, and reads others' messages
//! without going wrong on them.

use bytes::{BufMut, Bytes, BytesMut};
use postrider_core::{Record, TRACEPARENT, TRACESTATE};
use postrider_encoding::Message;
use uuid::Uuid;

use super::wire::Input;
use crate::encode::{CLOUD_EVENTS_PREFIX, KEY, TOPIC};

/// Application property with the event's type, which is the message's subject as well: readers over
/// AMQP 0-9-1 don't get a subject.
const TYPE: &str = "postrider-type";

/// The id stands within so many bytes of a message, in bytes: what may stand before it is a header
/// and annotations, of which RabbitMQ's own are names of 255 bytes at most.
pub(crate) const ID_WITHIN: usize = 4 << 10;

/// Sections of a message.
const PROPERTIES: u8 = 0x73;
const APPLICATION_PROPERTIES: u8 = 0x74;
const DATA: u8 = 0x75;
/// Codes of types.
const DESCRIBED: u8 = 0x00;
const NULL: u8 = 0x40;
const SMALL_ULONG: u8 = 0x53;
const TIMESTAMP: u8 = 0x83;
const UUID: u8 = 0x98;
const BINARY: u8 = 0xb0;
const STRING_8: u8 = 0xa1;
const STRING: u8 = 0xb1;
const SYMBOL: u8 = 0xb3;
const LIST_8: u8 = 0xc0;
const LIST: u8 = 0xd0;
const MAP: u8 = 0xd1;

/// The whole message of an event.
pub(crate) fn message(record: &Record, message: &Message) -> Bytes {
    let event = &record.event;
    let mut out = BytesMut::with_capacity(message.body.len() + 512);
    let id = event.id().to_string();
    section(&mut out, PROPERTIES);
    compound(&mut out, LIST, |list| {
        text(list, STRING, &id);
        list.put_bytes(NULL, 2); // user-id, to
        text(list, STRING, event.event_type().as_str());
        list.put_bytes(NULL, 2); // reply-to, correlation-id
        text(list, SYMBOL, &message.content_type);
        list.put_bytes(NULL, 2); // content-encoding, absolute-expiry-time
        list.put_u8(TIMESTAMP);
        list.put_i64(i64::try_from(record.appended_at.as_millis()).unwrap_or(i64::MAX));
        10
    });
    section(&mut out, APPLICATION_PROPERTIES);
    compound(&mut out, MAP, |map| {
        let mut count = 0;
        for (name, value) in properties(record, message) {
            text(map, STRING, &name);
            text(map, STRING, &value);
            count += 2;
        }
        count
    });
    section(&mut out, DATA);
    out.put_u8(BINARY);
    out.put_u32(length(message.body.len()));
    out.put_slice(&message.body);
    out.freeze()
}

/// Names and values of the application properties; no name comes twice.
fn properties(record: &Record, message: &Message) -> Vec<(String, String)> {
    let event = &record.event;
    let mut all: Vec<(String, String)> = Vec::new();
    let mut put = |name: &str, value: &str| match all.iter_mut().find(|(known, _)| known == name) {
        Some((_, old)) => value.clone_into(old),
        None => all.push((name.to_owned(), value.to_owned())),
    };
    for (name, value) in event.headers().iter() {
        if !name.eq_ignore_ascii_case(TRACEPARENT) && !name.eq_ignore_ascii_case(TRACESTATE) {
            put(name, value);
        }
    }
    for (attribute, value) in &message.attributes {
        put(&format!("{CLOUD_EVENTS_PREFIX}{attribute}"), value);
    }
    if let Some(trace) = event.trace() {
        put(TRACEPARENT, &trace.traceparent);
        if let Some(state) = &trace.tracestate {
            put(TRACESTATE, state);
        }
    }
    put(TOPIC, event.topic().as_str());
    put(KEY, event.key().as_str());
    put(TYPE, event.event_type().as_str());
    all
}

fn section(out: &mut BytesMut, code: u8) {
    out.put_slice(&[DESCRIBED, SMALL_ULONG, code]);
}

/// A list or map; `fill` writes its elements and tells their number.
fn compound(out: &mut BytesMut, code: u8, fill: impl FnOnce(&mut BytesMut) -> u32) {
    out.put_u8(code);
    let begin = out.len();
    out.put_u64(0);
    let count = fill(out);
    let size = length(out.len() - begin - 4);
    out[begin..begin + 4].copy_from_slice(&size.to_be_bytes());
    out[begin + 4..begin + 8].copy_from_slice(&count.to_be_bytes());
}

fn text(out: &mut BytesMut, code: u8, text: &str) {
    out.put_u8(code);
    out.put_u32(length(text.len()));
    out.put_slice(text.as_bytes());
}

/// An event has at most 16 MiB.
fn length(of: usize) -> u32 {
    u32::try_from(of).expect("a message is smaller than 4 GiB")
}

/// The id of a message, if it is one that an event can have. Its first bytes are enough.
pub(crate) fn id_of(message: &[u8]) -> Option<Uuid> {
    let mut input = Input(message);
    loop {
        if input.u8()? != DESCRIBED {
            return None;
        }
        let code = match input.u8()? {
            SMALL_ULONG => input.u8()?,
            // The long form of a code, or a symbol: no client of streams writes them.
            _ => return None,
        };
        match code {
            PROPERTIES => return first_of_list(&mut input),
            // What stands before the properties is passed; a body stands behind them.
            0x70..=0x72 => skip(&mut input)?,
            _ => return None,
        }
    }
}

fn first_of_list(input: &mut Input<'_>) -> Option<Uuid> {
    match input.u8()? {
        LIST_8 => drop(input.take(2)?),
        LIST => drop(input.take(8)?),
        _ => return None,
    }
    let text = match input.u8()? {
        UUID => {
            let bytes = input.take(16)?.try_into().ok()?;
            return Some(Uuid::from_bytes(bytes));
        }
        STRING_8 => {
            let length = input.u8()?;
            input.take(usize::from(length))?
        }
        STRING => {
            let length = input.u32()?;
            input.take(usize::try_from(length).ok()?)?
        }
        _ => return None,
    };
    Uuid::try_parse_ascii(text).ok()
}

/// Passes one value. By the type's code its high half tells how long it is.
fn skip(input: &mut Input<'_>) -> Option<()> {
    let code = input.u8()?;
    let length = match code >> 4 {
        0x4 => 0,
        0x5 => 1,
        0x6 => 2,
        0x7 => 4,
        0x8 => 8,
        0x9 => 16,
        0xa | 0xc | 0xe => usize::from(input.u8()?),
        0xb | 0xd | 0xf => usize::try_from(input.u32()?).ok()?,
        _ => return None,
    };
    input.take(length).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_conformance::samples::{event_with_id, fresh_id, record};
    use postrider_encoding::{Encoder, Encoding, EventSource};

    #[test]
    fn the_id_is_found_again_and_nothing_else_is_taken_for_one() {
        let record = record(event_with_id(fresh_id(), "Zo\u{eb} 42", 1), 1);
        let encoder = Encoder::new(Encoding::Plain, EventSource::default());
        let bytes = message(&record, &encoder.encode(&record));
        assert_eq!(id_of(&bytes), Some(*record.event.id().as_uuid()));
        // AMQP 1.0, 3.2.4: a content type is a symbol.
        let content_type = record.event.content_type().as_str();
        let length = u8::try_from(content_type.len()).expect("short");
        let symbol = [&[0xb3, 0, 0, 0, length], content_type.as_bytes()].concat();
        assert!(bytes.windows(symbol.len()).any(|part| part == symbol));
        for end in 0..50 {
            assert_eq!(id_of(&bytes[..end]), None, "{end}");
        }
        // A header, and annotations with a text of the short and of the long form.
        let before =
            b"\0\x53\x70\xc0\x02\x01\x41\0\x53\x72\xd1\0\0\0\x0c\0\0\0\x02\xa1\x01k\xb1\0\0\0\0";
        assert_eq!(id_of(&[&before[..], &bytes].concat()), Some(*record.event.id().as_uuid()));
        let uuid = b"\0\x53\x73\xc0\x12\x01\x980123456789abcdef";
        assert_eq!(id_of(uuid), Some(Uuid::from_bytes(*b"0123456789abcdef")));
        for other in [
            &b"\0\x53\x75\xa0\x01x"[..],
            b"\0\x53\x73\x45",
            b"\0\x53\x73\xc0\x04\x01\xa1\x01x",
            b"",
        ] {
            assert_eq!(id_of(other), None, "{other:?}");
        }
    }
}
