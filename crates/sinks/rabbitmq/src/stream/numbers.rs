//! Publishing ids: which one a producer gives next, and whose an id is.
//!
//! What lives here: the parts of an id. What does not: giving one to an event (`lane.rs`).
//! Invariant: ids of one producer rise by one. Every id of a later producer is above every id of an
//! earlier one, and no two producers have one in common.
//!
//! ```text
//! 0 | era: 19 bits | a drawn number: 20 bits | counter: 24 bits
//! ```

use std::hash::{BuildHasher, Hasher, RandomState};

use postrider_core::Result;

const COUNTER_BITS: u32 = 24;
const DRAWN_BITS: u32 = 20;
const ERA_SHIFT: u32 = COUNTER_BITS + DRAWN_BITS;
/// The highest bit stays free: other clients read ids as signed numbers.
const MAX_ERA: u64 = (1 << (63 - ERA_SHIFT)) - 1;

/// The ids of one producer, from its beginning to its end. Never of two: what another producer of
/// its reference stores, before it or after it, is told by the id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Numbers {
    /// Era and drawn number.
    producer: u64,
    /// What was given last.
    counter: u64,
}

impl Numbers {
    /// Those of a producer that begins where the server has `last` as the last id of its reference.
    ///
    /// # Errors
    /// When there are no higher ones.
    pub(crate) fn after(last: u64) -> Result<Self> {
        let drawn = RandomState::new().build_hasher().finish() & ((1 << DRAWN_BITS) - 1);
        let era = (last >> ERA_SHIFT) + 1;
        if era > MAX_ERA {
            return Err(crate::error::throttled(
                "all publishing ids of this producer's name are used up; give it another \
                 (producer)",
            ));
        }
        Ok(Self { producer: era << DRAWN_BITS | drawn, counter: 0 })
    }

    /// The next id. None once all are given; then a new producer begins.
    pub(crate) fn next(&mut self) -> Option<u64> {
        if self.counter >= (1 << COUNTER_BITS) - 1 {
            return None;
        }
        self.counter += 1;
        Some(self.last())
    }

    /// The id that was given last.
    pub(crate) fn last(&self) -> u64 {
        self.producer << COUNTER_BITS | self.counter
    }

    /// Whether one was given.
    pub(crate) fn is_used(&self) -> bool {
        self.counter > 0
    }

    /// Whether an id is of a producer that outranks this one.
    pub(crate) fn are_below(&self, id: u64) -> bool {
        id >> COUNTER_BITS > self.producer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_producer_is_above_all_of_an_earlier_one() {
        let mut first = Numbers::after(0).expect("ids");
        let one = first.next().expect("an id");
        assert_eq!(first.next(), Some(one + 1));
        first.counter = (1 << COUNTER_BITS) - 2;
        let most = first.next().expect("the last one");
        assert_eq!(first.next(), None);
        for seen in [one, most] {
            let mut second = Numbers::after(seen).expect("ids");
            let next = second.next().expect("an id");
            assert!(next > most && first.are_below(next) && !second.are_below(most));
        }
        assert!(!first.are_below(most) && !first.are_below(0));
    }

    #[test]
    fn two_that_begin_at_once_differ() {
        let drawn: std::collections::HashSet<u64> =
            (0..20).map(|_| Numbers::after(7).expect("ids").producer).collect();
        // One in fifty thousand times two of twenty are equal.
        assert!(drawn.len() >= 19, "{drawn:?}");
    }

    #[test]
    fn ids_stay_positive_and_end() {
        let last = MAX_ERA << ERA_SHIFT;
        assert!(i64::try_from(Numbers::after(last - 1).expect("ids").last()).is_ok());
        assert!(Numbers::after(last).is_err() && Numbers::after(u64::MAX).is_err());
    }
}
