//! Stores full of events, and relays that drain them.
//!
//! What lives here: set-up shared by the measurements. What does not: judging.
//! Invariant: the timed part holds nothing but the relay's own work.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use bytes::Bytes;
use postrider_core::{
    Clock, ConsumerName, ContentType, EventType, Feed, FeedSource, GroupName, Key, NewEvent,
    PollInterval, RelayId, RelayStore, Sink, Source, Topic,
};
use postrider_relay::{Relay, RelayOptions, RelayStatus, SinkOptions, SystemClock};
use postrider_store_sqlite::{SqliteOptions, SqliteStore};
use tokio_util::sync::CancellationToken;

pub(crate) const PAYLOAD_BYTES: usize = 200;

/// Makes events of one shape.
pub(crate) struct Maker {
    topic: Topic,
    kind: EventType,
    json: ContentType,
    payload: Bytes,
}

impl Maker {
    pub(crate) fn new() -> Result<Self> {
        let mut payload = b"{\"text\":\"".to_vec();
        payload.resize(PAYLOAD_BYTES - 2, b'x');
        payload.extend_from_slice(b"\"}");
        Ok(Self {
            topic: Topic::new("orders")?,
            kind: EventType::new("OrderPlaced")?,
            json: ContentType::new("application/json")?,
            payload: payload.into(),
        })
    }

    pub(crate) fn event(&self, key: &str) -> Result<NewEvent> {
        let new = NewEvent::builder(Key::new(key)?, self.topic.clone(), self.kind.clone());
        Ok(new.payload(self.json.clone(), self.payload.clone()).build()?)
    }

    /// Events `from..to`, dealt out to `keys` keys.
    pub(crate) fn dealt(&self, from: u64, to: u64, keys: u64) -> Result<Vec<NewEvent>> {
        (from..to).map(|n| self.event(&format!("key-{}", n % keys))).collect()
    }
}

/// A database with a backlog of `events`.
pub(crate) fn sqlite_with_backlog(path: &Path, events: u64, keys: u64) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let store = SqliteStore::open(SqliteOptions::new(path).partitions(4)).await?;
        drop(store);
        anyhow::Ok(())
    })?;
    let maker = Maker::new()?;
    let mut connection = rusqlite::Connection::open(path)?;
    connection.pragma_update(None, "synchronous", "OFF")?;
    let mut at = 0;
    while at < events {
        let to = (at + 10_000).min(events);
        let tx = connection.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
        postrider_store_sqlite::append(&tx, &maker.dealt(at, to, keys)?)?;
        tx.commit()?;
        at = to;
    }
    connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()))?;
    Ok(())
}

pub(crate) fn clock() -> Arc<dyn Clock> {
    Arc::new(SystemClock)
}

pub(crate) fn runtime() -> Result<tokio::runtime::Runtime> {
    let builder = &mut tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(2).enable_all().build().context("start a runtime")
}

/// A relay from `store` to `sink`, not running yet.
pub(crate) fn relay<S>(store: Arc<S>, sink: Arc<dyn Sink>) -> Result<Relay>
where
    S: Feed + RelayStore + 'static,
{
    relay_named("bench", store, sink)
}

/// The same as a group and a consumer of its own: one that begins at the oldest event.
pub(crate) fn relay_named<S>(name: &str, store: Arc<S>, sink: Arc<dyn Sink>) -> Result<Relay>
where
    S: Feed + RelayStore + 'static,
{
    let source = Arc::new(FeedSource::new(Arc::clone(&store), clock(), PollInterval::default()));
    relay_from(name, source, store, sink)
}

/// A relay from any source.
pub(crate) fn relay_from(
    name: &str,
    source: Arc<dyn Source>,
    store: Arc<dyn RelayStore>,
    sink: Arc<dyn Sink>,
) -> Result<Relay> {
    let options = RelayOptions::new(GroupName::new(name)?, RelayId::new(name)?);
    let builder = Relay::builder(source, store, options);
    Ok(builder.sink(SinkOptions::new(ConsumerName::new(name)?), sink).build()?)
}

/// This process's peak memory in KiB, as Linux counts it.
pub(crate) fn peak_kib() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status").context("read /proc/self/status")?;
    peak_in(&status)
}

/// The same of any process, from its file of that name.
pub(crate) fn peak_in(status: &str) -> Result<u64> {
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = peak.context("the system does not tell the peak memory")?;
    Ok(kib.trim().trim_end_matches(" kB").parse()?)
}

/// Runs the relay until `events` are published, stops it, and returns how long it took up to the
/// last one.
pub(crate) async fn drain(relay: Relay, events: u64) -> Result<Duration> {
    let (stop, status) = (CancellationToken::new(), relay.status());
    let mut tasks = tokio::task::JoinSet::new();
    let began = Instant::now();
    tasks.spawn(relay.run(stop.clone()));
    wait_published(&status, events).await?;
    let took = began.elapsed();
    stop.cancel();
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    Ok(took)
}

async fn wait_published(status: &RelayStatus, events: u64) -> Result<()> {
    let give_up = Instant::now() + Duration::from_secs(600);
    while status.snapshot().sinks.iter().map(|sink| sink.published).sum::<u64>() < events {
        anyhow::ensure!(Instant::now() < give_up, "not drained within ten minutes");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok(())
}

pub(crate) fn per_second(events: u64, took: Duration) -> f64 {
    as_f64(events) / took.as_secs_f64()
}

#[expect(clippy::cast_precision_loss, reason = "counts here are far below 2^53")]
pub(crate) fn as_f64(count: u64) -> f64 {
    count as f64
}

/// The processors' time that this process has used, all threads together.
pub(crate) fn cpu() -> Duration {
    let used = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::try_from(used).unwrap_or_default()
}
