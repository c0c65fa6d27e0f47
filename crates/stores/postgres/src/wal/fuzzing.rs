//! The decoders as a fuzzer calls them, and the invariants that it looks for.
//!
//! What lives here: one function for each decoder of bytes from a server. What does not: who calls
//! them (`fuzz/`, and the tests on random bytes).
//! Invariant: for no bytes whatever do they panic, loop, or take memory beyond the bytes' own.

use bytes::{Bytes, BytesMut};

use super::frames::{frame, server_error, split, text};
use super::pgoutput::{Message, decode};
use super::tuple::Value;
use super::wire::row;

/// Cuts one message of `pgoutput`; the first byte says whether it is streamed.
///
/// # Panics
/// If a part of the message is not inside it: that is what a fuzzer looks for.
pub(crate) fn pgoutput(bytes: &[u8]) {
    let Some((first, rest)) = bytes.split_first() else { return };
    let Ok(message) = decode(Bytes::copy_from_slice(rest), first & 1 == 1) else { return };
    match message {
        Message::Insert { new, .. } | Message::Update { new, .. } => {
            let mut held = 0;
            for value in new.values() {
                held += 1;
                if let Value::Text(value) | Value::Binary(value) = value {
                    assert_eq!(new.share(value), value, "a value is part of its row");
                    held += 4 + value.len();
                }
            }
            assert_eq!(new.values().count(), new.len(), "a row has the columns that it counts");
            assert!(held < rest.len(), "a row is part of its message");
        }
        Message::Relation { relation, .. } => {
            assert!(relation.columns.len() * 10 < rest.len(), "columns are part of their message");
        }
        Message::Logical { content, .. } => {
            assert!(content.len() < rest.len(), "a content is part of its message");
        }
        _ => {}
    }
}

/// Cuts a stream of the server's messages, and those that are made of parts.
pub(crate) fn frames(bytes: &[u8]) {
    let mut input = BytesMut::from(bytes);
    while let Ok(Some((_, body))) = split(&mut input) {
        let _ = server_error(&body);
        let _ = text(&body);
        let _ = row(&body);
        let _ = frame(body);
    }
    let capacity = input.capacity();
    assert!(capacity <= bytes.len(), "an announced length makes no room");
}
