//! A chunk of a stream, as the server delivers it: many messages at once.
//!
//! What lives here: its head, and the heads of its entries. What does not: reading it piece by
//! piece
//! (`connect.rs`), what stands in a message (`encode.rs`).
//! Invariant: a head that is malformed is none. A chunk may have 4 GiB: nothing here wants to have
//! more of it at once than a head.

use uuid::Uuid;

use super::wire::Input;

/// Bytes of a chunk's head.
pub(crate) const HEAD_BYTES: usize = 48;
/// Bytes of an entry's head, of which the first says how many it is.
const MESSAGE_HEAD_BYTES: usize = 4;
const PACKED_HEAD_BYTES: usize = 1 + 2 + 4 + 4;
/// First half of the first byte.
const MAGIC: u8 = 0x5;
/// Messages of users; other chunks hold what the server keeps for itself.
const MESSAGES: u8 = 0;

/// What is said of messages that were stored together.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Head {
    /// Offset behind its last message.
    pub(crate) end: u64,
    /// Messages, and packs of them, that follow.
    pub(crate) entries: u16,
}

impl Head {
    /// The head of a delivered chunk.
    pub(crate) fn read(bytes: &[u8]) -> Option<Self> {
        let mut input = Input(bytes.get(..HEAD_BYTES)?);
        if input.u8()? >> 4 != MAGIC {
            return None;
        }
        let kind = input.u8()?;
        let (entries, records) = (input.u16()?, input.u32()?);
        let (_time, _epoch, first) = (input.u64()?, input.u64()?, input.u64()?);
        let entries = if kind == MESSAGES { entries } else { 0 };
        Some(Self { end: first.checked_add(u64::from(records))?, entries })
    }
}

/// What is known of messages that were stored together, once they were read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    /// Offset behind its last message.
    pub(crate) end: u64,
    /// Ids of those that stand in it one by one: 65,535 at most. Messages that somebody packed
    /// together, and may have compressed, are not among them: this sink packs none.
    pub(crate) ids: Vec<Uuid>,
}

/// One entry: a message, or several that are packed together.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// A message of so many bytes.
    Message(usize),
    /// So many bytes of them.
    Packed(usize),
}

impl Entry {
    /// The longer of its two heads.
    pub(crate) const MAX_HEAD_BYTES: usize = PACKED_HEAD_BYTES;

    /// Bytes of its head, by the first of them.
    pub(crate) fn head_bytes(first: u8) -> usize {
        if first & 0x80 == 0 { MESSAGE_HEAD_BYTES } else { PACKED_HEAD_BYTES }
    }

    /// The entry with this head.
    pub(crate) fn read(head: &[u8]) -> Option<Self> {
        let length = u32::from_be_bytes(*head.last_chunk()?);
        let length = usize::try_from(length).ok()?;
        match head.len() {
            MESSAGE_HEAD_BYTES => Some(Self::Message(length)),
            PACKED_HEAD_BYTES => Some(Self::Packed(length)),
            _ => None,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A chunk with its head.
    pub(crate) fn chunk(kind: u8, entries: u16, records: u32, data: &[u8]) -> Vec<u8> {
        let mut chunk = vec![0x50, kind];
        chunk.extend(entries.to_be_bytes());
        chunk.extend(records.to_be_bytes());
        chunk.extend([0; 16]);
        chunk.extend(7_u64.to_be_bytes());
        chunk.extend([0; 4]);
        chunk.extend(u32::try_from(data.len()).expect("small").to_be_bytes());
        chunk.extend([0; 8]);
        chunk.extend(data);
        chunk
    }

    #[test]
    fn a_head_that_is_malformed_is_none() {
        let bytes = chunk(MESSAGES, 3, 5, b"");
        assert_eq!(Head::read(&bytes), Some(Head { end: 12, entries: 3 }));
        for end in 0..bytes.len() {
            assert_eq!(Head::read(&bytes[..end]), None, "{end}");
        }
        assert_eq!(Head::read(&chunk(1, 1, 0, b"")), Some(Head { end: 7, entries: 0 }));
        assert_eq!(Head::read(&[&[0x40], &bytes[1..]].concat()), None);
    }

    #[test]
    fn an_entry_is_a_message_or_a_pack() {
        for (head, entry) in [
            (&b"\0\0\x01\x02"[..], Entry::Message(258)),
            (b"\x80\0\x03\0\0\0\x09\0\0\0\x01", Entry::Packed(1)),
        ] {
            assert_eq!(Entry::head_bytes(head[0]), head.len());
            assert_eq!(Entry::read(head), Some(entry));
            assert_eq!(Entry::read(&head[1..]), None);
        }
    }
}
