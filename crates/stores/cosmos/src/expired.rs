//! Events that were deleted before they were read: gaps in the numbers of a key.
//!
//! What lives here: what was seen of each key's numbers, and what is missing between them. What
//! does not: the forecast (`advice.rs`).
//! Invariant: a gap is told once, and only where it can't be an event that comes later, nor one
//! that another relay has read: between two events of a key that one reader met, going on each time
//! just where it stood, or between the last of them and the number that an entity had when it was
//! written longer ago than an event lives.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use postrider_core::{PartitionId, Position, Successor, Timestamp};
use serde_json::Value;

use crate::CosmosStore;
use crate::event_document::{is_event, seq, text, written_seconds};

/// Keys whose numbers are remembered, of all readers together: beyond them the readers that read
/// longest ago are forgotten, and one alone forgets all of its own; gaps then go unseen.
const MAX_KEYS: usize = 100_000;
/// Readers that are remembered; beyond them the one that read longest ago is forgotten.
const MAX_READERS: usize = 1_024;

/// What was seen of the keys' numbers.
#[derive(Debug, Default)]
pub(crate) struct Expired {
    readers: Mutex<VecDeque<(PartitionId, Position, Seen)>>,
    /// Up to which number of a key gaps were told.
    told: Mutex<HashMap<String, u64>>,
    count: AtomicU64,
}

/// What one reader has met.
#[derive(Debug, Default, Clone)]
pub(crate) struct Seen {
    /// The last number of each key.
    last: HashMap<String, u64>,
    /// Whether it went on where another one stood, and not from the beginning of everything.
    resumed: bool,
}

/// Numbers of a key that are missing; none counted where only an entity tells that some may be.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Gap {
    pub(crate) key: String,
    pub(crate) count: u64,
    /// Which number comes after them.
    next: u64,
}

impl Expired {
    /// How many events were found missing.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    fn readers(&self) -> MutexGuard<'_, VecDeque<(PartitionId, Position, Seen)>> {
        self.readers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the reader that stands there has seen; nothing where none does: a range that was away
    /// comes back at another place.
    pub(crate) fn at(&self, partition: &PartitionId, place: &Position) -> Seen {
        let anew = || Seen { resumed: *place != Position::START, ..Seen::default() };
        self.taken(partition, place).unwrap_or_else(anew)
    }

    fn taken(&self, partition: &PartitionId, place: &Position) -> Option<Seen> {
        let mut readers = self.readers();
        let found = readers.iter().position(|(of, at, _)| of == partition && at == place);
        found.and_then(|at| readers.remove(at)).map(|(.., seen)| seen)
    }

    /// Keeps what a reader has seen that goes on from there.
    pub(crate) fn keep(&self, partition: &PartitionId, place: &Position, seen: Seen) {
        let mut readers = self.readers();
        if readers.len() >= MAX_READERS {
            readers.pop_front();
        }
        let mut keys: usize = readers.iter().map(|(.., seen)| seen.last.len()).sum();
        while keys + seen.last.len() > MAX_KEYS
            && let Some((.., oldest)) = readers.pop_front()
        {
            keys -= oldest.last.len();
        }
        readers.push_back((partition.clone(), place.clone(), seen));
    }

    /// What the reader of a range that was split has seen is what its successors' readers have,
    /// who begin where it stands.
    pub(crate) fn hand_over(
        &self,
        partition: &PartitionId,
        place: &Position,
        successors: &[Successor],
    ) {
        let Some(seen) = self.taken(partition, place) else { return };
        for successor in successors {
            self.keep(&successor.partition, &successor.from, seen.clone());
        }
    }

    /// Those that were not told yet; they count from here on as told.
    pub(crate) fn told(&self, mut gaps: Vec<Gap>) -> Vec<Gap> {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.len() > MAX_KEYS {
            told.clear();
        }
        gaps.retain(|gap| {
            let known = told.entry(gap.key.clone()).or_default();
            let is_new = gap.next > *known;
            *known = gap.next.max(*known);
            is_new
        });
        let missing = gaps.iter().map(|gap| gap.count).sum();
        self.count.fetch_add(missing, Ordering::Relaxed);
        gaps
    }
}

impl CosmosStore {
    /// Tells of events that were deleted before anybody read them here.
    pub(crate) fn look_for_expired(
        &self,
        partition: &PartitionId,
        seen: &mut Seen,
        page: &[Value],
        now: Timestamp,
    ) {
        let ttl = self.inner.event_ttl_seconds.unsigned_abs();
        let before = (now.as_millis() / 1_000).saturating_sub(ttl);
        let gaps = self.inner.expired.told(seen.look(page, before));
        let events: u64 = gaps.iter().map(|gap| gap.count).sum();
        let unknown = gaps.iter().filter(|gap| gap.count == 0).count();
        if unknown > 0 {
            tracing::warn!(
                %partition, keys = unknown,
                "entities changed longer ago than an event lives, and no event of theirs was met: \
                 some may have been deleted before they were read here"
            );
        }
        if events > 0 {
            metrics::counter!("postrider_cosmos_events_expired_total").increment(events);
            tracing::warn!(
                %partition, keys = gaps.len() - unknown, events,
                "events were deleted, most likely by their time to live, before they were read here"
            );
        }
    }
}

impl Seen {
    /// Looks at a page, in the order in which it is handed out. `expired_before` is the second
    /// before which an event written then has expired by now.
    pub(crate) fn look(&mut self, documents: &[Value], expired_before: u64) -> Vec<Gap> {
        let (mut gaps, last) = (Vec::new(), &mut self.last);
        for document in documents.iter().filter(|document| is_event(document)) {
            let number = seq(document).and_then(|number| u64::try_from(number).ok());
            let (Some(key), Some(number)) = (text(document, "partitionKey"), number) else {
                continue;
            };
            match last.get_mut(key) {
                Some(known) => {
                    if number > *known + 1 {
                        let count = number - *known - 1;
                        gaps.push(Gap { key: key.to_owned(), count, next: number });
                    }
                    *known = number.max(*known);
                }
                None => insert(last, key, number),
            }
        }
        for document in documents.iter().filter(|document| !is_event(document)) {
            let number = document.get("lastSeq").and_then(Value::as_u64);
            let (Some(key), Some(number)) = (text(document, "partitionKey"), number) else {
                continue;
            };
            if written_seconds(document) >= expired_before {
                continue;
            }
            // Of a key of which nothing was met here some may have been read before; in a reading
            // from the beginning, all of them, by whoever was there then.
            let Some(known) = last.get_mut(key) else {
                insert(last, key, number);
                if self.resumed {
                    gaps.push(Gap { key: key.to_owned(), count: 0, next: number + 1 });
                }
                continue;
            };
            if number > *known {
                gaps.push(Gap { key: key.to_owned(), count: number - *known, next: number + 1 });
                *known = number;
            }
        }
        gaps
    }
}

fn insert(last: &mut HashMap<String, u64>, key: &str, number: u64) {
    if last.len() >= MAX_KEYS {
        last.clear();
    }
    last.insert(key.to_owned(), number);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn event(key: &str, seq: u64) -> Value {
        json!({ "type": "domainEvent", "partitionKey": key, "seq": seq, "_ts": 100 })
    }

    fn entity(key: &str, last: u64, written: u64) -> Value {
        json!({ "type": "contact", "partitionKey": key, "lastSeq": last, "_ts": written })
    }

    fn gap(key: &str, count: u64, next: u64) -> Gap {
        Gap { key: key.to_owned(), count, next }
    }

    fn range() -> PartitionId {
        PartitionId::new("00-FF").expect("a valid name")
    }

    fn place(text: &str) -> Position {
        Position::from_bytes(text.as_bytes()).expect("short enough")
    }

    /// Reads a page from one place to another.
    fn read(expired: &Expired, from: &str, to: &str, page: &[Value]) -> Vec<Gap> {
        let mut seen = expired.at(&range(), &place(from));
        let gaps = seen.look(page, 0);
        expired.keep(&range(), &place(to), seen);
        expired.told(gaps)
    }

    #[test]
    fn a_gap_between_two_events_is_told_once() {
        let expired = Expired::default();
        assert_eq!(read(&expired, "0", "1", &[event("a", 7), event("b", 1)]), []);
        assert_eq!(read(&expired, "1", "2", &[event("a", 8), event("a", 11)]), [gap("a", 2, 11)]);
        // Read again, by another consumer or after a failure.
        assert_eq!(read(&expired, "1", "2", &[event("a", 8), event("a", 11)]), []);
        assert_eq!(read(&expired, "2", "3", &[event("a", 12), event("b", 2)]), []);
        assert_eq!(expired.count(), 2);
    }

    #[test]
    fn what_another_relay_has_read_is_no_gap() {
        let expired = Expired::default();
        assert_eq!(read(&expired, "0", "1", &[event("a", 1), event("a", 2)]), []);
        // The range was away, and comes back where the other one stood; or a consumer begins there
        // while one of this process lags.
        assert_eq!(read(&expired, "7", "8", &[event("a", 9)]), []);
        assert_eq!(read(&expired, "8", "9", &[event("a", 11)]), [gap("a", 1, 11)]);
        assert_eq!(read(&expired, "1", "2", &[event("a", 3)]), []);
    }

    #[test]
    fn an_entity_tells_of_events_that_have_expired_with_it() {
        let mut seen = Seen::default();
        // Its event comes in a later page, as far as anybody can tell.
        assert_eq!(seen.look(&[entity("a", 3, 100)], 100), []);
        assert_eq!(seen.look(&[event("a", 2), entity("a", 3, 99)], 100), [gap("a", 1, 4)]);
        assert_eq!(seen.look(&[entity("a", 3, 99)], 100), []);
        assert_eq!(seen.look(&[event("b", 3), entity("b", 3, 99)], 100), []);
        // Of one that nothing was met of, all may have been read long ago.
        assert_eq!(seen.look(&[entity("c", 5_000, 99)], 100), []);
        // It changed after the place where this reader went on: some may be missing.
        let mut resumed = Expired::default().at(&range(), &place("7"));
        assert_eq!(resumed.look(&[entity("c", 5_000, 99)], 100), [gap("c", 0, 5_001)]);
        assert_eq!(resumed.look(&[entity("c", 5_000, 99)], 100), []);
    }

    #[test]
    fn one_reader_remembers_so_many_keys_and_no_more() {
        let expired = Expired::default();
        let page: Vec<Value> = (0..=MAX_KEYS).map(|n| event(&n.to_string(), 1)).collect();
        assert_eq!(read(&expired, "0", "1", &page[..10]), []);
        assert_eq!(read(&expired, "a", "b", &page), []);
        let kept = |place_of: &str| expired.at(&range(), &place(place_of)).last.len();
        assert_eq!([kept("b"), kept("1")], [1, 10]);
        // The eldest makes room.
        assert_eq!(read(&expired, "0", "1", &page[..10]), []);
        assert_eq!(read(&expired, "0", "2", &page[..20]), []);
        assert_eq!(read(&expired, "a", "b", &page[..MAX_KEYS - 20]), []);
        assert_eq!([kept("1"), kept("2"), kept("b")], [0, 20, MAX_KEYS - 20]);
    }

    #[test]
    fn a_split_takes_what_was_seen_along() {
        let expired = Expired::default();
        assert_eq!(read(&expired, "0", "1", &[event("a", 1)]), []);
        let part = |name: &str| PartitionId::new(name).expect("a valid name");
        let to =
            ["00-80", "80-FF"].map(|name| Successor { partition: part(name), from: place("1") });
        expired.hand_over(&range(), &place("1"), &to);
        expired.hand_over(&range(), &place("1"), &to);
        for name in ["00-80", "80-FF"] {
            let mut seen = expired.at(&part(name), &place("1"));
            assert_eq!(seen.look(&[event("a", 3)], 0), [gap("a", 1, 3)]);
        }
    }
}
