//! What has happened to this process's stream, in numbers.
//!
//! What lives here: the counters. What does not: what the server says of the slot (`report.rs`).
//! Invariant: counting costs an atomic addition and waits for nobody.

use std::sync::atomic::{AtomicU64, Ordering};

/// Totals since the process began to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WalCounts {
    /// Times that a consumer began to read from the table what the slot could not give it.
    pub catch_ups: u64,
    /// Connections to the log that were lost or could not be made; each was tried again.
    pub reconnects: u64,
    /// Messages of the server of a kind that this program does not know; they were skipped.
    pub unknown_messages: u64,
}

/// The counters behind [`WalCounts`].
#[derive(Default)]
pub(super) struct Counters {
    catch_ups: AtomicU64,
    reconnects: AtomicU64,
    unknown_before: AtomicU64,
    unknown: AtomicU64,
}

impl Counters {
    pub(super) fn caught_up(&self) {
        self.catch_ups.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn reconnected(&self) {
        self.reconnects.fetch_add(1, Ordering::Relaxed);
    }

    /// Takes note of the present stream's total. A lower one than before is another stream's, which
    /// began anew.
    pub(super) fn unknown(&self, total: u64) {
        let before = self.unknown.swap(total, Ordering::Relaxed);
        if total < before {
            self.unknown_before.fetch_add(before, Ordering::Relaxed);
        }
    }

    pub(super) fn read(&self) -> WalCounts {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        WalCounts {
            catch_ups: of(&self.catch_ups),
            reconnects: of(&self.reconnects),
            unknown_messages: of(&self.unknown_before) + of(&self.unknown),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_messages_are_counted_over_streams() {
        let counters = Counters::default();
        for total in [0, 2, 2, 0, 1] {
            counters.unknown(total);
        }
        assert_eq!(counters.read().unknown_messages, 3);
    }
}
