//! The window: records read and not yet behind the checkpoint.
//!
//! What lives here: finding the contiguous prefix of finished records, and its position and tally.
//! What does not: when to write a checkpoint.
//! Invariant: the prefix never passes a record that is neither confirmed nor a dead letter.

use std::collections::VecDeque;

use postrider_core::{Position, Tally};

/// Numbers records in the order in which this pipeline read them.
pub(crate) type Seq = u64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    Open,
    Published,
    Parked,
    /// A position without a record.
    Passed,
}

#[derive(Debug)]
struct Slot {
    position: Position,
    fate: Fate,
}

#[derive(Debug, Default)]
pub(crate) struct Window {
    slots: VecDeque<Slot>,
    /// Number of the front slot.
    base: Seq,
    /// End of the contiguous prefix, if it moved since it was last taken.
    prefix: Option<Position>,
    tally: Tally,
    /// Highest number that left `Open`, plus one.
    high: Seq,
}

impl Window {
    /// A record that was read; finished later by its number.
    pub(crate) fn push(&mut self, position: Position) -> Seq {
        self.slots.push_back(Slot { position, fate: Fate::Open });
        self.base + self.slots.len() as Seq - 1
    }

    /// A position without a record: where a page ended.
    pub(crate) fn pass(&mut self, position: Position) {
        if self.slots.back().is_some_and(|last| last.position == position) {
            return;
        }
        self.slots.push_back(Slot { position, fate: Fate::Passed });
        self.advance();
    }

    /// Finishes a record.
    pub(crate) fn finish(&mut self, seq: Seq, fate: Fate) {
        assert!(fate != Fate::Open, "a finished record has a fate");
        let index = usize::try_from(seq - self.base).expect("the window fits memory");
        let slot =
            self.slots.get_mut(index).expect("a record is finished once, while in the window");
        assert!(slot.fate == Fate::Open, "record {seq} is finished twice");
        slot.fate = fate;
        self.high = self.high.max(seq + 1);
        if index == 0 {
            self.advance();
        }
    }

    fn advance(&mut self) {
        while let Some(front) = self.slots.front() {
            match front.fate {
                Fate::Open => return,
                Fate::Published => self.tally.published += 1,
                Fate::Parked => self.tally.parked += 1,
                Fate::Passed => {}
            }
            let front = self.slots.pop_front().expect("there is a front");
            self.prefix = Some(front.position);
            self.base += 1;
        }
    }

    /// The new end of the prefix and what happened up to it, once.
    pub(crate) fn take_prefix(&mut self) -> Option<(Position, Tally)> {
        let position = self.prefix.take()?;
        Some((position, std::mem::take(&mut self.tally)))
    }

    pub(crate) fn has_prefix(&self) -> bool {
        self.prefix.is_some()
    }

    /// Records and positions held.
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Finished records up to the prefix that was not taken yet.
    pub(crate) fn finished(&self) -> usize {
        usize::try_from(records(&self.tally)).unwrap_or(usize::MAX)
    }

    /// Number of the oldest record that is not finished.
    pub(crate) fn oldest(&self) -> Seq {
        self.base
    }

    /// Every finished record has a number below this.
    pub(crate) fn high(&self) -> Seq {
        self.high
    }
}

/// How many records a tally is of.
pub(crate) fn records(tally: &Tally) -> u64 {
    tally.published + tally.parked
}

#[cfg(test)]
mod tests {
    use super::*;

    fn position(n: u8) -> Position {
        Position::from_bytes(&[n]).expect("short")
    }

    #[test]
    fn a_gap_ends_the_prefix() {
        let mut window = Window::default();
        let seqs: Vec<Seq> = (0..4).map(|n| window.push(position(n))).collect();
        window.finish(seqs[1], Fate::Published);
        window.finish(seqs[3], Fate::Published);
        assert_eq!(window.take_prefix(), None, "record 0 is open");
        window.finish(seqs[0], Fate::Parked);
        assert_eq!((window.len(), window.finished()), (2, 2));
        assert_eq!(window.take_prefix(), Some((position(1), Tally { published: 1, parked: 1 })));
        assert_eq!(window.finished(), 0);
        assert_eq!(window.take_prefix(), None, "taken once");
        window.finish(seqs[2], Fate::Published);
        assert_eq!(window.take_prefix(), Some((position(3), Tally { published: 2, parked: 0 })));
        assert_eq!(window.len(), 0);
    }

    #[test]
    fn the_end_of_a_page_counts_once_all_before_is_finished() {
        let mut window = Window::default();
        let seq = window.push(position(1));
        window.pass(position(9));
        assert_eq!(window.take_prefix(), None);
        window.finish(seq, Fate::Published);
        assert_eq!(window.take_prefix(), Some((position(9), Tally { published: 1, parked: 0 })));
        window.pass(position(10));
        assert_eq!(window.take_prefix(), Some((position(10), Tally::default())));
    }
}
