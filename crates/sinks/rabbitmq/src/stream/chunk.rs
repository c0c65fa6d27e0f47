//! A chunk of a stream, as the server delivers it: many messages at once.
//!
//! What lives here: where a chunk begins and ends, and its messages. What does not: what stands in
//! a message (`encode.rs`).
//! Invariant: a chunk that is malformed is none; it is never half of one.

use super::wire::Input;

/// First half of the first byte.
const MAGIC: u8 = 0x5;
/// Messages of users; other chunks hold what the server keeps for itself.
const MESSAGES: u8 = 0;

/// Messages that were stored together.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Chunk<'a> {
    /// Offset of its first message.
    pub(crate) first: u64,
    /// Offset behind its last one.
    pub(crate) end: u64,
    /// Those that stand in it one by one. Messages that somebody packed together, and may have
    /// compressed, are not among them: this sink packs none.
    pub(crate) messages: Vec<&'a [u8]>,
}

impl<'a> Chunk<'a> {
    /// The chunk of a delivery.
    pub(crate) fn read(bytes: &'a [u8]) -> Option<Self> {
        let mut input = Input(bytes);
        if input.u8()? >> 4 != MAGIC {
            return None;
        }
        let kind = input.u8()?;
        let (entries, records) = (input.u16()?, input.u32()?);
        let (_time, _epoch) = (input.u64()?, input.u64()?);
        let first = input.u64()?;
        let (_sum, data, _trailer, _) = (input.u32()?, input.u32()?, input.u32()?, input.u32()?);
        let mut data = Input(input.take(usize::try_from(data).ok()?)?);
        let mut messages = Vec::new();
        if kind == MESSAGES {
            for _ in 0..entries {
                messages.extend(entry(&mut data)?);
            }
        }
        Some(Self { first, end: first.checked_add(u64::from(records))?, messages })
    }
}

/// One entry: a message, or several that are packed together.
fn entry<'a>(data: &mut Input<'a>) -> Option<Option<&'a [u8]>> {
    let is_packed = data.0.first()? & 0x80 != 0;
    if is_packed {
        let (_kind, _count, _unpacked) = (data.u8()?, data.u16()?, data.u32()?);
        let length = data.u32()?;
        data.take(usize::try_from(length).ok()?)?;
        return Some(None);
    }
    let length = data.u32()?;
    data.take(usize::try_from(length).ok()?).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(kind: u8, entries: u16, records: u32, data: &[u8]) -> Vec<u8> {
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
    fn messages_are_taken_out_and_packed_ones_passed() {
        let data = b"\0\0\0\x02ab\x80\0\x03\0\0\0\x09\0\0\0\x01z\0\0\0\x01c";
        let bytes = chunk(MESSAGES, 3, 5, data);
        let read = Chunk::read(&bytes).expect("a chunk");
        assert_eq!((read.first, read.end), (7, 12));
        assert_eq!(read.messages, [&b"ab"[..], b"c"]);
        for end in 0..bytes.len() {
            assert_eq!(Chunk::read(&bytes[..end]), None, "{end}");
        }
        let more = chunk(MESSAGES, 4, 5, data);
        assert_eq!(Chunk::read(&more), None);
        let other = chunk(1, 1, 0, b"\xff");
        assert_eq!(Chunk::read(&other).expect("a chunk").messages, [&b""[..]; 0]);
    }
}
