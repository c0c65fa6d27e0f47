//! The emulator's clock.
//!
//! What lives here: the one place where time is read, and moving it forward for tests. What does
//! not: what time does to messages (`broker/`).
//! Invariant: it never moves back because of a caller.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// Wall time when the emulator started, plus what has passed since, plus what tests have added.
#[derive(Debug)]
pub(crate) struct Clock {
    started_ms: i64,
    started: Instant,
    added_ms: AtomicI64,
}

impl Clock {
    #[expect(clippy::disallowed_methods, reason = "the one home of the emulator's wall clock")]
    pub(crate) fn start() -> Self {
        let since_epoch = std::time::SystemTime::now()
            .duration_since(std::time::SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        Self {
            started_ms: millis(since_epoch),
            started: Instant::now(),
            added_ms: AtomicI64::new(0),
        }
    }

    /// Milliseconds since 1970.
    pub(crate) fn now_ms(&self) -> i64 {
        let passed = millis(self.started.elapsed());
        self.started_ms.saturating_add(passed).saturating_add(self.added_ms.load(Ordering::SeqCst))
    }

    /// Moves it forward.
    pub(crate) fn advance(&self, by: Duration) {
        let _ = self.added_ms.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |added| {
            Some(added.saturating_add(millis(by)))
        });
    }
}

/// Whole milliseconds, as many as fit.
pub(crate) fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}
