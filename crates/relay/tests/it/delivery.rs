//! The plain path: everything arrives, in order, and is checkpointed.

use std::time::Duration;

use postrider_conformance::samples::{consumer, event, sized_event};
use postrider_core::{Capabilities, Chain, Checkpoints, Sink};

use crate::world::{SINK, World};

#[tokio::test(start_paused = true)]
async fn every_event_arrives_once_and_in_order_of_its_key() {
    let world = World::new(4);
    world.append_dealt(5_000, 37);
    let relay = world.relay("a");
    world.until_delivered(5_000).await;
    world.append_dealt(0, 1);
    relay.stop().await;
    world.assert_all_in_order(5_000, 37);
    assert_eq!(world.repetitions(), 0);
    assert_eq!(world.pending().await, 0);
}

#[tokio::test(start_paused = true)]
async fn o63_rolled_back_events_never_arrive() {
    let world = World::new(1);
    let relay = world.relay("a");
    for n in 0..20 {
        let mut tx = world.store.begin();
        tx.append(&[event("k", n)]).expect("valid");
        if n % 2 == 0 { tx.commit().expect("commits") } else { tx.rollback() }
    }
    world.until_delivered(10).await;
    relay.stop().await;
    assert_eq!(world.first_arrivals("k"), (0..20).step_by(2).collect::<Vec<_>>());
}

#[tokio::test(start_paused = true)]
async fn o15_a_transaction_of_a_thousand_keeps_its_order() {
    let world = World::new(1);
    let events: Vec<_> = (1..=1_000).map(|n| event("k", n)).collect();
    world.append(&events);
    let relay = world.relay("a");
    world.until_delivered(1_000).await;
    relay.stop().await;
    assert_eq!(world.first_arrivals("k"), (1..=1_000).collect::<Vec<_>>());
}

#[tokio::test(start_paused = true)]
async fn o23_a_confirmed_event_is_checkpointed_within_a_second_and_not_sent_again() {
    let world = World::new(1);
    let relay = world.relay("a");
    world.append(&[event("k", 1)]);
    world.until_delivered(1).await;
    let delivered_at = world.clock.elapsed();
    let partition = postrider_core::PartitionId::numbered(0, 1);
    loop {
        let found = world.store.checkpoint(&consumer(SINK), &partition).await.expect("answers");
        if found.is_some_and(|checkpoint| checkpoint.published == 1) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(world.clock.elapsed() - delivered_at < Duration::from_secs(1));
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(world.sink.delivered(), 1);
    relay.stop().await;
}

#[tokio::test(start_paused = true)]
async fn o69_events_of_many_keys_share_calls() {
    let world = World::new(1);
    world.append_dealt(1_000, 1_000);
    let relay = world.relay("a");
    world.until_delivered(1_000).await;
    let calls = relay.status.snapshot().sinks[0].calls;
    assert!(calls <= 10, "1,000 events of 1,000 keys took {calls} calls");
    relay.stop().await;
}

/// A sink that sends concurrently gets one event of a key at a time.
#[tokio::test(start_paused = true)]
async fn a_concurrent_sink_never_has_two_events_of_a_key_in_flight() {
    let mut world = World::new(1);
    let one = Capabilities {
        chain: Chain::One,
        max_batch_records: 1,
        max_in_flight: 16,
        ..world.sink.capabilities()
    };
    world.sink = world.sink.with_capabilities(one);
    world.sink.set_latency(Duration::from_millis(10));
    world.append_dealt(300, 3);
    let relay = world.relay("a");
    world.until_delivered(300).await;
    relay.stop().await;
    world.assert_all_in_order(300, 3);
    assert_eq!(world.repetitions(), 0);
}

/// W55: one event above the sink's limit is parked with its size; other keys flow.
#[tokio::test(start_paused = true)]
async fn w55_an_oversize_event_is_parked_and_the_next_key_flows() {
    let mut world = World::new(1);
    let small = Capabilities { max_event_bytes: Some(1_000), ..world.sink.capabilities() };
    world.sink = world.sink.with_capabilities(small);
    world.append(&[event("a", 1), sized_event("a", 2, 2_000), event("a", 3), event("b", 4)]);
    let relay = world.relay("a");
    world.until_delivered(2).await;
    let letters = world.until_letters(2).await;
    assert!(letters[0].reason.contains("2000 bytes"), "{}", letters[0].reason);
    assert_eq!(letters[0].attempts, 1);
    assert_eq!(world.first_arrivals("a"), [1]);
    assert_eq!(world.first_arrivals("b"), [4]);
    relay.stop().await;
    assert_eq!(world.pending().await, 0);
}

/// O41, in virtual time: a backlog is never held in memory.
#[tokio::test(start_paused = true)]
async fn o41_a_stalled_sink_stops_the_reading_at_the_byte_budget() {
    let world = World::new(1);
    let events: Vec<_> = (0..4_000).map(|n| sized_event(&format!("k{n}"), n, 10_000)).collect();
    world.append(&events);
    world.sink.hold();
    let mut options = World::sink_options();
    options.budget_bytes = 4 << 20;
    let relay = world.relay_with(World::options("a"), options);
    world.until("calls wait", |world| world.sink.waiting_calls() > 0).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let in_flight = relay.status.snapshot().sinks[0].in_flight_bytes;
    assert!(in_flight > 3 << 20, "the budget is used: {in_flight}");
    assert!(in_flight <= (4 << 20) + (1 << 20), "one page beyond the budget at most: {in_flight}");
    world.sink.release();
    world.until_delivered(4_000).await;
    relay.stop().await;
    assert_eq!(world.repetitions(), 0);
}

/// Raising the number of partitions reorders no key.
#[tokio::test(start_paused = true)]
async fn raising_partitions_keeps_the_order_of_every_key() {
    let world = World::new(2);
    let relay = world.relay("a");
    world.append_dealt(1_000, 50);
    world.until_delivered(300).await;
    world.store.raise_partitions(8).expect("a multiple");
    let more: Vec<_> = (1_000..2_000).map(|n| event(&format!("k{}", n % 50), n)).collect();
    world.append(&more);
    world.until_delivered(2_000).await;
    relay.stop().await;
    world.assert_all_in_order(2_000, 50);
    assert_eq!(world.repetitions(), 0);
}
