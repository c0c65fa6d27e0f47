//! A slot in order: found, freed of our own lost connection, or made.
//!
//! What lives here: what is done about each state of the slot. What does not: what the states are
//! (`slot.rs`), and reading.
//! Invariant: only a slot that can't be read is dropped, and only our own connection is ended.

use std::pin::pin;

use postrider_core::{Error, Result};
use tokio::time::timeout;

use super::{Past, process};
use crate::error::code_of;
use crate::wal::Wal;
use crate::wal::lsn::Lsn;
use crate::wal::slot::{self, SlotState};
use crate::wal::vigil::{self, SILENCE};
use crate::wal::wire::{Seam, SlotKind, Walsender};

/// What became of the slot since it was looked at passes: the next look finds out, and names what
/// does not. Another one may hold it, or has dropped or made it, or the server has given it up.
pub(super) fn passing(slot: &str, error: Error) -> Error {
    let text = match code_of(&error) {
        Some("55006") => format!(
            "replication slot {slot} is read by another process; it may be this one's own \
             connection of before, which the server drops after wal_sender_timeout"
        ),
        Some("42704" | "42710" | "55000") => format!(
            "replication slot {slot} or its publication was dropped, lost or made anew at this \
             moment; looking at both again"
        ),
        _ => return error,
    };
    Error::transient(text).with_source(error)
}

/// A slot to read from, and where it begins; with it the snapshot of one just made.
pub(super) async fn find_slot(
    wal: &Wal,
    walsender: &mut Walsender,
    past: &mut Past,
) -> Result<(Lsn, Option<Seam>)> {
    let connections = &wal.store.inner.connections;
    let slot = &wal.options.slot;
    let found = slot::look(connections, slot).await?;
    match found {
        SlotState::Ready { confirmed, reader } if !past.remake => {
            if let Some(reader) = reader.filter(|reader| past.reader == Some(*reader)) {
                tracing::info!(slot, reader, "ending the connection of before, which was lost");
                vigil::end_reader(connections, slot, reader).await?;
            }
            return Ok((confirmed, None));
        }
        SlotState::Ready { .. } => {
            tracing::warn!(slot, "the slot is older than its publication; making it anew");
            let dropped = slot::drop_slot(connections, slot).await;
            dropped.map_err(|error| passing(slot, error))?;
        }
        SlotState::Lost(why) => {
            tracing::warn!(slot, why, "the server gave the slot up; making it anew");
            let dropped = slot::drop_slot(connections, slot).await;
            dropped.map_err(|error| passing(slot, error))?;
        }
        SlotState::Foreign(text) => return Err(Error::transient(text)),
        SlotState::Forming => {
            return Err(Error::transient(format!(
                "replication slot {slot} is being made; it waits for the transactions that were \
                 open then"
            )));
        }
        SlotState::Missing => {}
    }
    let seam = make_slot(wal, walsender).await.map_err(|error| passing(slot, error))?;
    past.remake = false;
    tracing::info!(slot, from = %seam.consistent, "made the slot");
    Ok((seam.consistent, Some(seam)))
}

/// Makes the slot, which waits for every transaction that writes: readers are told for which.
async fn make_slot(wal: &Wal, walsender: &mut Walsender) -> Result<Seam> {
    let (slot, pid) = (&wal.options.slot, process(walsender));
    let failover = walsender.version() >= 170_000;
    let making = walsender.create_slot(slot, SlotKind::Permanent { failover });
    let mut making = pin!(vigil::over(wal, pid, making));
    loop {
        if let Ok(made) = timeout(SILENCE, &mut making).await {
            return made;
        }
        let who = vigil::oldest_writer(&wal.store.inner.connections);
        let who = tokio::select! {
            biased;
            made = &mut making => return made,
            // Without it the sentence still says what is the matter.
            who = who => who.unwrap_or_default(),
        };
        wal.hub.tell(&Error::transient(format!(
            "replication slot {slot} is being made; the server waits for the transactions that \
             were writing then{who}"
        )));
    }
}

#[cfg(test)]
mod tests {
    use postrider_core::ErrorKind;

    use super::*;
    use crate::error::{ServerError, replication_error};

    #[test]
    fn what_happens_to_a_slot_between_two_looks_passes() {
        let kind = |code: &str| {
            let (code, message) = (code.to_owned(), "no".to_owned());
            let server = ServerError { code: code.clone(), message, detail: None, hint: None };
            let error = passing("riders", replication_error("read the log", server));
            assert_eq!(code_of(&error), Some(code.as_str()));
            error.kind()
        };
        for code in ["42704", "42710", "55000", "55006"] {
            assert_eq!(kind(code), ErrorKind::Transient, "{code}");
        }
        assert_eq!(kind("42501"), ErrorKind::Permanent, "a privilege does not come by itself");
    }
}
