//! What the session asks of the hub and tells it.
//!
//! What lives here: opening and closing, filling and bounding the buffer, and what may be
//! acknowledged. What does not: what readers ask (`hub.rs`).
//! Invariant: as for the hub: bounded, and acknowledged no further than the lowest durable place.

use std::collections::VecDeque;
use std::sync::Arc;

use postrider_core::{ConsumerName, Error};

use super::{Footing, Hub, STARVED_AFTER, Seat, Session, State, Table};
use crate::wal::assembly::Chunk;
use crate::wal::ledger::Base;
use crate::wal::lsn::Lsn;
use crate::wal::position::WalPlace;
use crate::wal::wire::{Seam, System};

/// For the session.
impl Hub {
    /// Waits until anybody sits.
    pub(in crate::wal) async fn until_wanted(&self) {
        loop {
            let woken = self.task.notified();
            if self.is_wanted() {
                return;
            }
            woken.await;
        }
    }

    /// Whether anybody sits.
    pub(in crate::wal) fn is_wanted(&self) -> bool {
        self.state().seats.values().any(|seat| seat.left.is_none())
    }

    /// Opens a session: from now on readers know where the slot stands.
    pub(in crate::wal) fn open(
        &self,
        system: System,
        start: Lsn,
        publication: String,
        table: Table,
        seam: Option<Seam>,
    ) {
        let mut state = self.state();
        let session = state.number();
        let footing = Footing { session, system, start, publication, table };
        state.session = Some(Session {
            footing,
            seam,
            importing: 0,
            streaming: false,
            chunks: VecDeque::new(),
            first: 0,
            dropped: (start, 0),
            bytes: 0,
            end: (start, 0),
            received: start,
            rewind: false,
        });
        state.trouble = None;
        drop(state);
        self.readers.notify_waiters();
    }

    /// Ends the session; `trouble` is what readers are told.
    pub(in crate::wal) fn close(&self, trouble: Option<&Error>) {
        let mut state = self.state();
        if let Some(session) = state.session.take()
            && let Some(seen) = &mut state.seen
        {
            seen.flushed = seen.flushed.max(session.received);
        }
        state.candidate = None;
        if let Some(error) = trouble {
            // Each failed try is told once.
            state.trouble = Some((state.number(), error.kind(), error.chain()));
        }
        drop(state);
        self.readers.notify_waiters();
    }

    /// Tells readers what they wait for, while it is waited for.
    pub(in crate::wal) fn tell(&self, trouble: &Error) {
        let mut state = self.state();
        state.trouble = Some((state.number(), trouble.kind(), trouble.chain()));
        drop(state);
        self.readers.notify_waiters();
    }

    /// Takes note of which copy of the database answers, and fences readers if it is another.
    /// Returns whether it is.
    pub(in crate::wal) fn met(&self, now: &System) -> bool {
        let mut state = self.state();
        let other = state.seen.as_ref().is_some_and(|seen| {
            seen.system != now.system || seen.timeline != now.timeline || now.flushed < seen.flushed
        });
        if other {
            state.world += 1;
            state.seats.clear();
        }
        state.seen = Some(*now);
        drop(state);
        if other {
            self.readers.notify_waiters();
        }
        other
    }

    /// What was heard of the checkpoints: to be taken before the database is asked for them.
    pub(in crate::wal) fn durable(&self) -> Vec<(ConsumerName, WalPlace)> {
        let state = self.state();
        let durable = |(name, seat): (&ConsumerName, &Seat)| Some((name.clone(), seat.durable?));
        state.seats.iter().filter_map(durable).collect()
    }

    /// Compares the checkpoints that the database has with what was heard of them, and fences
    /// readers if one of them is gone or stands further back: then another copy answers, also when
    /// it has been written to since, so that nothing else tells. Returns whether that is so.
    pub(in crate::wal) fn compare(
        &self,
        heard: &[(ConsumerName, WalPlace)],
        found: &[(ConsumerName, WalPlace)],
    ) -> bool {
        let mut state = self.state();
        let is_behind = |(consumer, durable): &(ConsumerName, WalPlace)| {
            let here = found.iter().find(|(known, _)| known == consumer).map(|(_, place)| place);
            here.is_none_or(|place| place.system != durable.system || place.key() < durable.key())
        };
        let other = heard.iter().any(is_behind);
        if other {
            state.world += 1;
            state.seats.clear();
        }
        drop(state);
        if other {
            self.readers.notify_waiters();
        }
        other
    }

    /// Whether the stream may begin: somebody wants it, and nobody imports the snapshot that would
    /// be gone then.
    pub(in crate::wal) fn may_stream(&self) -> bool {
        let mut state = self.state();
        let wanted = state.seats.values().any(|seat| seat.wants && seat.left.is_none());
        let Some(session) = state.session.as_mut() else { return false };
        let may = wanted && session.importing == 0;
        if may {
            session.seam = None;
            session.streaming = true;
        }
        may
    }

    /// Whether the session has to begin again for a reader that was left behind.
    pub(in crate::wal) fn is_rewound(&self) -> bool {
        self.state().session.as_ref().is_none_or(|session| session.rewind)
    }

    /// Whether more may be read from the server. A reader that holds the buffer against one that
    /// waits is left behind.
    pub(in crate::wal) fn has_room(&self) -> bool {
        let mut state = self.state();
        if !state.is_full() {
            return true;
        }
        // One that has a chunk to read is no longer waiting, though it may not have come for it.
        let starved = state.seats.values().any(|seat| {
            state.session.as_ref().is_some_and(|session| session.has_nothing_for(seat))
                && seat.waits.is_some_and(|since| since.elapsed() > STARVED_AFTER)
        });
        if !starved {
            return false;
        }
        let State { seats, session, .. } = &mut *state;
        let index = |seat: &Seat| session.as_ref().and_then(|session| session.index(seat));
        let slowest = seats.iter_mut().filter_map(|(name, seat)| Some((index(seat)?, name, seat)));
        if let Some((_, name, seat)) = slowest.min_by_key(|(index, ..)| *index) {
            tracing::info!(sink = %name, "a sink is left behind, so that the others can go on");
            seat.at = None;
            seat.wants = false;
        }
        state.trim();
        drop(state);
        self.readers.notify_waiters();
        true
    }

    /// Hands a chunk to the readers.
    pub(in crate::wal) fn push(&self, chunk: Chunk) {
        let mut state = self.state();
        if let Some(session) = &mut state.session {
            session.bytes += chunk.bytes;
            session.end = chunk.end;
            session.received = session.received.max(chunk.end.0);
            session.chunks.push_back(Arc::new(chunk));
        }
        state.trim();
        drop(state);
        self.readers.notify_waiters();
    }

    /// Takes note of a place that the server has told.
    pub(in crate::wal) fn received(&self, lsn: Lsn) {
        if let Some(session) = &mut self.state().session {
            session.received = session.received.max(lsn);
        }
    }

    /// Up to where the slot may be acknowledged.
    pub(in crate::wal) fn acknowledged(&self) -> Lsn {
        let mut state = self.state();
        // Who comes back later is given what the table still has.
        let lasting = state.session.as_ref().is_some_and(|session| session.footing.table.lasting);
        if let Some(held_for) = self.held_for.filter(|_| lasting) {
            state.seats.retain(|_, seat| seat.left.is_none_or(|left| left.elapsed() < held_for));
        }
        let lowest = state.seats.values().map(|seat| seat.acked).min().unwrap_or_default();
        state
            .session
            .as_ref()
            .map_or(Lsn(0), |session| lowest.clamp(session.footing.start, session.received))
    }

    pub(in crate::wal) fn offer(&self, base: Base) {
        let mut state = self.state();
        let number = state.number();
        state.candidate = Some((number, Arc::new(base)));
    }
}
