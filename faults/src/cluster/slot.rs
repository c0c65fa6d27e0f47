//! What is done to the replication slot, and to the publication behind it.
//!
//! What lives here: doing it, against a relay that makes the slot anew. What does not: the
//! functions in the database by which it is done (`world/wal.rs`).
//! Invariant: the watch over the slot knows of everything that is done to it by hand, for as long
//! as it lasts.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use postrider_servers::postgres::Server;

use super::{Cluster, insisted};
use crate::schedule::{Schedule, SlotFault};
use crate::watch::Watch;

/// Each writes and leaves a segment of the log; so many are more than the server may keep.
const SEGMENTS: usize = 4;
/// How often the server is asked to give the slot up.
const TRIES: usize = 5;

/// Log is kept for a slot by these, otherwise.
const KEEP: [(&str, &str); 2] = [("max_slot_wal_keep_size", "'1MB'"), ("wal_keep_size", "0")];

/// Faults at the publication take turns: each of them leaves it whole.
static PUBLICATION: Mutex<()> = Mutex::new(());

impl Cluster {
    /// Begins to watch the slot.
    ///
    /// # Errors
    /// When there is no runtime.
    pub fn watch(&mut self, schedule: &Schedule) -> Result<()> {
        self.watch = Some(Watch::start(self.server(), schedule.sinks().len())?);
        Ok(())
    }

    /// What must not be and was seen of the slot.
    pub fn watched(&self) -> Vec<String> {
        self.watch.as_ref().map(Watch::findings).unwrap_or_default()
    }

    /// Does something to the slot, and again each time a while after it was made anew.
    ///
    /// # Errors
    /// When nobody watches it.
    pub fn disturb_slot(&mut self, how: SlotFault, times: u32, pause: Duration) -> Result<()> {
        let pass = self.watch.as_ref().context("the slot is watched")?.pass();
        let server = self.server();
        self.jobs.push(std::thread::spawn(move || {
            for time in 0..times {
                if time > 0 {
                    insisted(&server, "SELECT fault.await_slot()")?;
                    std::thread::sleep(pause);
                }
                let _unseen = pass.blindfold();
                match how {
                    SlotFault::Drop => insisted(&server, "SELECT fault.drop_slot()").map(drop),
                    SlotFault::Advance => {
                        insisted(&server, "SELECT fault.advance_slot()").map(drop)
                    }
                    SlotFault::Lose => lose(&server),
                }?;
            }
            Ok(())
        }));
        Ok(())
    }

    /// Takes the outbox out of the publication for a while, or the publication away.
    ///
    /// # Errors
    /// When nobody watches the slot, which is made anew then.
    pub fn disturb_publication(&mut self, dropped: bool, length: Duration) -> Result<()> {
        let pass = self.watch.as_ref().context("the slot is watched")?.pass();
        let server = self.server();
        self.jobs.push(std::thread::spawn(move || {
            let _turn = PUBLICATION.lock().unwrap_or_else(PoisonError::into_inner);
            let _unseen = pass.blindfold();
            let taken = match dropped {
                true => "DROP PUBLICATION IF EXISTS postrider_outbox",
                false => "ALTER PUBLICATION postrider_outbox DROP TABLE ONLY postrider.outbox",
            };
            insisted(&server, taken)?;
            std::thread::sleep(length);
            insisted(&server, "SELECT fault.publish()").map(drop)
        }));
        Ok(())
    }
}

/// Has the server give the slot up: so much log is kept for it that it may not.
fn lose(server: &Arc<Server>) -> Result<()> {
    for (setting, value) in KEEP {
        insisted(server, &format!("ALTER SYSTEM SET {setting} = {value}"))?;
    }
    insisted(server, "SELECT pg_reload_conf()")?;
    for _ in 0..TRIES {
        for _ in 0..SEGMENTS {
            insisted(server, "SELECT pg_logical_emit_message(false, 'fault', repeat('x', 99999))")?;
            insisted(server, "SELECT pg_switch_wal()")?;
        }
        insisted(server, "CHECKPOINT")?;
        let kept = "SELECT count(*) FROM pg_replication_slots
            WHERE slot_name = 'postrider_outbox' AND wal_status <> 'lost'";
        // It is lost, or made anew already by a relay that saw it.
        if insisted(server, kept)? == "0" {
            break;
        }
    }
    for (setting, _) in KEEP {
        insisted(server, &format!("ALTER SYSTEM RESET {setting}"))?;
    }
    insisted(server, "SELECT pg_reload_conf()").map(drop)
}
