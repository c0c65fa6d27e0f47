//! What the receiver answers: by its outage, its moods and its grudge against a few events.
//!
//! What lives here: the choice. What does not: sending it (`receiver.rs`).
//! Invariant: once healed, everything is taken and confirmed.

use std::time::Duration;

use rand::RngExt;
use rand::rngs::StdRng;
use uuid::Uuid;

use crate::schedule::{Moods, Outage};

/// Bounds of a late answer, in milliseconds: well below a relay's time-out.
const LATE_MS: std::ops::RangeInclusive<u64> = 30..=250;

/// One answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// Taken: 204.
    Confirm,
    /// Taken: 204, then the connection is closed without having said so.
    ConfirmAndClose,
    /// Taken: 204 after a while.
    Late(Duration),
    /// Taken, and the connection reset instead of an answer: the confirmation is lost.
    TakeAndReset,
    /// Taken, and never answered.
    TakeAndSaySilence,
    /// Refused with a status, and further header lines.
    Status(u16, &'static str),
}

impl Answer {
    /// Whether the receiver has the event then.
    pub fn takes(self) -> bool {
        !matches!(self, Self::Status(..))
    }

    /// Whether it has the event and the relay can't know.
    pub fn withholds(self) -> bool {
        matches!(self, Self::TakeAndReset | Self::TakeAndSaySilence)
    }
}

/// Chooses answers.
pub struct Answers {
    /// The outage under way.
    pub outage: Option<Outage>,
    moods: Moods,
    rng: StdRng,
}

const SERVER_ERROR: Answer = Answer::Status(500, "");
const THROTTLED: Answer = Answer::Status(429, "retry-after: 1\r\n");
const REFUSED: Answer = Answer::Status(400, "");

impl Answers {
    /// By moods, with randomness from `rng`.
    pub fn new(moods: Moods, rng: StdRng) -> Self {
        Self { outage: None, moods, rng }
    }

    /// Ends all misbehaviour.
    pub fn heal(&mut self) {
        self.outage = None;
        self.moods = Moods {
            server_error: 0,
            throttled: 0,
            lost_confirm: 0,
            cut: 0,
            slow: 0,
            closed: 0,
            refused_one_in: 0,
        };
    }

    /// Whether this request's connection is cut before its body was read.
    pub fn cuts_before_the_body(&mut self) -> bool {
        self.outage == Some(Outage::Refused) || self.rng.random_range(0..1_000) < self.moods.cut
    }

    /// The answer to a whole request.
    pub fn choose(&mut self, id: Uuid) -> Answer {
        match self.outage {
            Some(Outage::ServerError) => return SERVER_ERROR,
            Some(Outage::Throttled) => return THROTTLED,
            Some(Outage::Silent) => return Answer::TakeAndSaySilence,
            Some(Outage::Refused) | None => {}
        }
        let moods = self.moods;
        if moods.refused_one_in > 0 && is_disliked(id, moods.refused_one_in) {
            return REFUSED;
        }
        let late = Duration::from_millis(self.rng.random_range(LATE_MS));
        let mut drawn: u32 = self.rng.random_range(0..1_000);
        for (share, answer) in [
            (moods.server_error, SERVER_ERROR),
            (moods.throttled, THROTTLED),
            (moods.lost_confirm, Answer::TakeAndReset),
            (moods.slow, Answer::Late(late)),
            (moods.closed, Answer::ConfirmAndClose),
        ] {
            match drawn.checked_sub(share) {
                None => return answer,
                Some(rest) => drawn = rest,
            }
        }
        Answer::Confirm
    }
}

/// The same events each time, whoever sends them.
fn is_disliked(id: Uuid, one_in: u64) -> bool {
    let (_, low) = id.as_u64_pair();
    low.is_multiple_of(one_in)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::generator;

    fn moody() -> Moods {
        Moods {
            server_error: 100,
            throttled: 100,
            lost_confirm: 100,
            cut: 100,
            slow: 100,
            closed: 100,
            refused_one_in: 5,
        }
    }

    #[test]
    fn a_disliked_event_is_refused_each_time_until_the_healing() {
        let mut answers = Answers::new(moody(), generator(1, 2, "answers"));
        let disliked = Uuid::from_u64_pair(1, 10);
        assert!((0..50).all(|_| answers.choose(disliked) == REFUSED));
        answers.outage = Some(Outage::ServerError);
        answers.heal();
        assert!((0..50).all(|_| answers.choose(disliked) == Answer::Confirm));
        assert!((0..50).all(|_| !answers.cuts_before_the_body()));
    }

    #[test]
    fn every_mood_shows_and_an_outage_overrides_them() {
        let mut answers = Answers::new(moody(), generator(1, 2, "answers"));
        let liked = Uuid::from_u64_pair(1, 11);
        let given: Vec<Answer> = (0..500).map(|_| answers.choose(liked)).collect();
        for wanted in [SERVER_ERROR, THROTTLED, Answer::TakeAndReset, Answer::ConfirmAndClose] {
            assert!(given.contains(&wanted), "{wanted:?}");
        }
        assert!(given.iter().any(|answer| matches!(answer, Answer::Late(_))));
        answers.outage = Some(Outage::Silent);
        assert_eq!(answers.choose(liked), Answer::TakeAndSaySilence);
        assert!(answers.choose(liked).withholds() && answers.choose(liked).takes());
    }
}
