//! The inbox: an event's effect exactly once, however often it is delivered.
//!
//! What lives here: "seen before?" inside the handler's own transaction, and its expiry. What does
//! not: receiving messages.
//! Invariant: an id is forgotten only when the broker can no longer deliver it again.

use std::time::Duration;

use postrider_core::{ConsumerName, Error, EventId, Result, Timestamp};
use rusqlite::Transaction;

use crate::SqliteStore;
use crate::clock::{to_ms, wall_ms};
use crate::error::failed;
use crate::positions::ms;

/// Takes the write lock, so that of two deliveries at once one waits and then sees the other's.
const FIRST_TIME: &str = "INSERT INTO postrider_inbox (consumer, id, seen_ms) VALUES (?1, ?2, ?3)
    ON CONFLICT (consumer, id) DO NOTHING";

/// Notes in `tx` that `consumer` handles the event, and tells whether it is the first time. If
/// not, skip the handler and commit.
///
/// # Errors
/// `Transient` when the database is locked or full.
pub fn first_time(tx: &Transaction<'_>, consumer: &ConsumerName, id: EventId) -> Result<bool> {
    note(tx, consumer, id, wall_ms())
}

fn note(tx: &Transaction<'_>, consumer: &ConsumerName, id: EventId, now_ms: i64) -> Result<bool> {
    tx.prepare_cached(FIRST_TIME)
        .and_then(|mut statement| {
            statement.execute((consumer.as_str(), id.as_uuid().as_bytes().as_slice(), now_ms))
        })
        .map(|added| added == 1)
        .map_err(failed("note the event as handled"))
}

/// [`first_time`] inside a transaction of `sqlx`.
///
/// # Errors
/// As [`first_time`].
#[cfg(feature = "sqlx")]
pub async fn first_time_sqlx(
    tx: &mut sqlx::Transaction<'_, sqlx::Sqlite>,
    consumer: &ConsumerName,
    id: EventId,
) -> Result<bool> {
    sqlx::query(FIRST_TIME)
        .bind(consumer.as_str())
        .bind(id.as_uuid().as_bytes().as_slice())
        .bind(wall_ms())
        .execute(&mut **tx)
        .await
        .map(|done| done.rows_affected() == 1)
        .map_err(|error| crate::error::sqlx_error("note the event as handled", error))
}

/// How long ids are remembered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InboxOptions {
    /// At least this long after they were handled.
    pub dedup_window: Duration,
    /// The longest time after which the broker may still deliver a message again: its retention,
    /// or its time to live. The window may not be shorter.
    pub broker_horizon: Duration,
}

impl Default for InboxOptions {
    /// 14 days for both: the longest default retention of the brokers that Postrider knows.
    fn default() -> Self {
        let fortnight = Duration::from_secs(14 * 24 * 60 * 60);
        Self { dedup_window: fortnight, broker_horizon: fortnight }
    }
}

/// What became of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Handled<T> {
    /// The handler ran and its writes are committed.
    Now(T),
    /// It was handled before; the handler did not run.
    Before,
}

/// An inbox in the same database as the handler's own tables.
#[derive(Debug, Clone)]
pub struct SqliteInbox {
    store: SqliteStore,
    options: InboxOptions,
}

impl SqliteInbox {
    /// An inbox that remembers by `options`.
    ///
    /// # Errors
    /// `Permanent` if the window is shorter than the broker's horizon: a late redelivery would be
    /// handled twice.
    pub fn new(store: SqliteStore, options: InboxOptions) -> Result<Self> {
        if options.dedup_window < options.broker_horizon {
            return Err(Error::permanent(format!(
                "dedup_window ({} s) is shorter than the broker's horizon ({} s); a message \
                 delivered again after it would be handled twice: raise dedup_window",
                options.dedup_window.as_secs(),
                options.broker_horizon.as_secs()
            )));
        }
        Ok(Self { store, options })
    }

    /// Runs `handler` once per event: its writes, the events that it appends and the note that
    /// the event was seen share one transaction.
    ///
    /// # Errors
    /// Those of `handler`, after which the event counts as not seen, and the store's own.
    pub async fn handle<T, E>(
        &self,
        consumer: &ConsumerName,
        id: EventId,
        handler: impl FnOnce(&Transaction<'_>) -> Result<T, E> + Send + 'static,
    ) -> Result<Handled<T>, E>
    where
        T: Send + 'static,
        E: From<Error> + Send + 'static,
    {
        let (consumer, now_ms) = (consumer.clone(), self.store.inner.clock.wall_ms());
        self.store
            .transaction(move |tx| match note(tx, &consumer, id, now_ms)? {
                true => handler(tx).map(Handled::Now),
                false => Ok(Handled::Before),
            })
            .await
    }

    /// Forgets up to `batch` ids that are older than the window, and returns how many.
    /// `oldest_redeliverable` is when the oldest message that the broker still holds was sent, if
    /// the caller knows: nothing as young as that is forgotten, however far the wall clock says
    /// that time has gone.
    ///
    /// # Errors
    /// `Transient` when the database is locked.
    pub async fn prune(
        &self,
        consumer: &ConsumerName,
        oldest_redeliverable: Option<Timestamp>,
        batch: u32,
    ) -> Result<u64> {
        let now_ms = self.store.inner.clock.wall_ms();
        let window_ms = to_ms(self.options.dedup_window);
        let oldest_ms = oldest_redeliverable.map_or(i64::MAX, ms);
        let before_ms = now_ms.saturating_sub(window_ms).min(oldest_ms);
        let consumer = consumer.clone();
        self.store
            .write_tx(move |tx| {
                tx.prepare_cached(
                    "DELETE FROM postrider_inbox WHERE (consumer, id) IN (
                         SELECT consumer, id FROM postrider_inbox
                         WHERE consumer = ?1 AND seen_ms < ?2 LIMIT ?3)",
                )
                .and_then(|mut old| old.execute((consumer.as_str(), before_ms, batch)))
                .map(|forgotten| forgotten as u64)
                .map_err(failed("forget handled events"))
            })
            .await
    }
}
