//! The two times of this store: the wall clock, and one that nobody can set.
//!
//! What lives here: reading both, and an offset by which tests move them. What does not: deciding
//! what has expired. Invariant: leases use only `LeaseTime`, which on Linux counts since boot, goes
//! on during suspend and is the same for all processes of the machine; a time of another boot has
//! passed.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Moves the store's clocks, so that tests need not wait. Clones share their offset.
#[derive(Debug, Clone, Default)]
pub struct ClockOffset(Arc<Offsets>);

#[derive(Debug, Default)]
struct Offsets {
    wall_ms: AtomicI64,
    lease_ms: AtomicI64,
}

impl ClockOffset {
    /// Lets time pass on both clocks.
    pub fn advance(&self, by: Duration) {
        let by_ms = to_ms(by);
        self.0.wall_ms.fetch_add(by_ms, Ordering::SeqCst);
        self.0.lease_ms.fetch_add(by_ms, Ordering::SeqCst);
    }

    /// Sets the wall clock alone, forth or back, as an operator or NTP does.
    pub fn move_wall_clock(&self, by_ms: i64) {
        self.0.wall_ms.fetch_add(by_ms, Ordering::SeqCst);
    }
}

/// A moment by which leases live.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LeaseTime {
    pub(crate) boot_id: Arc<str>,
    pub(crate) now_ms: i64,
}

/// The store's clocks.
#[derive(Debug, Clone)]
pub(crate) struct StoreClock {
    offset: ClockOffset,
    boot_id: Arc<str>,
}

impl StoreClock {
    pub(crate) fn new(offset: ClockOffset) -> Self {
        Self { offset, boot_id: boot_id() }
    }

    /// The wall clock in milliseconds: for the times that people read.
    pub(crate) fn wall_ms(&self) -> i64 {
        wall_ms().saturating_add(self.offset.0.wall_ms.load(Ordering::SeqCst)).max(0)
    }

    pub(crate) fn lease_time(&self) -> LeaseTime {
        let offset_ms = self.offset.0.lease_ms.load(Ordering::SeqCst);
        LeaseTime {
            boot_id: Arc::clone(&self.boot_id),
            now_ms: boot_ms().saturating_add(offset_ms),
        }
    }
}

/// Milliseconds as SQLite's integers hold them.
pub(crate) fn to_ms(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

/// The process's wall clock in milliseconds since 1970.
#[expect(
    clippy::disallowed_methods,
    reason = "the one place where this store reads the wall clock"
)]
pub(crate) fn wall_ms() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, to_ms)
}

#[cfg(target_os = "linux")]
fn boot_ms() -> i64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    time.tv_sec.saturating_mul(1_000).saturating_add(time.tv_nsec / 1_000_000)
}

#[cfg(not(target_os = "linux"))]
fn boot_ms() -> i64 {
    wall_ms()
}

/// Names this run of the machine; a constant where the system does not tell, because the wall
/// clock is used there.
fn boot_id() -> Arc<str> {
    let path = "/proc/sys/kernel/random/boot_id";
    std::fs::read_to_string(path).map_or_else(|_| "unknown".into(), |id| id.trim().into())
}
