//! Writers, readers and retention at the same time.

use std::time::Duration;

use postrider_core::*;
use postrider_store_sqlite::{SqliteOptions, SqliteStore, append};

use crate::support::*;

/// Case O3: a slow transaction and one behind it; both arrive, in the order of the write lock.
#[tokio::test(flavor = "multi_thread")]
async fn o3_a_slow_writer_and_one_behind_it_both_arrive() {
    let world = World::new(1).await;
    let mut slow = world.connection();
    let tx = slow.transaction().expect("begin");
    append(&tx, &[event("k", "slow")]).expect("append");
    let mut fast = world.connection();
    let (started, wait) = std::sync::mpsc::channel();
    let behind = std::thread::spawn(move || {
        let tx = fast.transaction().expect("begin");
        started.send(()).expect("the test waits");
        append(&tx, &[event("k", "fast")]).expect("append, once the lock is free");
        tx.commit().expect("commit");
    });
    wait.recv().expect("it has begun");
    assert!(world.page(&p(0, 1), &Position::START).await.entries.is_empty());
    tx.commit().expect("commit");
    behind.join().expect("writer");
    let page = world.page(&p(0, 1), &Position::START).await;
    assert_eq!(payloads(&page), ["slow", "fast"]);
}

/// Cases O33 and O35: two prune while others write and a consumer follows; nobody fails, the
/// table stays bounded, and nothing that was not passed is gone.
#[tokio::test(flavor = "multi_thread")]
async fn o33_o35_the_table_stays_bounded_under_load() {
    let world = World::new(1).await;
    let (store, me, part) = (&world.store, consumer("sink"), p(0, 1));
    let lease = world.held(&part, "r").await;
    let policy = RetentionPolicy { keep: Duration::ZERO, batch: 50, dry_run: false };
    let mut connection = world.connection();
    let writer = std::thread::spawn(move || {
        for round in 0..60 {
            let tx = connection.transaction().expect("begin");
            let events: Vec<_> =
                (0..20).map(|i| event("k", &(round * 20 + i).to_string())).collect();
            append(&tx, &events).expect("append");
            tx.commit().expect("commit");
        }
    });
    let mut after = Position::START;
    let mut numbers = Vec::<u32>::new();
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    while numbers.len() < 1_200 {
        assert!(std::time::Instant::now() < deadline, "only {} arrived", numbers.len());
        let page = world.page(&part, &after).await;
        let texts = payloads(&page);
        numbers.extend(texts.iter().map(|text| text.parse::<u32>().expect("number")));
        after = page.position;
        let tally = Tally { published: texts.len() as u64, parked: 0 };
        store.advance(&lease, &me, &after, tally).await.expect("advance");
        let (one, two) =
            tokio::join!(store.prune(Some(&lease), &policy), store.prune(None, &policy));
        one.expect("prune");
        two.expect("prune");
    }
    writer.join().expect("writer");
    assert!(numbers.iter().copied().eq(0..1_200), "everything once, in order");
    world.clock.advance(Duration::from_millis(1));
    while store.prune(None, &policy).await.expect("prune").more {}
    let left: i64 = world
        .connection()
        .query_row("SELECT count(*) FROM postrider_outbox", [], |row| row.get(0))
        .expect("count");
    assert_eq!(left, 1, "only the newest is left");
}

/// Case O51: the store's own writes take the write lock before they read, so that two processes
/// on one file never meet a snapshot that is too old.
#[tokio::test(flavor = "multi_thread")]
async fn o51_two_stores_on_one_file_never_fail_each_other() {
    let world = World::new(8).await;
    let mut relays = tokio::task::JoinSet::new();
    for number in 0..2 {
        let options = SqliteOptions::new(world.path()).busy_timeout(Duration::from_secs(30));
        let store = SqliteStore::open(options).await.expect("open");
        relays.spawn(async move {
            for round in 0..60 {
                let relay = relay_id(&format!("relay-{number}"));
                let answer = store.acquire(&group(), &p(round % 8, 8), &relay, TTL).await;
                if let Acquired::Held(lease) = answer.expect("no fault") {
                    store.release(&lease).await.expect("no fault");
                }
            }
        });
    }
    while let Some(done) = relays.join_next().await {
        done.expect("relay");
    }
}

/// Case O41: whatever is pending, a page is one range of one index, without a sort.
#[tokio::test]
async fn o41_a_page_is_one_index_range() {
    let world = World::new(4).await;
    let connection = world.connection();
    let mut plan = connection
        .prepare(
            "EXPLAIN QUERY PLAN SELECT at_ms, seq, id, payload FROM postrider_outbox
             WHERE partition = 1 AND seq > 5 ORDER BY seq LIMIT 10",
        )
        .expect("a plan");
    let steps: Vec<String> =
        plan.query_map([], |row| row.get(3)).and_then(Iterator::collect).expect("the plan's steps");
    assert_eq!(steps.len(), 1, "{steps:?}");
    assert!(steps[0].contains("postrider_outbox_feed (partition=? AND rowid>?)"), "{steps:?}");
}

/// Case O63: a rolled-back append leaves a reused connection clean, and two appends in one
/// transaction keep their order.
#[tokio::test]
async fn o63_two_appends_in_one_transaction_keep_their_order() {
    let world = World::new(1).await;
    let mut connection = world.connection();
    let tx = connection.transaction().expect("begin");
    append(&tx, &[event("k", "undone")]).expect("append");
    drop(tx);
    let tx = connection.transaction().expect("begin");
    append(&tx, &[event("k", "1"), event("k", "2")]).expect("append");
    append(&tx, &[event("k", "2"), event("k", "3")]).expect("two identical events are two");
    tx.commit().expect("commit");
    let page = world.page(&p(0, 1), &Position::START).await;
    assert_eq!(payloads(&page), ["1", "2", "2", "3"]);
    let ids: std::collections::HashSet<_> =
        page.entries.iter().map(|entry| record(entry).event.id()).collect();
    assert_eq!(ids.len(), 4);
}
