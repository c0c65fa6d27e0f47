//! Where a sink begins, and that what comes after that is its own from then on.

use std::sync::Arc;
use std::time::Duration;

use postrider_conformance::samples::{consumer, event};
use postrider_core::{ErrorKind, RetentionPolicy, StartFrom};
use postrider_relay::{Relay, Retain, SinkOptions};
use postrider_sink_memory::{Fault, MemorySink};

use crate::world::{KeptOpen, Running, World, start};

const TROUBLE: Fault = Fault::Refuse(ErrorKind::Transient);

fn two_sinks(world: &World, name: &str, other: &MemorySink, retention: Option<Retain>) -> Running {
    let mut options = World::options(name);
    options.retention = retention;
    let relay = Relay::builder(world.source(), Arc::new(world.store.clone()), options)
        .clock(Arc::clone(&world.clock))
        .sink(World::sink_options(), Arc::new(KeptOpen(world.sink.clone())))
        .sink(SinkOptions::new(consumer("other")), Arc::new(KeptOpen(other.clone())))
        .build()
        .expect("valid");
    start(relay)
}

/// A sink that begins at "now" and is down at first gets what came meanwhile, over a restart too.
#[tokio::test(start_paused = true)]
async fn a_sink_that_begins_now_loses_nothing_to_a_restart_before_its_first_confirmation() {
    let world = World::new(1);
    world.append(&[event("k0", 0)]);
    world.sink.set_outage(Some(TROUBLE));
    let mut options = World::sink_options();
    options.from = StartFrom::Now;
    let relay = world.relay_with(World::options("a"), options.clone());
    tokio::time::sleep(Duration::from_secs(5)).await;
    world.append(&[event("k0", 1), event("k0", 2)]);
    tokio::time::sleep(Duration::from_secs(5)).await;
    relay.stop().await;
    world.append(&[event("k0", 3)]);
    world.sink.set_outage(None);
    let relay = world.relay_with(World::options("b"), options);
    tokio::time::sleep(Duration::from_secs(5)).await;
    relay.stop().await;
    assert_eq!(world.first_arrivals("k0"), [1, 2, 3]);
}

/// The same for a sink that had nothing to do before the restart.
#[tokio::test(start_paused = true)]
async fn a_sink_that_begins_now_loses_nothing_to_a_restart_before_its_first_event() {
    let world = World::new(1);
    world.append(&[event("k0", 0)]);
    let mut options = World::sink_options();
    options.from = StartFrom::Now;
    let relay = world.relay_with(World::options("a"), options.clone());
    tokio::time::sleep(Duration::from_secs(5)).await;
    relay.stop().await;
    world.append(&[event("k0", 1)]);
    let relay = world.relay_with(World::options("b"), options);
    tokio::time::sleep(Duration::from_secs(5)).await;
    relay.stop().await;
    assert_eq!(world.first_arrivals("k0"), [1]);
}

/// Retention waits for a sink that was never up, as for one that was.
#[tokio::test(start_paused = true)]
async fn retention_waits_for_a_sink_that_has_not_confirmed_anything_yet() {
    let world = World::new(1);
    let other = MemorySink::new(Arc::clone(&world.clock));
    other.set_outage(Some(TROUBLE));
    world.append_dealt(2_000, 10);
    let policy = RetentionPolicy { keep: Duration::from_secs(60), batch: 100, dry_run: false };
    let retain = Retain { every: Duration::from_secs(1), policy };
    let relay = two_sinks(&world, "a", &other, Some(retain));
    tokio::time::sleep(Duration::from_secs(600)).await;
    relay.stop().await;
    other.set_outage(None);
    let relay = two_sinks(&world, "b", &other, None);
    tokio::time::sleep(Duration::from_secs(60)).await;
    relay.stop().await;
    assert_eq!((world.sink.delivered(), other.delivered()), (2_000, 2_000));
}

/// After the partitions were raised, a sink that was behind follows into the new ones, too.
#[tokio::test(start_paused = true)]
async fn a_sink_that_is_behind_follows_into_raised_partitions() {
    let world = World::new(1);
    let other = MemorySink::new(Arc::clone(&world.clock));
    let relay = two_sinks(&world, "a", &other, None);
    world.append_dealt(100, 10);
    world.until_delivered(100).await;
    other.set_outage(Some(TROUBLE));
    let more: Vec<_> = (100..200).map(|n| event(&format!("k{}", n % 10), n)).collect();
    world.append(&more);
    world.store.raise_partitions(2).expect("a multiple");
    let more: Vec<_> = (200..300).map(|n| event(&format!("k{}", n % 10), n)).collect();
    world.append(&more);
    world.until_delivered(300).await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    other.set_outage(None);
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert_eq!(other.delivered(), 300, "the other sink follows");
    relay.stop().await;
    let other = World { sink: other, ..world };
    other.assert_all_in_order(300, 10);
}

/// A sink that says "fenced" gives the partition up and takes it again; it does not fall silent.
#[tokio::test(start_paused = true)]
async fn a_fenced_sink_beside_another_comes_back() {
    let world = World::new(1);
    let other = MemorySink::new(Arc::clone(&world.clock));
    other.fail_next(1, Fault::Refuse(ErrorKind::Fenced));
    let relay = two_sinks(&world, "a", &other, None);
    world.append_dealt(100, 10);
    world.until_delivered(100).await;
    tokio::time::sleep(Duration::from_secs(30)).await;
    relay.stop().await;
    let other = World { sink: other, ..world };
    other.assert_all_in_order(100, 10);
}

/// "Now" and a time mean the same after the partitions were raised: nothing older comes.
#[tokio::test(start_paused = true)]
async fn a_start_is_kept_over_partitions_that_were_raised_before() {
    for from_time in [false, true] {
        let world = World::new(1);
        for (round, count) in [2, 4].into_iter().enumerate() {
            world.append_dealt(20 * (round as u64 + 1), 10);
            world.store.raise_partitions(count).expect("a multiple");
            tokio::time::sleep(Duration::from_secs(10)).await;
        }
        let old: Vec<_> = (0..10).map(|n| event(&format!("k{n}"), 500 + n)).collect();
        world.append(&old);
        tokio::time::sleep(Duration::from_secs(10)).await;
        let mut options = World::sink_options();
        options.from = match from_time {
            true => StartFrom::Time(world.clock.now()),
            false => StartFrom::Now,
        };
        let relay = world.relay_with(World::options("a"), options);
        tokio::time::sleep(Duration::from_secs(10)).await;
        let new: Vec<_> = (0..10).map(|n| event(&format!("k{n}"), 1_000 + n)).collect();
        world.append(&new);
        tokio::time::sleep(Duration::from_secs(10)).await;
        relay.stop().await;
        for n in 0..10 {
            assert_eq!(world.first_arrivals(&format!("k{n}")), [1_000 + n], "time: {from_time}");
        }
    }
}
