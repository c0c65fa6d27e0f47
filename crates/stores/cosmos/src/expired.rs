//! Events that were deleted before they were read: gaps in the numbers of a key.
//!
//! What lives here: what was seen of each key's numbers, and what is missing between them. What
//! does not: the forecast (`advice.rs`).
//! Invariant: a gap is told once, and only where it can't be an event that comes later: between two
//! events of a key that were read one after the other, or below the number that an entity had when
//! it was written longer ago than an event lives.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use serde_json::Value;

use crate::event_document::{is_event, seq, text, written_seconds};

/// Keys whose numbers are remembered; beyond them all are forgotten, and gaps then go unseen.
const MAX_KEYS: usize = 100_000;

/// What was seen of the keys' numbers.
#[derive(Debug, Default)]
pub(crate) struct Expired {
    last: Mutex<HashMap<String, u64>>,
    count: AtomicU64,
}

/// Numbers of a key that are missing.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Gap {
    pub(crate) key: String,
    pub(crate) count: u64,
}

impl Expired {
    /// How many events were found missing.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Looks at a page, in the order in which it is handed out. `expired_before` is the second
    /// before which an event written then has expired by now.
    pub(crate) fn look(&self, documents: &[Value], expired_before: u64) -> Vec<Gap> {
        let mut gaps = Vec::new();
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.len() > MAX_KEYS {
            last.clear();
        }
        for document in documents.iter().filter(|document| is_event(document)) {
            let number = seq(document).and_then(|number| u64::try_from(number).ok());
            let (Some(key), Some(number)) = (text(document, "partitionKey"), number) else {
                continue;
            };
            match last.get_mut(key) {
                Some(known) => {
                    if number > *known + 1 {
                        gaps.push(Gap { key: key.to_owned(), count: number - *known - 1 });
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
                gaps.push(Gap { key: key.to_owned(), count: number - *known });
                *known = number;
            }
        }
        let missing = gaps.iter().map(|gap| gap.count).sum();
        self.count.fetch_add(missing, Ordering::Relaxed);
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

    fn gap(key: &str, count: u64) -> Gap {
        Gap { key: key.to_owned(), count }
    }

    #[test]
    fn a_gap_between_two_events_is_told_once() {
        let expired = Expired::default();
        assert_eq!(expired.look(&[event("a", 7), event("b", 1)], 0), []);
        assert_eq!(expired.look(&[event("a", 8), event("a", 11)], 0), [gap("a", 2)]);
        // Read again, by another consumer or after a restart.
        assert_eq!(expired.look(&[event("a", 7), event("a", 8), event("a", 11)], 0), []);
        assert_eq!(expired.look(&[event("a", 12), event("b", 2)], 0), []);
        assert_eq!(expired.count(), 2);
    }

    #[test]
    fn an_entity_tells_of_events_that_have_expired_with_it() {
        let expired = Expired::default();
        // Its event comes in a later page, as far as anybody can tell.
        assert_eq!(expired.look(&[entity("a", 3, 100)], 100), []);
        assert_eq!(expired.look(&[event("a", 2), entity("a", 3, 99)], 100), [gap("a", 1)]);
        assert_eq!(expired.look(&[entity("a", 3, 99)], 100), []);
        assert_eq!(expired.look(&[event("b", 3), entity("b", 3, 99)], 100), []);
        assert_eq!(expired.look(&[entity("c", 2, 99)], 100), [gap("c", 2)]);
    }
}
