//! Whether a sink as a whole is well: the circuit.
//!
//! What lives here: telling an outage of the sink from one event's own trouble, as pure state.
//! What does not: waiting, and an event's reaction (`retry` in core).
//! Invariant: with the circuit closed the sink is called freely; while it is open, at most one call
//! is under way, and no event's attempts are used up.
//!
//! ```text
//! Closed ── 3 keys fail, no success between ──▶ Open(until) ── time ──▶ one call ──▶ ok: Closed
//!                                                 ▲                       │
//!                                                 └────── failed ─────────┘
//! ```

use std::time::Duration;

use postrider_core::{Attempt, ErrorKind, Jitter, Key, Reaction, RetryPolicy, react};

/// One or two troubled keys are their own trouble; a third in a row is the sink's.
const OUTAGE_KEYS: usize = 3;
/// Longest wait of an open circuit that nobody asked for: a sink that is back is found so soon,
/// with whatever waited for it meanwhile, and one call costs it nothing.
const LONGEST_WAIT: Duration = Duration::from_secs(4);

#[derive(Debug, Default)]
pub(crate) struct Health {
    successes: u64,
    /// Keys that failed since the last success; at most `OUTAGE_KEYS`.
    failed: Vec<Key>,
    /// Failed calls since the circuit opened; it is open when above zero.
    open_failures: u32,
    open_until: Duration,
}

impl Health {
    /// Events that the sink confirmed since the start.
    pub(crate) fn successes(&self) -> u64 {
        self.successes
    }

    pub(crate) fn succeeded(&mut self, events: u64) {
        self.successes += events;
        self.failed.clear();
        self.open_failures = 0;
    }

    /// Hears of an event that failed for lack of a working sink.
    pub(crate) fn failed(
        &mut self,
        key: &Key,
        kind: ErrorKind,
        policy: &RetryPolicy,
        jitter: Jitter,
        now: Duration,
    ) {
        match kind {
            ErrorKind::Transient | ErrorKind::Throttled { .. } => {}
            ErrorKind::Permanent
            | ErrorKind::Fenced
            | ErrorKind::Unsupported
            | ErrorKind::Corrupt => return,
        }
        if self.failed.len() < OUTAGE_KEYS && !self.failed.contains(key) {
            self.failed.push(key.clone());
        }
        if self.failed.len() < OUTAGE_KEYS {
            return;
        }
        // Several events of one call failing together count once.
        if self.open_failures > 0 && now < self.open_until {
            return;
        }
        self.open_failures = self.open_failures.saturating_add(1);
        let max_delay = policy.max_delay.min(LONGEST_WAIT);
        let endless = RetryPolicy { max_attempts: u32::MAX, max_delay, ..policy.clone() };
        let attempt = Attempt(self.open_failures.min(u32::MAX - 1));
        if let Reaction::RetryAfter(wait) = react(kind, attempt, &endless, jitter) {
            // Full jitter may give next to nothing; an open circuit waits at least a little.
            self.open_until = now + wait.max(policy.base_delay / 2);
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        self.open_failures > 0
    }

    /// How many calls may be under way at `now`, out of `most`.
    pub(crate) fn allowed(&self, now: Duration, most: usize) -> usize {
        match self.open_failures {
            0 => most,
            _ if now < self.open_until => 0,
            _ => 1,
        }
    }

    /// When an open circuit lets the next call through.
    pub(crate) fn opens_at(&self) -> Option<Duration> {
        self.is_open().then_some(self.open_until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fail(health: &mut Health, key: &str, now_ms: u64) {
        let key = Key::new(key).expect("valid");
        let now = Duration::from_millis(now_ms);
        health.failed(&key, ErrorKind::Transient, &RetryPolicy::default(), Jitter::NONE, now);
    }

    #[test]
    fn one_troubled_key_never_opens_the_circuit() {
        let mut health = Health::default();
        for at in 0..100 {
            fail(&mut health, "poison", at);
        }
        assert_eq!(health.allowed(Duration::from_secs(1), 8), 8);
    }

    #[test]
    fn an_outage_opens_it_and_a_success_closes_it() {
        let mut health = Health::default();
        for key in ["a", "b", "c", "d"] {
            fail(&mut health, key, 1_000);
        }
        assert_eq!(health.allowed(Duration::from_millis(1_099), 8), 0);
        assert_eq!(health.allowed(Duration::from_millis(1_100), 8), 1, "one call probes");
        fail(&mut health, "a", 1_100);
        assert_eq!(health.opens_at(), Some(Duration::from_millis(1_300)), "the wait doubles");
        health.succeeded(1);
        assert_eq!(health.allowed(Duration::from_millis(1_101), 8), 8);
    }

    #[test]
    fn a_long_outage_is_looked_at_every_few_seconds_unless_the_sink_asks_for_more() {
        let mut health = Health::default();
        let mut now = Duration::ZERO;
        for n in 0..40 {
            for key in ["a", "b", "c"] {
                fail(&mut health, key, u64::try_from(now.as_millis()).expect("small"));
            }
            let next = health.opens_at().expect("open");
            assert!(next - now <= LONGEST_WAIT, "{n}");
            now = next;
        }
        let asked = Duration::from_secs(60);
        let kind = ErrorKind::Throttled { retry_after: Some(asked) };
        let key = Key::new("a").expect("valid");
        health.failed(&key, kind, &RetryPolicy::default(), Jitter::NONE, now);
        assert!(health.opens_at().expect("open") >= now + asked);
    }

    #[test]
    fn a_refusal_of_one_event_is_no_outage() {
        let mut health = Health::default();
        for key in ["a", "b", "c"] {
            let key = Key::new(key).expect("valid");
            let policy = RetryPolicy::default();
            health.failed(&key, ErrorKind::Permanent, &policy, Jitter::NONE, Duration::ZERO);
        }
        assert!(!health.is_open());
    }
}
