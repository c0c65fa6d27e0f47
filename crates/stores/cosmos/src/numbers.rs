//! The numbers of events: `seq` of an event, `lastSeq` of its entity.
//!
//! What lives here: which document of a batch counts, and what was last seen of a version's number.
//! What does not: looking for gaps (`expired.rs`).
//! Invariant: a number is taken from the very version that the batch demands, so that no two
//! batches of one entity use the same.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};

use postrider_core::{DocumentOperation, ETag};

use crate::batch::Work;

/// Most versions remembered: a few hundred kilobytes.
const MAX_VERSIONS: usize = 4_096;

/// The entity that counts a batch's events: the document that its partition key names. Of several
/// writes of it the last one carries the number.
pub(crate) fn counting(work: &Work) -> Option<usize> {
    work.operations.iter().rposition(|operation| id(operation) == work.partition_key)
}

/// The document that an operation writes.
pub(crate) fn id(operation: &DocumentOperation) -> &str {
    match operation {
        DocumentOperation::Create(document) | DocumentOperation::Replace { document, .. } => {
            &document.id
        }
        DocumentOperation::Delete { id, .. } => id,
    }
}

/// The last numbers of versions that this process has read or written, so that most commits need
/// no read of their own.
#[derive(Debug, Default)]
pub(crate) struct Numbers(Mutex<Versions>);

#[derive(Debug, Default)]
struct Versions {
    known: HashMap<(String, ETag), Option<u64>>,
    /// In the order in which they came.
    order: VecDeque<(String, ETag)>,
}

impl Numbers {
    /// Remembers the number of a version.
    pub(crate) fn note(&self, partition_key: &str, etag: &ETag, last_seq: Option<u64>) {
        let version = (partition_key.to_owned(), etag.clone());
        let mut versions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if versions.known.insert(version.clone(), last_seq).is_none() {
            versions.order.push_back(version);
        }
        if versions.order.len() > MAX_VERSIONS
            && let Some(eldest) = versions.order.pop_front()
        {
            versions.known.remove(&eldest);
        }
    }

    /// The number of a version, if it is known here.
    pub(crate) fn of(&self, partition_key: &str, etag: &ETag) -> Option<Option<u64>> {
        let versions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        versions.known.get(&(partition_key.to_owned(), etag.clone())).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_eldest_version_is_forgotten_first() {
        let numbers = Numbers::default();
        let etag = |n: usize| ETag::new(n.to_string());
        for n in 0..=MAX_VERSIONS {
            numbers.note("p", &etag(n), Some(1));
            numbers.note("p", &etag(n), Some(2));
        }
        assert_eq!(numbers.of("p", &etag(0)), None);
        assert_eq!(numbers.of("p", &etag(1)), Some(Some(2)));
        assert_eq!(numbers.of("q", &etag(1)), None);
    }
}
