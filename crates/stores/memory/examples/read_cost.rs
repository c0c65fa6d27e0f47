//! What a record costs to append, to read in pages of 512, and to prune.
//!
//! What lives here: the measurement that the engine's benchmark rests on. What does not: a relay.
//! Invariant: run it optimised, or the figures say nothing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use postrider_core::{
    Acquired, BatchLimit, Checkpoints, Clock, ConsumerName, ContentType, EventType, Feed,
    GroupName, Key, Leases, NewEvent, PartitionId, Position, RelayId, Result, Retention,
    RetentionPolicy, Tally, Timestamp, Topic,
};
use postrider_store_memory::MemoryStore;

const EVENTS: u64 = 500_000;
const KEYS: u64 = 10_000;
const PAGE: BatchLimit = BatchLimit { records: 512, bytes: 4 * 1024 * 1024 };

struct Stopwatch(Instant);

#[async_trait]
impl Clock for Stopwatch {
    fn now(&self) -> Timestamp {
        Timestamp::from_millis(1_672_671_845_000).plus(self.elapsed())
    }

    fn elapsed(&self) -> Duration {
        self.0.elapsed()
    }

    async fn sleep(&self, duration: Duration) {
        tokio::time::sleep(duration).await;
    }
}

fn report(what: &str, count: u64, began: Instant) {
    let each = began.elapsed().as_nanos() / u128::from(count);
    println!("{what}: {each} ns for each of {count}");
}

fn events() -> Result<Vec<NewEvent>> {
    let topic = Topic::new("orders")?;
    let kind = EventType::new("OrderPlaced")?;
    let json = ContentType::new("application/json")?;
    let keys: Vec<Key> = (0..KEYS).map(|n| Key::new(format!("key-{n}"))).collect::<Result<_>>()?;
    let payload = bytes::Bytes::from(vec![b'x'; 200]);
    let event = |n: u64| {
        let key = keys[(n % KEYS) as usize].clone();
        let builder = NewEvent::builder(key, topic.clone(), kind.clone());
        builder.payload(json.clone(), payload.clone()).build()
    };
    (0..EVENTS).map(event).collect()
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let store = MemoryStore::new(8, Arc::new(Stopwatch(Instant::now())));
    let events = events()?;
    let began = Instant::now();
    for batch in events.chunks(1_000) {
        store.append(batch)?;
    }
    report("append", EVENTS, began);
    let (consumer, group) = (ConsumerName::new("sink")?, GroupName::new("relays")?);
    let relay = RelayId::new("relay")?;
    let partitions = store.partitions(&consumer).await?;
    for round in ["read, first time", "read again"] {
        let began = Instant::now();
        for partition in &partitions {
            read_all(&store, partition).await?;
        }
        report(round, EVENTS, began);
    }
    for partition in &partitions {
        let ttl = Duration::from_secs(60);
        let held = store.acquire(&group, partition, &relay, ttl).await?;
        if let Acquired::Held(lease) = held {
            let head = store.head(partition).await?;
            store.advance(&lease, &consumer, &head, Tally::default()).await?;
        }
    }
    let began = Instant::now();
    let policy = RetentionPolicy { keep: Duration::ZERO, batch: 10_000, dry_run: false };
    let mut pruned = 0;
    loop {
        let batch = store.prune(None, &policy).await?;
        pruned += batch.events;
        if !batch.more {
            break;
        }
    }
    report("prune", pruned, began);
    Ok(())
}

async fn read_all(store: &MemoryStore, partition: &PartitionId) -> Result<()> {
    let mut after = Position::START;
    loop {
        let page = store.read(partition, &after, PAGE).await?;
        if page.entries.is_empty() {
            return Ok(());
        }
        after = page.position;
    }
}
