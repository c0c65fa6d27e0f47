//! A point in time, in milliseconds.
//!
//! What lives here: the newtype. What does not: reading a clock, or calendars.
//! Invariant: only a database or a `Clock` makes a timestamp of "now".

use std::time::Duration;

/// Milliseconds since 1970-01-01T00:00:00Z, never negative.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Timestamp(u64);

/// Largest value that fits a ULID's 48 bits (the year 10889).
const MAX_MS: u64 = (1 << 48) - 1;

impl Timestamp {
    /// From milliseconds; values beyond 48 bits are held at the largest one.
    pub const fn from_millis(ms: u64) -> Self {
        Self(if ms > MAX_MS { MAX_MS } else { ms })
    }

    /// Milliseconds since 1970-01-01T00:00:00Z.
    pub const fn as_millis(self) -> u64 {
        self.0
    }

    /// This time plus `duration`, held at the largest value.
    #[must_use]
    pub fn plus(self, duration: Duration) -> Self {
        let ms = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        Self::from_millis(self.0.saturating_add(ms))
    }

    /// How long after `earlier` this is; zero if it is not later.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}

impl std::fmt::Debug for Timestamp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}ms", self.0)
    }
}
