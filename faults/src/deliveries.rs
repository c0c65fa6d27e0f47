//! What arrived at a sink, in order, and moments between arrivals.
//!
//! What lives here: deliveries, marks and what a sink's end was told. What does not: how they
//! arrived (`receiver.rs`, `lines.rs`).
//! Invariant: a delivery is before a mark if the sink had begun to hear of it when the mark was
//! made, so that nothing that a dead relay had sent counts as sent later.

use std::collections::HashMap;

use postrider_conformance::sink::Delivered;
use postrider_core::EventId;

/// Where a delivery stands among what arrived.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// A request, by the relay that sent it.
    Request {
        /// The receiver's count when it knew whose event was coming.
        begun: u64,
        /// Which start of which relay.
        relay: usize,
    },
    /// A message that a broker keeps. It does not tell which relay sent it.
    Stored {
        /// How many the broker kept before it.
        at: u64,
    },
    /// A line of a file.
    Line {
        /// The file, under whatever name.
        inode: u64,
        /// The place after the line.
        end: u64,
    },
}

/// One arrival that counts: the sink had it, whatever it answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delivery {
    /// The event, as it arrived.
    pub message: Delivered,
    /// Where it stands.
    pub place: Place,
}

/// A moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mark {
    /// The receiver's count, or the broker's.
    Count(u64),
    /// The length of every file, by inode.
    Lengths(HashMap<u64, u64>),
}

impl Delivery {
    /// The event's id.
    pub fn id(&self) -> EventId {
        self.message.id
    }

    /// Whether the sink had heard of it at the mark.
    pub fn is_before(&self, mark: &Mark) -> bool {
        match (&self.place, mark) {
            (Place::Request { begun, .. }, Mark::Count(count)) => begun < count,
            (Place::Stored { at }, Mark::Count(count)) => at < count,
            (Place::Line { inode, end }, Mark::Lengths(lengths)) => {
                lengths.get(inode).is_some_and(|length| end <= length)
            }
            (Place::Request { .. } | Place::Stored { .. }, Mark::Lengths(_))
            | (Place::Line { .. }, Mark::Count(_)) => {
                panic!("marks and deliveries of one schedule come from one sink")
            }
        }
    }
}

/// All that arrived, in order.
#[derive(Debug, Clone, Default)]
pub struct Arrived {
    /// In order of arrival.
    pub deliveries: Vec<Delivery>,
    /// Events that the sink took without confirming, or may have, one entry for each time.
    pub withheld: Vec<EventId>,
    /// Whether the sink itself drops repetitions, so that no event may have arrived twice.
    pub drops_repetitions: bool,
    /// Arrivals that no event can have been: wrong signature, unreadable line.
    pub unreadable: Vec<String>,
}
