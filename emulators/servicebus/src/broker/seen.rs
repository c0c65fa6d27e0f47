//! The message-ids that an entity has seen within its window of duplicate detection.
//!
//! What lives here: remembering and forgetting them. What does not: what is done with a repetition.
//! Invariant: an id is forgotten only when its window is over, never to make room.

use std::collections::{HashSet, VecDeque};

/// How many ids one entity remembers. Beyond it messages are refused, or ids would be doubled.
pub(crate) const IDS_MAX: usize = 1_000_000;

/// Ids in the order in which they came.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    ids: HashSet<String>,
    order: VecDeque<(i64, String)>,
}

impl Seen {
    /// Forgets what is over.
    pub(crate) fn forget(&mut self, now_ms: i64) {
        while self.order.front().is_some_and(|(until, _)| *until <= now_ms) {
            if let Some((_, id)) = self.order.pop_front() {
                self.ids.remove(&id);
            }
        }
    }

    /// Whether the id is new; if so, it is remembered for the window.
    pub(crate) fn is_new(&mut self, id: String, until_ms: i64) -> bool {
        if !self.ids.insert(id.clone()) {
            return false;
        }
        self.order.push_back((until_ms, id));
        true
    }

    /// Whether so many more ids can be remembered.
    pub(crate) fn has_room_for(&self, count: usize) -> bool {
        self.ids.len().saturating_add(count) <= IDS_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_new_again_when_its_window_is_over_and_not_before() {
        let mut seen = Seen::default();
        assert!(seen.is_new("a".to_owned(), 100));
        seen.forget(99);
        assert!(!seen.is_new("a".to_owned(), 199));
        // The repetition has not made the window longer.
        seen.forget(100);
        assert!(seen.is_new("a".to_owned(), 200));
    }
}
