//! The scheme that goes by `created_at`, to be compared with ours.
//!
//! What lives here: its checkpoint, and what it sends. What does not: transactions, and the log.
//! Invariant: it is told of the same events and the same lost slots as our reader.

use std::collections::BTreeSet;

/// The scheme of the seed: it keeps the highest `created_at` that was sent, and when the slot is
/// gone it reads the rows above that. Here `created_at` has the order of `seq`.
#[derive(Debug, Default)]
pub(super) struct ByCreatedAt {
    checkpoint: i64,
    pub(super) sent: BTreeSet<i64>,
}

impl ByCreatedAt {
    pub(super) fn send(&mut self, created_at: i64) {
        self.sent.insert(created_at);
        self.checkpoint = self.checkpoint.max(created_at);
    }

    pub(super) fn recover(&mut self, rows: &[(u64, i64)]) {
        let checkpoint = self.checkpoint;
        rows.iter().filter(|(_, at)| *at > checkpoint).for_each(|(_, at)| self.send(*at));
    }
}
