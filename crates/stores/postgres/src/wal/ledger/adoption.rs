//! Beginning with what a copy of the checkpoint says.
//!
//! What lives here: the steps that write such a standing as a whole, by the statement of every
//! checkpoint. What does not: whether it may be taken over (`mirror/adopt.rs`).
//! Invariant: until these steps are durable nothing else is; each of them alone claims no more than
//! the whole does.

use super::{After, Delivered, Ledger, Step, stored};

impl Ledger {
    /// Books that begin where `delivered` stands, which is not in the database yet.
    pub(crate) fn adopting(delivered: Delivered) -> Self {
        Self { adopting: true, ..Self::new(delivered) }
    }

    /// What has to be written first, one after the other; nothing once that was done.
    pub(crate) fn adoption(&self) -> Vec<Step> {
        let old = &self.delivered;
        let Some(to) = old.place.filter(|_| self.adopting) else { return Vec::new() };
        let whole = Step {
            to,
            base: old.base.clone(),
            after: After::Becomes(old.after.clone()),
            blocks: stored(&old.after),
            partial: old.partial,
            moves_partial: old.base.is_some(),
            recoveries_kept: 0,
            recovery: old.recoveries.first().cloned(),
        };
        let more = old.recoveries.iter().enumerate().skip(1).map(|(number, recovery)| Step {
            to,
            base: None,
            after: After::Gains(Vec::new()),
            blocks: Vec::new(),
            partial: old.partial,
            moves_partial: false,
            recoveries_kept: number,
            recovery: Some(recovery.clone()),
        });
        std::iter::once(whole).chain(more).collect()
    }

    /// Takes note that it is durable.
    pub(crate) fn adopted(&mut self) {
        self.adopting = false;
    }
}
