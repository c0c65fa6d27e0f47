//! The adapters for applications that write through `sqlx`.

use std::str::FromStr as _;

use postrider_core::*;
use postrider_store_sqlite::{OnDuplicate, append_sqlx, append_sqlx_with, first_time_sqlx};
use sqlx::sqlite::{SqliteConnectOptions, SqlitePool, SqlitePoolOptions};
use uuid::Uuid;

use crate::support::*;

async fn pool(world: &World, connections: u32) -> SqlitePool {
    let options = SqliteConnectOptions::from_str(&format!("sqlite://{}", world.path().display()));
    let options = options.expect("options").busy_timeout(std::time::Duration::from_secs(20));
    SqlitePoolOptions::new()
        .max_connections(connections)
        .connect_with(options)
        .await
        .expect("connect")
}

/// Case O7: many at once through a pool of four connections; everything committed arrives, in the
/// order of its key.
#[tokio::test(flavor = "multi_thread")]
async fn o7_nothing_is_skipped_through_a_pool_of_four() {
    let world = World::new(2).await;
    let pool = pool(&world, 4).await;
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..4 {
        let pool = pool.clone();
        writers.spawn(async move {
            for number in 0..20 {
                let mut tx = pool.begin().await.expect("begin");
                let new = event(&format!("w{writer}"), &number.to_string());
                append_sqlx(&mut tx, &[new]).await.expect("append");
                tx.commit().await.expect("commit");
            }
        });
    }
    while let Some(done) = writers.join_next().await {
        done.expect("writer");
    }
    let mut numbers = std::collections::HashMap::<Key, Vec<u32>>::new();
    for record in world.drain().await {
        let number = std::str::from_utf8(record.event.payload()).expect("text").parse();
        let own = numbers.entry(record.event.key().clone()).or_default();
        own.push(number.expect("number"));
    }
    assert_eq!(numbers.len(), 4);
    assert!(numbers.values().all(|own| own.iter().copied().eq(0..20)), "{numbers:?}");
}

/// Case O63: roll back, then reuse the pooled connection; two appends in one transaction.
#[tokio::test]
async fn o63_a_reused_connection_carries_nothing_over() {
    let world = World::new(1).await;
    let pool = pool(&world, 1).await;
    let mut tx = pool.begin().await.expect("begin");
    append_sqlx(&mut tx, &[event("k", "rolled back")]).await.expect("append");
    drop(tx);
    let mut tx = pool.begin().await.expect("begin");
    append_sqlx(&mut tx, &[event("k", "1"), event("k", "2")]).await.expect("append");
    append_sqlx(&mut tx, &[event("k", "3")]).await.expect("append");
    tx.commit().await.expect("commit");
    let page = world.page(&p(0, 1), &Position::START).await;
    assert_eq!(payloads(&page), ["1", "2", "3"]);
}

#[tokio::test]
async fn every_part_and_every_refusal_is_as_with_rusqlite() {
    let world = World::new(1).await;
    let pool = pool(&world, 1).await;
    let id = EventId::from_uuid(Uuid::from_u128(3));
    let mut headers = Headers::new();
    headers.insert("a", "é").expect("valid");
    let octets = ContentType::new("application/octet-stream").expect("valid");
    let new = builder("Zoë").id(id).headers(headers).payload(octets, vec![0, 255, 1]);
    let new = new.build().expect("valid");
    let mut tx = pool.begin().await.expect("begin");
    assert_eq!(append_sqlx(&mut tx, std::slice::from_ref(&new)).await.expect("append"), [id]);
    let twice = append_sqlx(&mut tx, &[event("k", "lost"), new.clone()]).await.expect_err("twice");
    assert_eq!(twice.kind(), ErrorKind::Permanent);
    assert!(twice.to_string().contains("appended before"), "{twice}");
    let ignored = append_sqlx_with(&mut tx, std::slice::from_ref(&new), OnDuplicate::Ignore).await;
    assert_eq!(ignored.expect("ignored"), [id]);
    tx.commit().await.expect("commit");
    let records = world.drain().await;
    assert_eq!(records.len(), 1, "a failed append leaves nothing");
    assert_eq!(records[0].event, new.identified(|| id));
}

#[tokio::test]
async fn a_lock_is_transient_through_sqlx_too() {
    let world = World::new(1).await;
    let options = SqliteConnectOptions::from_str(&format!("sqlite://{}", world.path().display()));
    let options = options.expect("options").busy_timeout(std::time::Duration::from_millis(20));
    let pool = SqlitePool::connect_with(options).await.expect("connect");
    let mut holder = world.connection();
    let held = holder.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate);
    let held = held.expect("begin");
    let mut tx = pool.begin().await.expect("begin");
    let error = append_sqlx(&mut tx, &[event("k", "1")]).await.expect_err("locked");
    assert_eq!(error.kind(), ErrorKind::Transient, "{error:?}");
    drop(held);
}

#[tokio::test]
async fn an_inbox_note_shares_the_fate_of_its_sqlx_transaction() {
    let world = World::new(1).await;
    let pool = pool(&world, 1).await;
    let (me, id) = (consumer("billing"), EventId::from_uuid(Uuid::from_u128(1)));
    for (commit, expected) in [(false, true), (true, true), (true, false)] {
        let mut tx = pool.begin().await.expect("begin");
        assert_eq!(first_time_sqlx(&mut tx, &me, id).await.expect("note"), expected);
        if commit { tx.commit().await } else { tx.rollback().await }.expect("end");
    }
}
