//! The real clock.
//!
//! What lives here: the one place of the relay where time is read. What does not: policy.
//! Invariant: `elapsed` goes on while the process is stopped or the machine sleeps, so that a trust
//! window never outlasts the lease behind it.

use std::time::Duration;

use async_trait::async_trait;
use postrider_core::{Clock, Timestamp};

/// Wall time from the host, monotonic time since boot, waits on tokio's timer.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

#[async_trait]
impl Clock for SystemClock {
    #[expect(clippy::disallowed_methods, reason = "the one home of the relay's wall clock")]
    fn now(&self) -> Timestamp {
        let since_epoch = std::time::SystemTime::now()
            .duration_since(std::time::SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        Timestamp::from_millis(u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX))
    }

    fn elapsed(&self) -> Duration {
        // CLOCK_MONOTONIC stands still while a Linux machine is suspended; leases do not.
        #[cfg(target_os = "linux")]
        let id = rustix::time::ClockId::Boottime;
        #[cfg(not(target_os = "linux"))]
        let id = rustix::time::ClockId::Monotonic;
        let time = rustix::time::clock_gettime(id);
        let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
        let nanos = u32::try_from(time.tv_nsec).unwrap_or_default();
        Duration::new(seconds, nanos)
    }

    async fn sleep(&self, duration: Duration) {
        tokio::time::sleep(duration).await;
    }
}
