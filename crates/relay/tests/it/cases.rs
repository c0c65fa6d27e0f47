//! Faults that users of other systems met, by their ids.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use postrider_conformance::samples::{consumer, event, group, number, relay as relay_id};
use postrider_core::{
    Capabilities, Chain, Checkpoints, Clock, ErrorKind, FeedSource, Outcome, PartitionId,
    PollInterval, Publish, Result, Sink,
};
use postrider_relay::{Keeper, Relay, RelayOptions, SinkOptions, SystemClock};
use postrider_sink_memory::{Fault, MemorySink};
use postrider_store_memory::MemoryStore;
use tokio_util::sync::CancellationToken;

use crate::world::{SINK, World, start};

const TROUBLE: Fault = Fault::Refuse(ErrorKind::Transient);

/// W11, W13, W15, W19: the broker takes the first k of ten, then refuses; the relay dies there.
#[tokio::test(start_paused = true)]
async fn w15_whatever_part_of_a_batch_was_taken_the_rest_arrives_in_order() {
    for taken in 0..=10u64 {
        let world = World::new(1);
        let events: Vec<_> = (0..10).map(|n| event("k0", n)).collect();
        world.append(&events);
        let ids: Vec<_> = {
            let partition = PartitionId::numbered(0, 1);
            let start = postrider_core::Position::START;
            let page = postrider_core::Feed::read(
                &world.store,
                &partition,
                &start,
                postrider_core::BatchLimit { records: 100, bytes: 1 << 20 },
            );
            let entries = page.await.expect("readable").entries;
            entries
                .iter()
                .filter_map(|entry| match entry {
                    postrider_core::Entry::Record(record) => Some(record.event.id()),
                    postrider_core::Entry::Malformed(_) => None,
                })
                .collect()
        };
        if let Some(refused) = ids.get(usize::try_from(taken).expect("small")) {
            world.sink.fail_event(*refused, 1_000, TROUBLE);
        }
        let relay = world.relay("a");
        world.until_delivered(taken).await;
        relay.kill().await;
        let fresh = World { sink: MemorySink::new(Arc::clone(&world.clock)), ..world };
        let relay = fresh.relay("b");
        fresh.until("nothing is left", |world| world.sink.delivered() >= 10 - taken).await;
        relay.stop().await;
        let mut arrived = fresh.first_arrivals("k0");
        // What the first broker had confirmed durably may be missing here, and nothing else.
        assert!(arrived.len() as u64 >= 10 - taken, "taken {taken}: {arrived:?}");
        let expected: Vec<u64> = (10 - arrived.len() as u64..10).collect();
        arrived.sort_unstable();
        assert_eq!(arrived, expected, "taken {taken}");
    }
}

/// O21: a batch that failed is sent again before anything newer of its keys.
#[tokio::test(start_paused = true)]
async fn o21_a_failed_batch_is_never_overtaken_by_a_newer_one() {
    let world = World::new(1);
    world.sink.fail_next(25, TROUBLE);
    let relay = world.relay("a");
    for round in 0..20 {
        let events: Vec<_> = (0..10).map(|n| event(&format!("k{n}"), round * 10 + n)).collect();
        world.append(&events);
        tokio::time::sleep(Duration::from_millis(13)).await;
    }
    world.until_delivered(200).await;
    relay.stop().await;
    world.assert_all_in_order(200, 10);
    assert_eq!(world.repetitions(), 0);
}

/// O29: a broker's "duplicate" counts as confirmed.
#[tokio::test(start_paused = true)]
async fn o29_a_duplicate_counts_as_confirmed() {
    let mut world = World::new(1);
    let window = Some(Duration::from_secs(600));
    let dedup = Capabilities { dedup_window: window, ..world.sink.capabilities() };
    world.sink = world.sink.with_capabilities(dedup);
    world.sink.fail_next(10, Fault::LoseConfirm);
    world.append_dealt(50, 50);
    let relay = world.relay("a");
    let status = relay.status.clone();
    world.until("all are confirmed", |_| status.snapshot().sinks[0].published == 50).await;
    assert_eq!(relay.status.snapshot().sinks[0].duplicates, 10);
    relay.stop().await;
    assert_eq!(world.sink.delivered(), 50);
    assert_eq!(world.pending().await, 0);
}

/// W27: after an error and a restart only what was in flight is sent again.
#[tokio::test(start_paused = true)]
async fn w27_a_restart_repeats_only_what_was_above_the_checkpoint() {
    let world = World::new(1);
    let relay = world.relay("a");
    world.append_dealt(1_000, 10);
    world.until_delivered(1_000).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    world.append_dealt(50, 10);
    world.until_delivered(1_050).await;
    relay.kill().await;
    let checkpoint = world
        .store
        .checkpoint(&consumer(SINK), &PartitionId::numbered(0, 1))
        .await
        .expect("answers")
        .expect("written a second ago");
    let above = 1_050 - checkpoint.published;
    let relay = world.relay("b");
    let status = relay.status.clone();
    world.until("the rest is confirmed", |_| status.snapshot().sinks[0].published == above).await;
    relay.stop().await;
    assert!(above <= 50, "{above} above the checkpoint");
    assert_eq!(world.repetitions() as u64, above);
}

/// Stalls one key's calls for half a minute; takes the others at once.
struct StallsOneKey(MemorySink);

#[async_trait]
impl Sink for StallsOneKey {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            chain: Chain::One,
            max_batch_records: 1,
            max_in_flight: 4,
            ..self.0.capabilities()
        }
    }

    async fn publish(&self, batch: Publish<'_>) -> Vec<Outcome> {
        if batch.records()[0].event.key().as_str() == "k0" {
            tokio::time::sleep(Duration::from_secs(29)).await;
        }
        self.0.publish(batch).await
    }

    async fn check(&self) -> Result<()> {
        Ok(())
    }

    async fn close(&self) -> Result<()> {
        Ok(())
    }
}

/// O47: half a minute's stall of one call holds up its own key only.
#[tokio::test(start_paused = true)]
async fn o47_a_stalled_call_holds_up_its_own_key_only() {
    let world = World::new(1);
    let sink = Arc::new(StallsOneKey(world.sink.clone()));
    let relay = Relay::builder(world.source(), Arc::new(world.store.clone()), World::options("a"))
        .clock(Arc::clone(&world.clock))
        .sink(World::sink_options(), sink)
        .build()
        .expect("valid");
    let relay = start(relay);
    let began = world.clock.elapsed();
    world.append_dealt(500, 50);
    world.until_delivered(490).await;
    assert!(world.clock.elapsed() - began < Duration::from_secs(2));
    world.until_delivered(500).await;
    relay.stop().await;
    world.assert_all_in_order(500, 50);
    assert_eq!(world.repetitions(), 0);
}

/// Blocks its thread once, as a starved runtime would.
struct Starves {
    log: MemorySink,
    starved: AtomicBool,
    time: Duration,
}

#[async_trait]
impl Sink for Starves {
    fn capabilities(&self) -> Capabilities {
        self.log.capabilities()
    }

    async fn publish(&self, batch: Publish<'_>) -> Vec<Outcome> {
        if !self.starved.swap(true, Ordering::SeqCst) {
            std::thread::sleep(self.time);
        }
        self.log.publish(batch).await
    }

    async fn check(&self) -> Result<()> {
        Ok(())
    }

    async fn close(&self) -> Result<()> {
        Ok(())
    }
}

fn real_relay(store: &MemoryStore, name: &str, keeper: Keeper, sink: Arc<dyn Sink>) -> Relay {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let source =
        FeedSource::new(Arc::new(store.clone()), Arc::clone(&clock), PollInterval::default());
    let mut options = RelayOptions::new(group("relays"), relay_id(name));
    options.keeper = keeper;
    options.lease_ttl = Duration::from_millis(400);
    Relay::builder(Arc::new(source), Arc::new(store.clone()), options)
        .sink(SinkOptions::new(consumer(SINK)), sink)
        .build()
        .expect("valid")
}

/// Runs `starved` on a thread of its own and a second relay beside it, in real time. Returns what
/// each delivered.
fn beside_a_starved_relay(keeper: Keeper) -> (Vec<u64>, Vec<u64>) {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let store = MemoryStore::new(1, Arc::clone(&clock));
    let events: Vec<_> = (0..100).map(|n| event("k", n)).collect();
    store.append(&events).expect("valid");
    let (first, second) = (MemorySink::new(Arc::clone(&clock)), MemorySink::new(clock));
    let starves = Starves {
        log: first.clone(),
        starved: AtomicBool::new(false),
        time: Duration::from_millis(1_500),
    };
    let stop = CancellationToken::new();
    let run = |relay: Relay, stop: CancellationToken| {
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(relay.run(stop)).expect("ends well");
        })
    };
    let a = run(real_relay(&store, "starved", keeper, Arc::new(starves)), stop.clone());
    std::thread::sleep(Duration::from_millis(200));
    let b_sink: Arc<dyn Sink> = Arc::new(second.clone());
    let b = run(real_relay(&store, "standby", Keeper::OwnThread, b_sink), stop.clone());
    let deadline = std::time::Instant::now() + Duration::from_secs(20);
    while first.delivered() + second.delivered() < 100 || first.delivered() == 0 {
        assert!(std::time::Instant::now() < deadline, "not delivered in 20 s");
        std::thread::sleep(Duration::from_millis(10));
    }
    stop.cancel();
    a.join().expect("no panic");
    b.join().expect("no panic");
    let numbers = |sink: &MemorySink| -> Vec<u64> {
        sink.deliveries().iter().map(|one| number(&one.event)).collect()
    };
    (numbers(&first), numbers(&second))
}

/// O27: a starved runtime does not lose its lease, because leases are renewed on another thread;
/// no second relay publishes meanwhile.
#[test]
fn o27_a_starved_relay_keeps_its_lease_and_nobody_publishes_beside_it() {
    let (starved, standby) = beside_a_starved_relay(Keeper::OwnThread);
    assert_eq!(starved, (0..100).collect::<Vec<_>>());
    assert!(standby.is_empty(), "{standby:?}");
}

/// O27, the other way: where the renewals starve as well, the standby takes over after the TTL, and
/// the starved relay's late confirmation is fenced: it sends nothing beyond the call it was in.
#[test]
fn o27_a_relay_whose_renewals_starve_stops_by_itself() {
    let (starved, standby) = beside_a_starved_relay(Keeper::SameRuntime);
    assert_eq!(standby, (0..100).collect::<Vec<_>>(), "all were taken over, in order");
    assert!(starved.len() <= 100, "one call at most: {starved:?}");
}
