//! Writers at a fixed rate, and when their events were committed and confirmed.
//!
//! What lives here: the open loop of writers, the sink that notes times, and the waits between.
//! What does not: what else happens meanwhile.
//! Invariant: a writer that is held up does not slow the others down, and its wait counts from when
//! its event was due.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use async_trait::async_trait;
use postrider_core::{Capabilities, Chain, EventId, Outcome, Publish, Result as SeamResult, Sink};
use postrider_relay::{Relay, RelayStatus};
use postrider_servers::postgres::Database;
use postrider_store_postgres::PostgresStore;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::server::Session;
use crate::world::{PAYLOAD_BYTES, relay_named};

/// Events a second.
pub(crate) const RATE: u32 = 1_000;
/// Each writer appends an event in 8 ms: several times what a commit takes.
const EVENTS_A_WRITER: u32 = 125;
/// Longest wait for the last confirmations.
const GIVE_UP: Duration = Duration::from_secs(30);

/// Confirms at once and notes when.
#[derive(Default)]
struct Noting {
    confirmed: Mutex<HashMap<EventId, Instant>>,
}

impl Noting {
    fn confirmed(&self) -> std::sync::MutexGuard<'_, HashMap<EventId, Instant>> {
        self.confirmed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Sink for Noting {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            max_event_bytes: None,
            max_batch_records: 4_096,
            max_batch_bytes: 4 << 20,
            max_in_flight: 4,
            chain: Chain::Many,
            dedup_window: None,
        }
    }

    async fn publish(&self, batch: Publish<'_>) -> Vec<Outcome> {
        let now = Instant::now();
        let mut confirmed = self.confirmed();
        confirmed.extend(batch.records().iter().map(|record| (record.event.id(), now)));
        batch.records().iter().map(|_| Outcome::Confirmed).collect()
    }

    async fn check(&self) -> SeamResult<()> {
        Ok(())
    }

    async fn close(&self) -> SeamResult<()> {
        Ok(())
    }
}

/// A running relay whose sink notes times.
pub(crate) struct Attached {
    sink: Arc<Noting>,
    status: RelayStatus,
    stop: CancellationToken,
    tasks: JoinSet<SeamResult<()>>,
}

impl Attached {
    pub(crate) fn to(store: &PostgresStore) -> Result<Self> {
        Self::with(|sink| relay_named("paced", Arc::new(store.clone()), sink))
    }

    /// Whatever relay is made for the sink.
    pub(crate) fn with(relay: impl FnOnce(Arc<dyn Sink>) -> Result<Relay>) -> Result<Self> {
        let sink = Arc::new(Noting::default());
        let relay = relay(Arc::clone(&sink) as _)?;
        let status = relay.status();
        let stop = CancellationToken::new();
        let mut tasks = JoinSet::new();
        tasks.spawn(Relay::run(relay, stop.clone()));
        Ok(Self { sink, status, stop, tasks })
    }

    /// Waits until `id` is confirmed.
    pub(crate) async fn confirms(&self, id: EventId) -> Result<()> {
        let give_up = Instant::now() + GIVE_UP;
        while !self.sink.confirmed().contains_key(&id) {
            let late = Instant::now() >= give_up;
            ensure!(!late, "an event was not confirmed: {:?}", self.status.snapshot());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    /// From commit to confirmation, once all are confirmed.
    pub(crate) async fn waits(&self, appended: &[Appended]) -> Result<Waits> {
        for event in appended {
            self.confirms(event.id).await?;
        }
        let confirmed = self.sink.confirmed();
        let wait = |event: &Appended| confirmed[&event.id].saturating_duration_since(event.at);
        Ok(Waits::new(appended.iter().map(wait).collect()))
    }

    pub(crate) async fn end(mut self) -> Result<()> {
        self.stop.cancel();
        while let Some(ended) = self.tasks.join_next().await {
            ended??;
        }
        Ok(())
    }
}

/// An event whose commit was answered.
pub(crate) struct Appended {
    id: EventId,
    /// When it should have been appended.
    pub(crate) due: Instant,
    /// When its commit was answered.
    at: Instant,
}

/// From when events were due to the answers to their commits.
pub(crate) fn writers_waits<'a>(appended: impl IntoIterator<Item = &'a Appended>) -> Waits {
    Waits::new(appended.into_iter().map(|event| event.at - event.due).collect())
}

/// Durations, of which quantiles are asked.
pub(crate) struct Waits(Vec<Duration>);

impl Waits {
    fn new(mut waits: Vec<Duration>) -> Self {
        waits.sort_unstable();
        Self(waits)
    }

    /// In milliseconds.
    pub(crate) fn percentile(&self, percent: usize) -> f64 {
        let at = (self.0.len() * percent / 100).min(self.0.len().saturating_sub(1));
        self.0.get(at).map_or(f64::NAN, |wait| wait.as_secs_f64() * 1e3)
    }
}

/// A transaction of one event, as an application sends it that has nothing else to write.
pub(crate) const APPEND: &str = "SELECT postrider.append($1, 'orders', 'OrderPlaced', $2::bytea)";

/// Sessions that append at the fixed rate.
pub(crate) struct Writers {
    sessions: Vec<Arc<Session>>,
    rate: u32,
}

impl Writers {
    pub(crate) async fn connect(database: &Database) -> Result<Self> {
        Self::at(RATE, database).await
    }

    /// Another rate, in events a second.
    pub(crate) async fn at(rate: u32, database: &Database) -> Result<Self> {
        let mut sessions = Vec::new();
        for _ in 0..rate.div_ceil(EVENTS_A_WRITER) {
            sessions.push(Arc::new(Session::open(database).await?));
        }
        Ok(Self { sessions, rate })
    }

    /// Appends for so long, or until told to stop.
    pub(crate) async fn append(
        &self,
        how_long: Duration,
        stop: &CancellationToken,
    ) -> Result<Vec<Appended>> {
        let began = Instant::now();
        let mut writers = JoinSet::new();
        let events = (Duration::from_secs(1) / self.rate, self.sessions.len());
        for (number, session) in (0..).zip(&self.sessions) {
            let pace = Pace { began, how_long, first: number, events };
            writers.spawn(write(Arc::clone(session), pace, stop.clone()));
        }
        let mut appended = Vec::new();
        while let Some(done) = writers.join_next().await {
            appended.extend(done??);
        }
        Ok(appended)
    }
}

/// When one of several writers appends.
struct Pace {
    began: Instant,
    how_long: Duration,
    /// The number of its first event.
    first: u32,
    /// The time from one event to the next, of whatever writer, and how many writers there are.
    events: (Duration, usize),
}

async fn write(
    session: Arc<Session>,
    pace: Pace,
    stop: CancellationToken,
) -> Result<Vec<Appended>> {
    let Pace { began, how_long, first, events: (each, writers) } = pace;
    let statement = session.prepare(APPEND).await?;
    let payload = vec![b'x'; PAYLOAD_BYTES];
    let mut appended = Vec::new();
    for n in (first..).step_by(writers) {
        let offset = each * n;
        if offset >= how_long || stop.is_cancelled() {
            break;
        }
        let due = began + offset;
        tokio::time::sleep_until(due.into()).await;
        let key = format!("key-{}", n % 10_000);
        let row = session.query_one(&statement, &[&key, &payload]).await.context("append")?;
        let at = Instant::now();
        appended.push(Appended { id: EventId::from_uuid(row.get(0)), due, at });
    }
    Ok(appended)
}
