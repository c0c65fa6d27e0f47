//! Which events a stream has already, as far as they are remembered.
//!
//! What lives here: the ids of what this process stored and of what it read back, and how far it
//! read. What does not: reading itself (`lane.rs`).
//! Invariant: an id is known only once its message is stored. What was read of a stream is known
//! without a gap from where reading began, so that a later reader goes on where that ended.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use uuid::Uuid;

/// Ids that are remembered: eight times what a partition may have confirmed beyond its checkpoint.
/// Of each stream there is room for so many that were read, and so many that this process stored;
/// about 30 MiB for each when all are taken.
pub(crate) const REMEMBERED: usize = 8 << 16;
/// How far back a stream is read: four times what a partition may have confirmed beyond its
/// checkpoint, since other partitions' messages stand in between.
pub(crate) const READ_BACK: u64 = 4 << 16;
const _: () = assert!(READ_BACK as usize <= REMEMBERED, "what is read is remembered");

/// Ids, the last ones.
#[derive(Default)]
struct Ids {
    all: HashSet<u128>,
    order: VecDeque<u128>,
}

impl Ids {
    /// The oldest is forgotten when there are too many.
    fn add(&mut self, id: u128) {
        if !self.all.insert(id) {
            return;
        }
        self.order.push_back(id);
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.all.remove(&oldest);
        }
    }
}

/// What is known of a stream. Ids that this process stored and ids that it read don't push each
/// other out: it reads its own long after it stored them.
#[derive(Default)]
struct Known {
    own: Ids,
    read: Ids,
    /// Offset behind what was read.
    read_to: u64,
}

/// Ids of the events that are in the sink's streams.
#[derive(Default)]
pub(crate) struct Seen {
    known: Mutex<HashMap<String, Known>>,
    /// Held by whoever reads a stream.
    readers: Mutex<HashMap<String, Reader>>,
}

type Reader = Arc<tokio::sync::Mutex<()>>;

impl Seen {
    fn known(&self) -> MutexGuard<'_, HashMap<String, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<T>(&self, stream: &str, with: impl FnOnce(&mut Known) -> T) -> T {
        let mut known = self.known();
        if let Some(known) = known.get_mut(stream) {
            return with(known);
        }
        with(known.entry(stream.to_owned()).or_default())
    }

    /// Whether the stream has the event.
    pub(crate) fn has(&self, stream: &str, id: &Uuid) -> bool {
        let id = id.as_u128();
        self.with(stream, |known| known.own.all.contains(&id) || known.read.all.contains(&id))
    }

    /// Whether the event was read, whoever stored it.
    pub(crate) fn has_read(&self, stream: &str, id: &Uuid) -> bool {
        self.with(stream, |known| known.read.all.contains(&id.as_u128()))
    }

    /// To be locked while a stream is read.
    pub(crate) fn reader(&self, stream: &str) -> Reader {
        let mut readers = self.readers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reader) = readers.get(stream) {
            return Arc::clone(reader);
        }
        Arc::clone(readers.entry(stream.to_owned()).or_default())
    }

    /// This process stored the event.
    pub(crate) fn add(&self, stream: &str, id: &Uuid) {
        self.with(stream, |known| known.own.add(id.as_u128()));
    }

    /// Up to where a stream was read so far. To be asked before its end is.
    pub(crate) fn read_to(&self, stream: &str) -> u64 {
        self.with(stream, |known| known.read_to)
    }

    /// Where to read on in a stream whose end is at an offset, and of which `before` was read when
    /// its end was asked for. Others may have read beyond that end since.
    pub(crate) fn begin(&self, stream: &str, before: u64, end: u64) -> u64 {
        self.with(stream, |known| {
            if before > end {
                // It is shorter than what was read of it: it was deleted and made anew.
                *known = Known::default();
            }
            known.read_to.max(end.saturating_sub(READ_BACK))
        })
    }

    /// These ids were read, up to an offset.
    pub(crate) fn reached(&self, stream: &str, end: u64, ids: impl Iterator<Item = Uuid>) {
        self.with(stream, |known| {
            ids.for_each(|id| known.read.add(id.as_u128()));
            known.read_to = known.read_to.max(end);
        });
    }

    /// Nothing is known of the stream any more: it was deleted and made anew.
    pub(crate) fn forget(&self, stream: &str) {
        self.known().remove(stream);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_is_forgotten_and_nothing_else() {
        let (seen, all) = (Seen::default(), REMEMBERED as u128);
        let id = Uuid::from_u128;
        (0..all).for_each(|n| seen.add("s", &id(n)));
        seen.add("s", &id(5));
        assert!(seen.has("s", &id(0)));
        seen.reached("s", 9, std::iter::once(id(all + 7)));
        seen.add("s", &id(all));
        assert!(!seen.has("s", &id(0)) && seen.has("s", &id(1)) && seen.has("s", &id(all)));
        assert!(seen.has("s", &id(all + 7)));
        assert!(!seen.has("t", &id(1)), "each stream by itself");
        let sizes = seen.with("s", |known| (known.own.all.len(), known.own.order.len()));
        assert_eq!(sizes, (REMEMBERED, REMEMBERED));
    }

    #[test]
    fn a_stream_is_read_on_where_reading_ended_but_never_from_too_far_back() {
        let seen = Seen::default();
        assert_eq!(seen.begin("s", 0, 100), 0);
        seen.reached("s", 80, std::iter::empty());
        seen.reached("s", 60, std::iter::empty());
        assert_eq!((seen.begin("s", 80, 100), seen.begin("t", 0, 100)), (80, 0));
        assert_eq!(seen.begin("s", 80, 80 + READ_BACK + 3), 83);
        seen.add("s", &Uuid::nil());
        // Another read on after this one's end was asked for: nothing is wrong with the stream.
        assert_eq!(seen.begin("s", 60, 70), 80);
        assert!(seen.has("s", &Uuid::nil()));
        assert_eq!(seen.begin("s", seen.read_to("s"), 70), 0, "it was deleted and made anew");
        assert!(!seen.has("s", &Uuid::nil()));
    }
}
