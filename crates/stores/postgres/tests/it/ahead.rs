//! Reading one chunk ahead of the readers of a backlog.
//!
//! What lives here: that it is done, once for each chunk, and never outlives retention. What does
//! not: what a chunk holds (`conformance.rs`, `race.rs`).
//! Invariant: reads are counted by the server itself.

use std::time::Duration;

use crate::support::*;
use postrider_core::*;
use postrider_servers::postgres::Version;
use postrider_store_postgres::{PostgresOptions, PostgresStore};
use tokio::time::Instant;

/// Three chunks of 4,096 and a rest.
const EVENTS: usize = 13_000;
/// Nothing is read ahead of readers that take a second for a chunk, as a loaded machine's may.
const NOT_SLOW: Duration = Duration::from_millis(900);
const PAGE: BatchLimit = BatchLimit { records: 4_096, bytes: 64 << 20 };

/// A backlog of one tick in one partition; the server counts the calls of its functions.
async fn backlog(version: Version) -> World {
    let world = World::new(version, 1).await;
    let count = format!("ALTER DATABASE {} SET track_functions = 'all'", world.database.name());
    world.database.psql(&count).expect("counting");
    let options = PostgresOptions::new(world.database.url()).tick_interval(Duration::ZERO);
    let store = PostgresStore::open(options.partitions(1)).await.expect("open");
    let world = World { store, ..world };
    let append = format!(
        "INSERT INTO postrider.outbox (key, topic, type, payload)
         SELECT 'k', 't', 'T', convert_to(n::text, 'UTF8') FROM generate_series(1, {EVENTS}) AS n"
    );
    world.database.psql(&append).expect("appended");
    world
}

async fn page(world: &World, after: &mut Position) -> Result<Vec<String>> {
    let read = Feed::read(&world.store, &p(0, 1), after, PAGE).await?;
    *after = read.position;
    let payload = |entry: &Entry| match entry {
        Entry::Record(record) => String::from_utf8_lossy(record.event.payload()).into_owned(),
        Entry::Malformed(malformed) => panic!("unreadable: {malformed:?}"),
    };
    Ok(read.entries.iter().map(payload).collect())
}

/// A backlog of which two chunks were read as fast as a relay does, and where they end.
async fn two_chunks_of_a_backlog(version: Version) -> (World, Position) {
    for _ in 0..10 {
        let world = backlog(version).await;
        world.store.head(&p(0, 1)).await.expect("a tick");
        let (mut after, began) = (Position::START, Instant::now());
        let mut seen = page(&world, &mut after).await.expect("read");
        seen.extend(page(&world, &mut after).await.expect("read"));
        assert_eq!(seen.len(), 2 * PAGE.records);
        if began.elapsed() < NOT_SLOW {
            return (world, after);
        }
    }
    panic!("the machine is too slow for this test");
}

/// Waits until the server has counted so many reads; it tells them with a delay.
async fn counted(world: &World, reads: i64) {
    let session = world.session().await;
    let sql = "SELECT coalesce(sum(calls), 0)::bigint FROM pg_stat_user_functions
        WHERE funcname = 'outbox_read'";
    let give_up = Instant::now() + Duration::from_secs(60);
    loop {
        let calls: i64 = session.query_one(sql, &[]).await.expect("counted").get(0);
        if calls == reads {
            return;
        }
        assert!(calls < reads, "{calls} reads instead of {reads}");
        assert!(Instant::now() < give_up, "{calls} reads instead of {reads}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// All of a backlog comes once and in order, and readers that are not slow cost one read for each
/// chunk.
async fn a_backlog_is_read_whole_and_each_chunk_once(version: Version) {
    let world = backlog(version).await;
    world.store.head(&p(0, 1)).await.expect("a tick");
    let (mut after, mut seen, began) = (Position::START, Vec::new(), Instant::now());
    while seen.len() < EVENTS {
        seen.extend(page(&world, &mut after).await.expect("read"));
    }
    let took = began.elapsed();
    assert!(page(&world, &mut after).await.expect("read").is_empty());
    let whole: Vec<String> = (1..=EVENTS).map(|n| n.to_string()).collect();
    assert!(seen == whole, "{} events of {EVENTS}, or another order", seen.len());
    if took < NOT_SLOW {
        counted(&world, 4).await;
    }
}

/// After two chunks in a row the third is read before it is asked for.
async fn the_third_chunk_is_read_ahead(version: Version) {
    let (world, _) = two_chunks_of_a_backlog(version).await;
    counted(&world, 3).await;
}

/// What was read ahead is not handed out once it lies below the horizon.
async fn what_was_read_ahead_is_not_handed_out_below_the_horizon(version: Version) {
    let (world, mut after) = two_chunks_of_a_backlog(version).await;
    let head = world.store.head(&p(0, 1)).await.expect("head");
    let lease = world.held(&p(0, 1), "r").await;
    world.store.advance(&lease, &consumer("me"), &head, Tally::default()).await.expect("moved");
    let policy = RetentionPolicy { keep: Duration::ZERO, batch: 1_000, dry_run: false };
    world.store.prune(Some(&lease), &policy).await.expect("pruned");
    let error = page(&world, &mut after).await.expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::Permanent, "{error}");
    assert!(error.chain().contains("horizon"), "{}", error.chain());
}

on_both_versions! {
    a_backlog_is_read_whole_and_each_chunk_once
    the_third_chunk_is_read_ahead
    what_was_read_ahead_is_not_handed_out_below_the_horizon
}
