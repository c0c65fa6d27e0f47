//! The trust window: how long a worker may believe in its lease without hearing from the database.
//!
//! What lives here: the deadline that the keeper moves and workers obey. What does not: renewing.
//! Invariant: the deadline counts from *before* the renewal was sent, so it ends before the lease.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

/// Shared between the keeper (writes) and a partition's worker (reads).
#[derive(Debug)]
pub(crate) struct Trust {
    /// Milliseconds of the clock's `elapsed`; 0 once lost.
    until_ms: AtomicU64,
    /// Wakes whoever sleeps in the belief that there is time left.
    lost: CancellationToken,
}

impl Trust {
    pub(crate) fn new(until: Duration) -> Self {
        Self { until_ms: AtomicU64::new(millis(until)), lost: CancellationToken::new() }
    }

    /// Moves the deadline, unless the lease was lost before.
    pub(crate) fn extend(&self, until: Duration) {
        let later = |now: u64| (now != 0).then(|| now.max(millis(until)));
        // A failed update means lost: nothing to extend.
        let _ = self.until_ms.fetch_update(Ordering::AcqRel, Ordering::Acquire, later);
    }

    pub(crate) fn lose(&self) {
        self.until_ms.store(0, Ordering::Release);
        self.lost.cancel();
    }

    /// Ends when the lease is known to be lost, or was seen to have run out. Cancel-safe.
    pub(crate) async fn lost(&self) {
        self.lost.cancelled().await;
    }

    /// What is left at `now`; nothing means: stop publishing at once. Whoever sees that first ends
    /// it for all: a late renewal would let one sink go on where another has stopped for good.
    pub(crate) fn remaining(&self, now: Duration) -> Option<Duration> {
        let until = Duration::from_millis(self.until_ms.load(Ordering::Acquire));
        let left = until.checked_sub(now).filter(|left| !left.is_zero());
        if left.is_none() {
            self.lose();
        }
        left
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_renewal_never_revives_a_lost_lease() {
        let trust = Trust::new(Duration::from_secs(4));
        assert_eq!(trust.remaining(Duration::from_secs(1)), Some(Duration::from_secs(3)));
        trust.extend(Duration::from_secs(6));
        assert!(trust.remaining(Duration::from_secs(5)).is_some());
        trust.lose();
        trust.extend(Duration::from_secs(60));
        assert_eq!(trust.remaining(Duration::from_secs(5)), None);
    }

    #[test]
    fn a_window_that_was_seen_to_end_stays_ended() {
        let trust = Trust::new(Duration::from_secs(4));
        assert_eq!(trust.remaining(Duration::from_secs(4)), None);
        trust.extend(Duration::from_secs(6));
        assert_eq!(trust.remaining(Duration::from_secs(5)), None);
    }
}
