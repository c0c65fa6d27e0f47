//! Two clocks for tests: one that stands still until it is moved, and one that runs with tokio's.
//!
//! What lives here: both implementations of the clock seam. What does not: the wall clock, which
//! no test needs.
//! Invariant: neither ever goes back.

use std::time::Duration;

use async_trait::async_trait;
use postrider_core::{Clock, Timestamp};
use tokio::sync::watch;
use tokio::time::Instant;

/// Where both clocks begin: 2023-01-02T15:04:05Z, the time of the ULID vectors.
pub const EPOCH: Timestamp = Timestamp::from_millis(1_672_671_845_000);

/// Stands still until [`advance`](Self::advance).
pub struct ManualClock {
    passed: watch::Sender<Duration>,
}

impl Default for ManualClock {
    fn default() -> Self {
        Self { passed: watch::Sender::new(Duration::ZERO) }
    }
}

impl ManualClock {
    /// Lets time pass and wakes whoever waited for it.
    pub fn advance(&self, duration: Duration) {
        self.passed.send_modify(|passed| *passed += duration);
    }
}

#[async_trait]
impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        EPOCH.plus(*self.passed.borrow())
    }

    fn elapsed(&self) -> Duration {
        *self.passed.borrow()
    }

    async fn sleep(&self, duration: Duration) {
        let until = self.elapsed() + duration;
        let mut passed = self.passed.subscribe();
        passed.wait_for(|passed| *passed >= until).await.expect("the clock outlives its sleepers");
    }
}

/// Runs with tokio's own time, so that a paused runtime pauses it.
pub struct TokioClock {
    began: Instant,
}

impl Default for TokioClock {
    fn default() -> Self {
        Self { began: Instant::now() }
    }
}

#[async_trait]
impl Clock for TokioClock {
    fn now(&self) -> Timestamp {
        EPOCH.plus(self.elapsed())
    }

    fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    async fn sleep(&self, duration: Duration) {
        tokio::time::sleep(duration).await;
    }
}
