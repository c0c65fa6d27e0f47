//! Refusals, outages and dead letters.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use postrider_conformance::samples::{event, key};
use postrider_core::{
    BatchLimit, Capabilities, Chain, ConsumerName, DeadLetterFilter, DeadLetterState, DeadLetters,
    Error, ErrorKind, OnFailure, Outcome, PartitionId, Position, Publish, ReadOutcome, Reader,
    Result, RetryPolicy, Sink, Source, StartFrom,
};
use postrider_relay::{Relay, SinkState};
use postrider_sink_memory::Fault;

use crate::world::{World, quick_retries, start};

const REFUSED: Fault = Fault::Refuse(ErrorKind::Permanent);
const TROUBLE: Fault = Fault::Refuse(ErrorKind::Transient);

fn states(letters: &[postrider_core::DeadLetter]) -> Vec<DeadLetterState> {
    letters.iter().map(|letter| letter.state).collect()
}

/// O17: a broker rejects one event of a batch; only its key stops, and requeue delivers in order.
#[tokio::test(start_paused = true)]
async fn o17_one_refused_event_of_a_batch_stops_its_key_alone() {
    let world = World::new(1);
    world.sink.fail_key(key("k1"), REFUSED);
    world.append_dealt(30, 3);
    let relay = world.relay("a");
    let letters = world.until_letters(10).await;
    world.until_delivered(20).await;
    assert_eq!(states(&letters)[..2], [DeadLetterState::Parked, DeadLetterState::Waiting]);
    assert!(world.first_arrivals("k1").is_empty());
    assert_eq!(world.first_arrivals("k0"), (0..30).step_by(3).collect::<Vec<_>>());

    // Later events of the key wait as well, also in another batch.
    world.append(&[event("k1", 31), event("k2", 32)]);
    world.until_letters(11).await;
    world.until_delivered(21).await;

    world.sink.mend_key(&key("k1"));
    let parked = DeadLetterFilter { state: Some(DeadLetterState::Parked), ..Default::default() };
    assert_eq!(world.store.requeue(&parked).await.expect("requeues"), 1);
    world.until_letters(0).await;
    world.append(&[event("k1", 34)]);
    world.until_delivered(33).await;
    relay.stop().await;
    let mut expected: Vec<u64> = (1..30).step_by(3).collect();
    expected.extend([31, 34]);
    assert_eq!(world.first_arrivals("k1"), expected);
    assert_eq!(world.repetitions(), 0);
    assert_eq!(world.pending().await, 0);
}

#[tokio::test(start_paused = true)]
async fn a_requeued_event_that_is_refused_again_is_parked_again_with_its_attempts() {
    let world = World::new(1);
    world.sink.fail_key(key("k0"), REFUSED);
    world.append_dealt(2, 1);
    let relay = world.relay("a");
    world.until_letters(2).await;
    let all = DeadLetterFilter::default();
    world.store.requeue(&all).await.expect("requeues");
    let give_up = world.clock.elapsed() + Duration::from_secs(60);
    loop {
        let letters = world.letters().await;
        if letters[0].state == DeadLetterState::Parked && letters[0].attempts > 1 {
            assert_eq!(states(&letters), [DeadLetterState::Parked, DeadLetterState::Waiting]);
            break;
        }
        assert!(world.clock.elapsed() < give_up, "{letters:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // Skipped: it stays to be seen, and the next one goes out.
    world.sink.mend_key(&key("k0"));
    let parked = DeadLetterFilter { state: Some(DeadLetterState::Parked), ..Default::default() };
    assert_eq!(world.store.skip(&parked).await.expect("skips"), 1);
    world.until_delivered(1).await;
    assert_eq!(world.first_arrivals("k0"), [1]);
    assert_eq!(states(&world.until_letters(1).await), [DeadLetterState::Skipped]);
    relay.stop().await;
}

/// O57: an outage never counts as an attempt, however long; nothing is parked, all arrives.
#[tokio::test(start_paused = true)]
async fn o57_an_outage_uses_up_no_attempts() {
    let world = World::new(2);
    world.sink.set_outage(Some(TROUBLE));
    world.append_dealt(500, 50);
    let mut options = World::sink_options();
    options.retry = quick_retries(3);
    let relay = world.relay_with(World::options("a"), options);
    tokio::time::sleep(Duration::from_secs(7_200)).await;
    assert!(world.letters().await.is_empty());
    assert!(matches!(relay.status.snapshot().sinks[0].state, SinkState::Outage { .. }));
    let calls = relay.status.snapshot().sinks[0].calls;
    // Each partition looks every two seconds, on average: up to four, with full jitter.
    assert!(calls < 9_000, "an open circuit calls seldom: {calls} calls in two hours");
    world.sink.set_outage(None);
    world.until_delivered(500).await;
    relay.stop().await;
    world.assert_all_in_order(500, 50);
    assert!(world.letters().await.is_empty());
    assert_eq!(world.repetitions(), 0);
}

/// One key that always fails uses up its attempts and is parked, while the others flow.
#[tokio::test(start_paused = true)]
async fn a_key_that_fails_among_healthy_ones_is_parked_after_its_attempts() {
    let mut world = World::new(1);
    let one = Capabilities {
        chain: Chain::One,
        max_batch_records: 1,
        max_in_flight: 16,
        ..world.sink.capabilities()
    };
    world.sink = world.sink.with_capabilities(one);
    world.sink.fail_key(key("poison"), TROUBLE);
    let mut options = World::sink_options();
    options.retry = quick_retries(4);
    let relay = world.relay_with(World::options("a"), options);
    world.append(&[event("poison", 0), event("poison", 1)]);
    for n in 0..200 {
        world.append(&[event(&format!("k{n}"), n)]);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    world.until_delivered(200).await;
    let letters = world.until_letters(2).await;
    assert_eq!(states(&letters), [DeadLetterState::Parked, DeadLetterState::Waiting]);
    assert!(letters[0].attempts >= 4, "{}", letters[0].attempts);
    relay.stop().await;
}

/// However long a part of the sink asks for patience: a failure after it is the first that counts.
#[tokio::test(start_paused = true)]
async fn patience_uses_up_no_attempts() {
    let mut world = World::new(1);
    let one = Capabilities {
        chain: Chain::One,
        max_batch_records: 1,
        max_in_flight: 16,
        ..world.sink.capabilities()
    };
    world.sink = world.sink.with_capabilities(one);
    let busy = Fault::Refuse(ErrorKind::Throttled { retry_after: None });
    world.sink.fail_key(key("slow"), busy);
    let mut options = World::sink_options();
    options.retry = quick_retries(4);
    let relay = world.relay_with(World::options("a"), options);
    world.append(&[event("slow", 0)]);
    for n in 0..200 {
        if n == 150 {
            world.sink.fail_key(key("slow"), TROUBLE);
        }
        world.append(&[event(&format!("k{n}"), n)]);
        tokio::time::sleep(Duration::from_secs(1)).await;
        if n == 150 {
            // One attempt comes at least every 30 s.
            tokio::time::sleep(Duration::from_secs(31)).await;
            world.sink.mend_key(&key("slow"));
        }
    }
    world.until_delivered(201).await;
    assert!(world.letters().await.is_empty());
    relay.stop().await;
}

#[tokio::test(start_paused = true)]
async fn on_failure_skip_goes_on_with_the_key() {
    let world = World::new(1);
    world.append_dealt(3, 1);
    let first = {
        let relay = world.relay("a");
        world.until_delivered(3).await;
        relay.stop().await;
        world.sink.deliveries()[0].event.id()
    };
    assert_ne!(first.as_uuid(), &uuid::Uuid::nil());
    world.sink.fail_next(1, REFUSED);
    let mut options = World::sink_options();
    options.retry.on_failure = OnFailure::Skip;
    let relay = world.relay_with(World::options("b"), options);
    world.append(&[event("k0", 10), event("k0", 11)]);
    world.until_delivered(4).await;
    assert_eq!(world.first_arrivals("k0"), [0, 1, 2, 11]);
    assert_eq!(states(&world.until_letters(1).await), [DeadLetterState::Skipped]);
    relay.stop().await;
    assert_eq!(world.pending().await, 0);
}

#[tokio::test(start_paused = true)]
async fn on_failure_halt_stops_the_sink_and_says_so() {
    let world = World::new(1);
    world.sink.fail_next(1, REFUSED);
    let mut options = World::sink_options();
    options.retry.on_failure = OnFailure::Halt;
    let relay = world.relay_with(World::options("a"), options.clone());
    world.append_dealt(3, 1);
    let status = relay.status.clone();
    world
        .until("halted", |_| matches!(status.snapshot().sinks[0].state, SinkState::Halted { .. }))
        .await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    let snapshot = relay.status.snapshot();
    assert!(!snapshot.ready && snapshot.reasons[0].contains("halted"), "{:?}", snapshot.reasons);
    assert_eq!(world.sink.delivered(), 0);
    relay.stop().await;
    // A restart begins at the same event.
    let relay = world.relay_with(World::options("b"), options);
    world.until_delivered(3).await;
    relay.stop().await;
    world.assert_all_in_order(3, 1);
}

/// A database that was replaced by another copy: the reader says so once, and the relay begins
/// again under a lease of its own.
#[tokio::test(start_paused = true)]
async fn a_source_that_fences_its_reader_is_read_again_from_the_checkpoint() {
    let world = World::new(1);
    world.append_dealt(20, 4);
    let fences = Arc::new(AtomicBool::new(false));
    let source = Fences { inner: world.source(), fences: Arc::clone(&fences) };
    let relay =
        Relay::builder(Arc::new(source), Arc::new(world.store.clone()), World::options("a"))
            .clock(Arc::clone(&world.clock))
            .sink(World::sink_options(), Arc::new(world.sink.clone()))
            .build()
            .expect("valid");
    let relay = start(relay);
    world.until_delivered(20).await;
    fences.store(true, Ordering::SeqCst);
    world.append_dealt(20, 4);
    world.until_delivered(40).await;
    assert!(!fences.load(Ordering::SeqCst), "the reader was fenced");
    assert!(relay.status.snapshot().ready, "{:?}", relay.status.snapshot().reasons);
    relay.stop().await;
    let deliveries = world.sink.deliveries();
    let ids: std::collections::HashSet<_> = deliveries.iter().map(|one| one.event.id()).collect();
    assert_eq!(ids.len(), 40, "every appended event arrived");
}

/// Its readers answer `Fenced` once when told to.
struct Fences<S> {
    inner: Arc<S>,
    fences: Arc<AtomicBool>,
}

struct FencedReader {
    inner: Box<dyn Reader>,
    fences: Arc<AtomicBool>,
}

#[async_trait::async_trait]
impl<S: Source> Source for Fences<S> {
    fn identity(&self) -> String {
        self.inner.identity()
    }

    async fn partitions(&self, consumer: &ConsumerName) -> Result<Vec<PartitionId>> {
        self.inner.partitions(consumer).await
    }

    async fn open(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        from: StartFrom,
    ) -> Result<Box<dyn Reader>> {
        let inner = self.inner.open(consumer, partition, from).await?;
        Ok(Box::new(FencedReader { inner, fences: Arc::clone(&self.fences) }))
    }
}

#[async_trait::async_trait]
impl Reader for FencedReader {
    async fn next(&mut self, limit: BatchLimit) -> Result<ReadOutcome> {
        let outcome = self.inner.next(limit).await?;
        if self.fences.swap(false, Ordering::SeqCst) {
            return Err(Error::fenced("the database was replaced by another copy"));
        }
        Ok(outcome)
    }

    fn confirmed(&mut self, position: &Position) {
        self.inner.confirmed(position);
    }
}

/// W17: whatever kind of trouble, everything is sent again under the same id.
#[tokio::test(start_paused = true)]
async fn w17_trouble_of_every_kind_ends_in_delivery_under_the_same_id() {
    let world = World::new(1);
    world.append_dealt(40, 4);
    for fault in [
        TROUBLE,
        Fault::LoseConfirm,
        Fault::Refuse(ErrorKind::Throttled { retry_after: Some(Duration::from_secs(2)) }),
    ] {
        world.sink.fail_next(5, fault);
        let relay = world.relay("a");
        world.append_dealt(40, 4);
        tokio::time::sleep(Duration::from_secs(30)).await;
        relay.stop().await;
    }
    let deliveries = world.sink.deliveries();
    let ids: std::collections::HashSet<_> = deliveries.iter().map(|one| one.event.id()).collect();
    assert_eq!(ids.len(), 160, "every appended event arrived");
    assert!(world.letters().await.is_empty());
}

/// A key between attempts does not hold the checkpoint of all others back for ever.
#[tokio::test(start_paused = true)]
async fn a_failing_key_is_set_aside_before_the_window_is_full() {
    let world = World::new(1);
    world.sink.fail_key(key("slow"), TROUBLE);
    world.append(&[event("slow", 0), event("slow", 1)]);
    let mut options = World::sink_options();
    options.retry = RetryPolicy { max_attempts: 1_000, ..RetryPolicy::default() };
    let relay = world.relay_with(World::options("a"), options);
    world.append_dealt(120_000, 1_000);
    world.until_delivered(120_000).await;
    world.until_letters(2).await;
    world.sink.mend_key(&key("slow"));
    world.until_delivered(120_002).await;
    world.until_letters(0).await;
    relay.stop().await;
    assert_eq!(world.first_arrivals("slow"), [0, 1]);
    assert_eq!(world.pending().await, 0);
}

/// published + parked + dropped + pending = appended, through every fate.
#[tokio::test(start_paused = true)]
async fn the_counts_add_up() {
    use postrider_core::Checkpoints;
    let world = World::new(4);
    world.sink.fail_key(key("k3"), REFUSED);
    world.append_dealt(1_000, 10);
    let relay = world.relay("a");
    world.until_delivered(900).await;
    world.until_letters(100).await;
    let first = world.letters().await[0].id;
    let one = DeadLetterFilter { ids: vec![first], ..Default::default() };
    assert_eq!(world.store.discard(&one).await.expect("discards"), 1);
    world.sink.mend_key(&key("k3"));
    world.until_delivered(999).await;
    relay.stop().await;
    world.append_dealt(7, 7);
    let progress = world.store.progress().await.expect("answers");
    let sum =
        |of: fn(&postrider_core::ConsumerProgress) -> u64| -> u64 { progress.iter().map(of).sum() };
    let published = sum(|one| one.checkpoint.published);
    let (parked, dropped) = (sum(|one| one.parked), sum(|one| one.dropped));
    let pending = sum(|one| one.pending);
    assert_eq!((published, parked, dropped, pending), (999, 0, 1, 7));
}

/// Confirms up to three of a key's events in a call and gives the rest back.
struct Unhurried {
    inner: Arc<dyn Sink>,
    longest: std::sync::Mutex<Duration>,
}

#[async_trait::async_trait]
impl Sink for Unhurried {
    fn capabilities(&self) -> Capabilities {
        Capabilities { chain: Chain::Many, ..self.inner.capabilities() }
    }
    async fn publish(&self, batch: Publish<'_>) -> Vec<Outcome> {
        *self.longest.lock().expect("not poisoned") = batch.sending_time();
        let records = batch.records();
        let sent = records.len().min(3);
        let part = Publish::new(batch.partition(), &records[..sent]);
        let mut outcomes = self.inner.publish(part).await;
        outcomes.extend(records[sent..].iter().map(|_| Outcome::HeldBack));
        outcomes
    }
    async fn check(&self) -> Result<()> {
        self.inner.check().await
    }
    async fn close(&self) -> Result<()> {
        self.inner.close().await
    }
}

/// What a slow sink gives back unsent behind what it confirmed is no failure: it goes at once, in
/// order, without an attempt.
#[tokio::test(start_paused = true)]
async fn a_hot_key_gets_through_a_sink_that_gives_back_what_it_had_no_time_for() {
    let world = World::new(1);
    world.append_dealt(100, 1);
    let sink = Arc::new(Unhurried {
        inner: Arc::new(world.sink.clone()),
        longest: std::sync::Mutex::default(),
    });
    let began = world.clock.elapsed();
    let relay = Relay::builder(world.source(), Arc::new(world.store.clone()), World::options("a"))
        .clock(Arc::clone(&world.clock))
        .sink(World::sink_options(), sink.clone())
        .build()
        .expect("valid options");
    let relay = start(relay);
    world.until_delivered(100).await;
    assert!(world.clock.elapsed() - began < Duration::from_secs(1), "it waited between calls");
    assert_eq!(relay.status.snapshot().sinks[0].failures, 0);
    relay.stop().await;
    assert_eq!(world.first_arrivals("k0"), (0..100).collect::<Vec<_>>());
    assert_eq!(world.repetitions(), 0);
    assert_eq!(*sink.longest.lock().expect("not poisoned"), Duration::from_secs(10));
}
