//! Which events go together in one call of the script.
//!
//! What lives here: records by key, keys by call, and a call's outcomes by key. What does not: the
//! call (`append.rs`) and sending it (`publish.rs`).
//! Invariant: a key's events are in one call, in their order, or in several one after the other.

use postrider_core::{Outcome, Record};

use crate::publish::BATCH_BYTES;

/// Events of several keys in one call of the script: a call costs the server as much as an event or
/// two, and while it runs the server does nothing else, here for less than a millisecond.
const BUNDLE_RECORDS: usize = 128;
/// Bytes of them: a key with more has calls of its own.
const BUNDLE_BYTES: usize = 256 << 10;

/// Keys' events that go together, in the order of the keys; a key with many is alone.
pub(crate) fn bundles<'a>(
    chains: impl Iterator<Item = Vec<&'a Record>>,
) -> Vec<Vec<Vec<&'a Record>>> {
    let mut bundles: Vec<Vec<Vec<&Record>>> = Vec::new();
    let (mut records, mut bytes) = (usize::MAX, usize::MAX);
    for chain in chains {
        let own: usize = chain.iter().map(|record| record.event.cost_bytes()).sum();
        records = records.saturating_add(chain.len());
        bytes = bytes.saturating_add(own);
        match bundles.last_mut() {
            Some(last) if records <= BUNDLE_RECORDS && bytes <= BUNDLE_BYTES => last.push(chain),
            _ => {
                (records, bytes) = (chain.len(), own);
                bundles.push(vec![chain]);
            }
        }
    }
    bundles
}

/// Each key's share of the outcomes of a call.
pub(crate) fn dealt(outcomes: Vec<Outcome>, chains: &[Vec<&Record>]) -> Vec<Vec<Outcome>> {
    let mut outcomes = outcomes.into_iter();
    chains.iter().map(|chain| outcomes.by_ref().take(chain.len()).collect()).collect()
}

/// How many of the first events go in one call of the script.
pub(crate) fn piece(records: &[&Record], most: usize) -> usize {
    let mut bytes = 0;
    let fits = |record: &&&Record| {
        bytes += record.event.cost_bytes();
        bytes <= BATCH_BYTES
    };
    records.iter().take(most).take_while(fits).count().max(1)
}
