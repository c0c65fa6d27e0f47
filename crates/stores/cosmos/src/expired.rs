//! Events that were deleted before they were read: gaps in the numbers of a key.
//!
//! What lives here: what was seen of each key's numbers, and what is missing between them. What
//! does not: the forecast (`advice.rs`).
//! Invariant: a gap is told once, and only where it can't be an event that comes later, nor one
//! that another relay has read: between two events of a key that one reader met, going on each time
//! just where it stood, or below the number that an entity had when it was written longer ago than
//! an event lives.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use postrider_core::{PartitionId, Position};
use serde_json::Value;

use crate::event_document::{is_event, seq, text, written_seconds};

/// Keys whose numbers are remembered; beyond them all are forgotten, and gaps then go unseen.
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

/// The last number of each key that one reader has met.
#[derive(Debug, Default)]
pub(crate) struct Seen(HashMap<String, u64>);

/// Numbers of a key that are missing.
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
        let mut readers = self.readers();
        let found = readers.iter().position(|(of, at, _)| of == partition && at == place);
        found.and_then(|at| readers.remove(at)).map(|(.., seen)| seen).unwrap_or_default()
    }

    /// Keeps what a reader has seen that goes on from there.
    pub(crate) fn keep(&self, partition: &PartitionId, place: &Position, seen: Seen) {
        let mut readers = self.readers();
        if readers.len() >= MAX_READERS {
            readers.pop_front();
        }
        let keys: usize = readers.iter().map(|(.., seen)| seen.0.len()).sum();
        if keys + seen.0.len() > MAX_KEYS {
            readers.clear();
        }
        readers.push_back((partition.clone(), place.clone(), seen));
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

impl Seen {
    /// Looks at a page, in the order in which it is handed out. `expired_before` is the second
    /// before which an event written then has expired by now.
    pub(crate) fn look(&mut self, documents: &[Value], expired_before: u64) -> Vec<Gap> {
        let (mut gaps, last) = (Vec::new(), &mut self.0);
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
                None => {
                    last.insert(key.to_owned(), number);
                }
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
            let known = last.entry(key.to_owned()).or_default();
            if number > *known {
                gaps.push(Gap { key: key.to_owned(), count: number - *known, next: number + 1 });
                *known = number;
            }
        }
        gaps
    }
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
        assert_eq!(seen.look(&[entity("c", 2, 99)], 100), [gap("c", 2, 3)]);
    }
}
