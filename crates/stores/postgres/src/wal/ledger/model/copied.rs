//! Tables that were lost, and a copy of what they had.
//!
//! What lives here: going on from the copy, and how much the tables keep. What does not: when a
//! copy counts (`mirror/adopt.rs`).
//! Invariant: the tables have the same afterwards as before they were lost, whatever is left there.

use super::{Ledger, World};

impl World {
    pub(in crate::wal::ledger) fn remember(&mut self) {
        self.earlier = self.tables.clone();
    }

    /// The tables are as they were earlier, and what they had since comes from a copy of it.
    pub(in crate::wal::ledger) fn adopt(&mut self) {
        let copy = self.tables.load();
        let here = |system: u64| system == self.server.system;
        let is_one = copy.place.is_some_and(|place| here(place.system))
            && copy.base.as_ref().is_none_or(|base| here(base.system))
            && self.earlier.place.is_none_or(|place| here(place.system));
        if !is_one {
            return;
        }
        self.crash();
        self.tables = std::mem::take(&mut self.earlier);
        let mut ledger = Ledger::adopting(copy.clone());
        for step in ledger.adoption() {
            self.tables.write(&step);
        }
        ledger.adopted();
        assert!(ledger.adoption().is_empty());
        assert_eq!(self.tables.load(), copy);
        self.check();
    }

    /// How much is kept beyond the base.
    pub(in crate::wal::ledger) fn kept(&self) -> usize {
        self.tables.blocks.len() + self.tables.recoveries.len()
    }
}
