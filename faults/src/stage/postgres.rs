//! What faults do to a PostgreSQL server and the ways to it.
//!
//! What lives here: beginning them, and the change from a server to its older copy. What does not:
//! how it is done (`cluster.rs`), faults of every source.
//! Invariant: nothing here waits for a server: take-overs must be seen while it is away.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result};

use super::{Action, Stage};
use crate::allowance::Replaced;
use crate::relays::bound_to_us;
use crate::schedule::Fault;

/// How often the copy in the making is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(10);

impl Stage<'_> {
    /// Begins a fault of a server.
    pub(super) fn disturb_server(&mut self, fault: Fault) -> Result<()> {
        let data = self.world.postgres()?;
        match fault {
            Fault::RestartServer { how, down } => {
                if !data.cluster().restart(how, down) {
                    self.faults -= 1;
                }
            }
            Fault::Terminate { whose } => data.cluster().terminate(whose),
            Fault::Wire { whose, how, length } => {
                data.cluster().disturb(whose, how);
                self.at(length, Action::Restore { whose, how });
            }
            Fault::OpenTransaction { length, prepared } => {
                self.hold_transaction(length, prepared)?;
            }
            Fault::ReadOnly { length } => data.cluster().read_only(length),
            Fault::RaisePartitions => data.cluster().raise_partitions(),
            Fault::Slot { how, times, pause } => {
                data.cluster().disturb_slot(how, times, pause)?;
            }
            Fault::Publication { dropped, length } => {
                data.cluster().disturb_publication(dropped, length)?;
            }
            Fault::Replace { lag } => {
                data.cluster().begin_copy();
                self.at(LOOK_EVERY, Action::AwaitCopy { lag });
            }
            other => anyhow::bail!("no fault of a server: {other:?}"),
        }
        Ok(())
    }

    fn hold_transaction(&mut self, length: Duration, prepared: bool) -> Result<()> {
        let own = std::env::current_exe().context("find the own binary")?;
        let mut command = bound_to_us(&own);
        command.arg("postgres-holder").arg(self.world.postgres()?.writer_url());
        command.arg("--length-ms").arg(length.as_millis().to_string());
        command.arg("--seed").arg(self.schedule.seed.to_string());
        command.arg("--index").arg((self.schedule.index * 100 + self.faults as u64).to_string());
        if prepared {
            command.arg("--prepared");
        }
        // It may lose its connection as any client may.
        command.stderr(Stdio::null());
        self.holders.push(command.spawn().context("start a transaction's holder")?);
        Ok(())
    }

    pub(super) fn await_copy(&mut self, lag: Duration) -> Result<()> {
        match self.world.postgres()?.cluster().copy_stands() {
            true => self.at(lag, Action::Replace),
            false => self.at(LOOK_EVERY, Action::AwaitCopy { lag }),
        }
        Ok(())
    }

    /// Puts the copy in the server's place.
    pub(super) fn replace(&mut self) -> Result<()> {
        // Where a copy takes over there is one sink. It has to be there, to tell how far it is.
        let Some(at) = self.endings[0].mark()? else {
            self.at(LOOK_EVERY, Action::Replace);
            return Ok(());
        };
        let past = self.world.postgres()?.replace()?;
        let numbers: Vec<i64> = past.takeovers.iter().map(|takeover| takeover.number).collect();
        self.mark(&numbers)?;
        let at = self.endings[0].mark()?.unwrap_or(at);
        let marked = |number: &i64| self.marks.get(number).map_or(&at, |marks| &marks[0]).clone();
        let marks = numbers.iter().map(marked).collect();
        // The copy gives the numbers that follow again.
        self.marks.retain(|number, _| *number <= past.shared_takeover);
        self.replaced = Some(Replaced { past, marks, at });
        Ok(())
    }
}
