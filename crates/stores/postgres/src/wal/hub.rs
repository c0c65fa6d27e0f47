//! One stream for all consumers of a process: who reads, how far each has come, and the part of the
//! stream that is kept for them.
//!
//! What lives here: the state that readers and the session share, and what a reader asks of it.
//! What does not: the connection that fills it (`session.rs`), and a consumer's own books
//! (`ledger.rs`).
//! Invariant: the slot is acknowledged up to the lowest durable place of all consumers, and never
//! beyond what the present server has sent; the buffer is bounded, whoever reads slowly.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use postrider_core::{ConsumerName, Error, ErrorKind, Result};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::assembly::Chunk;
use super::ledger::Base;
use super::lsn::Lsn;
use super::position::WalPlace;
use super::wire::{Seam, System};

/// Bytes of events kept for readers; the server is not read from while there are more.
const BUFFER_BYTES: usize = 8 * 1024 * 1024;
/// A reader that has nothing to read, because another one holds the buffer, waits this long before
/// that one is left behind: it reads again what it missed.
const STARVED_AFTER: Duration = Duration::from_millis(500);
/// The slot is held this long for a consumer that went away, so that it need not catch up from the
/// table when it comes back.
pub(super) const HELD_FOR: Duration = Duration::from_secs(300);
/// A reader that was left behind by more log than this reads the table instead of making the others
/// wait while the server sends it again. In bytes.
const REWIND_BYTES: u64 = 64 * 1024 * 1024;

/// What readers need to know of the connection to the slot.
#[derive(Debug, Clone)]
pub(super) struct Footing {
    pub(super) session: u64,
    pub(super) system: System,
    /// All from here on comes in this session.
    pub(super) start: Lsn,
    /// Under which the stream was begun.
    pub(super) publication: String,
    pub(super) table: Table,
}

/// What the table can give of what the stream doesn't.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Table {
    /// It tells which of its rows a consumer has had.
    pub(super) exact: bool,
    /// A row stays until every consumer has had it, so that a consumer may be left behind by the
    /// stream on purpose, and go on from the table.
    pub(super) lasting: bool,
}

impl Table {
    /// An outbox of Postrider's own.
    pub(super) const OWN: Self = Self { exact: true, lasting: true };
}

/// A snapshot that may be imported, for as long as this is held.
pub(super) struct Borrowed<'a> {
    hub: &'a Hub,
    session: u64,
    pub(super) seam: Seam,
}

impl Drop for Borrowed<'_> {
    fn drop(&mut self) {
        let mut state = self.hub.state();
        if let Some(session) = state.session.as_mut().filter(|s| s.footing.session == self.session)
        {
            session.importing -= 1;
        }
        drop(state);
        self.hub.task.notify_one();
    }
}

/// Where a reader goes on.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Entrance {
    /// In the stream.
    Stream,
    /// The stream begins again where this reader needs it: ask again.
    Again,
    /// The stream has passed it, or would cost the others too much.
    Behind,
}

struct Session {
    footing: Footing,
    /// Of a slot just made; gone once the stream begins.
    seam: Option<Seam>,
    importing: usize,
    streaming: bool,
    chunks: VecDeque<Arc<Chunk>>,
    /// Number of the front chunk, and how far the one before it went.
    first: u64,
    dropped: (Lsn, u32),
    bytes: usize,
    /// How far the last chunk goes.
    end: (Lsn, u32),
    /// Highest place that the server has told.
    received: Lsn,
    rewind: bool,
}

impl Session {
    /// Which chunk the seat reads next: the front one, if it is about to enter.
    fn index(&self, seat: &Seat) -> Option<u64> {
        match seat.at {
            Some((session, index)) if session == self.footing.session => Some(index),
            _ => (seat.wants && seat.left.is_none()).then_some(self.first),
        }
    }

    /// Whether the seat is in the stream and has read all of it.
    fn has_nothing_for(&self, seat: &Seat) -> bool {
        let end = self.first + self.chunks.len() as u64;
        seat.at.is_some_and(|(session, index)| session == self.footing.session && index >= end)
    }
}

struct Seat {
    /// Of the reader that sits there.
    id: u64,
    acked: Lsn,
    /// Where the checkpoint stood when that was last heard of.
    durable: Option<WalPlace>,
    /// The session and the chunk that it reads next; none outside the stream.
    at: Option<(u64, u64)>,
    /// It wants to be in the stream.
    wants: bool,
    /// Since when it waits for a chunk.
    waits: Option<Instant>,
    /// Since when nobody sits there.
    left: Option<Instant>,
}

#[derive(Default)]
struct State {
    seats: HashMap<ConsumerName, Seat>,
    session: Option<Session>,
    /// What keeps the stream from flowing, and its number.
    trouble: Option<(u64, ErrorKind, String)>,
    /// Grows when another copy of the database answers.
    world: u64,
    /// The copy that answered last, and the highest place that it told.
    seen: Option<System>,
    candidate: Option<(u64, Arc<Base>)>,
    /// The last number given to a seat, a session, a trouble or a candidate.
    numbers: u64,
}

/// What all consumers of an outbox share.
pub(super) struct Hub {
    state: Mutex<State>,
    held_for: Option<Duration>,
    /// Wakes readers.
    readers: Notify,
    /// Wakes the session.
    pub(super) task: Notify,
}

impl Hub {
    /// The slot is held for `held_for` for those that went away; for ever without it.
    pub(super) fn new(held_for: Option<Duration>) -> Self {
        let (readers, task) = (Notify::new(), Notify::new());
        Self { state: Mutex::default(), readers, task, held_for }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `look` finds what it wants.
    async fn until<T>(&self, mut look: impl FnMut(&mut State) -> Option<T>) -> T {
        loop {
            let changed = self.readers.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if let Some(found) = look(&mut self.state()) {
                return found;
            }
            changed.await;
        }
    }
}

/// For readers. All waits are cancel-safe.
impl Hub {
    /// Takes the consumer's seat; a later reader of the same consumer takes it over.
    pub(super) fn sit(&self, consumer: &ConsumerName, acked: Lsn) -> SeatView {
        let mut state = self.state();
        let id = state.number();
        let seat =
            Seat { id, acked, durable: None, at: None, wants: false, waits: None, left: None };
        state.seats.insert(consumer.clone(), seat);
        let view = SeatView { consumer: consumer.clone(), id, world: state.world, told: 0 };
        drop(state);
        self.task.notify_one();
        view
    }

    /// Leaves the seat; the slot is still held for the consumer, for a while.
    pub(super) fn leave(&self, seat: &SeatView) {
        let mut state = self.state();
        if let Some(seat) = state.seat(seat) {
            seat.at = None;
            seat.wants = false;
            seat.left = Some(Instant::now());
        }
        state.trim();
        drop(state);
        self.task.notify_one();
    }

    /// Holds the slot for a consumer that is known and has no reader yet.
    pub(super) fn expect(&self, consumer: ConsumerName, acked: Lsn) {
        let mut state = self.state();
        let left = Some(Instant::now());
        let seat = Seat { id: 0, acked, durable: None, at: None, wants: false, waits: None, left };
        state.seats.entry(consumer).or_insert(seat);
    }

    /// Says that the consumer's checkpoint stands at `place`.
    pub(super) fn acknowledge(&self, seat: &SeatView, place: WalPlace) {
        let mut state = self.state();
        if let Some(seat) = state.seat(seat) {
            seat.acked = seat.acked.max(place.lsn);
            let is_older = |known: WalPlace| known.key() <= place.key();
            if seat.durable.is_none_or(is_older) {
                seat.durable = Some(place);
            }
        }
        drop(state);
        self.task.notify_one();
    }

    /// The connection to the slot, once there is one.
    ///
    /// # Errors
    /// What keeps it from being there, each trouble once; `Fenced` when another copy of the
    /// database answers than the one that the seat was taken in.
    pub(super) async fn footing(&self, seat: &mut SeatView) -> Result<Footing> {
        self.until(|state| {
            if let Err(error) = state.check(seat) {
                return Some(Err(error));
            }
            state.session.as_ref().map(|session| Ok(session.footing.clone()))
        })
        .await
    }

    /// Waits for the session after `known`, which begins again for this reader.
    ///
    /// # Errors
    /// As [`Self::footing`].
    pub(super) async fn next_session(&self, seat: &mut SeatView, known: &Footing) -> Result<()> {
        self.until(|state| {
            if let Err(error) = state.check(seat) {
                return Some(Err(error));
            }
            let session = state.session.as_ref()?;
            (session.footing.session != known.session).then_some(Ok(()))
        })
        .await
    }

    /// Asks to read the stream from `place` on.
    pub(super) fn enter(&self, seat: &SeatView, place: &WalPlace, may_leave: bool) -> Entrance {
        let mut state = self.state();
        let alone = !state
            .seats
            .iter()
            .any(|(consumer, other)| *consumer != seat.consumer && other.at.is_some());
        let Some(session) = state.session.as_mut() else { return Entrance::Again };
        if place.lsn < session.footing.start {
            return Entrance::Behind;
        }
        let entrance = if place.key() >= session.dropped || !session.streaming {
            Entrance::Stream
        } else if alone || !may_leave || session.end.0.0 - place.lsn.0 < REWIND_BYTES {
            session.rewind = true;
            Entrance::Again
        } else {
            Entrance::Behind
        };
        let at = (session.footing.session, session.first);
        if let Some(seat) = state.seat(seat) {
            seat.wants = entrance != Entrance::Behind;
            seat.at = (entrance == Entrance::Stream).then_some(at);
        }
        drop(state);
        self.task.notify_one();
        entrance
    }

    /// The snapshot of a slot that was just made, if it still can be imported.
    pub(super) fn borrow_seam(&self) -> Option<Borrowed<'_>> {
        let mut state = self.state();
        let session = state.session.as_mut()?;
        let seam = session.seam.clone()?;
        session.importing += 1;
        Some(Borrowed { hub: self, session: session.footing.session, seam })
    }

    /// The chunk that the seat reads next; none when it is no longer in the stream and has to enter
    /// it again.
    ///
    /// # Errors
    /// As [`Self::footing`].
    pub(super) async fn chunk(&self, seat: &mut SeatView) -> Result<Option<Arc<Chunk>>> {
        self.until(|state| {
            if let Err(error) = state.check(seat) {
                return Some(Err(error));
            }
            let session = state.session.as_ref();
            let own = state.seats.get_mut(&seat.consumer).filter(|own| own.id == seat.id)?;
            let (Some((number, index)), Some(session)) = (own.at, session) else {
                return Some(Ok(None));
            };
            if number != session.footing.session || index < session.first {
                own.at = None;
                return Some(Ok(None));
            }
            let offset = usize::try_from(index - session.first).unwrap_or(usize::MAX);
            let chunk = session.chunks.get(offset).map(Arc::clone);
            own.waits = match chunk {
                Some(_) => None,
                None => own.waits.or_else(|| Some(Instant::now())),
            };
            chunk.map(|chunk| Ok(Some(chunk)))
        })
        .await
    }

    /// Says that the seat is done with its chunk.
    pub(super) fn consumed(&self, seat: &SeatView) {
        let mut state = self.state();
        if let Some((_, index)) = state.seat(seat).and_then(|seat| seat.at.as_mut()) {
            *index += 1;
        }
        let was_full = state.is_full();
        state.trim();
        let woken = was_full && !state.is_full();
        drop(state);
        if woken {
            self.task.notify_one();
        }
    }

    /// The newest base candidate after number `seen`.
    pub(super) fn candidate(&self, seen: u64) -> Option<(u64, Arc<Base>)> {
        let state = self.state();
        state.candidate.as_ref().filter(|(number, _)| *number > seen).cloned()
    }
}

/// What a reader remembers of its seat.
pub(super) struct SeatView {
    consumer: ConsumerName,
    id: u64,
    world: u64,
    /// Number of the last trouble that it was told.
    told: u64,
}

impl State {
    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    fn seat(&mut self, view: &SeatView) -> Option<&mut Seat> {
        self.seats.get_mut(&view.consumer).filter(|seat| seat.id == view.id)
    }

    fn check(&self, seat: &mut SeatView) -> Result<()> {
        if seat.world < self.world {
            return Err(Error::fenced(
                "the database was replaced by another copy; reading again from its checkpoint",
            ));
        }
        if self.seats.get(&seat.consumer).is_some_and(|own| own.id > seat.id) {
            return Err(Error::fenced("a later reader of this consumer was opened"));
        }
        match &self.trouble {
            Some((number, kind, text)) if *number > seat.told => {
                seat.told = *number;
                Err(Error::new(*kind, text.clone()))
            }
            _ => Ok(()),
        }
    }

    /// Drops the chunks that every reader in the stream has.
    fn trim(&mut self) {
        let Some(session) = &mut self.session else { return };
        let at = |seat: &Seat| session.index(seat);
        let lowest = self.seats.values().filter_map(at).min().unwrap_or(u64::MAX);
        while session.first < lowest {
            let Some(chunk) = session.chunks.pop_front() else { break };
            session.first += 1;
            session.bytes -= chunk.bytes;
            session.dropped = chunk.end;
        }
    }

    fn is_full(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.bytes >= BUFFER_BYTES)
    }
}

mod serving;
#[cfg(test)]
mod tests;
