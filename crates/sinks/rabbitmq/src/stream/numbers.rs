//! Publishing ids: which one a producer gives next, and whose an id is.
//!
//! What lives here: the parts of an id. What does not: giving one to an event (`lane.rs`).
//! Invariant: ids of one producer rise by one. Every id of a producer is above the id that the
//! server told at its beginning, and above all ids of producers that began earlier, as far as
//! their clocks agree. No two that begin at the same moment count the same numbers.
//!
//! ```text
//! 0 | the tick in which the producer began: 39 bits | a number that counts on from a drawn one: 24
//! ```

use std::hash::{BuildHasher, Hasher, RandomState};

use postrider_core::{Result, Timestamp};

const COUNTER_BITS: u32 = 24;
const COUNTER_END: u64 = (1 << COUNTER_BITS) - 1;
/// A producer begins to count in the lower half, so that it has 8,388,608 ids or more.
const DRAWN: u64 = (1 << (COUNTER_BITS - 1)) - 1;
/// The highest bit stays free: other clients read ids as signed numbers.
const MAX_TICK: u64 = (1 << (63 - COUNTER_BITS)) - 1;
/// Tick 0: the beginning of 2026, in milliseconds. The last one is in 2094.
const BEGINNING_MS: u64 = 1_767_225_600_000;
/// So many in a second.
const TICKS: u64 = 256;
/// A producer ends before its ids do, at a moment when nothing is under way.
const SPARE: u64 = 1 << 16;

/// The ids of one producer, from its beginning to its end. Never of two: what another producer of
/// its reference stores, before it or after it, is told by the id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Numbers {
    /// Below the first one.
    begin: u64,
    /// What was given last; `begin` before that.
    last: u64,
}

impl Numbers {
    /// Those of a producer that begins where the server has `last` as the last id of its reference.
    ///
    /// The tick ranks producers that began one after another and of which the earlier stored
    /// nothing: what comes late of it is dropped. Where a clock is behind, or was, ids are above
    /// `last` all the same, and the drawn number ranks them.
    ///
    /// # Errors
    /// When there are no higher ones.
    pub(crate) fn after(last: u64, now: Timestamp) -> Result<Self> {
        let drawn = RandomState::new().build_hasher().finish() & DRAWN;
        let now = now.as_millis().saturating_sub(BEGINNING_MS);
        let now = now / 1_000 * TICKS + now % 1_000 * TICKS / 1_000;
        let tick = now.max((last >> COUNTER_BITS) + 1);
        if tick > MAX_TICK {
            return Err(crate::error::throttled(
                "all publishing ids of this producer's name are used up; give it another \
                 (producer), and look at the clock",
            ));
        }
        let begin = tick << COUNTER_BITS | drawn;
        Ok(Self { begin, last: begin })
    }

    /// The next id. None once all are given; then a new producer begins.
    pub(crate) fn next(&mut self) -> Option<u64> {
        if self.last & COUNTER_END == COUNTER_END {
            return None;
        }
        self.last += 1;
        Some(self.last)
    }

    /// The id that was given last.
    pub(crate) fn last(&self) -> u64 {
        self.last
    }

    /// Whether one was given.
    pub(crate) fn are_used(&self) -> bool {
        self.last > self.begin
    }

    /// Whether so few are left that another producer is to begin.
    pub(crate) fn run_short(&self) -> bool {
        COUNTER_END - (self.last & COUNTER_END) < SPARE
    }

    /// Whether an id is of a producer that outranks this one: it is none of those that were given.
    pub(crate) fn are_below(&self, id: u64) -> bool {
        id > self.last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(tick: u64) -> Timestamp {
        Timestamp::from_millis(BEGINNING_MS + (tick * 1_000).div_ceil(TICKS))
    }

    #[test]
    fn a_later_producer_is_above_all_of_an_earlier_one() {
        let mut first = Numbers::after(0, at(50)).expect("ids");
        let one = first.next().expect("an id");
        assert_eq!(first.next(), Some(one + 1));
        first.last = (first.last | COUNTER_END) - 1;
        let most = first.next().expect("the last one");
        assert_eq!(first.next(), None);
        // Also where the clock is behind.
        for (seen, now) in [(one, 50), (most, 50), (most, 0), (most, 90)] {
            let mut second = Numbers::after(seen, at(now)).expect("ids");
            let next = second.next().expect("an id");
            assert!(next > most && first.are_below(next) && !second.are_below(most));
        }
        assert!(!first.are_below(most) && !first.are_below(0));
    }

    /// What an earlier one sent, and the server has not stored yet, is dropped when it comes.
    #[test]
    fn a_later_producer_outranks_one_that_stored_nothing() {
        for seen in [0, 7 << COUNTER_BITS | 12] {
            for tick in 50..100 {
                let mut dead = Numbers::after(seen, at(tick)).expect("ids");
                dead.last = (dead.last | COUNTER_END) - 1;
                let late = dead.next().expect("its last one");
                let mut heir = Numbers::after(seen, at(tick + 1)).expect("ids");
                assert!(heir.next().expect("an id") > late);
            }
        }
    }

    #[test]
    fn two_that_begin_at_once_differ_and_know_each_other() {
        let all: Vec<Numbers> = (0..20).map(|_| Numbers::after(7, at(9)).expect("ids")).collect();
        let begins: std::collections::HashSet<u64> = all.iter().map(|one| one.begin).collect();
        assert_eq!(begins.len(), 20, "one in 44,000 times two of twenty are equal");
        let highest = all.iter().max_by_key(|one| one.begin).expect("twenty");
        let lower = all.iter().filter(|one| one.are_below(highest.last + 1)).count();
        assert_eq!(lower, 20);
        assert!(all.iter().all(|one| one == highest || !highest.are_below(one.last + 1)));
    }

    #[test]
    fn ids_stay_positive_and_end() {
        let last = MAX_TICK << COUNTER_BITS;
        let numbers = Numbers::after(last - 1, at(0)).expect("ids");
        assert!(i64::try_from(numbers.last()).is_ok());
        assert!(Numbers::after(last, at(0)).is_err() && Numbers::after(u64::MAX, at(0)).is_err());
        assert!(Numbers::after(0, at(MAX_TICK + 1)).is_err());
        // A clock from before 2026 is one that is behind.
        let early = Numbers::after(0, Timestamp::from_millis(0)).expect("ids");
        assert_eq!(early.begin >> COUNTER_BITS, 1);
    }

    #[test]
    fn a_producer_ends_before_its_ids_do() {
        let mut numbers = Numbers::after(0, at(1)).expect("ids");
        assert!(!numbers.run_short() && !numbers.are_used());
        numbers.next().expect("an id");
        assert!(numbers.are_used());
        numbers.last = (numbers.last | COUNTER_END) - SPARE + 1;
        assert!(numbers.run_short() && numbers.next().is_some());
    }
}
