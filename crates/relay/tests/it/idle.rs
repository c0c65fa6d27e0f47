//! What a relay asks of its store while there is nothing to do, and that it still hears of whatever
//! there is.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use postrider_conformance::samples::{event, key};
use postrider_core::{
    ConsumerName, DeadLetterFilter, DeadLetters, ErrorKind, FeedSource, OnFailure, PartitionId,
    Reader, Result, RetryPolicy, Source, StartFrom,
};
use postrider_relay::Relay;
use postrider_sink_memory::Fault;
use postrider_store_memory::MemoryStore;

use crate::hooked::{Call, Heartbeats, Hooked};
use crate::world::{KeptOpen, Running, World, start};

const REFUSED: Fault = Fault::Refuse(ErrorKind::Permanent);

/// How often each call was made.
type Calls = Arc<Mutex<HashMap<&'static str, u32>>>;

fn count(calls: &Calls, name: &'static str) {
    *calls.lock().expect("no test panicked").entry(name).or_default() += 1;
}

/// A source whose lists of partitions are counted with the store's calls.
struct Counted {
    inner: Arc<FeedSource<MemoryStore>>,
    calls: Calls,
}

#[async_trait]
impl Source for Counted {
    fn identity(&self) -> String {
        self.inner.identity()
    }

    async fn partitions(&self, consumer: &ConsumerName) -> Result<Vec<PartitionId>> {
        count(&self.calls, "partitions");
        self.inner.partitions(consumer).await
    }

    async fn open(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        from: StartFrom,
    ) -> Result<Box<dyn Reader>> {
        self.inner.open(consumer, partition, from).await
    }
}

/// A relay whose store brings news with its heartbeats.
fn counted(world: &World, name: &str) -> (Running, Calls) {
    let calls = Calls::default();
    let counting = Arc::clone(&calls);
    let hook = move |call: Call| {
        let name = match call {
            Call::Checkpoint => "checkpoint",
            Call::Blocked => "blocked",
            Call::Park => "park",
            Call::Released => "released",
            Call::Leases => "leases",
            Call::Heartbeat => "heartbeat",
            Call::Other(name) => name,
        };
        count(&counting, name);
        (Duration::ZERO, None)
    };
    let heartbeats = Heartbeats::WithNews;
    let store = Hooked { inner: world.store.clone(), hook: Arc::new(hook), heartbeats };
    let source = Counted { inner: world.source(), calls: Arc::clone(&calls) };
    let mut sink = World::sink_options();
    sink.retry = RetryPolicy { on_failure: OnFailure::Skip, ..RetryPolicy::default() };
    let relay = Relay::builder(Arc::new(source), Arc::new(store), World::options(name))
        .clock(Arc::clone(&world.clock))
        .sink(sink, Arc::new(KeptOpen(world.sink.clone())))
        .build()
        .expect("valid options");
    (start(relay), calls)
}

/// With eight partitions, at rest, one call for each renewal is all but the feed's own poll: two
/// queries a second must be enough for both.
#[tokio::test(start_paused = true)]
async fn an_idle_relay_asks_one_thing_for_each_renewal() {
    let world = World::new(8);
    let (relay, calls) = counted(&world, "a");
    world.append_dealt(100, 20);
    world.until_delivered(100).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    calls.lock().expect("no test panicked").clear();
    tokio::time::sleep(Duration::from_secs(60)).await;
    let mut made = calls.lock().expect("no test panicked").clone();
    let heartbeats = made.remove("heartbeat").expect("leases are renewed");
    assert!((39..=41).contains(&heartbeats), "{heartbeats} in a minute");
    let listed = made.remove("partitions").unwrap_or(0);
    assert!(listed <= 1, "{listed} lists of partitions in a minute");
    // The memory store's head moves with its clock, and the checkpoints follow it.
    made.remove("advance");
    assert!(made.is_empty(), "and nothing else: {made:?}");
    relay.stop().await;
}

/// A letter that holds nothing back may be sent again by a person, also while the relay rests.
#[tokio::test(start_paused = true)]
async fn a_relay_at_rest_hears_of_a_requeued_letter() {
    let world = World::new(8);
    world.sink.fail_next(1, REFUSED);
    let (relay, calls) = counted(&world, "a");
    world.append(&[event("k0", 0)]);
    world.until_letters(1).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    calls.lock().expect("no test panicked").clear();
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(calls.lock().expect("no test panicked").get("released"), None, "it rests");
    let asked_at = world.clock.elapsed();
    world.store.requeue(&DeadLetterFilter::default()).await.expect("requeues");
    world.until_letters(0).await;
    let took = world.clock.elapsed() - asked_at;
    assert!(took <= Duration::from_secs(3), "a renewal and a look later, not {took:?}");
    assert_eq!(world.first_arrivals("k0"), [0]);
    relay.stop().await;
}

/// Letters that hold a key back are looked for as ever: what a person decides takes effect soon.
#[tokio::test(start_paused = true)]
async fn a_key_that_waits_keeps_the_relay_looking() {
    let world = World::new(2);
    world.sink.fail_key(key("k0"), REFUSED);
    let store = Hooked {
        inner: world.store.clone(),
        hook: Arc::new(|_| (Duration::ZERO, None)),
        heartbeats: Heartbeats::WithNews,
    };
    let relay = Relay::builder(world.source(), Arc::new(store), World::options("a"))
        .clock(Arc::clone(&world.clock))
        .sink(World::sink_options(), Arc::new(KeptOpen(world.sink.clone())))
        .build()
        .expect("valid options");
    let relay = start(relay);
    world.append(&[event("k0", 0), event("k0", 1)]);
    world.until_letters(2).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    world.sink.mend_key(&key("k0"));
    let first = DeadLetterFilter { ids: vec![world.letters().await[0].id], ..Default::default() };
    world.store.skip(&first).await.expect("skips");
    // The one behind it is released by that, though nothing is requeued.
    world.until_letters(1).await;
    assert_eq!(world.first_arrivals("k0"), [1]);
    relay.stop().await;
}

/// One that joins gets its share, and one that leaves is succeeded, as soon as without news.
#[tokio::test(start_paused = true)]
async fn a_relay_at_rest_hears_of_others_that_come_and_go() {
    let world = World::new(8);
    let (first, _) = counted(&world, "a");
    world.append_dealt(100, 20);
    world.until_delivered(100).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    let (second, _) = counted(&world, "b");
    let joined_at = world.clock.elapsed();
    world
        .until("the second has its half", |_| second.status.snapshot().partitions.len() == 4)
        .await;
    let took = world.clock.elapsed() - joined_at;
    assert!(took <= Duration::from_secs(3), "a renewal and a look later, not {took:?}");
    tokio::time::sleep(Duration::from_secs(60)).await;
    let left_at = world.clock.elapsed();
    second.stop().await;
    world.until("the first has all", |_| first.status.snapshot().partitions.len() == 8).await;
    let took = world.clock.elapsed() - left_at;
    assert!(took <= Duration::from_millis(500), "a planned hand-over, not {took:?}");
    first.stop().await;
}
