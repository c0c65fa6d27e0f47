//! From messages to chunks of events, transaction by transaction.
//!
//! What lives here: which transaction is open, the number of each of its events, and where the
//! stream stands. What does not: the connection, and who reads (`hub.rs`).
//! Invariant: a chunk's end covers no event that is not in it or in an earlier chunk; an event's
//! place is the same whenever the server sends it again.

use std::collections::HashMap;

use bytes::Bytes;
use postrider_core::{Entry, Error, Event, Result, Timestamp};

use super::adopted::Adopted;
use super::emitted;
use super::events::{self, Layout};
use super::lsn::Lsn;
use super::pgoutput::{self, Message, Relation};
use super::position::WalPlace;
use super::tuple::Tuple;
use crate::row::Decoder;

/// One event of the stream.
pub(super) struct StreamEvent {
    pub(super) lsn: Lsn,
    pub(super) ordinal: u32,
    pub(super) xid: Option<u64>,
    pub(super) seq: i64,
    pub(super) entry: Entry,
}

/// A piece of the stream: its events, and how far it goes.
pub(super) struct Chunk {
    pub(super) events: Vec<StreamEvent>,
    pub(super) end: (Lsn, u32),
    pub(super) bytes: usize,
}

/// What an event takes in the buffer besides its payload and texts: event, entry and positions by
/// their sizes; a chunk takes as much. An estimate in bytes.
const EVENT_BYTES: usize = 512;

/// What of the stream is events.
pub(super) enum Wanted {
    /// The rows of a table that `init` made.
    Own { schema: String, outbox: String },
    /// The rows of one of the application's.
    Adopted(Box<Adopted>),
    /// The messages of this prefix.
    Messages(String),
}

impl Wanted {
    /// Whether messages of this prefix are.
    fn has(&self, prefix: &str) -> bool {
        matches!(self, Self::Messages(wanted) if wanted == prefix)
    }

    /// How the rows of a table are read, if they are wanted.
    fn layout(&self, relation: &Relation) -> Result<Option<Layout>> {
        match self {
            Self::Own { schema, outbox }
                if relation.namespace == *schema && relation.name == *outbox =>
            {
                Layout::of_own(relation).map(Some)
            }
            // By its number, which no change of its name changes.
            Self::Adopted(adopted) if relation.id == adopted.oid => {
                let mapped = adopted.fit(&relation.columns)?;
                Ok(Some(Layout::Adopted(Box::new(mapped))))
            }
            Self::Own { .. } | Self::Adopted(_) | Self::Messages(_) => Ok(None),
        }
    }
}

/// The stream of one connection.
pub(super) struct Assembly {
    wanted: Wanted,
    system: u64,
    timeline: u32,
    /// By the server's number; none for a table that is not the outbox.
    layouts: HashMap<u32, Option<Layout>>,
    decoder: Decoder,
    /// Where the open transaction's commit record begins, and its events so far.
    open: Option<(Lsn, u32)>,
    /// When it was committed.
    committed_at: Timestamp,
    events: Vec<StreamEvent>,
    bytes: usize,
    end: (Lsn, u32),
    /// Messages of a kind that this program does not know.
    pub(super) unknown: u64,
    /// Whether the outbox was described, as it is before its first row and after each change of
    /// the publication.
    pub(super) described: bool,
}

/// Most tables whose layout is remembered; all are described again when there are more.
const MAX_LAYOUTS: usize = 4_096;

impl Assembly {
    pub(super) fn new(wanted: Wanted, system: u64, timeline: u32, start: Lsn) -> Self {
        Self {
            wanted,
            system,
            timeline,
            layouts: HashMap::new(),
            decoder: Decoder::default(),
            open: None,
            committed_at: Timestamp::default(),
            events: Vec::new(),
            bytes: 0,
            end: (start, 0),
            unknown: 0,
            described: false,
        }
    }

    /// Takes the next message.
    ///
    /// # Errors
    /// `Corrupt` for bytes that are no message, or come at the wrong place; `Permanent` for a table
    /// that can't be read.
    pub(super) fn message(&mut self, payload: Bytes) -> Result<()> {
        match pgoutput::decode(payload, false)? {
            Message::Begin { commit, at, .. } => {
                if self.open.is_some() {
                    return Err(Error::corrupt("the log begins a transaction within another"));
                }
                self.open = Some((commit, 0));
                self.committed_at = events::timestamp(at);
            }
            Message::Commit { end, .. } => {
                self.open = None;
                self.end = (end, 0);
            }
            Message::Relation { relation, .. } => self.describe(&relation)?,
            Message::Insert { relation, new, .. } => self.insert(relation, &new)?,
            Message::Logical { lsn, prefix, content, .. } if self.wanted.has(&prefix) => {
                self.emitted(lsn, &content)?;
            }
            Message::Unknown(tag) => {
                self.unknown += 1;
                if self.unknown == 1 {
                    tracing::warn!(
                        tag,
                        "the server sends a kind of message that this program does not know; \
                         skipped"
                    );
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn describe(&mut self, relation: &Relation) -> Result<()> {
        let layout = self.wanted.layout(relation)?;
        self.described |= layout.is_some();
        if self.layouts.len() >= MAX_LAYOUTS {
            self.layouts.retain(|_, layout| layout.is_some());
        }
        self.layouts.insert(relation.id, layout);
        Ok(())
    }

    fn insert(&mut self, relation: u32, tuple: &Tuple) -> Result<()> {
        let Some(Some(layout)) = self.layouts.get(&relation) else { return Ok(()) };
        let Some((lsn, ordinal)) = &mut self.open else {
            return Err(Error::corrupt("the log has a row outside any transaction"));
        };
        *ordinal = next(*ordinal)?;
        let (lsn, ordinal) = (*lsn, *ordinal);
        let (system, timeline) = (self.system, self.timeline);
        let position = WalPlace { system, timeline, lsn, ordinal }.position()?;
        let at = self.committed_at;
        let found = events::read(&mut self.decoder, layout, tuple, position, at)?;
        let (xid, seq, entry) = (found.xid, found.seq, found.entry);
        self.add(StreamEvent { lsn, ordinal, xid, seq, entry });
        Ok(())
    }

    /// A message of a transaction counts as its rows would; one of none stands for itself.
    fn emitted(&mut self, own: Lsn, content: &[u8]) -> Result<()> {
        let (lsn, ordinal) = match &mut self.open {
            Some((lsn, ordinal)) => {
                *ordinal = next(*ordinal)?;
                (*lsn, *ordinal)
            }
            None => (own, 1),
        };
        let (system, timeline) = (self.system, self.timeline);
        let position = WalPlace { system, timeline, lsn, ordinal }.position()?;
        let entry = emitted::read(&mut self.decoder, content, position);
        self.add(StreamEvent { lsn, ordinal, xid: None, seq: 0, entry });
        Ok(())
    }

    fn add(&mut self, event: StreamEvent) {
        let texts = event.entry.cost_bytes().saturating_sub(Event::OVERHEAD_BYTES);
        self.bytes += EVENT_BYTES + texts;
        self.end = (event.lsn, event.ordinal);
        self.events.push(event);
    }

    /// Hears how far the server has read: nothing is open below that.
    pub(super) fn idle_at(&mut self, lsn: Lsn) {
        if self.open.is_none() && lsn > self.end.0 {
            self.end = (lsn, 0);
        }
    }

    /// Where the stream stands.
    pub(super) fn end(&self) -> (Lsn, u32) {
        self.end
    }

    /// Bytes of the events that wait to be taken.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// What has come since the last call.
    pub(super) fn take(&mut self) -> Chunk {
        let events = std::mem::take(&mut self.events);
        let bytes = EVENT_BYTES + std::mem::take(&mut self.bytes);
        Chunk { events, end: self.end, bytes }
    }
}

fn next(ordinal: u32) -> Result<u32> {
    let next = ordinal.checked_add(1);
    next.ok_or_else(|| Error::corrupt("a transaction has more rows than PostgreSQL allows"))
}
