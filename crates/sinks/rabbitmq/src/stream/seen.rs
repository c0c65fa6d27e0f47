//! Which events a stream has already, as far as they are remembered.
//!
//! What lives here: the ids of what this process stored and of what it read back, and how far it
//! read. What does not: reading itself (`lane.rs`).
//! Invariant: an id is known only once its message is stored. What was read of a stream is known
//! without a gap from where reading began, so that a later reader goes on where that ended.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use uuid::Uuid;

/// Ids that are remembered of a stream: eight times what a partition may have confirmed beyond its
/// checkpoint. There is room for so many that were read, and so many that this process stored.
pub(crate) const REMEMBERED: usize = 8 << 16;
/// Ids that are remembered of all streams of a sink together: of more than eight each has less.
pub(crate) const MOST_REMEMBERED: usize = 8 * REMEMBERED;
/// What an id takes, in bytes, in a set that has twice the places, of 17 bytes, and in a queue.
const ID_BYTES: usize = 2 * 17 + 16;
/// Most memory for what is known of a sink's streams, in bytes: ids that were read, and as many
/// that
/// were stored.
pub(crate) const MAX_KNOWN_BYTES: usize = 2 * MOST_REMEMBERED * ID_BYTES;
const _: () = assert!(MAX_KNOWN_BYTES == 400 << 20, "as the documents say");

/// How far back a stream is read, of which so many ids are remembered: half of it. That is four
/// times what a partition may have confirmed beyond its checkpoint, since other partitions'
/// messages
/// stand in between.
fn read_back(remembered: usize) -> u64 {
    u64::try_from(remembered / 2).unwrap_or(u64::MAX)
}

/// Ids, the last ones.
#[derive(Default)]
struct Ids {
    all: HashSet<u128>,
    order: VecDeque<u128>,
}

impl Ids {
    /// The oldest is forgotten when there are more than `most`.
    fn add(&mut self, id: u128, most: usize) {
        if self.all.contains(&id) {
            return;
        }
        // Before there is one more: neither grows beyond its bound.
        self.forget(most.saturating_sub(1));
        self.all.insert(id);
        self.order.push_back(id);
    }

    /// The oldest are forgotten until there are `most`.
    fn forget(&mut self, most: usize) {
        while self.order.len() > most
            && let Some(oldest) = self.order.pop_front()
        {
            self.all.remove(&oldest);
        }
    }

    /// Leaves `most` of them, and gives the room of the others back.
    fn shrink(&mut self, most: usize) {
        self.forget(most);
        self.order.shrink_to(most);
        self.all.shrink_to(most);
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
pub(crate) struct Seen {
    /// How many ids of each stream are remembered.
    remembered: AtomicUsize,
    known: Mutex<HashMap<String, Known>>,
    /// Held by whoever reads a stream.
    readers: Mutex<HashMap<String, Reader>>,
}

type Reader = Arc<tokio::sync::Mutex<()>>;

impl Default for Seen {
    fn default() -> Self {
        let remembered = AtomicUsize::new(REMEMBERED);
        Self { remembered, known: Mutex::default(), readers: Mutex::default() }
    }
}

impl Seen {
    /// From now on it is of so many streams, which share what may be remembered. What is known of
    /// others is forgotten.
    pub(crate) fn share(&self, streams: &[String]) {
        // Collections grow by doubling.
        let share = (MOST_REMEMBERED / streams.len().max(1)).clamp(1, REMEMBERED);
        let each = 1 << share.ilog2();
        let mut known = self.known();
        known.retain(|stream, _| streams.contains(stream));
        if self.remembered.swap(each, Ordering::Relaxed) > each {
            for known in known.values_mut() {
                known.own.shrink(each);
                known.read.shrink(each);
            }
        }
    }

    fn remembered(&self) -> usize {
        self.remembered.load(Ordering::Relaxed)
    }

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
        let most = self.remembered();
        self.with(stream, |known| known.own.add(id.as_u128(), most));
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
            known.read_to.max(end.saturating_sub(read_back(self.remembered())))
        })
    }

    /// These ids were read, up to an offset.
    pub(crate) fn reached(&self, stream: &str, end: u64, ids: impl Iterator<Item = Uuid>) {
        let most = self.remembered();
        self.with(stream, |known| {
            ids.for_each(|id| known.read.add(id.as_u128(), most));
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

    const READ_BACK: u64 = 4 << 16;

    /// What ids take, by what the collections say of themselves.
    fn bytes(seen: &Seen) -> usize {
        let of = |ids: &Ids| ids.order.capacity() * 16 + ids.all.capacity() * 8 / 7 * 17;
        seen.known().values().map(|known| of(&known.own) + of(&known.read)).sum()
    }

    /// However many streams a super stream has, and however full: the bound is of all together.
    #[test]
    fn all_streams_together_stay_below_the_bound() {
        let seen = Seen::default();
        for count in [8, 9, 200] {
            let streams: Vec<String> = (0..count).map(|n| format!("s-{n}")).collect();
            seen.share(&streams);
            let most = (MOST_REMEMBERED / count) as u128 + 10;
            let ids = (0..most).map(Uuid::from_u128);
            ids.clone().for_each(|id| seen.add("s-0", &id));
            seen.reached("s-0", 9, ids);
            assert!(bytes(&seen) * count <= MAX_KNOWN_BYTES, "{} for {count}", bytes(&seen));
            let [first, last] = [0, most - 1].map(Uuid::from_u128);
            assert!(!seen.has("s-0", &first) && seen.has("s-0", &last));
        }
        // So no stream is read from further back than it is remembered.
        assert_eq!(seen.begin("s-0", 0, 1 << 40), (1 << 40) - (16_384 / 2));
        seen.share(&["t".to_owned()]);
        assert_eq!(bytes(&seen), 0, "nothing is known of streams that are none any more");
    }

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
