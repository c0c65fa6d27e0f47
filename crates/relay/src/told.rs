//! Tells a trouble that lasts once, and not at each attempt.
//!
//! What lives here: what was told last, and when it is told again. What does not: the line itself,
//! which stands where the trouble is handled. Invariant: an unchanged trouble makes one line a
//! minute at most, however often it is met, and its end is told only where its begin was; one of
//! many events makes one line for each step of their back-off at most.

use std::time::Duration;

/// How soon an unchanged trouble is told again.
const TELL_AGAIN_AFTER: Duration = Duration::from_secs(60);

/// What was last told of one trouble, and when.
#[derive(Debug, Default)]
pub(crate) struct Told(Option<(String, Duration)>);

impl Told {
    /// Whether `text` should be told at `now`; from then on it counts as told.
    pub(crate) fn is_news(&mut self, text: &str, now: Duration) -> bool {
        let known = self
            .0
            .as_ref()
            .is_some_and(|(told, at)| told == text && now.saturating_sub(*at) < TELL_AGAIN_AFTER);
        if !known {
            self.0 = Some((text.to_owned(), now));
        }
        !known
    }

    /// The trouble is over: whether it was told, so that its end should be, too.
    pub(crate) fn is_over(&mut self) -> bool {
        self.0.take().is_some()
    }
}

/// The first step between two lines of a trouble that many share, and the longest, which is that of
/// the back-off between two attempts.
const FIRST_STEP: Duration = Duration::from_secs(1);
const LONGEST_STEP: Duration = Duration::from_secs(30);
/// Without a line for this long beyond the last step the next trouble is another one.
const OVER_AFTER: Duration = Duration::from_secs(60);

/// When a trouble that many share, each with its own text, is told again: ever rarer.
#[derive(Debug, Default)]
pub(crate) struct Rarely(Option<(Duration, Duration)>);

impl Rarely {
    /// Whether a line may be told at `now`; from then on it counts as told.
    pub(crate) fn is_due(&mut self, now: Duration) -> bool {
        let step = match self.0 {
            Some((next, _)) if now < next => return false,
            Some((next, step)) if now < next + OVER_AFTER => (step * 2).min(LONGEST_STEP),
            _ => FIRST_STEP,
        };
        self.0 = Some((now + step, step));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trouble_of_many_is_told_ever_rarer() {
        let mut rarely = Rarely::default();
        let told = |rarely: &mut Rarely, from: u64, to: u64| {
            (from..to).filter(|at| rarely.is_due(Duration::from_millis(*at))).collect::<Vec<_>>()
        };
        let first = told(&mut rarely, 0, 20_000);
        assert_eq!(first, [0, 1_000, 3_000, 7_000, 15_000]);
        assert_eq!(told(&mut rarely, 20_000, 620_000).len(), 20, "one in thirty seconds");
        assert_eq!(told(&mut rarely, 800_000, 801_000), [800_000], "another trouble");
        assert_eq!(told(&mut rarely, 801_000, 801_001), [801_000]);
    }

    #[test]
    fn an_unchanged_trouble_is_told_once_a_minute_and_another_one_at_once() {
        let mut told = Told::default();
        let at = Duration::from_secs;
        assert!(told.is_news("nobody listens", at(1)));
        assert!(!told.is_news("nobody listens", at(2)));
        assert!(!told.is_news("nobody listens", at(60)));
        assert!(told.is_news("nobody listens", at(61)));
        assert!(!told.is_news("nobody listens", at(62)));
        assert!(told.is_news("the server starts", at(63)));
        assert!(told.is_news("nobody listens", at(64)));
    }

    #[test]
    fn the_end_of_a_trouble_is_told_once_and_only_after_its_begin() {
        let mut told = Told::default();
        assert!(!told.is_over());
        assert!(told.is_news("nobody listens", Duration::ZERO));
        assert!(told.is_over());
        assert!(!told.is_over());
        assert!(told.is_news("nobody listens", Duration::ZERO), "a new one is news");
    }
}
