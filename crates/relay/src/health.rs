//! Whether a sink as a whole is well: the circuit.
//!
//! What lives here: telling an outage of the sink from the trouble of some events or of one of its
//! destinations, as pure state. What does not: waiting, and an event's reaction (`retry` in core).
//! Invariant: with the circuit closed the sink is called freely; while it is open, at most one call
//! is under way, and no event's attempts are used up. A destination that is missing never opens it
//! twice for the same events: what failed before and after a success is no sign of an outage.
//!
//! ```text
//! Closed ── 3 keys fail first, and none gets through ──▶ Open(until) ── time ──▶ one call ──▶ ok:
//!                                                          ▲                       │       Closed
//!                                                          └────── failed ─────────┘
//! ```

use std::time::Duration;

use postrider_core::{Attempt, ErrorKind, Jitter, Key, Reaction, RetryPolicy, react};

/// One or two troubled keys are their own trouble; a third in a row is the sink's.
const OUTAGE_KEYS: usize = 3;
/// Longest wait of an open circuit that nobody asked for: a sink that is back is found so soon,
/// with whatever waited for it meanwhile, and one call costs it nothing.
const LONGEST_WAIT: Duration = Duration::from_secs(4);
/// Longest wait, unless it was asked for, of events that were not tried yet: the circuit may be
/// open for events of one destination, and theirs may be another.
const LONGEST_WAIT_UNTRIED: Duration = Duration::from_millis(500);
/// A sink that confirmed something within this time is not said to be away.
const TOLD_AFTER: Duration = Duration::from_secs(2);
/// However long a time without a confirmation turned out to be no outage, after this it is one.
const LONGEST_PATIENCE: Duration = Duration::from_secs(30);
/// Where nothing was confirmed for so long there is an outage, whenever its events began to fail.
const LONGEST_SILENCE: Duration = Duration::from_secs(60);
/// For how long it is remembered that such a time was none.
const PATIENT_FOR: Duration = Duration::from_secs(600);

#[derive(Debug, Default)]
pub(crate) struct Health {
    successes: u64,
    succeeded_at: Option<Duration>,
    /// Keys that failed for the first time since the last success; at most `OUTAGE_KEYS`.
    failed: Vec<Key>,
    lull: Option<Lull>,
    /// Events that failed in such a time failed on after it: it was no outage of the sink, and
    /// so is none that is shorter than this. With the time when that was learned.
    patience: Option<(Duration, Duration)>,
    /// Failed calls since the circuit opened; it is open when above zero.
    open_failures: u32,
    open_until: Duration,
    /// When events that were not tried yet may be.
    untried_from: Duration,
    /// The one call of an open circuit is under way.
    trying: bool,
    told: bool,
}

/// The last time without a success in which `OUTAGE_KEYS` failed first.
#[derive(Debug)]
struct Lull {
    /// Successes before it.
    successes: u64,
    length: Duration,
    /// Keys that failed in it, and on after it; at most `OUTAGE_KEYS`.
    failed_on: Vec<Key>,
}

/// What is known of an event that failed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Failure {
    pub(crate) kind: ErrorKind,
    /// The sink's successes when it failed first. None if that told nothing of the sink: others
    /// got through in the same call, or it was before this relay.
    pub(crate) began: Option<u64>,
}

/// Calls that may be under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Allowed {
    pub(crate) calls: usize,
    /// Only with events that were not tried yet.
    pub(crate) untried_only: bool,
}

impl Health {
    /// Events that the sink confirmed since the start.
    pub(crate) fn successes(&self) -> u64 {
        self.successes
    }

    /// Closes the circuit. Says whether an outage ended that was told.
    pub(crate) fn succeeded(&mut self, events: u64, now: Duration) -> bool {
        if self.failed.len() >= OUTAGE_KEYS {
            let (successes, length) = (self.successes, self.silence(now));
            self.lull = Some(Lull { successes, length, failed_on: Vec::new() });
        }
        self.successes += events;
        self.succeeded_at = Some(now);
        self.failed.clear();
        self.open_failures = 0;
        self.trying = false;
        std::mem::take(&mut self.told)
    }

    /// How long nothing has been confirmed.
    fn silence(&self, now: Duration) -> Duration {
        self.succeeded_at.map_or(Duration::MAX, |at| now.saturating_sub(at))
    }

    /// How long nothing need be confirmed before failures count as an outage.
    fn patience(&self, now: Duration) -> Duration {
        let known = self.patience.filter(|(_, at)| now.saturating_sub(*at) < PATIENT_FOR);
        known.map_or(Duration::ZERO, |(patience, _)| patience)
    }

    /// Hears of an event that failed. Says whether there is an outage now that was not told yet.
    pub(crate) fn failed(
        &mut self,
        key: &Key,
        failure: Failure,
        policy: &RetryPolicy,
        jitter: Jitter,
        now: Duration,
    ) -> bool {
        let asked = match failure.kind {
            ErrorKind::Transient => false,
            ErrorKind::Throttled { retry_after } => retry_after.is_some(),
            ErrorKind::Permanent
            | ErrorKind::Fenced
            | ErrorKind::Unsupported
            | ErrorKind::Corrupt => return false,
        };
        // It fails whether or not the sink takes others; but where none got through for long, that
        // is an outage, whenever it began to fail.
        let own = failure.began != Some(self.successes) && self.silence(now) < LONGEST_SILENCE;
        if own {
            self.learn(key, failure.began, now);
        } else if self.failed.len() < OUTAGE_KEYS && !self.failed.contains(key) {
            self.failed.push(key.clone());
        }
        let opens = match self.is_open() {
            // Several events of one call failing together count once.
            true => std::mem::take(&mut self.trying),
            false => {
                !own && self.failed.len() >= OUTAGE_KEYS
                    && (asked || self.silence(now) >= self.patience(now))
            }
        };
        if opens {
            self.open(failure.kind, asked, policy, jitter, now);
        }
        let news = self.open_failures > 1 && !self.told && self.silence(now) >= TOLD_AFTER;
        self.told |= news;
        news
    }

    fn open(
        &mut self,
        kind: ErrorKind,
        asked: bool,
        policy: &RetryPolicy,
        jitter: Jitter,
        now: Duration,
    ) {
        self.open_failures = self.open_failures.saturating_add(1);
        let max_delay = policy.max_delay.min(LONGEST_WAIT);
        let endless = RetryPolicy { max_attempts: u32::MAX, max_delay, ..policy.clone() };
        let attempt = Attempt(self.open_failures.min(u32::MAX - 1));
        if let Reaction::RetryAfter(wait) = react(kind, attempt, &endless, jitter) {
            // Full jitter may give next to nothing; an open circuit waits at least a little.
            let wait = wait.max(policy.base_delay / 2);
            self.open_until = now + wait;
            let untried = if asked { wait } else { wait.min(LONGEST_WAIT_UNTRIED) };
            self.untried_from = now + untried;
        }
    }

    /// The last time without a success was no outage, if enough that failed in it fail on.
    fn learn(&mut self, key: &Key, began: Option<u64>, now: Duration) {
        let Some(lull) = self.lull.as_mut().filter(|lull| began == Some(lull.successes)) else {
            return;
        };
        if !lull.failed_on.contains(key) {
            lull.failed_on.push(key.clone());
        }
        if lull.failed_on.len() >= OUTAGE_KEYS {
            let patience = lull.length.saturating_mul(2).min(LONGEST_PATIENCE);
            self.lull = None;
            self.patience = Some((patience.max(self.patience(now)), now));
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        self.open_failures > 0
    }

    /// Whether there is an outage that was told.
    pub(crate) fn is_outage(&self) -> bool {
        self.told
    }

    /// How many calls may be under way at `now`, out of `most`.
    pub(crate) fn allowed(&self, now: Duration, most: usize) -> Allowed {
        let only = |calls, untried_only| Allowed { calls, untried_only };
        match self.open_failures {
            0 => only(most, false),
            _ if now < self.untried_from => only(0, false),
            _ => only(1, now < self.open_until),
        }
    }

    /// A call begins.
    pub(crate) fn tries(&mut self) {
        self.trying = self.is_open();
    }

    /// When an open circuit lets the next call through; sooner for events not tried yet.
    pub(crate) fn opens_at(&self, untried: bool) -> Option<Duration> {
        self.is_open().then_some(if untried { self.untried_from } else { self.open_until })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRANSIENT: ErrorKind = ErrorKind::Transient;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// A failure of an event that failed first after `began` successes.
    fn fail(health: &mut Health, key: &str, began: u64, kind: ErrorKind, now_ms: u64) -> bool {
        let key = Key::new(key).expect("valid");
        let failure = Failure { kind, began: Some(began) };
        health.failed(&key, failure, &RetryPolicy::default(), Jitter::NONE, ms(now_ms))
    }

    fn fail_new(health: &mut Health, key: &str, now_ms: u64) -> bool {
        fail(health, key, health.successes(), TRANSIENT, now_ms)
    }

    fn calls(health: &Health, now_ms: u64) -> usize {
        health.allowed(ms(now_ms), 8).calls
    }

    #[test]
    fn one_troubled_key_never_opens_the_circuit() {
        let mut health = Health::default();
        for at in 0..100 {
            fail_new(&mut health, "poison", at);
        }
        assert_eq!(calls(&health, 1_000), 8);
    }

    #[test]
    fn an_outage_opens_it_at_once_and_a_success_closes_it() {
        let mut health = Health::default();
        health.succeeded(10, ms(999));
        for key in ["a", "b", "c", "d"] {
            assert!(!fail_new(&mut health, key, 1_000), "it may be over in a moment");
        }
        assert_eq!(calls(&health, 1_099), 0);
        assert_eq!(calls(&health, 1_100), 1, "one call probes");
        // A call from before fails late.
        fail_new(&mut health, "e", 1_100);
        assert_eq!(health.opens_at(false), Some(ms(1_100)));
        health.tries();
        for key in ["a", "b"] {
            fail_new(&mut health, key, 1_100);
            assert_eq!(health.opens_at(false), Some(ms(1_300)), "the wait doubles");
        }
        assert!(!health.succeeded(1, ms(1_101)), "nothing was told");
        assert_eq!(calls(&health, 1_101), 8);
    }

    /// An outage is told once, when nothing has been confirmed for some time.
    #[test]
    fn an_outage_is_told_once_and_so_is_its_end() {
        let mut health = Health::default();
        health.succeeded(10, ms(999));
        let mut told = Vec::new();
        let mut now = 1_000;
        for _ in 0..20 {
            health.tries();
            for key in ["a", "b", "c"] {
                if fail_new(&mut health, key, now) {
                    told.push(now);
                }
            }
            now = u64::try_from(health.opens_at(false).expect("open").as_millis()).expect("small");
        }
        assert_eq!(told.len(), 1, "{told:?}");
        assert!((3_000..7_000).contains(&told[0]), "{told:?}");
        assert!(health.is_outage() && health.succeeded(1, ms(now)));
        assert!(!health.is_outage() && !health.succeeded(1, ms(now)));
    }

    #[test]
    fn a_long_outage_is_looked_at_every_few_seconds_unless_the_sink_asks_for_more() {
        let mut health = Health::default();
        let mut now = Duration::ZERO;
        for n in 0..40 {
            health.tries();
            for key in ["a", "b", "c"] {
                fail_new(&mut health, key, u64::try_from(now.as_millis()).expect("small"));
            }
            let next = health.opens_at(false).expect("open");
            assert!(next - now <= LONGEST_WAIT, "{n}");
            let untried = health.opens_at(true).expect("open");
            assert!(untried - now <= LONGEST_WAIT_UNTRIED, "{n}");
            now = next;
        }
        health.tries();
        let asked = Duration::from_secs(60);
        let kind = ErrorKind::Throttled { retry_after: Some(asked) };
        fail(&mut health, "a", 0, kind, u64::try_from(now.as_millis()).expect("small"));
        for untried in [false, true] {
            assert!(health.opens_at(untried).expect("open") >= now + asked);
        }
    }

    /// Whoever failed before a success and fails after it is in trouble alone.
    #[test]
    fn events_that_fail_while_others_get_through_never_open_it_again() {
        let mut health = Health::default();
        health.succeeded(1, ms(0));
        for key in ["a", "b", "c"] {
            fail_new(&mut health, key, 10);
        }
        assert!(health.is_open(), "that might be an outage");
        health.succeeded(1, ms(60));
        for at in 1..1_000 {
            for key in ["a", "b", "c"] {
                assert!(!fail(&mut health, key, 1, TRANSIENT, 60 + at * 500));
            }
            assert_eq!(calls(&health, 60 + at * 500), 8);
            if at % 100 == 0 {
                health.succeeded(1, ms(60 + at * 500));
            }
        }
        // Until nothing has got through for a minute.
        for key in ["a", "b", "c"] {
            fail(&mut health, key, 1, TRANSIENT, 600_000);
        }
        assert!(health.is_open());
        health.succeeded(1, ms(600_000));
        // And the next outage is seen at once.
        for key in ["x", "y", "z"] {
            fail_new(&mut health, key, 700_000);
        }
        assert!(health.is_open());
    }

    /// New events of a missing destination among those of others: after a time the circuit is
    /// patient with them, and forgets that later.
    #[test]
    fn a_time_without_success_that_was_no_outage_teaches_patience() {
        let mut health = Health::default();
        let mut openings = 0;
        let mut key = 0;
        // One event gets through in a second, ten do not.
        for second in 0..60u64 {
            let now = second * 1_000;
            health.succeeded(1, ms(now));
            let began = health.successes();
            for tenth in 1..10 {
                key += 1;
                let was_open = health.is_open();
                assert!(!fail(
                    &mut health,
                    &format!("k{key}"),
                    began,
                    TRANSIENT,
                    now + tenth * 100
                ));
                openings += u32::from(health.is_open() && !was_open);
            }
            // They fail again, after the next success.
            health.succeeded(1, ms(now + 999));
            for ago in 0..3 {
                fail(&mut health, &format!("k{}", key - ago), began, TRANSIENT, now + 999);
            }
        }
        assert!(openings <= 2, "{openings}");
        assert_eq!(health.patience(ms(60_000)), ms(2 * 999));
        for key in ["a", "b", "c"] {
            fail_new(&mut health, key, 62_000);
        }
        assert!(health.is_open(), "longer than ever before: that is an outage");
        health.succeeded(1, ms(63_000));
        let later = 63_000 + 600_000;
        assert_eq!(health.patience(ms(later)), Duration::ZERO);
    }

    /// One key that fails on after an outage does not make the next one be seen late.
    #[test]
    fn a_troubled_key_beside_an_outage_teaches_nothing() {
        let mut health = Health::default();
        health.succeeded(1, ms(0));
        for key in ["a", "b", "poison"] {
            fail_new(&mut health, key, 10);
        }
        health.succeeded(2, ms(9_000));
        for at in 0..9 {
            fail(&mut health, "poison", 1, TRANSIENT, 9_000 + at);
        }
        assert_eq!(health.patience(ms(9_999)), Duration::ZERO);
    }

    #[test]
    fn who_asks_for_patience_gets_it_whatever_was_learned() {
        let mut health = Health { patience: Some((ms(9_000), ms(0))), ..Health::default() };
        health.succeeded(1, ms(0));
        let wait = Duration::from_secs(7);
        for key in ["a", "b", "c"] {
            fail(&mut health, key, 1, ErrorKind::Throttled { retry_after: Some(wait) }, 10);
        }
        assert!(health.opens_at(true).expect("open") >= wait);
    }

    #[test]
    fn a_refusal_of_one_event_is_no_outage() {
        let mut health = Health::default();
        for key in ["a", "b", "c"] {
            fail(&mut health, key, 0, ErrorKind::Permanent, 0);
        }
        assert!(!health.is_open());
    }
}
