//! The emulated account of a measurement.
//!
//! What lives here: containers with a backlog, the SDK's change feed by itself, what was asked of
//! the account. What does not: relays, and what is judged (`mod.rs`).
//! Invariant: what was asked is what the emulator counted, by whomever it was asked.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures_util::stream::{StreamExt, TryStreamExt, iter};
use postrider_servers::cosmos::Cosmos;
use postrider_store_cosmos::azure_data_cosmos::TransactionalBatch;
use postrider_store_cosmos::azure_data_cosmos::clients::ContainerClient;
use postrider_store_cosmos::azure_data_cosmos::feed::{FeedRange, FeedScope};
use postrider_store_cosmos::azure_data_cosmos::options::{
    ChangeFeedOptions, ChangeFeedStartFrom, MaxItemCountHint,
};
use postrider_store_cosmos::{CosmosConfig, CosmosStore, Numbering};
use serde_json::{Value, json};

use crate::world::Maker;

const DATABASE: &str = "shop";
const CONTAINER: &str = "orders";
/// Entities that the events are of.
const KEYS: u64 = 200;
/// Events that are saved with their entity at a time.
const EACH: u64 = 9;
/// Batches that are written at a time.
const WRITERS: usize = 8;

/// What the emulator was asked for since it was told to forget.
pub(super) struct Asked {
    /// All requests.
    pub(super) requests: f64,
    /// Those that read the change feed.
    pub(super) reads: f64,
    /// Request units of all.
    pub(super) charge: f64,
}

/// An account with a container of documents and events, and one of leases.
pub(super) struct Account {
    emulator: Cosmos,
    store: Arc<CosmosStore>,
    maker: Maker,
    page: u32,
}

impl Account {
    pub(super) async fn start(ranges: u32) -> Result<Self> {
        let emulator = Cosmos::start().context("start the Cosmos DB emulator")?;
        emulator.create_container(DATABASE, CONTAINER, ranges)?;
        emulator.create_container(DATABASE, "leases", 1)?;
        let config = CosmosConfig::new(emulator.connection_string(), DATABASE, CONTAINER);
        let store = Arc::new(CosmosStore::open(&config).await?);
        Ok(Self { emulator, store, maker: Maker::new()?, page: config.max_items })
    }

    pub(super) fn store(&self) -> Arc<CosmosStore> {
        Arc::clone(&self.store)
    }

    /// Most documents in a page of the relay's.
    pub(super) fn page(&self) -> u32 {
        self.page
    }

    /// Forgets what was asked.
    pub(super) fn forget(&self) -> Result<()> {
        Ok(self.emulator.ask("DELETE", "requests", "").map(drop)?)
    }

    pub(super) fn asked(&self) -> Result<Asked> {
        let counted: Value = serde_json::from_str(&self.emulator.requests()?)?;
        let number = |value: &Value| value.as_f64().unwrap_or(0.0);
        Ok(Asked {
            requests: number(&counted["total"]),
            reads: number(&counted["byOperation"]["changeFeed"]),
            charge: number(&counted["requestCharge"]),
        })
    }

    /// Saves so many events, each few with their entity.
    pub(super) async fn fill(&self, events: u64) -> Result<()> {
        let batches = (0..events / EACH).map(|batch| (batch % KEYS, batch / KEYS * EACH));
        // Those of one entity one after the other.
        let rounds: Vec<_> = batches.collect();
        for round in rounds.chunks(usize::try_from(KEYS)?) {
            let saved = iter(round).map(|(key, last)| self.save_events(*key, *last, EACH));
            saved.buffer_unordered(WRITERS).try_collect::<()>().await?;
        }
        Ok(())
    }

    async fn save_events(&self, key: u64, last: u64, count: u64) -> Result<()> {
        let key = format!("order-{key}");
        let entity = json!({
            "id": key, "partitionKey": key, "type": "order", "data": { "id": key },
            "ttl": -1, "lastSeq": last + count,
        });
        let batch = TransactionalBatch::new(key.clone()).upsert_item(entity, None)?;
        let events = (0..count).map(|_| self.maker.event(&key)).collect::<Result<Vec<_>>>()?;
        let numbering = Numbering::After(last);
        let (batch, _) = self.store.append(batch, &key, &events, numbering)?;
        self.execute(batch).await
    }

    /// Saves an entity, with an event or without.
    pub(super) async fn save(&self, round: usize, with_event: bool) -> Result<()> {
        self.save_events(0, round as u64, u64::from(with_event)).await
    }

    async fn execute(&self, batch: TransactionalBatch) -> Result<()> {
        let answer = self.store.container().execute_transactional_batch(batch, None).await?;
        let answer = answer.into_model()?;
        ensure!(answer.results().iter().all(|result| result.is_success()), "a batch was refused");
        Ok(())
    }

    /// Reads all events by a bare loop over the SDK's change feed, each range by itself; how long
    /// that took.
    pub(super) async fn read(&self, events: u64, page: u32) -> Result<Duration> {
        let container = self.store.container();
        let ranges = container.read_feed_ranges(None).await?;
        let read = AtomicU64::new(0);
        let began = Instant::now();
        let loops = iter(&ranges).map(|range| read_range(&container, range, page, &read, events));
        loops.buffer_unordered(ranges.len()).try_collect::<()>().await?;
        let took = began.elapsed();
        let read = read.into_inner();
        ensure!(read == events, "{read} of {events} events were read");
        Ok(took)
    }
}

async fn read_range(
    container: &ContainerClient,
    range: &FeedRange,
    page: u32,
    read: &AtomicU64,
    events: u64,
) -> Result<()> {
    let most = MaxItemCountHint::Limit(NonZeroU32::new(page).context("a page has documents")?);
    let options = ChangeFeedOptions::default().with_max_item_count(most);
    let (scope, start) = (FeedScope::range(range.clone()), ChangeFeedStartFrom::Beginning);
    let mut pages = container.query_change_feed::<Value>(scope, start, Some(options)).await?;
    while read.load(Ordering::Relaxed) < events {
        let Some(page) = pages.next().await else { break };
        let items = page?.into_items();
        if items.is_empty() {
            break;
        }
        let found = items.iter().filter_map(|item| item.current());
        let found = found.filter(|document| document["type"] == "domainEvent").count();
        read.fetch_add(found as u64, Ordering::Relaxed);
    }
    Ok(())
}
