//! What a fault on the way to a broker leaves in doubt: events whose confirmation nobody heard.
//!
//! What lives here: which places of the broker's order may have been under way. What does not: the
//! faults, and counting what came twice.
//! Invariant: a fault that ends connections, or loses answers, excuses one repetition of what may
//! have been under way at that moment and of nothing else. More than `under_way` events never are:
//! the sinks are set so. What they had sent may be stored a little before or after the count is
//! asked, hence twice as many on each side.

use postrider_core::EventId;

use crate::deliveries::{Delivery, Place};

/// Places from the first up to the one before the last.
type Span = (u64, u64);

/// The doubts of one broker.
pub(super) struct Doubts {
    under_way: u64,
    /// Connections that the proxy had cut by its rule when it was asked last.
    cuts: u64,
    /// Faults whose place is not known yet: the broker has to be asked.
    open: usize,
    /// A state that lasts, by where it began once that is known; and whether it has ended.
    lasting: Option<(Option<u64>, bool)>,
    spans: Vec<Span>,
}

impl Doubts {
    pub(super) fn new(under_way: u64) -> Self {
        Self { under_way, cuts: 0, open: 0, lasting: None, spans: Vec::new() }
    }

    /// A fault happens now.
    pub(super) fn begin(&mut self) {
        self.open += 1;
    }

    /// From now on confirmations may come too late, until [`end_last`](Self::end_last).
    pub(super) fn last(&mut self) {
        self.lasting.get_or_insert((None, false)).1 = false;
    }

    /// They come in time again.
    pub(super) fn end_last(&mut self) {
        if let Some((_, ended)) = &mut self.lasting {
            *ended = true;
        }
    }

    /// So many connections were cut by now.
    pub(super) fn see_cuts(&mut self, cuts: u64) {
        self.open += usize::try_from(cuts.saturating_sub(self.cuts)).unwrap_or(usize::MAX);
        self.cuts = cuts;
    }

    /// Whether a place is to be asked for.
    pub(super) fn are_open(&self) -> bool {
        self.open > 0 || matches!(self.lasting, Some((None, _) | (_, true)))
    }

    /// The broker holds so many events now.
    pub(super) fn settle(&mut self, count: u64) {
        let slack = 2 * self.under_way;
        let (from, to) = (count.saturating_sub(slack), count + slack);
        self.spans.extend(std::iter::repeat_n((from, to), self.open));
        self.open = 0;
        if let Some((began, ended)) = &mut self.lasting {
            let began = *began.get_or_insert(from);
            if *ended {
                self.spans.push((began, to));
                self.lasting = None;
            }
        }
    }

    /// The events in doubt, each once for each doubt.
    pub(super) fn withheld(&self, deliveries: &[Delivery]) -> Vec<EventId> {
        let mut withheld = Vec::new();
        for (from, to) in &self.spans {
            let mut ids: Vec<EventId> = deliveries
                .iter()
                .filter(
                    |one| matches!(one.place, Place::Stored { at } if (*from..*to).contains(&at)),
                )
                .map(Delivery::id)
                .collect();
            // Twice within a span is what the doubt excuses, not two doubts.
            ids.sort_unstable_by_key(|id| id.as_uuid().as_u128());
            ids.dedup();
            withheld.append(&mut ids);
        }
        withheld
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verdict::tests::message;

    fn ids(doubts: &Doubts, count: u64) -> Vec<u128> {
        let deliveries: Vec<Delivery> = (0..count)
            .map(|at| Delivery { message: message(u128::from(at)), place: Place::Stored { at } })
            .collect();
        let withheld = doubts.withheld(&deliveries);
        withheld.iter().map(|id| id.as_uuid().as_u128()).collect()
    }

    #[test]
    fn a_cut_excuses_what_may_have_been_under_way_and_nothing_else() {
        let mut doubts = Doubts::new(2);
        assert!(!doubts.are_open() && ids(&doubts, 100).is_empty());
        doubts.see_cuts(1);
        doubts.see_cuts(1);
        assert!(doubts.are_open());
        doubts.settle(50);
        assert!(!doubts.are_open());
        assert_eq!(ids(&doubts, 100), (46..54).collect::<Vec<u128>>());
        doubts.begin();
        doubts.settle(52);
        assert_eq!(ids(&doubts, 100).iter().filter(|id| **id == 50).count(), 2);
    }

    #[test]
    fn what_lasts_excuses_from_its_begin_to_its_end() {
        let mut doubts = Doubts::new(1);
        doubts.last();
        doubts.settle(10);
        assert!(!doubts.are_open(), "nothing is asked while it lasts");
        doubts.last();
        doubts.end_last();
        assert!(doubts.are_open());
        doubts.settle(20);
        assert_eq!(ids(&doubts, 100), (8..22).collect::<Vec<u128>>());
        doubts.end_last();
        assert!(!doubts.are_open(), "nothing had begun");
    }

    #[test]
    fn an_event_that_stands_twice_in_one_doubt_is_excused_once() {
        let mut doubts = Doubts::new(5);
        doubts.begin();
        doubts.settle(1);
        let twice = [0, 1].map(|at| Delivery { message: message(7), place: Place::Stored { at } });
        assert_eq!(doubts.withheld(&twice).len(), 1);
    }
}
