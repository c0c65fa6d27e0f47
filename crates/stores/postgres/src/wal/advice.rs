//! What a person should look at where an outbox is read from the log.
//!
//! What lives here: the server's settings that matter, and a sentence with the remedy for each
//! finding. What does not: the numbers (`report.rs`); what every outbox has (`crate::advice`).
//! Invariant: reads only, in one statement; what can't be seen from this role is left out.

use std::time::Duration;

use postrider_core::{Error, Result};
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::report::{SlotStanding, WalReport};
use super::setup::UNLOGGED;
use super::{PostgresWal, Recover};
use crate::names::literal;

/// A slot that will be lost sooner needs attention.
const SOON: Duration = Duration::from_secs(3600);

/// Settings come as the server's own people read them. A walsender that reads a logical slot is no
/// standby.
const LOOK: &str = ", current_setting('max_slot_wal_keep_size'),
        current_setting('wal_sender_timeout'),
        nullif(current_setting('idle_replication_slot_timeout', true), '0'),
        current_setting('synchronized_standby_slots', true),
        current_setting('logical_decoding_work_mem'),
        (SELECT (to_jsonb(r) ->> 'failover')::boolean FROM pg_replication_slots AS r
            WHERE r.slot_name = $1),
        EXISTS (SELECT FROM pg_replication_slots AS r WHERE r.slot_type = 'physical')
            OR EXISTS (SELECT FROM pg_stat_replication AS w WHERE w.state = 'streaming'
                AND w.pid NOT IN (SELECT r.active_pid FROM pg_replication_slots AS r
                    WHERE r.active_pid IS NOT NULL AND r.slot_type = 'logical')),
        (SELECT t.spill_txns FROM pg_stat_replication_slots AS t
            WHERE t.slot_name = $1 AND t.spill_txns > 0)";

/// What was found, as the server says it.
#[derive(Debug, Clone, Default)]
struct Found {
    unlogged: Option<String>,
    keep: String,
    sender_timeout: String,
    /// 18 and newer, unless it is off.
    idle_timeout: Option<String>,
    /// 17 and newer.
    synchronized: Option<String>,
    work_mem: String,
    /// 17 and newer, of a slot that is there.
    failover: Option<bool>,
    standbys: bool,
    spilled: Option<i64>,
}

impl Found {
    fn of(row: &Row) -> Self {
        let text = |at: usize| row.get::<_, Option<String>>(at);
        Self {
            unlogged: text(0),
            keep: text(1).unwrap_or_default(),
            sender_timeout: text(2).unwrap_or_default(),
            idle_timeout: text(3),
            synchronized: text(4),
            work_mem: text(5).unwrap_or_default(),
            failover: row.get(6),
            standbys: row.get(7),
            spilled: row.get(8),
        }
    }
}

/// What a person should look at, a sentence each, with the remedy.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct WalAdvice {
    /// Trouble now.
    pub attention: Vec<String>,
    /// What is weaker than it could be, by the way in which the server is set up.
    pub weaker: Vec<String>,
}

impl PostgresWal {
    /// What a person should look at, by a report and, if it can be told, when the slot will be lost
    /// ([`WalReport::lost_in`]). With what is lost where the table is an application's own.
    ///
    /// # Errors
    /// `Transient` when the database can't be reached.
    ///
    /// # Cancellation
    /// Safe: it changes nothing.
    pub async fn advice(&self, report: &WalReport, lost_in: Option<Duration>) -> Result<WalAdvice> {
        let inner = &self.store().inner;
        let sql = inner.names.fill(&format!("SELECT {UNLOGGED}{LOOK}"));
        let params = [(&self.slot() as _, Type::TEXT)];
        let rows = inner.connections.query("look at the server's settings", &sql, &params).await?;
        let row =
            rows.first().ok_or_else(|| Error::corrupt("the server says nothing of itself"))?;
        let found = Found::of(row);
        let halts = self.wal.options.recover == Recover::Halt;
        let judged = Judged { slot: self.slot(), report, lost_in, found: &found, halts };
        let mut weaker = self.store().adopted_warnings_of(true).await?;
        weaker.extend(judged.weaker());
        Ok(WalAdvice { attention: judged.attention(), weaker })
    }
}

struct Judged<'a> {
    slot: &'a str,
    report: &'a WalReport,
    lost_in: Option<Duration>,
    found: &'a Found,
    halts: bool,
}

impl Judged<'_> {
    fn attention(&self) -> Vec<String> {
        let mut found = Vec::new();
        found.extend(self.unreadable());
        if self.halts {
            found.extend(self.passed());
        }
        if self.report.wal_status.as_deref() == Some("unreserved") {
            found.push(format!(
                "replication slot {} is about to be lost: it holds more log than \
                 max_slot_wal_keep_size ({}); start the relay, or raise that",
                self.slot, self.found.keep
            ));
        } else if let Some(left) = self.lost_in.filter(|left| *left < SOON) {
            found.push(format!(
                "replication slot {} will be lost in about {} min at the rate of this moment, by \
                 max_slot_wal_keep_size ({}); start the relay or see why it is behind, or raise \
                 that",
                self.slot,
                left.as_secs() / 60,
                self.found.keep
            ));
        }
        if let Some(tables) = &self.found.unlogged {
            found.push(format!(
                "what is appended to {tables} is not in the log: UNLOGGED; run ALTER TABLE … SET \
                 LOGGED for each"
            ));
        }
        found
    }

    /// Why nobody can read the slot as it is.
    fn unreadable(&self) -> Option<String> {
        let slot = self.slot;
        let next = match self.halts {
            true => {
                "recover = \"halt\" keeps the relay from reading on: see what is pending, then set \
                 recover = \"auto\" and start it"
            }
            false => "the relay makes it anew and reads what is missing from the table",
        };
        let known = !self.report.consumers.is_empty();
        match &self.report.slot {
            SlotStanding::Active(_) | SlotStanding::Idle => None,
            SlotStanding::Missing => {
                known.then(|| format!("replication slot {slot} is gone; {next}"))
            }
            SlotStanding::Lost(why) => {
                Some(format!("replication slot {slot} is lost ({why}); {next}"))
            }
            SlotStanding::Forming => Some(format!(
                "replication slot {slot} is being made and waits for every transaction that was \
                 open then, in all databases of the server; see pg_stat_activity, by xact_start"
            )),
            SlotStanding::Foreign(text) => Some(text.clone()),
        }
    }

    /// Consumers that the slot has passed. While there is no slot, all are.
    fn passed(&self) -> Option<String> {
        if !matches!(self.report.slot, SlotStanding::Active(_) | SlotStanding::Idle) {
            return None;
        }
        let passed = self.report.consumers.iter().filter(|consumer| consumer.catches_up);
        let names: Vec<_> =
            passed.map(|one| format!("{:?} at {}", one.consumer.as_str(), one.place)).collect();
        (!names.is_empty()).then(|| {
            let next = match self.halts {
                true => "recover = \"halt\" keeps it from that: set recover = \"auto\" to allow it",
                false => "the relay does so by itself, in the order of the table",
            };
            format!(
                "what comes next for {} has to be read from the table, the slot has passed it; \
                 {next}",
                names.join(" and ")
            )
        })
    }

    fn weaker(&self) -> Vec<String> {
        let Self { slot, found: has, .. } = self;
        let mut found = Vec::new();
        if !self.halts {
            found.extend(self.passed());
        }
        if has.keep == "-1" {
            found.push(
                "max_slot_wal_keep_size is -1: while no relay reads, the server keeps log until \
                 its disk is full; ALTER SYSTEM SET max_slot_wal_keep_size to what the disk can \
                 spare: a slot that is lost by it costs a catch-up from the table, no event"
                    .to_owned(),
            );
        }
        if has.sender_timeout == "0" {
            found.push(
                "wal_sender_timeout is 0: the slot stays with a relay whose host has vanished \
                 until TCP gives up; set it, 60s is the server's default"
                    .to_owned(),
            );
        }
        if let Some(timeout) = &has.idle_timeout {
            found.push(format!(
                "idle_replication_slot_timeout is {timeout}: a slot that nobody has read for that \
                 long is lost at the next checkpoint of the server, which costs a catch-up from \
                 the table"
            ));
        }
        if has.standbys && has.failover == Some(false) {
            found.push(format!(
                "there are standbys, and replication slot {slot} was made without failover: after \
                 a fail-over the relay catches up from the table; with the relay stopped, SELECT \
                 pg_drop_replication_slot({}), and it makes one with it",
                literal(slot)
            ));
        }
        let unsynchronized = has.synchronized.as_deref() == Some("");
        if has.standbys && has.failover == Some(true) && unsynchronized {
            found.push(
                "synchronized_standby_slots is empty: events may be sent that a standby does not \
                 have yet, and after a fail-over to it the source knows nothing of them; name the \
                 standbys' physical slots there"
                    .to_owned(),
            );
        }
        if let Some(times) = has.spilled {
            found.push(format!(
                "the server has put {times} transactions on disk to decode them, being larger than \
                 logical_decoding_work_mem ({}); ALTER ROLE … SET logical_decoding_work_mem for \
                 the relay's role makes them fewer",
                has.work_mem
            ));
        }
        found
    }
}
