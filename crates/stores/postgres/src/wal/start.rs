//! Where a reader begins, and with which books.
//!
//! What lives here: the place for a checkpoint, for a copy of one, and for each `from`. What does
//! not: whether a copy counts (`mirror/adopt.rs`), and reading (`reader.rs`).
//! Invariant: the slot is held at what the database has, whatever a copy says beyond it.

use postrider_core::{Result, StartFrom};

use super::Wal;
use super::ledger::{Base, Delivered, Ledger};
use super::lsn::Lsn;
use super::mirror::Beginning;
use super::position::WalPlace;

/// What a reader begins with.
pub(super) struct Start {
    pub(super) ledger: Ledger,
    pub(super) at: StartPlace,
}

/// Where a reader begins.
pub(super) struct StartPlace {
    pub(super) place: WalPlace,
    /// The publication under which all before that was read.
    pub(super) publication: Option<String>,
    /// Whether the consumer was there before.
    pub(super) is_known: bool,
    /// Whether the place is handed out first, so that it becomes durable.
    pub(super) begins: bool,
    /// What the database has.
    pub(super) durable: Lsn,
}

impl Wal {
    /// Where a consumer begins of which the database has `known`.
    pub(super) async fn start(
        &self,
        from: StartFrom,
        known: Delivered,
        beginning: &Beginning,
    ) -> Result<Start> {
        let durable = known.place.map(|place| place.lsn);
        // Without a base it has only begun, and has missed nothing yet.
        let is_known = known.base.is_some();
        if let Beginning::Copied(copy) = beginning
            && let Some(place) = copy.place
        {
            let publication = copy.base.as_ref().map(|base| base.publication.clone());
            let ledger = Ledger::adopting(Delivered::clone(copy));
            let (durable, is_known) = (durable.unwrap_or_default(), copy.base.is_some());
            let at = StartPlace { place, publication, is_known, begins: true, durable };
            return Ok(Start { ledger, at });
        }
        let fresh = || Ledger::new(Delivered::default());
        let (place, publication, ledger, is_known) = match (from, known.place, beginning) {
            (StartFrom::After(_), Some(place), _) => {
                let publication = known.base.as_ref().map(|base| base.publication.clone());
                (place, publication, Ledger::new(known), is_known)
            }
            (StartFrom::Now, _, Beginning::Usual | Beginning::Copied(_)) => {
                let base = self.base().await?;
                let Base { system, timeline, lsn, .. } = base;
                let publication = Some(base.publication.clone());
                let mut ledger = fresh();
                ledger.candidate(base);
                (WalPlace { system, timeline, lsn, ordinal: 0 }, publication, ledger, is_known)
            }
            (_, _, beginning) => {
                let Base { system, timeline, .. } = self.base().await?;
                let is_known = match beginning {
                    Beginning::Oldest { gap } => *gap,
                    Beginning::Usual | Beginning::Copied(_) => is_known,
                };
                (WalPlace { system, timeline, lsn: Lsn(0), ordinal: 0 }, None, fresh(), is_known)
            }
        };
        // From the oldest on, it begins where the snapshot is that shows it.
        let begins = !is_known && publication.is_some();
        let durable = durable.unwrap_or(place.lsn);
        Ok(Start { ledger, at: StartPlace { place, publication, is_known, begins, durable } })
    }
}
