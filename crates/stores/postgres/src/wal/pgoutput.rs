//! What `pgoutput` says of transactions and rows, in versions 1 to 4 of its protocol.
//!
//! What lives here: cutting a message into its parts. What does not: which table matters, and what
//! a transaction's changes come to. Rows are in `tuple.rs`.
//! Invariant: every length is checked against the bytes that are there, and nothing is allocated by
//! an announced count; parts share the message's bytes. Errors name a tag and an offset, never what
//! stands there.

use bytes::{Buf, Bytes};
use postrider_core::{Error, Result};

use super::lsn::Lsn;
use super::tuple::Tuple;

/// One message. Times are the server's, in microseconds since 2000.
///
/// `xid` of a change is there inside a streamed block alone, and may be a subtransaction's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Message {
    Begin {
        /// Where the commit's record begins.
        commit: Lsn,
        at: i64,
        xid: u32,
    },
    Commit {
        /// Where the commit's record begins.
        commit: Lsn,
        /// Where it ends.
        end: Lsn,
        at: i64,
    },
    /// The transaction came from another server.
    Origin {
        commit: Lsn,
        name: String,
    },
    Relation {
        xid: Option<u32>,
        relation: Relation,
    },
    /// A type that is none of the server's own; only its name.
    Type,
    Insert {
        xid: Option<u32>,
        relation: u32,
        new: Tuple,
    },
    Update {
        xid: Option<u32>,
        relation: u32,
        new: Tuple,
    },
    Delete {
        xid: Option<u32>,
        relation: u32,
    },
    Truncate,
    /// Of `pg_logical_emit_message`.
    Logical {
        xid: Option<u32>,
        transactional: bool,
        lsn: Lsn,
        prefix: String,
        content: Bytes,
    },
    StreamStart {
        xid: u32,
        /// The first block of this transaction.
        first: bool,
    },
    StreamStop,
    StreamCommit {
        xid: u32,
        commit: Lsn,
        end: Lsn,
        at: i64,
    },
    StreamAbort {
        xid: u32,
        /// What was rolled back: the transaction itself, or a part of it.
        subxid: u32,
    },
    /// A step of a two-phase commit, by its tag; nobody here asks for them.
    TwoPhase(u8),
    Unknown(u8),
}

/// A table as the changes that follow have it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Relation {
    pub(crate) id: u32,
    /// Empty for `pg_catalog`.
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// `d`, `n`, `f` or `i`, as in `pg_class.relreplident`.
    pub(crate) replica_identity: u8,
    pub(crate) columns: Vec<Column>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Column {
    pub(crate) name: String,
    /// The type's `oid`.
    pub(crate) type_id: u32,
    pub(crate) modifier: i32,
    /// Part of the replica identity.
    pub(crate) key: bool,
}

/// Cuts a message into its parts. `streamed` is whether it stands between a `StreamStart` and its
/// `StreamStop`.
///
/// # Errors
/// `Corrupt` for bytes that don't fit their message.
pub(crate) fn decode(payload: Bytes, streamed: bool) -> Result<Message> {
    let mut parts = Parts::new(payload)?;
    let message = match parts.tag {
        b'I' | b'U' | b'D' | b'R' | b'Y' | b'T' | b'M' => change(&mut parts, streamed)?,
        b'B' => Message::Begin { commit: parts.lsn()?, at: parts.i64()?, xid: parts.u32()? },
        b'C' => {
            parts.u8()?;
            Message::Commit { commit: parts.lsn()?, end: parts.lsn()?, at: parts.i64()? }
        }
        b'O' => Message::Origin { commit: parts.lsn()?, name: parts.text()? },
        b'S' => Message::StreamStart { xid: parts.u32()?, first: parts.u8()? != 0 },
        b'E' => Message::StreamStop,
        b'c' => {
            let xid = parts.u32()?;
            parts.u8()?;
            let (commit, end) = (parts.lsn()?, parts.lsn()?);
            Message::StreamCommit { xid, commit, end, at: parts.i64()? }
        }
        b'A' => {
            let (xid, subxid) = (parts.u32()?, parts.u32()?);
            // With `streaming = parallel` also where and when.
            if !parts.rest.is_empty() {
                parts.lsn()?;
                parts.i64()?;
            }
            Message::StreamAbort { xid, subxid }
        }
        tag @ (b'b' | b'P' | b'K' | b'r' | b'p') => return Ok(Message::TwoPhase(tag)),
        tag => return Ok(Message::Unknown(tag)),
    };
    match parts.rest.is_empty() {
        true => Ok(message),
        false => Err(parts.corrupt("has more than its parts")),
    }
}

/// The messages that have a transaction's id first when they are streamed.
fn change(parts: &mut Parts, streamed: bool) -> Result<Message> {
    let xid = if streamed { Some(parts.u32()?) } else { None };
    Ok(match parts.tag {
        b'R' => Message::Relation { xid, relation: relation(parts)? },
        b'Y' => {
            parts.u32()?;
            parts.text()?;
            parts.text()?;
            Message::Type
        }
        b'T' => {
            let count = parts.u32()?;
            parts.u8()?;
            for _ in 0..count {
                parts.u32()?;
            }
            Message::Truncate
        }
        b'M' => {
            let transactional = parts.u8()? & 1 == 1;
            let (lsn, prefix) = (parts.lsn()?, parts.text()?);
            let length = parts.u32()?;
            let content = parts.bytes(length)?;
            Message::Logical { xid, transactional, lsn, prefix, content }
        }
        tag => {
            let relation = parts.u32()?;
            let mut next = parts.u8()?;
            // The row as it was: its key, or all of it.
            if matches!((tag, next), (b'U' | b'D', b'K' | b'O')) {
                parts.tuple()?;
                if tag == b'D' {
                    return Ok(Message::Delete { xid, relation });
                }
                next = parts.u8()?;
            }
            match (tag, next) {
                (b'I', b'N') => Message::Insert { xid, relation, new: parts.tuple()? },
                (b'U', b'N') => Message::Update { xid, relation, new: parts.tuple()? },
                _ => return Err(parts.corrupt("has a row of no known kind")),
            }
        }
    })
}

fn relation(parts: &mut Parts) -> Result<Relation> {
    let (id, namespace, name) = (parts.u32()?, parts.text()?, parts.text()?);
    let replica_identity = parts.u8()?;
    let mut columns = Vec::new();
    for _ in 0..parts.u16()? {
        columns.push(Column {
            key: parts.u8()? & 1 == 1,
            name: parts.text()?,
            type_id: parts.u32()?,
            modifier: parts.u32()?.cast_signed(),
        });
    }
    Ok(Relation { id, namespace, name, replica_identity, columns })
}

/// What is left of a message.
struct Parts {
    tag: u8,
    /// Bytes of the whole message.
    length: usize,
    rest: Bytes,
}

impl Parts {
    fn new(payload: Bytes) -> Result<Self> {
        let length = payload.len();
        let mut parts = Self { tag: 0, length, rest: payload };
        parts.tag = parts.u8()?;
        Ok(parts)
    }

    fn corrupt(&self, what: &str) -> Error {
        let Self { tag, length, rest } = self;
        Error::corrupt(format!(
            "read the log: a message of tag {tag:#04x} and {length} bytes {what}, at offset {}",
            length - rest.len()
        ))
    }

    fn short(&self) -> Error {
        self.corrupt("is cut short")
    }

    fn u8(&mut self) -> Result<u8> {
        self.rest.try_get_u8().map_err(|_| self.short())
    }

    fn u16(&mut self) -> Result<u16> {
        self.rest.try_get_u16().map_err(|_| self.short())
    }

    fn u32(&mut self) -> Result<u32> {
        self.rest.try_get_u32().map_err(|_| self.short())
    }

    fn i64(&mut self) -> Result<i64> {
        self.rest.try_get_i64().map_err(|_| self.short())
    }

    fn lsn(&mut self) -> Result<Lsn> {
        self.rest.try_get_u64().map(Lsn).map_err(|_| self.short())
    }

    /// Up to a zero byte. The session's encoding is UTF-8.
    fn text(&mut self) -> Result<String> {
        let end = self.rest.iter().position(|byte| *byte == 0).ok_or_else(|| self.short())?;
        let text = std::str::from_utf8(&self.rest[..end]);
        let text = text.map_err(|_| self.corrupt("has a name that is not UTF-8"))?.to_owned();
        self.rest.advance(end + 1);
        Ok(text)
    }

    fn bytes(&mut self, length: u32) -> Result<Bytes> {
        match usize::try_from(length) {
            Ok(length) if length <= self.rest.len() => Ok(self.rest.split_to(length)),
            _ => Err(self.short()),
        }
    }

    fn tuple(&mut self) -> Result<Tuple> {
        let (count, length) = Tuple::measure(&self.rest).map_err(|at| {
            self.rest.advance(at);
            self.corrupt("has a row that is cut short or of no known kind")
        })?;
        Ok(Tuple::new(count, self.rest.split_to(length)))
    }
}

#[cfg(test)]
mod tests;
