//! One poisoned key among 10,000: what the others notice.
//!
//! What lives here: the latency from commit to confirmation at a fixed rate, with and without a key
//! whose events are always refused. What does not: throughput.
//! Invariant: both sides of a pair append the same events at the same rate; the poisoned key's own
//! latencies are left out on both.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use async_trait::async_trait;
use postrider_core::{
    Capabilities, Chain, Error, EventId, Outcome, Publish, Result as SeamResult, Sink,
};
use postrider_store_sqlite::{SqliteOptions, SqliteStore};
use tokio_util::sync::CancellationToken;

use crate::figure::{Goal, Report};
use crate::world::{Maker, relay, runtime};

const KEYS: u64 = 10_000;
const POISON: &str = "key-0";
/// A broker's round trip.
const ROUND_TRIP: Duration = Duration::from_millis(2);
/// Events a second: well below what the store takes, so that queues do not hide the effect.
const RATE: u64 = 500;

pub(crate) fn measure(report: &mut Report, runs: usize, smoke: bool) -> Result<()> {
    let seconds = if smoke { 1 } else { 6 };
    let mut pairs = Vec::new();
    for run in 0..runs {
        // Which side goes first alternates, so that a drift of the machine favours neither.
        let (with, without) = if run % 2 == 0 {
            let with = p99(true, seconds)?;
            (with, p99(false, seconds)?)
        } else {
            let without = p99(false, seconds)?;
            (p99(true, seconds)?, without)
        };
        pairs.push((with, without));
    }
    let figure = "p99 of other keys beside a poisoned one";
    report.ratio(figure, &pairs, "us", Goal::AtMost(1.1));
    Ok(())
}

type Times = Arc<Mutex<HashMap<EventId, Instant>>>;

/// Confirms after a round trip; refuses the poisoned key when asked to.
struct Broker {
    poisoned: bool,
    confirmed: Times,
}

#[async_trait]
impl Sink for Broker {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            max_event_bytes: None,
            max_batch_records: 256,
            max_batch_bytes: 1 << 20,
            max_in_flight: 8,
            chain: Chain::Many,
            dedup_window: None,
        }
    }

    async fn publish(&self, batch: Publish<'_>) -> Vec<Outcome> {
        tokio::time::sleep(ROUND_TRIP).await;
        let now = Instant::now();
        let mut confirmed = self.confirmed.lock().unwrap_or_else(PoisonError::into_inner);
        let outcome = |record: &postrider_core::Record| {
            if record.event.key().as_str() == POISON {
                return match self.poisoned {
                    true => Outcome::Failed(Error::permanent("poisoned")),
                    false => Outcome::Confirmed,
                };
            }
            confirmed.insert(record.event.id(), now);
            Outcome::Confirmed
        };
        batch.records().iter().map(outcome).collect()
    }

    async fn check(&self) -> SeamResult<()> {
        Ok(())
    }

    async fn close(&self) -> SeamResult<()> {
        Ok(())
    }
}

/// The 99th percentile, in microseconds, from commit to confirmation.
fn p99(poisoned: bool, seconds: u64) -> Result<f64> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("bench.db");
    let confirmed = Times::default();
    let committed = runtime()?.block_on(async {
        let store = Arc::new(SqliteStore::open(SqliteOptions::new(&path).partitions(4)).await?);
        let broker = Broker { poisoned, confirmed: Arc::clone(&confirmed) };
        let relay = relay(Arc::clone(&store), Arc::new(broker))?;
        let stop = CancellationToken::new();
        let mut tasks = tokio::task::JoinSet::new();
        tasks.spawn(relay.run(stop.clone()));
        let committed = append_at_rate(&store, seconds).await?;
        let give_up = Instant::now() + Duration::from_secs(30);
        while confirmed.lock().unwrap_or_else(PoisonError::into_inner).len() < committed.len() {
            anyhow::ensure!(Instant::now() < give_up, "not everything was confirmed");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        stop.cancel();
        while let Some(ended) = tasks.join_next().await {
            ended??;
        }
        anyhow::Ok(committed)
    })?;
    let confirmed = confirmed.lock().unwrap_or_else(PoisonError::into_inner);
    let mut waits: Vec<Duration> =
        committed.iter().map(|(id, at)| confirmed[id].saturating_duration_since(*at)).collect();
    waits.sort_unstable();
    let at = waits.len() * 99 / 100;
    Ok(waits[at.min(waits.len() - 1)].as_secs_f64() * 1e6)
}

/// Appends at the fixed rate; returns when each event was committed, the poisoned key's left out.
async fn append_at_rate(store: &SqliteStore, seconds: u64) -> Result<Vec<(EventId, Instant)>> {
    let maker = Maker::new()?;
    let mut committed = Vec::new();
    let began = Instant::now();
    for n in 0..RATE * seconds {
        let due = began + Duration::from_micros(1_000_000 / RATE) * u32::try_from(n)?;
        tokio::time::sleep_until(due.into()).await;
        // Every hundredth event is the poisoned key's: it goes on being written to.
        let key = if n % 100 == 0 {
            POISON.to_owned()
        } else {
            format!("key-{}", 1 + n * 7 % (KEYS - 1))
        };
        let event = maker.event(&key)?;
        let ids = store.transaction(move |tx| store_append(tx, event)).await?;
        if key != POISON {
            committed.push((ids, Instant::now()));
        }
    }
    Ok(committed)
}

fn store_append(
    tx: &rusqlite::Transaction<'_>,
    event: postrider_core::NewEvent,
) -> SeamResult<EventId> {
    let ids = postrider_store_sqlite::append(tx, &[event])?;
    Ok(ids[0])
}
