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
    letters_wait_for_the_end_of_a_catch_up
    letters_of_another_cluster_are_released
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
    drop_slot(&cluster).await;
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

async fn drop_slot(cluster: &Cluster) {
    let session = cluster.session().await;
    let deadline = tokio::time::Instant::now() + PATIENCE;
    let dropped = "SELECT pg_drop_replication_slot('postrider_outbox')";
    while session.execute(dropped, &[]).await.is_err() {
        assert!(tokio::time::Instant::now() < deadline, "the slot is still read");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Sent before its event is read again, it would be gone by then, and the event sent twice. And
/// those of the catch-up come behind it.
async fn letters_wait_for_the_end_of_a_catch_up(version: Version) {
    let cluster = Cluster::new(version).await;
    cluster.append(&[("done", "0")]).await;
    let mut rider = cluster.rider("sink").await;
    assert_eq!(rider.take(1).await, ["0"]);
    cluster.append(&[("late", "1")]).await;
    let read = next_record(&mut rider).await;
    assert_eq!(waits(&rider, &read).await, 1);
    assert_eq!(released(&rider).await, [0u8; 0], "the checkpoint is below it");
    // All goes down before the checkpoint has passed it.
    drop(rider);
    drop_slot(&cluster).await;
    cluster.append(&[("late", "2")]).await;
    let mut rider = cluster.rider("sink").await;
    let begun = rider.next().await;
    assert!(begun.entries.is_empty(), "a catch-up begins with its place");
    rider.confirm(&begun.position, 0).await;
    assert!(begun.position.as_bytes() > read.position.as_bytes(), "it stands where it will end");
    assert_eq!(released(&rider).await, [0u8; 0], "its event is still to be read");
    let page = rider.next().await;
    let records: Vec<_> = page.entries.iter().map(|entry| record(entry).clone()).collect();
    assert_eq!(payloads(&records), ["1", "2"]);
    // The first is known as a letter; the second becomes one behind it.
    assert_eq!((waits(&rider, &records[0]).await, waits(&rider, &records[1]).await), (0, 1));
    rider.confirm(records.first().map_or(&page.position, |first| &first.position), 0).await;
    assert_eq!(released(&rider).await, [0u8; 0], "not in part");
    rider.confirm(&page.position, 0).await;
    assert_eq!(released(&rider).await, [0u8; 0], "the second is behind the first");
    let end = rider.next().await;
    assert!(end.entries.is_empty());
    rider.confirm(&end.position, 0).await;
    assert_eq!(released(&rider).await, *b"12");
}

/// A dump brings letters with places of another cluster, which may be before or behind all here.
async fn letters_of_another_cluster_are_released(version: Version) {
    let cluster = Cluster::new(version).await;
    cluster.append(&[("k", "1")]).await;
    let mut rider = cluster.rider("sink").await;
    let mut read = next_record(&mut rider).await;
    let mut bytes = read.position.as_bytes().to_vec();
    bytes[0] = u8::MAX;
    let here = std::mem::replace(&mut read.position, Position::from_bytes(&bytes).expect("one"));
    assert_eq!(waits(&rider, &read).await, 1);
    rider.confirm(&here, 1).await;
    rider.nothing_within(Duration::from_millis(100)).await;
    assert_eq!(released(&rider).await, *b"1");
}

async fn next_record(rider: &mut Rider) -> Record {
    loop {
        let batch = rider.next().await;
        if let Some(entry) = batch.entries.first() {
            return record(entry).clone();
        }
        rider.confirm(&batch.position, 0).await;
    }
}

/// The payloads of the letters that may be sent now.
async fn released(rider: &Rider) -> Vec<u8> {
    let limit = BatchLimit { records: 9, bytes: 1 << 20 };
    let letters = rider.wal.released(&rider.consumer, &partition(), limit).await;
    let letters = letters.expect("the released ones");
    letters.iter().flat_map(|one| record(&one.entry).event.payload().to_vec()).collect()
}

async fn waits(rider: &Rider, record: &Record) -> u64 {
    write_letter(rider, record, DeadLetterState::Waiting).await
}

async fn park(rider: &Rider, record: &Record) -> u64 {
    write_letter(rider, record, DeadLetterState::Parked).await
}

async fn write_letter(rider: &Rider, record: &Record, state: DeadLetterState) -> u64 {
    let letter = NewDeadLetter {
        entry: Entry::Record(record.clone()),
        state,
        reason: "no".into(),
        attempts: 1,
    };
    let parked = rider.wal.park(&rider.lease, &rider.consumer, &[letter]).await;
    parked.expect("parked")
}
