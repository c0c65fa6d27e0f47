//! The inbox: an event's effect exactly once, however often it is delivered.
//!
//! What lives here: "seen before?" inside the handler's own transaction, and its expiry. What does
//! not: receiving messages.
//! Invariant: an id is forgotten only when the broker can no longer deliver it again.

use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::io::{AsyncRead, AsyncWrite};
use postrider_core::{ConsumerName, Error, EventId, Result, Timestamp};
use sha2::{Digest, Sha256};
use tiberius::Client;
use tracing::Dispatch;
use tracing::instrument::WithSubscriber;

use crate::connections::Param;
use crate::error::failed;
use crate::leases::short_answer;
use crate::names::{Names, exact};
use crate::row::{ms, number};
use crate::{Outbox, SqlServerClient, SqlServerStore, sql};

const PLACE: &str = "note the event as handled";

/// How long one of two deliveries at once waits for the other, in milliseconds.
const LOCK_TIMEOUT_MS: i32 = 30_000;

/// The application lock that keeps two deliveries of one event apart.
fn lock_name(names: &Names, consumer: &ConsumerName, id: EventId) -> String {
    let hash = Sha256::new()
        .chain_update(consumer.as_str())
        .chain_update([0])
        .chain_update(id.as_uuid().as_bytes())
        .finalize();
    let hash: String = hash.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    names.lock(&format!("inbox/{hash}"))
}

async fn note<S>(
    client: &mut Client<S>,
    names: &Names,
    consumer: &ConsumerName,
    id: EventId,
) -> Result<bool>
where
    S: AsyncRead + AsyncWrite + Unpin + Send,
{
    exact("consumer", consumer.as_str())?;
    let lock = lock_name(names, consumer, id);
    let params: [Param<'_>; 4] = [&consumer.as_str(), id.as_uuid(), &lock, &LOCK_TIMEOUT_MS];
    let text = names.fill(sql::INBOX_FIRST_TIME);
    let asked = Box::pin(async { client.query(&*text, &params).await?.into_results().await });
    let sets = asked.with_subscriber(Dispatch::none()).await.map_err(failed(PLACE))?;
    let row = sets.last().and_then(|set| set.first()).ok_or_else(|| short_answer(PLACE))?;
    match number(row, 0, "first_time")? {
        -1 => Err(Error::transient(format!(
            "{PLACE}: another delivery of it did not end in time; try again"
        ))),
        first => Ok(first == 1),
    }
}

impl Outbox {
    /// Notes, in the transaction that `client` has open, that `consumer` handles the event, and
    /// tells whether it is the first time. If not, skip the handler and commit.
    ///
    /// # Errors
    /// `Transient` when another delivery of the event does not end in time, or the connection
    /// fails; `Permanent` when no transaction is open.
    pub async fn first_time<S>(
        &self,
        client: &mut Client<S>,
        consumer: &ConsumerName,
        id: EventId,
    ) -> Result<bool>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send,
    {
        note(client, &self.names, consumer, id).await
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
pub struct SqlServerInbox {
    store: SqlServerStore,
    options: InboxOptions,
}

impl SqlServerInbox {
    /// An inbox that remembers by `options`.
    ///
    /// # Errors
    /// `Permanent` if the window is shorter than the broker's horizon: a late redelivery would be
    /// handled twice.
    pub fn new(store: SqlServerStore, options: InboxOptions) -> Result<Self> {
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
    /// the event was seen share one transaction. The handler begins and ends none.
    ///
    /// # Errors
    /// Those of `handler`, after which the event counts as not seen, and the store's own.
    ///
    /// # Cancellation
    /// A dropped call is rolled back, unless the commit was under way.
    pub async fn handle<T, E>(
        &self,
        consumer: &ConsumerName,
        id: EventId,
        handler: impl for<'c> FnOnce(&'c mut SqlServerClient) -> BoxFuture<'c, Result<T, E>>
        + Send
        + 'static,
    ) -> Result<Handled<T>, E>
    where
        T: Send,
        E: From<Error> + Send,
    {
        let (names, consumer) = (self.store.inner.names.clone(), consumer.clone());
        self.store
            .transaction(move |session| {
                Box::pin(async move {
                    match note(session, &names, &consumer, id).await? {
                        true => handler(session).await.map(Handled::Now),
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
        let place = "forget handled events";
        let window = i64::try_from(self.options.dedup_window.as_millis()).unwrap_or(i64::MAX / 2);
        let window = window.min(i64::MAX / 2);
        let (oldest, batch) = (oldest_redeliverable.map(ms), i64::from(batch));
        let params: [Param<'_>; 4] = [&consumer.as_str(), &window, &oldest, &batch];
        let sets = self.store.run(place, sql::INBOX_PRUNE, &params).await?;
        let row = sets.last().and_then(|set| set.first()).ok_or_else(|| short_answer(place))?;
        Ok(number(row, 0, "forgotten")?.unsigned_abs())
    }
}
