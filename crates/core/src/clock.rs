//! Time comes in by this door.
//!
//! What lives here: the seam. What does not: an implementation; the relay has the real one, the
//! simulation a fake one.
//! Invariant: `elapsed` never goes back, also when somebody sets the wall clock.

use std::time::Duration;

use async_trait::async_trait;

use crate::Timestamp;

/// A wall clock, a monotonic clock, and a way to wait.
#[async_trait]
pub trait Clock: Send + Sync + 'static {
    /// The wall clock: for people and protocols, never for leases.
    fn now(&self) -> Timestamp;

    /// Monotonic time since some fixed moment; goes on while the process is stopped.
    fn elapsed(&self) -> Duration;

    /// Waits. Cancel-safe.
    async fn sleep(&self, duration: Duration);
}
