//! Events that are in the log alone: `emit`, and reading what it wrote.

use std::time::Duration;

use postrider_core::*;
use postrider_servers::postgres::Version;
use postrider_store_postgres::WalOptions;

use crate::support::*;
use crate::wal_support::*;
use crate::wal_taker::drop_slot;

on_both_versions! {
    w23_messages_come_once_in_order_over_restarts
    messages_that_a_lost_slot_took_along_are_told_and_not_passed_over
    messages_lost_within_a_readers_life_are_told_too
    an_impossible_message_is_refused_and_a_strangers_is_handed_out
}

async fn rider(cluster: &Cluster) -> Rider {
    Rider::new(cluster.wal(WalOptions::new().messages("mine")).await, "sink").await
}

fn emit(payload: &str, rest: &str) -> String {
    format!(
        "SELECT postrider.emit(key => 'k', topic => 't', type => 'T', payload => '{payload}'::text,
            prefix => 'mine'{rest})"
    )
}

async fn w23_messages_come_once_in_order_over_restarts(version: Version) {
    let cluster = Cluster::new(version).await;
    let mut session = cluster.session().await;
    let mut sink = rider(&cluster).await;
    // It begins where the slot is made: what was before has no place.
    sink.nothing_within(Duration::from_millis(500)).await;
    session.batch_execute(&emit("1", "")).await.expect("emit");
    let rows =
        "INSERT INTO postrider.outbox (key, topic, type, payload) VALUES ('k', 't', 'T', 'x')";
    session.batch_execute(rows).await.expect("a row, which nobody reads here");
    let tx = session.transaction().await.expect("begin");
    tx.batch_execute(&emit("lost", "")).await.expect("emit");
    tx.batch_execute(&emit("2", ", transactional => false")).await.expect("emit");
    tx.rollback().await.expect("rollback");
    let tx = session.transaction().await.expect("begin");
    for payload in ["3", "4", "5"] {
        tx.batch_execute(&emit(payload, "")).await.expect("emit");
    }
    tx.commit().await.expect("commit");
    session
        .batch_execute(&emit("6", ", prefix => 'theirs'").replace("prefix => 'mine', ", ""))
        .await
        .expect("emit");
    let mut found = Vec::new();
    while found.len() < 5 {
        let batch = sink.next().await;
        found.extend(batch.entries.iter().map(|entry| record(entry).clone()));
    }
    assert_eq!(payloads(&found), ["1", "2", "3", "4", "5"]);
    // One of the three that were committed together is confirmed.
    sink.confirm(&found[2].position, 3).await;
    drop(sink);
    let mut sink = rider(&cluster).await;
    assert_eq!(sink.take(2).await, ["4", "5"]);
    sink.nothing_within(Duration::from_millis(300)).await;
}

async fn messages_that_a_lost_slot_took_along_are_told_and_not_passed_over(version: Version) {
    let cluster = Cluster::new(version).await;
    let session = cluster.session().await;
    let mut sink = rider(&cluster).await;
    sink.nothing_within(Duration::from_millis(500)).await;
    session.batch_execute(&emit("1", "")).await.expect("emit");
    assert_eq!(sink.take(1).await, ["1"]);
    drop(sink);
    drop_slot(&session).await;
    session.batch_execute(&emit("2", "")).await.expect("emit");
    let mut sink = rider(&cluster).await;
    halts(&mut sink).await;
}

/// The same, for a reader that began "now" and was never closed.
async fn messages_lost_within_a_readers_life_are_told_too(version: Version) {
    let cluster = Cluster::new(version).await;
    let session = cluster.session().await;
    // Makes the slot, so that the next one enters a stream that is there.
    let mut first = rider(&cluster).await;
    first.nothing_within(Duration::from_millis(500)).await;
    let mut sink = first.beside("later", StartFrom::Now).await;
    sink.nothing_within(Duration::from_millis(300)).await;
    session.batch_execute(&emit("1", "")).await.expect("emit");
    assert_eq!(sink.take(1).await, ["1"]);
    drop(first);
    drop_slot(&session).await;
    session.batch_execute(&emit("2", "")).await.expect("emit");
    halts(&mut sink).await;
}

async fn halts(sink: &mut Rider) {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    let error = loop {
        let next = sink.reader.next(LIMIT);
        match tokio::time::timeout_at(deadline, next).await.expect("nothing is told") {
            Err(error) if error.kind() == ErrorKind::Transient => {}
            Err(error) => break error,
            // A place without an event.
            Ok(ReadOutcome::Batch(batch)) if batch.entries.is_empty() => {
                sink.confirm(&batch.position, 0).await;
            }
            Ok(outcome) => panic!("{outcome:?}"),
        }
    };
    assert_eq!(error.kind(), ErrorKind::Permanent);
    assert!(error.to_string().contains("postrider consumers remove"), "{error}");
}

async fn an_impossible_message_is_refused_and_a_strangers_is_handed_out(version: Version) {
    let cluster = Cluster::new(version).await;
    let session = cluster.session().await;
    let mut sink = rider(&cluster).await;
    sink.nothing_within(Duration::from_millis(500)).await;
    let empty = emit("x", "").replace("key => 'k'", "key => ''");
    let refused = session.batch_execute(&empty).await.expect_err("an empty key");
    assert!(refused.as_db_error().expect("the server's").message().contains("key"));
    let strange = "SELECT pg_logical_emit_message(true, 'mine', 'hello')";
    session.batch_execute(strange).await.expect("emit");
    let batch = sink.next().await;
    let Some(Entry::Malformed(found)) = batch.entries.first() else { panic!("{batch:?}") };
    assert_eq!(&found.raw[..], b"hello");
}
