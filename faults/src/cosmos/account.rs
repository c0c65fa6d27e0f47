//! The account of one schedule: entities and their events, written, and read as the truth.
//!
//! What lives here: writers and what the container holds at the end. What does not: relays.
//! Invariant: an event and its entity's new number are one batch; a writer whose answer was lost
//! looks before it writes again, with the same ids.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures_util::TryStreamExt;
use postrider_conformance::sink::Delivered;
use postrider_core::{
    Checkpoints, ConsumerName, DeadLetterFilter, DeadLetters, EventId, GroupName, Leases,
};
use postrider_servers::cosmos::Cosmos;
use postrider_store_cosmos::azure_data_cosmos::TransactionalBatch;
use postrider_store_cosmos::azure_data_cosmos::clients::ContainerClient;
use postrider_store_cosmos::azure_data_cosmos::feed::FeedScope;
use postrider_store_cosmos::{CosmosConfig, CosmosStore};
use rand::RngExt;
use rand::rngs::StdRng;
use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};
use uuid::Uuid;

use crate::schedule::generator;
use crate::verdict::Accounts;
use crate::world::{Committed, SINK};

pub(super) const DATABASE: &str = "shop";
pub(super) const CONTAINER: &str = "orders";
pub(super) const LEASES: &str = "leases";
/// The topic of events whose documents name none.
const TOPIC: &str = "events";
/// How the emulator tells of ranges that it would merge otherwise than the service does.
pub(super) const OUT_OF_ORDER: &str = "not in the order of their numbers";
/// A writer that meets trouble tries the same batch again this soon.
const AGAIN: Duration = Duration::from_millis(15);

/// An emulated account with its two containers.
pub(super) struct Account {
    pub(super) emulator: Cosmos,
    store: CosmosStore,
    runtime: Runtime,
}

impl Account {
    /// With two regions, if one is to go.
    pub(super) fn start(ranges: u32, regions: &[&str]) -> Result<Self> {
        let arguments: Vec<&str> = regions.iter().flat_map(|name| ["--region", *name]).collect();
        let emulator = Cosmos::start_with(&arguments).context("start the Cosmos DB emulator")?;
        emulator.create_container(DATABASE, CONTAINER, ranges).context("make a container")?;
        emulator.create_container(DATABASE, LEASES, 1).context("make the lease container")?;
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.context("start a runtime")?;
        let mut config = CosmosConfig::new(emulator.connection_string(), DATABASE, CONTAINER);
        LEASES.clone_into(&mut config.lease_container);
        let store = runtime.block_on(CosmosStore::open(&config)).context("open the store")?;
        Ok(Self { emulator, store, runtime })
    }

    /// Writes for a while, on a thread of the caller's.
    pub(super) fn write(&self, task: &Task) -> Result<u64> {
        self.runtime.block_on(write(&self.store, task))
    }

    /// How many events are not settled yet: pending, among the dead letters, or of a range that no
    /// relay has begun with.
    pub(super) fn unsettled(&self) -> Result<i64> {
        let accounts = self.accounts()?;
        let begun = accounts.committed.len() as i64 - accounts.published;
        Ok(accounts.unsettled.max(begun))
    }

    /// Who holds the leases of ranges, one for each; an expired one counts until it is taken over.
    pub(super) fn holders(&self) -> Result<Vec<String>> {
        let leases = self.runtime.block_on(self.store.leases(&GroupName::new("default")?))?;
        Ok(leases.into_iter().map(|lease| lease.holder.as_str().to_owned()).collect())
    }

    /// Saves an event of each of so many keys; their ids.
    pub(super) fn probe(&self, round: usize, keys: usize) -> Result<Vec<String>> {
        let container = self.store.container();
        let mut rng = generator(1, round as u64, "cosmos probe");
        self.runtime.block_on(async {
            let mut ids = Vec::new();
            for at in 0..keys {
                let (key, last) = (format!("probe {at}"), round as u64);
                let batch = documents(&key, last, 1, &mut rng);
                while !is_written(&container, &key, &batch, last + 1).await? {
                    tokio::time::sleep(AGAIN).await;
                }
                ids.push(batch[1]["id"].as_str().context("an event has an id")?.to_owned());
            }
            Ok(ids)
        })
    }

    /// Splits a range or merges two, which takes `locked`; the ranges in their place.
    pub(super) fn change(&self, how: &str, ranges: &[u32], locked: Duration) -> Result<Vec<u32>> {
        let asked = json!({
            "database": DATABASE, "container": CONTAINER, "ranges": ranges,
            "lockMs": locked.as_millis() as u64,
        });
        let answer = self.emulator.ask("POST", how, &asked.to_string());
        let answer = answer.with_context(|| format!("{how} ranges {ranges:?}"))?;
        let answer: Value = serde_json::from_str(&answer).context("read the emulator's answer")?;
        serde_json::from_value(answer["ranges"].clone()).context("read the ranges' numbers")
    }

    pub(super) fn requeue_all(&self) -> Result<u64> {
        let all = DeadLetterFilter::default();
        self.runtime.block_on(self.store.requeue(&all)).context("requeue the dead letters")
    }

    /// What the containers say at the end.
    pub(super) fn accounts(&self) -> Result<Accounts> {
        let documents = self.runtime.block_on(all(&self.store.container()))?;
        let progress = self.runtime.block_on(self.store.progress()).context("ask for progress")?;
        let sink = ConsumerName::new(SINK)?;
        let published: u64 =
            progress.iter().filter(|one| one.consumer == sink).map(|one| one.published()).sum();
        let (committed, events_alone, rows_alone) = truth(&documents)?;
        let unsettled: u64 = progress.iter().map(|one| one.pending + one.parked).sum();
        Ok(Accounts {
            committed,
            events_alone,
            rows_alone,
            published: i64::try_from(published).context("count what was published")?,
            unsettled: i64::try_from(unsettled).context("count what is unsettled")?,
        })
    }
}

/// What a consumer's checkpoint counts.
trait Published {
    fn published(&self) -> u64;
}

impl Published for postrider_core::ConsumerProgress {
    fn published(&self) -> u64 {
        self.checkpoint.published
    }
}

/// What a writer is told.
pub(super) struct Task {
    pub(super) seed: u64,
    pub(super) index: u64,
    pub(super) writer: usize,
    pub(super) keys: usize,
    pub(super) length: Duration,
}

/// Writes until the time is over; returns how many events. Each key is this writer's own.
async fn write(store: &CosmosStore, task: &Task) -> Result<u64> {
    let mut rng = generator(task.seed, task.index, format!("cosmos writer {}", task.writer));
    let begun = Instant::now();
    let mut last: Vec<u64> = vec![0; task.keys];
    let mut written = 0;
    while begun.elapsed() < task.length {
        let at = rng.random_range(0..task.keys);
        let key = format!("w{}/köln {at}", task.writer);
        let count = if rng.random_bool(0.03) { 40 } else { rng.random_range(1..=4) };
        let batch = documents(&key, last[at], count, &mut rng);
        let next = last[at] + count;
        while !is_written(&store.current_container().await, &key, &batch, next).await? {
            ensure!(begun.elapsed() < task.length * 30, "a writer gets nothing written");
            tokio::time::sleep(AGAIN).await;
        }
        (last[at], written) = (next, written + count);
        tokio::time::sleep(Duration::from_millis(rng.random_range(1..15))).await;
    }
    Ok(written)
}

/// An entity with its new number, and the events that lead to it.
fn documents(key: &str, last: u64, count: u64, rng: &mut StdRng) -> Vec<Value> {
    let entity = json!({
        "id": key.replace('/', "-"), "partitionKey": key, "type": "order",
        "data": { "id": key }, "ttl": -1, "lastSeq": last + count,
    });
    let mut all = vec![entity];
    for seq in last + 1..=last + count {
        let id = Uuid::from_u128(rng.random()).to_string();
        let size = if rng.random_bool(0.02) { 30_000 } else { rng.random_range(0..300) };
        let text: String = (0..size).map(|_| rng.random_range(' '..'~')).collect();
        all.push(json!({
            "id": id, "partitionKey": key, "type": "domainEvent",
            "data": { "action": "OrderChanged", "id": id, "n": seq, "text": text },
            "ttl": 864_000, "seq": seq,
        }));
    }
    all
}

/// Writes a batch, or finds that it was written already.
async fn is_written(
    container: &ContainerClient,
    key: &str,
    documents: &[Value],
    next: u64,
) -> Result<bool> {
    let mut batch = TransactionalBatch::new(key.to_owned()).upsert_item(&documents[0], None)?;
    for event in &documents[1..] {
        batch = batch.create_item(event)?;
    }
    let answer = container.execute_transactional_batch(batch, None).await;
    if let Ok(answer) = answer.and_then(|answer| answer.into_model())
        && answer.results().iter().all(|result| result.is_success())
    {
        return Ok(true);
    }
    let id = key.replace('/', "-");
    let Ok(found) = container.read_item(key.to_owned(), &id, None).await else {
        return Ok(false);
    };
    let Ok(entity) = found.into_model::<Value>() else { return Ok(false) };
    Ok(entity["lastSeq"].as_u64() == Some(next))
}

async fn all(container: &ContainerClient) -> Result<Vec<Value>> {
    let everything = FeedScope::full_container();
    let found = container.query_items::<Value>("SELECT * FROM c", everything, None).await?;
    found.try_collect().await.context("read the container")
}

/// The events, in the order of each key's numbers; how many of them no entity's number covers, and
/// how many an entity's number covers that are not there.
fn truth(documents: &[Value]) -> Result<(Vec<Committed>, i64, i64)> {
    let mut keys: BTreeMap<&str, (u64, BTreeMap<u64, &Value>)> = BTreeMap::new();
    for document in documents {
        let key = document["partitionKey"].as_str().context("a document has a key")?;
        let of_key = keys.entry(key).or_default();
        match document["seq"].as_u64() {
            Some(seq) => ensure!(of_key.1.insert(seq, document).is_none(), "{seq} of {key} twice"),
            None => of_key.0 = document["lastSeq"].as_u64().context("an entity has a number")?,
        }
    }
    let (mut committed, mut alone, mut lacking) = (Vec::new(), 0, 0);
    for (key, (last, events)) in keys {
        alone += events.range(last + 1..).count() as i64;
        lacking += (1..=last).filter(|seq| !events.contains_key(seq)).count() as i64;
        for event in events.into_values() {
            let id: Uuid = event["id"].as_str().context("an event has an id")?.parse()?;
            let place = committed.len() as u128 + 1;
            let message = Delivered {
                id: EventId::from_uuid(id),
                key: key.to_owned(),
                topic: TOPIC.to_owned(),
                event_type: "OrderChanged".to_owned(),
                content_type: "application/json".to_owned(),
                headers: Vec::new(),
                payload: event["data"].to_string().into_bytes(),
            };
            committed.push(Committed { message, partition: String::new(), place });
        }
    }
    Ok((committed, alone, lacking))
}
