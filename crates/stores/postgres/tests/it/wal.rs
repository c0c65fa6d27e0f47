//! Reading the write-ahead log, and going on where a consumer stood.

use std::time::Duration;

use postrider_core::*;
use postrider_servers::postgres::Version;

use crate::support::*;
use crate::wal_support::*;

on_both_versions! {
    events_come_once_in_order_over_restarts
    a_transaction_goes_on_where_it_was_left
    what_a_dropped_slot_took_along_comes_from_the_table
    two_consumers_share_one_slot
    an_event_that_is_read_again_from_the_table_is_one_dead_letter
}

async fn events_come_once_in_order_over_restarts(version: Version) {
    let cluster = Cluster::new(version).await;
    cluster.append(&[("a", "1"), ("b", "2")]).await;
    let mut rider = cluster.rider("sink").await;
    assert_eq!(rider.take(2).await, ["1", "2"]);
    cluster.append(&[("a", "3")]).await;
    cluster.append(&[("a", "4")]).await;
    assert_eq!(rider.take(2).await, ["3", "4"]);
    drop(rider);
    cluster.append(&[("a", "5")]).await;
    let mut rider = cluster.rider("sink").await;
    assert_eq!(rider.take(1).await, ["5"]);
    rider.nothing_within(Duration::from_millis(300)).await;
}

/// A transaction of ten, of which six were confirmed: exactly the other four come.
async fn a_transaction_goes_on_where_it_was_left(version: Version) {
    let cluster = Cluster::new(version).await;
    let mut rider = cluster.rider("sink").await;
    cluster.append(&[("k", "0")]).await;
    assert_eq!(rider.take(1).await, ["0"]);
    let numbers: Vec<String> = (1..=10).map(|n| n.to_string()).collect();
    let events: Vec<_> = numbers.iter().map(|n| ("k", n.as_str())).collect();
    cluster.append(&events).await;
    // It may come in several pieces.
    let mut places = Vec::new();
    while places.len() < 10 {
        let batch = rider.next().await;
        places.extend(batch.entries.iter().map(|entry| entry.position().clone()));
    }
    rider.confirm(&places[5], 6).await;
    drop(rider);
    let mut rider = cluster.rider("sink").await;
    assert_eq!(rider.take(4).await, ["7", "8", "9", "10"]);
    rider.nothing_within(Duration::from_millis(300)).await;
}

async fn what_a_dropped_slot_took_along_comes_from_the_table(version: Version) {
    let cluster = Cluster::new(version).await;
    let mut rider = cluster.rider("sink").await;
    cluster.append(&[("k", "0"), ("k", "1")]).await;
    assert_eq!(rider.take(2).await, ["0", "1"]);
    // Half of the next transaction is confirmed when all goes down.
    cluster.append(&[("k", "2"), ("k", "3")]).await;
    let batch = loop {
        let batch = rider.next().await;
        if !batch.entries.is_empty() {
            break batch;
        }
    };
    rider.confirm(batch.entries[0].position(), 1).await;
    drop(rider);
    let session = cluster.session().await;
    let deadline = tokio::time::Instant::now() + PATIENCE;
    let dropped = "SELECT pg_drop_replication_slot('postrider_outbox')";
    while session.execute(dropped, &[]).await.is_err() {
        assert!(tokio::time::Instant::now() < deadline, "the slot is still read");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    cluster.append(&[("k", "4")]).await;
    let mut rider = cluster.rider("sink").await;
    assert_eq!(rider.take(2).await, ["3", "4"]);
    cluster.append(&[("k", "5")]).await;
    assert_eq!(rider.take(1).await, ["5"]);
    rider.nothing_within(Duration::from_millis(300)).await;
}

async fn two_consumers_share_one_slot(version: Version) {
    let cluster = Cluster::new(version).await;
    cluster.append(&[("k", "0")]).await;
    let mut first = cluster.rider("first").await;
    assert_eq!(first.take(1).await, ["0"]);
    let mut second = first.beside("second", StartFrom::Now).await;
    let begin = second.next().await;
    assert!(begin.entries.is_empty());
    second.confirm(&begin.position, 0).await;
    cluster.append(&[("k", "1")]).await;
    assert_eq!(first.take(1).await, ["1"]);
    assert_eq!(second.take(1).await, ["1"]);
    let session = cluster.session().await;
    let slots: i64 = one(&session, "SELECT count(*) FROM pg_replication_slots").await;
    assert_eq!(slots, 1);
}

/// It has one place in the log and another one in a catch-up.
async fn an_event_that_is_read_again_from_the_table_is_one_dead_letter(version: Version) {
    let cluster = Cluster::new(version).await;
    cluster.append(&[("k", "1"), ("k", "2")]).await;
    let mut rider = cluster.rider("sink").await;
    let mut records = Vec::new();
    while records.len() < 2 {
        records.extend(rider.next().await.entries.iter().map(|entry| record(entry).clone()));
    }
    let mut moved = records[0].clone();
    let mut bytes = moved.position.as_bytes().to_vec();
    bytes[12] += 1;
    moved.position = Position::from_bytes(&bytes).expect("a position");
    assert_eq!(park(&rider, &records[0]).await, 1);
    assert_eq!(park(&rider, &moved).await, 0, "it waits already");
    assert_eq!(park(&rider, &records[1]).await, 1, "another event is another letter");
}

async fn park(rider: &Rider, record: &Record) -> u64 {
    let letter = NewDeadLetter {
        entry: Entry::Record(record.clone()),
        state: DeadLetterState::Parked,
        reason: "no".into(),
        attempts: 1,
    };
    let parked = rider.wal.park(&rider.lease, &rider.consumer, &[letter]).await;
    parked.expect("parked")
}
