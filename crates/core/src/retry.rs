//! What to do after a failed attempt: a pure function.
//!
//! What lives here: the policy and `react`. What does not: waiting, parking, logging.
//! Invariant: the same arguments give the same reaction; randomness comes in as a number.

use std::time::Duration;

use crate::ErrorKind;

/// What happens to an event that can't be delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnFailure {
    /// It becomes a dead letter and its key waits behind it.
    #[default]
    Park,
    /// It becomes a dead letter and its key goes on.
    Skip,
    /// The sink stops and says so.
    Halt,
}

/// Counts an event's own failed attempts, from 1; an outage of the sink does not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Attempt(pub u32);

/// A number in [0, 1) that spreads retries out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Jitter(f64);

impl Jitter {
    /// No jitter taken off: the longest wait.
    pub const NONE: Self = Self(1.0);

    /// From a random number; held within [0, 1].
    pub fn new(fraction: f64) -> Self {
        Self(if fraction.is_finite() { fraction.clamp(0.0, 1.0) } else { 1.0 })
    }
}

/// How failures are met.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Upper bound of the first wait.
    pub base_delay: Duration,
    /// Upper bound of every wait, unless the server asks for more.
    pub max_delay: Duration,
    /// Attempts after which a transient failure is treated as permanent.
    pub max_attempts: u32,
    /// What happens then.
    pub on_failure: OnFailure,
}

impl Default for RetryPolicy {
    /// 100 ms doubling to 30 s, 12 attempts (about two minutes of a sink that takes everything
    /// else), then park.
    fn default() -> Self {
        Self {
            base_delay: Duration::from_millis(100),
            max_delay: Duration::from_secs(30),
            max_attempts: 12,
            on_failure: OnFailure::Park,
        }
    }
}

/// A server's wish is honoured up to this: longer, and a mistaken header would stall a key for
/// days.
pub const MAX_RETRY_AFTER: Duration = Duration::from_secs(3_600);

/// What to do now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reaction {
    /// Send again after this wait.
    RetryAfter(Duration),
    /// Write to the dead letters; the key waits.
    Park,
    /// Write to the dead letters; the key goes on.
    Skip,
    /// Stop this sink with the error.
    Halt,
    /// Another relay has the partition: stop working on it.
    StepDown,
}

/// Decides what follows a failure of `kind` at the event's `attempt`-th attempt.
///
/// Waits are exponential with full jitter: uniform in [0, min(`max_delay`, `base_delay` × 2ⁿ⁻¹)]
/// (the scheme of "Exponential Backoff and Jitter", AWS Architecture Blog, 2015). A wait that the
/// server named is a floor, up to [`MAX_RETRY_AFTER`].
pub fn react(kind: ErrorKind, attempt: Attempt, policy: &RetryPolicy, jitter: Jitter) -> Reaction {
    let give_up = match policy.on_failure {
        OnFailure::Park => Reaction::Park,
        OnFailure::Skip => Reaction::Skip,
        OnFailure::Halt => Reaction::Halt,
    };
    match kind {
        ErrorKind::Transient if attempt.0 >= policy.max_attempts => give_up,
        ErrorKind::Transient => Reaction::RetryAfter(backoff(attempt, policy, jitter)),
        ErrorKind::Throttled { retry_after } => {
            let floor = retry_after.unwrap_or_default().min(MAX_RETRY_AFTER);
            Reaction::RetryAfter(floor + backoff(attempt, policy, jitter))
        }
        ErrorKind::Permanent | ErrorKind::Unsupported => give_up,
        ErrorKind::Fenced => Reaction::StepDown,
        ErrorKind::Corrupt => Reaction::Halt,
    }
}

fn backoff(attempt: Attempt, policy: &RetryPolicy, jitter: Jitter) -> Duration {
    let doublings = attempt.0.saturating_sub(1).min(31);
    let ceiling = policy.base_delay.saturating_mul(1 << doublings).min(policy.max_delay);
    ceiling.mul_f64(jitter.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn policy(on_failure: OnFailure) -> RetryPolicy {
        RetryPolicy { on_failure, ..RetryPolicy::default() }
    }

    #[test]
    fn every_kind_has_its_reaction() {
        let park = policy(OnFailure::Park);
        let at = |kind, attempt| react(kind, Attempt(attempt), &park, Jitter::NONE);
        assert_eq!(at(ErrorKind::Transient, 1), Reaction::RetryAfter(Duration::from_millis(100)));
        assert_eq!(at(ErrorKind::Transient, 4), Reaction::RetryAfter(Duration::from_millis(800)));
        assert_eq!(at(ErrorKind::Transient, 12), Reaction::Park);
        assert_eq!(at(ErrorKind::Permanent, 1), Reaction::Park);
        assert_eq!(at(ErrorKind::Unsupported, 1), Reaction::Park);
        assert_eq!(at(ErrorKind::Fenced, 1), Reaction::StepDown);
        assert_eq!(at(ErrorKind::Corrupt, 1), Reaction::Halt);
        for (on_failure, reaction) in
            [(OnFailure::Skip, Reaction::Skip), (OnFailure::Halt, Reaction::Halt)]
        {
            let given_up =
                react(ErrorKind::Permanent, Attempt(1), &policy(on_failure), Jitter::NONE);
            assert_eq!(given_up, reaction);
        }
    }

    #[test]
    fn throttling_honours_the_server_and_never_gives_up() {
        let park = policy(OnFailure::Park);
        let named = ErrorKind::Throttled { retry_after: Some(Duration::from_secs(7)) };
        assert_eq!(
            react(named, Attempt(100), &park, Jitter::new(0.0)),
            Reaction::RetryAfter(Duration::from_secs(7))
        );
        let absurd = ErrorKind::Throttled { retry_after: Some(Duration::MAX) };
        assert_eq!(
            react(absurd, Attempt(1), &park, Jitter::new(0.0)),
            Reaction::RetryAfter(MAX_RETRY_AFTER)
        );
    }

    proptest! {
        #[test]
        fn waits_stay_within_their_bounds(attempt: u32, jitter: f64) {
            let policy = RetryPolicy { max_attempts: u32::MAX, ..RetryPolicy::default() };
            let jitter = Jitter::new(jitter);
            match react(ErrorKind::Transient, Attempt(attempt), &policy, jitter) {
                Reaction::RetryAfter(wait) => prop_assert!(wait <= policy.max_delay),
                Reaction::Park => prop_assert_eq!(attempt, u32::MAX),
                other => prop_assert!(false, "{:?}", other),
            }
        }
    }
}
