//! What the server says of the slot, and how far each consumer is behind in the log.
//!
//! What lives here: the look, and the forecast. What does not: what a person should do about it
//! (`advice.rs`), pending events and their age, which `progress` counts.
//! Invariant: reads only, by three short statements; needs no privilege beyond a relay's.

use std::time::{Duration, Instant};

use postrider_core::{ConsumerName, Error, Result};
use tokio_postgres::types::Type;

use super::counts::WalCounts;
use super::lsn::Lsn;
use super::slot::{self, SlotState};
use super::{PostgresWal, checkpoints};

/// Bytes are differences of places; `safe_wal_size` is NULL where nothing bounds what is kept.
const LOOK: &str = "SELECT pg_current_wal_lsn()::text, s.system_identifier, r.restart_lsn::text,
        r.confirmed_flush_lsn::text, r.safe_wal_size, r.wal_status
    FROM pg_control_system() AS s
    LEFT JOIN pg_replication_slots AS r ON r.slot_name = $1";

/// What the slot is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SlotStanding {
    /// A process reads it: the server's, by its id.
    Active(i32),
    /// Nobody reads it.
    Idle,
    /// There is none.
    Missing,
    /// It is being made, and waits for the transactions that were open then.
    Forming,
    /// The server gave it up; why.
    Lost(String),
    /// It is not Postrider's; why, and what to do.
    Foreign(String),
}

impl SlotStanding {
    /// One word for it.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Active(_) => "active",
            Self::Idle => "idle",
            Self::Missing => "missing",
            Self::Forming => "forming",
            Self::Lost(_) => "lost",
            Self::Foreign(_) => "foreign",
        }
    }
}

/// One consumer in the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WalConsumer {
    /// Who.
    pub consumer: ConsumerName,
    /// Where its checkpoint stands, as the server writes places.
    pub place: String,
    /// Log beyond it, of all databases and tables of the server, in bytes; none for a checkpoint of
    /// another cluster.
    pub lag_bytes: Option<u64>,
    /// Whether the slot can't give it what comes next, so that it reads from the table.
    pub catches_up: bool,
}

/// How the log stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WalReport {
    /// What the slot is.
    pub slot: SlotStanding,
    /// The server's own word for what is left of the log for the slot: `reserved`, `extended`,
    /// `unreserved`, `lost`.
    pub wal_status: Option<String>,
    /// The end of the log, as the server writes places.
    pub head: String,
    /// Log that the server keeps for the slot, in bytes.
    pub retained_bytes: Option<u64>,
    /// Log that may still be written before the slot is lost, in bytes; none where nothing bounds
    /// what is kept.
    pub safe_bytes: Option<u64>,
    /// Log beyond what the slot was acknowledged, in bytes.
    pub lag_bytes: Option<u64>,
    /// By name.
    pub consumers: Vec<WalConsumer>,
    written: u64,
    taken: Instant,
}

impl WalReport {
    /// When the slot will be lost if as much log is written as since `before`, an earlier report,
    /// and nobody reads it. None where nothing bounds what is kept, or nothing was written.
    pub fn lost_in(&self, before: &Self) -> Option<Duration> {
        let safe = self.safe_bytes?;
        let written = self.written.checked_sub(before.written).filter(|written| *written > 0)?;
        let passed = self.taken.checked_duration_since(before.taken)?;
        forecast(safe, written, passed)
    }
}

fn forecast(safe: u64, written: u64, passed: Duration) -> Option<Duration> {
    let nanos = passed.as_nanos().saturating_mul(u128::from(safe)).checked_div(written.into())?;
    Some(Duration::from_secs(u64::try_from(nanos / 1_000_000_000).unwrap_or(u64::MAX)))
}

impl PostgresWal {
    /// What has happened to this process's stream.
    pub fn counts(&self) -> WalCounts {
        self.wal.counts.read()
    }

    /// How the log stands, also while another process reads it.
    ///
    /// # Errors
    /// `Transient` when the database can't be reached.
    ///
    /// # Cancellation
    /// Safe: it changes nothing.
    pub async fn report(&self) -> Result<WalReport> {
        let connections = &self.store().inner.connections;
        let params = [(&self.slot() as _, Type::TEXT)];
        // The slot before the consumers: it follows them, so that a checkpoint below it is one that
        // the slot has really passed.
        let state = slot::look(connections, self.slot()).await?;
        let rows = connections.query("look at the log", LOOK, &params).await?;
        let row =
            rows.first().ok_or_else(|| Error::corrupt("the server says nothing of itself"))?;
        let head = Lsn::parse(row.get(0))?;
        let place = |number| row.get::<_, Option<&str>>(number).map(Lsn::parse).transpose();
        let behind = |place: Option<Lsn>| place.map(|place| head.0.saturating_sub(place.0));
        let (restart, confirmed) = (place(2)?, place(3)?);
        let system = row.get::<_, i64>(1).cast_unsigned();
        let confirmed_now = match &state {
            SlotState::Ready { confirmed, .. } => Some(*confirmed),
            _ => None,
        };
        let mut consumers = Vec::new();
        for (consumer, place) in checkpoints::places(self.store()).await? {
            let here = place.system == system;
            consumers.push(WalConsumer {
                consumer,
                place: place.lsn.to_string(),
                lag_bytes: here.then(|| head.0.saturating_sub(place.lsn.0)),
                catches_up: !here || confirmed_now.is_none_or(|confirmed| place.lsn < confirmed),
            });
        }
        Ok(WalReport {
            slot: standing(state),
            wal_status: row.get(5),
            head: head.to_string(),
            retained_bytes: behind(restart),
            safe_bytes: row.get::<_, Option<i64>>(4).map(|bytes| u64::try_from(bytes).unwrap_or(0)),
            lag_bytes: behind(confirmed),
            consumers,
            written: head.0,
            taken: Instant::now(),
        })
    }
}

fn standing(state: SlotState) -> SlotStanding {
    match state {
        SlotState::Missing => SlotStanding::Missing,
        SlotState::Forming => SlotStanding::Forming,
        SlotState::Ready { reader: Some(pid), .. } => SlotStanding::Active(pid),
        SlotState::Ready { reader: None, .. } => SlotStanding::Idle,
        SlotState::Lost(why) => SlotStanding::Lost(why),
        SlotState::Foreign(text) => SlotStanding::Foreign(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_forecast_is_the_room_by_the_rate() {
        let second = Duration::from_secs(1);
        assert_eq!(forecast(600, 10, second), Some(Duration::from_secs(60)));
        assert_eq!(forecast(0, 10, second), Some(Duration::ZERO));
        assert_eq!(forecast(600, 0, second), None);
        assert!(forecast(u64::MAX, 1, Duration::from_secs(u64::MAX)).is_some());
    }
}
