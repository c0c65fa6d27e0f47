//! The inbox: an event's effect exactly once, however often it is delivered.
//!
//! What lives here: "seen before?" inside the handler's own transaction, and its expiry. What does
//! not: receiving messages.
//! Invariant: an id is forgotten only when the broker can no longer deliver it again.

use std::time::Duration;

use futures_util::future::BoxFuture;
use postrider_core::{ConsumerName, Error, EventId, Result, Timestamp};
use tokio_postgres::Transaction;
use tokio_postgres::types::Type;

use crate::PostgresStore;
use crate::append::Outbox;
use crate::checkpoints::whole;
use crate::connections::Param;
use crate::error::failed;

/// Of two deliveries at once the second waits for the end of the first one's transaction, and then
/// sees its note or takes its place.
const FIRST_TIME: &str = "INSERT INTO {schema}.inbox (consumer, id) VALUES ($1, $2)
    ON CONFLICT (consumer, id) DO NOTHING RETURNING 1";

/// An id that a handler notes again at this moment is not there to be forgotten.
const PRUNE: &str = "WITH old AS (
        DELETE FROM {schema}.inbox WHERE (consumer, id) IN (
            SELECT consumer, id FROM {schema}.inbox
            WHERE consumer = $1 AND seen_at < clock_timestamp() - $2 * interval '1 millisecond'
                AND ($3::bigint IS NULL
                    OR seen_at < timestamptz 'epoch' + $3 * interval '1 millisecond')
            ORDER BY seen_at LIMIT $4)
        RETURNING 1)
    SELECT count(*) FROM old";

const NOTE: &str = "note the event as handled";

impl Outbox {
    /// Notes in `tx` that `consumer` handles the event, and tells whether it is the first time. If
    /// not, skip the handler and commit.
    ///
    /// Waits while another transaction that noted the same event is open.
    ///
    /// # Errors
    /// `Transient` when the connection was lost or the wait was cut short.
    pub async fn first_time(
        &self,
        tx: &Transaction<'_>,
        consumer: &ConsumerName,
        id: EventId,
    ) -> Result<bool> {
        let (consumer, id) = (consumer.as_str(), id.as_uuid());
        let params: [Param<'_>; 2] = [(&consumer, Type::TEXT), (&id, Type::UUID)];
        let rows = tx.query_typed(&self.names.fill(FIRST_TIME), &params).await;
        Ok(!rows.map_err(failed(NOTE))?.is_empty())
    }

    /// [`Outbox::first_time`] inside a transaction of `sqlx`.
    ///
    /// # Errors
    /// As [`Outbox::first_time`].
    #[cfg(feature = "sqlx")]
    pub async fn first_time_sqlx(
        &self,
        tx: &mut sqlx::PgConnection,
        consumer: &ConsumerName,
        id: EventId,
    ) -> Result<bool> {
        sqlx::query(sqlx::AssertSqlSafe(self.names.fill(FIRST_TIME)))
            .bind(consumer.as_str())
            .bind(id.as_uuid())
            .fetch_optional(tx)
            .await
            .map(|row| row.is_some())
            .map_err(|error| crate::error::sqlx_error(NOTE, error))
    }
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
pub struct PostgresInbox {
    store: PostgresStore,
    options: InboxOptions,
}

impl PostgresInbox {
    /// An inbox that remembers by `options`.
    ///
    /// # Errors
    /// `Permanent` if the window is shorter than the broker's horizon: a late redelivery would be
    /// handled twice.
    pub fn new(store: PostgresStore, options: InboxOptions) -> Result<Self> {
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
    /// the event was seen share one transaction, which the store's `statement_timeout` bounds as a
    /// whole.
    ///
    /// # Errors
    /// Those of `handler`, after which the event counts as not seen, and the store's own. When the
    /// connection is lost at the commit, whether it was handled is told by the next delivery.
    ///
    /// # Cancellation
    /// A dropped call rolls back, unless the commit was sent.
    pub async fn handle<T, E>(
        &self,
        consumer: &ConsumerName,
        id: EventId,
        handler: impl for<'a> FnOnce(&'a Transaction<'_>) -> BoxFuture<'a, Result<T, E>>
        + Send
        + 'static,
    ) -> Result<Handled<T>, E>
    where
        T: Send,
        E: From<Error> + Send + 'static,
    {
        let (outbox, consumer) = (self.store.outbox(), consumer.clone());
        self.store
            .transaction(move |tx| {
                Box::pin(async move {
                    match outbox.first_time(tx, &consumer, id).await? {
                        true => handler(tx).await.map(Handled::Now),
                        false => Ok(Handled::Before),
                    }
                })
            })
            .await
    }

    /// Forgets up to `batch` ids that are older than the window, and returns how many.
    /// `oldest_redeliverable` is when the oldest message that the broker still holds was sent, if
    /// the caller knows: nothing as young as that is forgotten, however far the database's clock
    /// says that time has gone.
    ///
    /// # Errors
    /// `Transient` when the database can't be reached.
    pub async fn prune(
        &self,
        consumer: &ConsumerName,
        oldest_redeliverable: Option<Timestamp>,
        batch: u32,
    ) -> Result<u64> {
        let window_ms = self.options.dedup_window.as_secs_f64() * 1_000.0;
        let oldest_ms = oldest_redeliverable.map(|time| whole(time.as_millis()));
        let params: [Param<'_>; 4] = [
            (&consumer.as_str(), Type::TEXT),
            (&window_ms, Type::FLOAT8),
            (&oldest_ms, Type::INT8),
            (&i64::from(batch), Type::INT8),
        ];
        let rows = self.store.query("forget handled events", PRUNE, &params).await?;
        Ok(rows[0].get::<_, i64>(0).unsigned_abs())
    }
}
