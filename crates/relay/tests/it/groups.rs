//! Several relays, sinks, hand-overs and crashes.

use std::sync::Arc;
use std::time::Duration;

use postrider_conformance::samples::{consumer, event, group, relay as relay_id};
use postrider_core::{Acquired, ErrorKind, Leases, PartitionId, RetentionPolicy};
use postrider_relay::{Relay, Retain, SinkOptions};
use postrider_sink_memory::{Fault, MemorySink};

use crate::world::{World, start};

const TTL: Duration = Duration::from_secs(5);

/// O25: three relays share eight partitions evenly, and nothing is delivered twice.
#[tokio::test(start_paused = true)]
async fn o25_three_relays_share_evenly_and_repeat_nothing() {
    let world = World::new(8);
    let relays: Vec<_> = ["a", "b", "c"].iter().map(|name| world.relay(name)).collect();
    let held = |world: &World| {
        let _ = world;
        let mut counts: Vec<usize> =
            relays.iter().map(|relay| relay.status.snapshot().partitions.len()).collect();
        counts.sort_unstable();
        counts
    };
    world.until("the shares are even", |world| held(world) == [2, 3, 3]).await;
    world.append_dealt(10_000, 100);
    world.until_delivered(10_000).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(world.sink.delivered(), 10_000);
    world.assert_all_in_order(10_000, 100);
    for relay in relays {
        relay.stop().await;
    }
}

/// A killed relay's partitions are served by another within the TTL and a second.
#[tokio::test(start_paused = true)]
async fn a_killed_relay_is_taken_over_within_ttl_plus_one_second() {
    let world = World::new(4);
    let a = world.relay("a");
    world.append_dealt(100, 10);
    world.until_delivered(100).await;
    let b = world.relay("b");
    world.until("b has a share", |_| b.status.snapshot().partitions.len() == 2).await;
    a.kill().await;
    let killed_at = world.clock.elapsed();
    let more: Vec<_> = (100..200).map(|n| event(&format!("k{}", n % 10), n)).collect();
    world.append(&more);
    world.until("all partitions are served", |_| b.status.snapshot().partitions.len() == 4).await;
    world.until_delivered(200).await;
    let gap = world.clock.elapsed() - killed_at;
    assert!(gap <= TTL + Duration::from_secs(1), "taken over after {gap:?}");
    b.stop().await;
    world.assert_all_in_order(200, 10);
}

/// A planned hand-over is quick and repeats nothing, with events flowing all the while.
#[tokio::test(start_paused = true)]
async fn a_planned_hand_over_takes_at_most_200_ms_and_repeats_nothing() {
    let world = World::new(4);
    world.sink.set_latency(Duration::from_millis(3));
    let a = world.relay("a");
    world.until("a holds all", |_| a.status.snapshot().partitions.len() == 4).await;
    let b = world.relay("b");
    world.until("b has a share", |_| b.status.snapshot().partitions.len() == 2).await;
    let mut longest = Duration::ZERO;
    let mut stop_a = Some(a);
    for n in 0..2_000u64 {
        world.append(&[event(&format!("k{}", n % 40), n)]);
        if n == 1_000 {
            let a = stop_a.take().expect("stopped once");
            let stopping = world.clock.elapsed();
            let stop = a.stop();
            tokio::pin!(stop);
            stop.await;
            world.until("b holds all", |_| b.status.snapshot().partitions.len() == 4).await;
            longest = world.clock.elapsed() - stopping;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    world.until_delivered(2_000).await;
    b.stop().await;
    world.assert_all_in_order(2_000, 40);
    assert_eq!(world.repetitions(), 0);
    assert!(longest <= Duration::from_millis(200), "handed over in {longest:?}");
}

/// A stop with a key between attempts leaves no confirmed event beyond the checkpoint.
#[tokio::test(start_paused = true)]
async fn a_planned_stop_repeats_nothing_even_with_a_key_between_attempts() {
    let world = World::new(1);
    world
        .sink
        .fail_key(postrider_conformance::samples::key("k0"), Fault::Refuse(ErrorKind::Transient));
    world.append_dealt(300, 3);
    let a = world.relay("a");
    world.until_delivered(200).await;
    a.stop().await;
    world.sink.mend_key(&postrider_conformance::samples::key("k0"));
    let b = world.relay("b");
    world.until_delivered(300).await;
    b.stop().await;
    world.assert_all_in_order(300, 3);
    assert_eq!(world.repetitions(), 0);
    assert!(world.letters().await.is_empty());
}

/// O43, W13, W19: whenever the relay dies, all arrives, in order; only what was published after
/// the last checkpoint is repeated.
#[tokio::test(start_paused = true)]
async fn o43_a_relay_that_dies_again_and_again_loses_and_reorders_nothing() {
    let world = World::new(2);
    world.sink.set_latency(Duration::from_millis(7));
    world.append_dealt(20_000, 30);
    for life in 0..40 {
        let relay = world.relay(&format!("life-{life}"));
        tokio::time::sleep(Duration::from_millis(5_000 + 37 * life % 211)).await;
        relay.kill().await;
    }
    let relay = world.relay("last");
    world.until("nothing is pending", |_| relay.status.snapshot().partitions.len() == 2).await;
    world.until_delivered(20_000).await;
    relay.stop().await;
    world.assert_all_in_order(20_000, 30);
}

/// O67, O27: a relay whose lease was taken over writes nothing more, and stops by itself.
#[tokio::test(start_paused = true)]
async fn o67_a_relay_that_lost_its_lease_writes_no_checkpoint() {
    let world = World::new(1);
    world.sink.hold();
    let a = world.relay("a");
    world.append_dealt(10, 1);
    world.until("a call waits", |world| world.sink.waiting_calls() == 1).await;
    // The database gives the lease to another, as after a stop longer than the TTL.
    let partition = PartitionId::numbered(0, 1);
    let held = world.store.leases(&group("relays")).await.expect("answers");
    let ours = postrider_core::HeldLease::granted(
        group("relays"),
        partition.clone(),
        held[0].holder.clone(),
        held[0].epoch,
    );
    world.store.release(&ours).await.expect("released behind the relay's back");
    let taken = world.store.acquire(&group("relays"), &partition, &relay_id("thief"), TTL).await;
    assert!(matches!(taken, Ok(Acquired::Held(_))));
    world.sink.release();
    world.until_delivered(10).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(a.status.snapshot().partitions.is_empty(), "the worker stepped down");
    let progress = postrider_core::Checkpoints::progress(&world.store).await.expect("answers");
    assert!(progress.iter().all(|one| one.checkpoint.published == 0), "{progress:?}");
    a.kill().await;
}

/// W49: a sink that fails holds up no other, and readiness names it.
#[tokio::test(start_paused = true)]
async fn w49_a_sink_that_fails_holds_up_no_other() {
    let world = World::new(1);
    let broken = MemorySink::new(Arc::clone(&world.clock));
    broken.set_outage(Some(Fault::Refuse(ErrorKind::Transient)));
    let relay = Relay::builder(world.source(), Arc::new(world.store.clone()), World::options("a"))
        .clock(Arc::clone(&world.clock))
        .sink(World::sink_options(), Arc::new(world.sink.clone()))
        .sink(SinkOptions::new(consumer("broken")), Arc::new(broken.clone()))
        .build()
        .expect("valid");
    let relay = start(relay);
    world.append_dealt(500, 10);
    world.until_delivered(500).await;
    tokio::time::sleep(Duration::from_secs(31)).await;
    let snapshot = relay.status.snapshot();
    assert!(!snapshot.ready);
    assert!(snapshot.reasons.iter().all(|reason| reason.contains("broken")), "{snapshot:?}");
    broken.set_outage(None);
    world.until("the other recovers", |_| broken.delivered() == 500).await;
    assert!(relay.status.snapshot().ready);
    relay.stop().await;
}

#[tokio::test(start_paused = true)]
async fn o37_retention_never_passes_an_unsent_event() {
    let world = World::new(1);
    world.sink.set_outage(Some(Fault::Refuse(ErrorKind::Transient)));
    world.append_dealt(100, 10);
    let mut options = World::options("a");
    let policy = RetentionPolicy { keep: Duration::from_secs(60), batch: 10, dry_run: false };
    options.retention = Some(Retain { every: Duration::from_secs(1), policy });
    let relay = world.relay_with(options, World::sink_options());
    tokio::time::sleep(Duration::from_secs(3_600)).await;
    world.sink.set_outage(None);
    world.until_delivered(100).await;
    relay.stop().await;
    world.assert_all_in_order(100, 10);
}

#[test]
fn bad_options_are_refused_by_name() {
    let world_error = |change: fn(&mut SinkOptions)| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let world = World::new(1);
            let mut options = World::sink_options();
            change(&mut options);
            let sink = Arc::new(world.sink.clone());
            Relay::builder(world.source(), Arc::new(world.store.clone()), World::options("a"))
                .sink(World::sink_options(), sink.clone())
                .sink(options, sink)
                .build()
                .map(drop)
                .expect_err("refused")
                .to_string()
        })
    };
    assert_eq!(world_error(|_| {}), "two sinks are named broker; rename one");
    let zero = world_error(|options| {
        options.name = consumer("other");
        options.retry.max_attempts = 0;
    });
    assert_eq!(zero, "max_attempts of sink other is zero; give it at least 1");
}

/// A sink that has not begun yet is not known to the database: nothing is pruned before it has.
#[tokio::test(start_paused = true)]
async fn retention_waits_until_every_sink_has_begun() {
    let world = World::new(1);
    world.append_dealt(50, 5);
    let late = MemorySink::new(Arc::clone(&world.clock));
    let mut options = World::options("a");
    let policy = RetentionPolicy { keep: Duration::from_millis(1), batch: 10, dry_run: false };
    options.retention = Some(Retain { every: Duration::from_millis(100), policy });
    let source = Arc::new(OpensLate { inner: world.source(), clock: Arc::clone(&world.clock) });
    let relay = Relay::builder(source, Arc::new(world.store.clone()), options)
        .clock(Arc::clone(&world.clock))
        .sink(World::sink_options(), Arc::new(world.sink.clone()))
        .sink(SinkOptions::new(consumer("late")), Arc::new(late.clone()))
        .build()
        .expect("valid");
    let relay = start(relay);
    world.until_delivered(50).await;
    world.until("the late sink has all", |_| late.delivered() == 50).await;
    relay.stop().await;
}

/// Opens the reader of the sink `late` only after a minute.
struct OpensLate<S> {
    inner: Arc<S>,
    clock: Arc<dyn postrider_core::Clock>,
}

#[async_trait::async_trait]
impl<S: postrider_core::Source> postrider_core::Source for OpensLate<S> {
    fn identity(&self) -> String {
        self.inner.identity()
    }

    async fn partitions(
        &self,
        consumer: &postrider_core::ConsumerName,
    ) -> postrider_core::Result<Vec<PartitionId>> {
        self.inner.partitions(consumer).await
    }

    async fn open(
        &self,
        consumer: &postrider_core::ConsumerName,
        partition: &PartitionId,
        from: postrider_core::StartFrom,
    ) -> postrider_core::Result<Box<dyn postrider_core::Reader>> {
        if consumer.as_str() == "late" {
            self.clock.sleep(Duration::from_secs(60)).await;
        }
        self.inner.open(consumer, partition, from).await
    }
}
