//! Records: events at their places in a feed, and the batches a reader hands out.
//!
//! What lives here: `Record`, `Malformed`, `Entry`, `Batch`, `BatchLimit`. What does not: reading.
//! Invariant: a batch's position is at or after the position of its last entry.

use bytes::Bytes;

use crate::{Event, Key, Position, Timestamp};

/// An event at a position. Cloning shares the event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Its place in its partition's feed.
    pub position: Position,
    /// When it was appended, in the database's time.
    pub appended_at: Timestamp,
    /// The event itself.
    pub event: Event,
}

/// Something that looks like an event and cannot be read as one. The relay parks it.
#[derive(Clone, PartialEq, Eq)]
pub struct Malformed {
    /// Its place in its partition's feed.
    pub position: Position,
    /// When it was appended, in the database's time.
    pub appended_at: Timestamp,
    /// Its key, if that much could be read: later events of the key then wait behind it.
    pub key: Option<Key>,
    /// What is wrong with it, for a person. Without payload.
    pub reason: String,
    /// The bytes as found.
    pub raw: Bytes,
}

impl std::fmt::Debug for Malformed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Malformed {{ {}, {} }}", self.position, self.reason)
    }
}

/// What stands at one position of a feed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    /// A readable event.
    Record(Record),
    /// An unreadable one.
    Malformed(Malformed),
}

impl Entry {
    /// Its place in the feed.
    pub fn position(&self) -> &Position {
        match self {
            Self::Record(record) => &record.position,
            Self::Malformed(malformed) => &malformed.position,
        }
    }

    /// Its key, if it has a readable one.
    pub fn key(&self) -> Option<&Key> {
        match self {
            Self::Record(record) => Some(record.event.key()),
            Self::Malformed(malformed) => malformed.key.as_ref(),
        }
    }

    /// What it costs of a byte budget.
    pub fn cost_bytes(&self) -> usize {
        match self {
            Self::Record(record) => record.event.cost_bytes(),
            Self::Malformed(malformed) => Event::OVERHEAD_BYTES + malformed.raw.len(),
        }
    }
}

/// Entries in feed order, and the position after them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// In feed order; may be empty when only the position moved.
    pub entries: Vec<Entry>,
    /// Where reading goes on; may lie beyond the last entry.
    pub position: Position,
}

/// How much a reader may hand out at once. A single entry above `bytes` still comes, alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchLimit {
    /// Most entries.
    pub records: usize,
    /// Most bytes, as [`Entry::cost_bytes`] counts.
    pub bytes: usize,
}
