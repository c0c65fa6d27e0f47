//! Dead letters under way: released, refused again, and beside a database in trouble.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use postrider_conformance::samples::{event, key, sized_event};
use postrider_core::{
    Capabilities, Chain, DeadLetterFilter, DeadLetters, Error, ErrorKind, NewEvent, Outcome,
    Publish, Record, Sink,
};
use postrider_relay::Relay;
use postrider_sink_memory::Fault;

use crate::hooked::{Call, Heartbeats, Hook, Hooked};
use crate::world::{KeptOpen, Running, World, start};

const REFUSED: Fault = Fault::Refuse(ErrorKind::Permanent);
const TROUBLE: Fault = Fault::Refuse(ErrorKind::Transient);

fn of_key(name: &str) -> DeadLetterFilter {
    DeadLetterFilter { key: Some(key(name)), ..Default::default() }
}

fn hooked(world: &World, hook: Arc<Hook>) -> Running {
    let mut sink = World::sink_options();
    sink.budget_bytes = 4 * 1024 * 1024;
    let store = Arc::new(Hooked { inner: world.store.clone(), hook, heartbeats: Heartbeats::Bare });
    let relay = Relay::builder(world.source(), store, World::options("a"))
        .clock(Arc::clone(&world.clock))
        .sink(sink, Arc::new(KeptOpen(world.sink.clone())))
        .build()
        .expect("valid options");
    start(relay)
}

/// A sink as brokers' are: the limit that it tells is the one that it was told when it connected.
struct Remembering {
    inner: KeptOpen,
    limit: AtomicU64,
    actual: AtomicU64,
}

#[async_trait::async_trait]
impl Sink for Remembering {
    fn capabilities(&self) -> Capabilities {
        let limit = usize::try_from(self.limit.load(Ordering::SeqCst)).expect("a limit");
        Capabilities { max_event_bytes: Some(limit), ..self.inner.capabilities() }
    }

    async fn publish(&self, batch: Publish<'_>) -> Vec<Outcome> {
        let limit = self.actual.load(Ordering::SeqCst);
        self.limit.store(limit, Ordering::SeqCst);
        let large = |record: &Record| record.event.payload().len() as u64 > limit;
        if batch.records().iter().any(large) {
            return vec![Outcome::Failed(Error::permanent("too large"))];
        }
        self.inner.publish(batch).await
    }

    async fn check(&self) -> postrider_core::Result<()> {
        Ok(())
    }

    async fn close(&self) -> postrider_core::Result<()> {
        Ok(())
    }
}

/// Nobody has to send something else first, nor to start the relay anew.
#[tokio::test(start_paused = true)]
async fn an_oversize_event_flows_when_it_is_requeued_after_the_limit_was_raised() {
    let world = World::new(1);
    let sink = Arc::new(Remembering {
        inner: KeptOpen(world.sink.clone()),
        limit: AtomicU64::new(1_000),
        actual: AtomicU64::new(1_000),
    });
    let relay = Relay::builder(world.source(), Arc::new(world.store.clone()), World::options("a"))
        .clock(Arc::clone(&world.clock))
        .sink(World::sink_options(), Arc::clone(&sink) as Arc<dyn Sink>)
        .build()
        .expect("valid options");
    let relay = start(relay);
    world.append(&[sized_event("a", 1, 2_000), event("a", 2)]);
    world.until_letters(2).await;
    world.store.requeue(&of_key("a")).await.expect("requeues");
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(world.letters().await.len(), 2, "it is still too large");
    sink.actual.store(4_000, Ordering::SeqCst);
    world.store.requeue(&of_key("a")).await.expect("requeues");
    world.until_letters(0).await;
    relay.stop().await;
    assert_eq!(world.first_arrivals("a"), [1, 2]);
}

/// A released letter that fails again and again does not hold up other keys' letters, also when
/// nothing else is delivered.
#[tokio::test(start_paused = true)]
async fn a_released_letter_that_still_fails_holds_up_no_other_key() {
    let world = World::new(1);
    world.sink.fail_key(key("k0"), REFUSED);
    world.sink.fail_key(key("k1"), REFUSED);
    world.append(&[event("k0", 0), event("k1", 1), event("k0", 2), event("k1", 3)]);
    let relay = world.relay("a");
    world.until_letters(4).await;
    world.sink.fail_key(key("k0"), TROUBLE);
    world.store.requeue(&of_key("k0")).await.expect("requeues");
    tokio::time::sleep(Duration::from_secs(60)).await;
    world.sink.mend_key(&key("k1"));
    world.store.requeue(&of_key("k1")).await.expect("requeues");
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(world.first_arrivals("k1"), [1, 3]);
    world.sink.mend_key(&key("k0"));
    world.until_letters(0).await;
    relay.stop().await;
    assert_eq!(world.first_arrivals("k0"), [0, 2]);
    assert_eq!(world.repetitions(), 0);
}

#[tokio::test(start_paused = true)]
async fn each_attempt_at_a_letter_counts_once() {
    let world = World::new(1);
    world.sink.fail_key(key("k0"), REFUSED);
    world.append(&[event("k0", 0)]);
    let relay = world.relay("a");
    world.until_letters(1).await;
    for attempts in 2..6 {
        world.store.requeue(&of_key("k0")).await.expect("requeues");
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(world.letters().await[0].attempts, attempts);
    }
    relay.stop().await;
}

/// A person requeues a skipped letter just as another key is parked: the parked key still waits.
#[tokio::test(start_paused = true)]
async fn a_key_parked_beside_a_requeued_one_is_not_overtaken() {
    let world = World::new(1);
    world.sink.fail_next(1, REFUSED);
    let slow = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&slow);
    let looks = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&looks);
    let relay = hooked(
        &world,
        Arc::new(move |call| {
            let slow = call == Call::Released && seen.load(Ordering::Relaxed);
            counted.fetch_add(u64::from(slow), Ordering::Relaxed);
            (if slow { Duration::from_millis(300) } else { Duration::ZERO }, None)
        }),
    );
    world.append(&[event("skipped", 0)]);
    world.until_letters(1).await;
    world.store.skip(&of_key("skipped")).await.expect("skips");
    // The pipeline learns that nothing is held back.
    tokio::time::sleep(Duration::from_secs(5)).await;
    slow.store(true, Ordering::Relaxed);
    world.store.requeue(&of_key("skipped")).await.expect("requeues");
    let before = looks.load(Ordering::Relaxed);
    world.until("a look is under way", |_| looks.load(Ordering::Relaxed) > before).await;
    world.sink.fail_key(key("poison"), REFUSED);
    world.append(&[event("poison", 1)]);
    world.until_letters(2).await;
    world.sink.mend_key(&key("poison"));
    world.until_letters(1).await;
    world.append(&[event("poison", 2)]);
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(world.first_arrivals("poison").is_empty(), "2 waits behind 1");
    world.store.requeue(&of_key("poison")).await.expect("requeues");
    world.until_letters(0).await;
    relay.stop().await;
    assert_eq!(world.first_arrivals("poison"), [1, 2]);
}

/// While letters can't be written, what waits to be written counts towards the budget.
#[tokio::test(start_paused = true)]
async fn letters_that_can_not_be_written_fill_the_budget_too() {
    let world = World::new(1);
    world.sink.set_outage(Some(REFUSED));
    let events: Vec<NewEvent> =
        (0..100).map(|n| sized_event(&format!("k{n}"), n, 512 * 1024)).collect();
    world.append(&events);
    let full = Arc::new(AtomicBool::new(true));
    let seen = Arc::clone(&full);
    let relay = hooked(
        &world,
        Arc::new(move |call| {
            let error = (call == Call::Park && seen.load(Ordering::Relaxed))
                .then(|| Error::transient("the disk is full"));
            (Duration::ZERO, error)
        }),
    );
    tokio::time::sleep(Duration::from_secs(600)).await;
    let refused = relay.status.snapshot().sinks[0].failures;
    assert!(refused <= 16, "{refused} events of 512 KiB are in memory; the budget is 4 MiB");
    full.store(false, Ordering::Relaxed);
    world.until_letters(100).await;
    relay.stop().await;
}

/// A database that asks for patience is asked again, not given up.
#[tokio::test(start_paused = true)]
async fn a_throttling_database_halts_no_sink() {
    for busy in [Call::Checkpoint, Call::Blocked, Call::Park] {
        let world = World::new(1);
        world.sink.fail_next(1, REFUSED);
        world.append(&[event("k0", 0), event("k1", 1)]);
        let left = AtomicU64::new(3);
        let relay = hooked(
            &world,
            Arc::new(move |call| {
                let struck = call == busy
                    && left
                        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1))
                        .is_ok();
                let kind = ErrorKind::Throttled { retry_after: Some(Duration::from_millis(200)) };
                (Duration::ZERO, struck.then(|| Error::new(kind, "too many requests")))
            }),
        );
        world.until_letters(1).await;
        world.append(&[event("k1", 2)]);
        tokio::time::sleep(Duration::from_secs(30)).await;
        assert_eq!(world.first_arrivals("k1"), [1, 2], "{busy:?}");
        relay.stop().await;
    }
}

/// While one call tries whether the sink is back, a stop is not held up beyond its time-out.
#[tokio::test(start_paused = true)]
async fn a_stop_during_a_probe_keeps_to_the_drain_timeout() {
    let mut world = World::new(1);
    let one = Capabilities { chain: Chain::One, max_batch_records: 1, ..world.sink.capabilities() };
    world.sink = world.sink.with_capabilities(one);
    world.sink.set_outage(Some(TROUBLE));
    world.append_dealt(50, 50);
    let mut options = World::options("a");
    options.drain_timeout = Duration::from_millis(300);
    let relay = world.relay_with(options, World::sink_options());
    tokio::time::sleep(Duration::from_secs(60)).await;
    world.sink.hold();
    world.until("the probe hangs", |world| world.sink.waiting_calls() == 1).await;
    let stopping = world.clock.elapsed();
    relay.stop().await;
    let took = world.clock.elapsed() - stopping;
    assert!(took <= Duration::from_millis(500), "stopped after {took:?}");
}

/// A stop during an outage does not wait for the sink: the gaps below confirmed events are set
/// aside.
#[tokio::test(start_paused = true)]
async fn a_stop_during_an_outage_is_quick_and_repeats_nothing() {
    let mut world = World::new(1);
    let one = Capabilities { chain: Chain::One, max_batch_records: 1, ..world.sink.capabilities() };
    world.sink = world.sink.with_capabilities(one);
    world.sink.fail_key(key("k0"), TROUBLE);
    world.append_dealt(50, 50);
    let relay = world.relay("a");
    world.until_delivered(49).await;
    world.sink.set_outage(Some(TROUBLE));
    world.append_dealt(50, 50);
    tokio::time::sleep(Duration::from_secs(180)).await;
    let stopping = world.clock.elapsed();
    relay.stop().await;
    let took = world.clock.elapsed() - stopping;
    assert!(took <= Duration::from_millis(500), "stopped after {took:?}");
    world.sink.set_outage(None);
    world.sink.mend_key(&key("k0"));
    let relay = world.relay("b");
    world.until_delivered(100).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    relay.stop().await;
    assert_eq!((world.sink.delivered(), world.repetitions()), (100, 0));
}

/// Where looking for released letters is dear, as behind a long backlog, it is done more rarely.
#[tokio::test(start_paused = true)]
async fn looking_for_released_letters_takes_a_small_part_of_the_time() {
    let world = World::new(1);
    let looks = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&looks);
    let hook = move |call| {
        let dear = call == Call::Released;
        counted.fetch_add(u64::from(dear), Ordering::Relaxed);
        (if dear { Duration::from_millis(500) } else { Duration::ZERO }, None)
    };
    let relay = hooked(&world, Arc::new(hook));
    tokio::time::sleep(Duration::from_secs(600)).await;
    let looks = looks.load(Ordering::Relaxed);
    assert!((30..=120).contains(&looks), "{looks} looks of half a second in ten minutes");
    relay.stop().await;
}

/// A stop reaches the workers at once, also while the coordinator waits for the database.
#[tokio::test(start_paused = true)]
async fn a_stop_does_not_wait_for_a_slow_database_to_reach_the_workers() {
    let world = World::new(2);
    let slow = Arc::new(AtomicBool::new(false));
    let (seen, asked) = (Arc::clone(&slow), Arc::new(AtomicBool::new(false)));
    let told = Arc::clone(&asked);
    let hook = move |call| {
        let slow = call == Call::Leases && seen.load(Ordering::Relaxed);
        told.fetch_or(slow, Ordering::Relaxed);
        (if slow { Duration::from_secs(20) } else { Duration::ZERO }, None)
    };
    let relay = hooked(&world, Arc::new(hook));
    let status = relay.status.clone();
    world.until("it works", |_| status.snapshot().partitions.len() == 2).await;
    // Another relay takes a share, so that this one keeps looking at the leases.
    let other = world.relay("b");
    world.until("shared", |_| status.snapshot().partitions.len() == 1).await;
    slow.store(true, Ordering::Relaxed);
    world.until("the database is slow", |_| asked.load(Ordering::Relaxed)).await;
    let stopping = world.clock.elapsed();
    let watch = world.until("it hands over", |_| status.snapshot().partitions.is_empty());
    let watched = async {
        watch.await;
        world.clock.elapsed() - stopping
    };
    let ((), took) = tokio::join!(relay.stop(), watched);
    assert!(took <= Duration::from_millis(200), "handed over after {took:?}");
    other.stop().await;
}

/// A key that fails on and on keeps the checkpoint back, but not another key's requeued letters.
#[tokio::test(start_paused = true)]
async fn a_failing_key_below_them_holds_up_no_released_letters() {
    let world = World::new(1);
    world.sink.fail_key(key("k0"), TROUBLE);
    world.sink.fail_key(key("k1"), REFUSED);
    world.append(&[event("k0", 0), event("k1", 1), event("k0", 2), event("k1", 3)]);
    let relay = world.relay("a");
    world.until_letters(2).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    world.sink.mend_key(&key("k1"));
    world.store.requeue(&of_key("k1")).await.expect("requeues");
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(world.first_arrivals("k1"), [1, 3]);
    world.sink.mend_key(&key("k0"));
    world.until_letters(0).await;
    relay.stop().await;
    assert_eq!(world.first_arrivals("k0"), [0, 2]);
    assert_eq!(world.repetitions(), 0);
}
