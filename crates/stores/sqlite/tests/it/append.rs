//! Appending inside the caller's transaction.

use std::time::Duration;

use postrider_core::*;
use postrider_store_sqlite::{OnDuplicate, append, append_with};
use uuid::Uuid;

use crate::support::*;

#[tokio::test]
async fn an_event_has_the_fate_of_its_business_row() {
    let world = World::new(1).await;
    let mut connection = world.connection();
    connection.execute("CREATE TABLE business (id INTEGER)", []).expect("table");
    let tx = connection.transaction().expect("begin");
    tx.execute("INSERT INTO business VALUES (1)", []).expect("insert");
    append(&tx, &[event("a", "rolled back")]).expect("append");
    tx.rollback().expect("rollback");
    assert!(world.drain().await.is_empty());
    let tx = connection.transaction().expect("begin");
    tx.execute("INSERT INTO business VALUES (2)", []).expect("insert");
    let ids = append(&tx, &[event("a", "1"), event("b", "2"), event("a", "3")]).expect("append");
    assert!(world.drain().await.is_empty(), "nothing is seen before the commit");
    tx.commit().expect("commit");
    let records = world.drain().await;
    assert_eq!(records.iter().map(|r| r.event.id()).collect::<Vec<_>>(), ids);
    assert!(ids.iter().all(|id| id.as_uuid().get_version_num() == 7));
}

#[tokio::test]
async fn every_part_of_an_event_comes_back_as_it_went_in() {
    let world = World::new(4).await;
    let mut headers = Headers::new();
    for (name, value) in [("z", "1"), ("Content-Language", "dé \"x\" \\ \t"), ("a", "")] {
        headers.insert(name, value).expect("valid");
    }
    let octets = ContentType::new("application/octet-stream").expect("valid");
    let bytes: Vec<u8> = (0..=255).collect();
    let id = EventId::from_uuid(Uuid::from_u128(7));
    let new = builder("Zoë 日本").id(id).headers(headers).payload(octets, bytes).build();
    let new = new.expect("within the limits");
    world.append(vec![new.clone()]).await;
    let records = world.drain().await;
    assert_eq!(records[0].event, new.identified(|| id));
}

#[tokio::test]
async fn an_id_is_appended_once_and_a_failed_append_leaves_nothing() {
    let world = World::new(1).await;
    let id = EventId::from_uuid(Uuid::from_u128(1));
    let known = builder("k").id(id).build().expect("valid");
    world.append(vec![known.clone()]).await;
    let mut connection = world.connection();
    let tx = connection.transaction().expect("begin");
    let error = append(&tx, &[event("k", "before"), known.clone()]).expect_err("twice");
    assert_eq!(error.kind(), ErrorKind::Permanent);
    assert!(error.to_string().contains(&id.to_string()), "{error}");
    append(&tx, &[event("k", "after")]).expect("the transaction goes on");
    let ids = append_with(&tx, &[known], OnDuplicate::Ignore).expect("ignored");
    assert_eq!(ids, [id]);
    tx.commit().expect("commit");
    let texts: Vec<_> = world.drain().await.iter().map(|r| r.event.payload().clone()).collect();
    assert_eq!(texts, ["".as_bytes(), b"after"]);
}

/// Case O51: two writers; the first statement takes the write lock, so neither meets a snapshot
/// that is too old.
#[tokio::test]
async fn o51_an_append_takes_the_write_lock_with_its_first_statement() {
    let world = World::new(1).await;
    let (mut one, mut two) = (world.connection(), world.connection());
    let slow = one.transaction().expect("begin");
    append(&slow, &[event("k", "1")]).expect("append");
    two.busy_timeout(Duration::ZERO).expect("set");
    let late = two.transaction().expect("begin");
    let error = append(&late, &[event("k", "2")]).expect_err("locked");
    assert_eq!(error.kind(), ErrorKind::Transient);
    assert!(error.to_string().contains("locked by another connection"), "{error}");
    slow.commit().expect("commit");
    append(&late, &[event("k", "2")]).expect("the lock is free, the snapshot is new");
    late.commit().expect("commit");
    let page = world.page(&p(0, 1), &Position::START).await;
    assert_eq!(payloads(&page), ["1", "2"]);
}

/// Case O51: a deferred transaction that has read cannot write after another; the error says why.
#[tokio::test]
async fn o51_a_read_before_the_append_names_the_remedy() {
    let world = World::new(1).await;
    let mut connection = world.connection();
    let tx = connection.transaction().expect("begin");
    let count: i64 =
        tx.query_row("SELECT count(*) FROM postrider_outbox", [], |row| row.get(0)).expect("read");
    assert_eq!(count, 0);
    world.append(vec![event("k", "1")]).await;
    let error = append(&tx, &[event("k", "2")]).expect_err("stale");
    assert_eq!(error.kind(), ErrorKind::Transient);
    assert!(error.to_string().contains("begin it as IMMEDIATE"), "{error}");
}

/// Case O9: an append on a transaction that has ended is an error, never lost in silence.
#[tokio::test]
async fn o9_an_append_after_the_end_of_its_transaction_is_refused() {
    let world = World::new(1).await;
    let mut connection = world.connection();
    let tx = connection.transaction().expect("begin");
    tx.execute_batch("COMMIT").expect("ended behind its back");
    let error = append(&tx, &[event("k", "1")]).expect_err("no transaction");
    assert!(error.to_string().contains("outside a transaction"), "{error}");
}
