//! A source that is read from its database's log, as commands see it.
//!
//! What lives here: what can be asked of such a log, and the answers. What does not: any database.
//! Invariant: numbers and words only; nothing here knows whose log it is.

use std::time::Duration;

use futures_util::future::BoxFuture;
use postrider_core::Result;

/// A log beside the source.
pub(crate) trait Log: Send + Sync {
    /// What `init` has made of it, for people.
    fn made(&self) -> String;

    /// Whether everything is there that reading it needs. An error names what is missing, with the
    /// remedy.
    fn ready(&self) -> BoxFuture<'_, Result<()>>;

    /// How it stands now. The first call may take a second, to see how fast the log grows.
    fn standing(&self) -> BoxFuture<'_, Result<LogStanding>>;

    /// How the copy of the checkpoints stands, if there is to be one.
    fn mirror(&self) -> BoxFuture<'_, Option<LogMirror>>;

    /// For how long the copy has been behind the checkpoint of each consumer of this process.
    fn mirror_behind(&self) -> Vec<(String, Duration)>;
}

/// A copy of the checkpoints outside of the database.
#[derive(Debug, Clone)]
pub(crate) struct LogMirror {
    /// Where, without secrets.
    pub(crate) place: String,
    /// Consumers, by name.
    pub(crate) consumers: Vec<MirrorConsumer>,
    /// What keeps it from being read.
    pub(crate) trouble: Option<String>,
}

/// A consumer in the copy.
#[derive(Debug, Clone)]
pub(crate) struct MirrorConsumer {
    pub(crate) name: String,
    /// Where it stands there.
    pub(crate) place: String,
    /// How long ago that was written.
    pub(crate) age: Duration,
}

/// How a log stands.
#[derive(Debug, Clone)]
pub(crate) struct LogStanding {
    /// The server's slot.
    pub(crate) slot: String,
    /// One word for what it is.
    pub(crate) state: &'static str,
    /// Why, or what to do, where the word does not say it.
    pub(crate) detail: Option<String>,
    /// The server's process that reads it.
    pub(crate) reader: Option<i32>,
    /// The server's own word for what is left of the log.
    pub(crate) wal_status: Option<String>,
    /// The end of the log.
    pub(crate) head: String,
    /// Log that is kept for the slot.
    pub(crate) retained_bytes: Option<u64>,
    /// Log that may still be written before the slot is lost; none without a bound.
    pub(crate) safe_bytes: Option<u64>,
    /// Log beyond what the slot was acknowledged.
    pub(crate) lag_bytes: Option<u64>,
    /// When the slot is lost at the present rate.
    pub(crate) lost_in: Option<Duration>,
    /// Consumers, by name.
    pub(crate) consumers: Vec<LogConsumer>,
    /// Of this process: times that a consumer began to catch up from the table.
    pub(crate) catch_ups: u64,
    /// Of this process: connections that were lost or could not be made.
    pub(crate) reconnects: u64,
    /// Of this process: messages of unknown kinds.
    pub(crate) unknown_messages: u64,
}

/// A consumer in the log.
#[derive(Debug, Clone)]
pub(crate) struct LogConsumer {
    pub(crate) name: String,
    /// Where its checkpoint stands.
    pub(crate) place: String,
    /// Log beyond it; none where it can't be compared.
    pub(crate) lag_bytes: Option<u64>,
    /// Whether it goes on from the table, the slot having passed it.
    pub(crate) catches_up: bool,
}

/// Every word for a slot, in the order of its number in `/metrics`.
pub(crate) const STATES: &[&str] = &["active", "idle", "missing", "forming", "lost", "foreign"];
