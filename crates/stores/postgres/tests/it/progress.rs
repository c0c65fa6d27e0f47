//! What is pending: counted by SQL, compared with what the feed hands out.

use std::collections::HashMap;

use postrider_core::*;
use postrider_servers::postgres::Version;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use tokio_postgres::Client;

use crate::support::*;

on_both_versions! {
    what_is_pending_is_what_will_be_read
    what_is_pending_after_raising_ends_with_the_generation
    counting_at_the_head_reads_no_old_rows
    a_long_backlog_is_estimated_and_not_read
    a_key_with_many_letters_costs_one_look
}

const SINK: &str = "sink";

async fn append_in(client: &Client, key: usize) {
    let sql = "SELECT postrider.append($1, 'orders', 'OrderPlaced', '1'::bytea)";
    client.execute(sql, &[&format!("key {key}")]).await.expect("appended");
}

async fn move_to(world: &World, lease: &HeldLease, to: &Position) {
    let moved = world.store.advance(lease, &consumer(SINK), to, Tally::default()).await;
    moved.expect("moved");
}

async fn progress_of(world: &World) -> HashMap<PartitionId, ConsumerProgress> {
    let found = world.store.progress().await.expect("readable");
    found.into_iter().map(|one| (one.partition.clone(), one)).collect()
}

async fn records_after(world: &World, partition: &PartitionId, after: &Position) -> Vec<Record> {
    let mut found = Vec::new();
    let mut after = after.clone();
    loop {
        let page = world.page(partition, &after).await;
        if page.entries.is_empty() {
            return found;
        }
        after = page.position.clone();
        found.extend(page.entries.iter().map(|entry| record(entry).clone()));
    }
}

/// Counts before the feed is read, so that rows without a tick are among them, then reads and
/// compares.
async fn compare(world: &World, partitions: &[PartitionId], schedule: &str) {
    let before = progress_of(world).await;
    for partition in partitions {
        let standing = &before[partition];
        let left = records_after(world, partition, &standing.checkpoint.position).await;
        assert_eq!(standing.pending, left.len() as u64, "{schedule}, {partition} {standing:?}");
        let oldest = left.iter().map(|record| record.appended_at).min();
        assert_eq!(standing.oldest_pending_at, oldest, "{schedule}, {partition}");
    }
    let after = progress_of(world).await;
    for partition in partitions {
        assert_eq!(after[partition].pending, before[partition].pending, "{schedule}: ticks change");
    }
}

/// Many schedules of transactions that stay open over ticks, roll back, end late; checkpoints at
/// any record and at ends of ticks; and a copy of the data in another cluster.
async fn what_is_pending_is_what_will_be_read(version: Version) {
    let world = World::new(version, 2).await;
    let partitions = [p(0, 2), p(1, 2)];
    let leases = [world.held(&partitions[0], "one").await, world.held(&partitions[1], "one").await];
    for lease in &leases {
        move_to(&world, lease, &Position::START).await;
    }
    let mut dice = StdRng::seed_from_u64(7);
    let mut open: Vec<Client> = Vec::new();
    let own = world.session().await;
    for step in 0..60 {
        match dice.random_range(0..6) {
            0 | 1 if open.len() < 4 => {
                let client = world.session().await;
                client.batch_execute("BEGIN").await.expect("begun");
                append_in(&client, step).await;
                open.push(client);
            }
            2 if !open.is_empty() => {
                let client = open.swap_remove(dice.random_range(0..open.len()));
                let end = if dice.random_range(0..4) == 0 { "ROLLBACK" } else { "COMMIT" };
                client.batch_execute(end).await.expect("ended");
            }
            3 => {
                // Moves one checkpoint to some place further on.
                let which = dice.random_range(0..2);
                let standing = &progress_of(&world).await[&partitions[which]];
                let after = &standing.checkpoint.position;
                let left = records_after(&world, &partitions[which], after).await;
                let end = Feed::head(&world.store, &partitions[which]).await.expect("the head");
                let places = left.into_iter().map(|record| record.position).chain([end]);
                let places: Vec<Position> = places.collect();
                move_to(&world, &leases[which], &places[dice.random_range(0..places.len())]).await;
            }
            4 if step == 40 || step == 20 => {}
            _ => append_in(&own, step).await,
        }
        if step == 30 {
            // As after a restore: the ticks so far belong to another cluster.
            for client in open.drain(..) {
                client.batch_execute("COMMIT").await.expect("committed");
            }
            let other = "UPDATE postrider.outbox_tick SET system = 1";
            own.batch_execute(other).await.expect("changed");
        }
        compare(&world, &partitions, &format!("step {step}")).await;
    }
}

/// Nothing that belongs to the next generation is pending in a partition that has ended, whether a
/// tick tells of the raise yet or not; and all in all nothing is counted twice or left out.
async fn what_is_pending_after_raising_ends_with_the_generation(version: Version) {
    let world = World::new(version, 1).await;
    let (old, sink) = (p(0, 1), consumer(SINK));
    world.append(vec![event("a", "1"), event("b", "2")]).await;
    let first = world.records(&old).await.remove(0);
    let lease = world.held(&old, "one").await;
    let tally = Tally { published: 1, parked: 0 };
    world.store.advance(&lease, &sink, &first.position, tally).await.expect("moved");
    // No tick yet: the number is raised by SQL, and more is appended.
    let client = world.session().await;
    client.batch_execute("SELECT postrider.outbox_raise(2)").await.expect("raised");
    world.append(vec![event("a", "3"), event("b", "4"), event("c", "5")]).await;
    assert_eq!(progress_of(&world).await[&old].pending, 1, "the others are the successors'");
    let end = world.page(&old, &first.position).await;
    assert_eq!(progress_of(&world).await[&old].pending, 1, "now with a tick");
    let last = end.entries.last().expect("one").position().clone();
    world.store.advance(&lease, &sink, &last, tally).await.expect("moved");
    let successors = world.page(&old, &last).await.ended.expect("it has ended");
    world.store.finish(&lease, &sink, &successors).await.expect("finished");
    let found = progress_of(&world).await;
    assert!(found[&old].ended && found[&old].pending == 0);
    let sum: u64 = found.values().map(|one| one.pending + one.checkpoint.published).sum();
    assert_eq!(sum, 5);
    compare(&world, &[p(0, 2), p(1, 2)], "in the new generation").await;
}

/// `status` and the metrics ask often; behind a long history the count must not read it again.
async fn counting_at_the_head_reads_no_old_rows(version: Version) {
    let world = World::new(version, 8).await;
    let client = world.session().await;
    client.batch_execute(FILL).await.expect("filled");
    let open = open_two(&world).await;
    let head = Feed::head(&world.store, &p(0, 8)).await.expect("the head");
    let lists = "SELECT cardinality(ARRAY(SELECT pg_snapshot_xip(snap))) > 0
            AND pg_snapshot_xmax(snap) < own
        FROM postrider.outbox_tick ORDER BY stamp DESC LIMIT 1";
    assert!(one::<bool>(&client, lists).await, "the tick has transactions of both kinds");
    for partition in 0..8 {
        let lease = world.held(&p(partition, 8), "one").await;
        move_to(&world, &lease, &head).await;
    }
    world.append(vec![event("a", "1")]).await;
    // Autovacuum comes a minute late, and not at all under some pressure.
    let vacuum = "SELECT count(*) = 0 FROM pg_stats WHERE tablename LIKE 'outbox_s%'";
    assert!(one::<bool>(&client, vacuum).await, "there are no statistics yet");
    assert!(rows_read_by_counts(&world, &client).await < 2_000, "without statistics");
    client.batch_execute("ANALYZE postrider.outbox").await.expect("analysed");
    assert!(rows_read_by_counts(&world, &client).await < 2_000, "with statistics");
    drop(open);
}

/// By twenty counts that each find one event.
async fn rows_read_by_counts(world: &World, client: &Client) -> i64 {
    rows_read(client, async {
        for _ in 0..20 {
            let found = progress_of(world).await;
            assert_eq!(found.values().map(|one| one.pending).sum::<u64>(), 1);
        }
    })
    .await
}

/// Who looks while millions are pending needs an answer before the time-out. 150,000 events of 100
/// keys, and a consumer beside that has had all but one.
async fn a_long_backlog_is_estimated_and_not_read(version: Version) {
    let world = World::new(version, 8).await;
    let client = world.session().await;
    for _ in 0..5 {
        client.batch_execute(FILL).await.expect("filled");
    }
    let head = Feed::head(&world.store, &p(0, 8)).await.expect("the head");
    world.append(vec![event("a", "1")]).await;
    let start = Position::from_bytes(&[0; 16]).expect("a position");
    for partition in 0..8 {
        let lease = world.held(&p(partition, 8), "one").await;
        move_to(&world, &lease, &start).await;
        let ahead = world.store.advance(&lease, &consumer("ahead"), &head, Tally::default()).await;
        ahead.expect("moved");
    }
    let oldest: i64 = one(
        &client,
        "SELECT (extract(epoch FROM min(created_at)) * 1000000)::bigint / 1000
            FROM postrider.outbox",
    )
    .await;
    let read = rows_read(&client, async {
        let found = world.store.progress().await.expect("readable");
        let of = |name| found.iter().filter(move |one| one.consumer == consumer(name));
        let sum: u64 = of(SINK).map(|one| one.pending).sum();
        assert!((149_990..=150_010).contains(&sum), "{sum}");
        let sum: u64 = of("ahead").map(|one| one.pending).sum();
        assert!(sum <= 1, "{sum}");
        let first = of(SINK).filter_map(|one| one.oldest_pending_at).min().expect("one is pending");
        assert_eq!(i64::try_from(first.as_millis()), Ok(oldest));
        assert!(of(SINK).all(|one| one.pending == 0 || one.oldest_pending_at.is_some()));
    });
    let read = read.await;
    assert!(read < 120_000, "{read} rows");
}

/// Each batch asks which of its keys have letters: one key that is refused for hours must not make
/// it dearer for the others.
async fn a_key_with_many_letters_costs_one_look(version: Version) {
    let world = World::new(version, 1).await;
    let client = world.session().await;
    let letters = "INSERT INTO postrider.dead_letter
            (outbox, consumer, partition, position, state, reason, attempts, appended_ms, key,
                payload)
        SELECT 'outbox', 'sink', '0/1', int8send(1) || int8send(i), 'waiting', 'refused', 1, 0,
            'hot', ''
        FROM generate_series(1, 50000) AS i";
    client.batch_execute(letters).await.expect("inserted");
    let keys: Vec<Key> = (0..500).map(|number| key(&format!("k{number}"))).collect();
    let keys = [keys, vec![key("hot")]].concat();
    for analyse in [false, true] {
        if analyse {
            client.batch_execute("ANALYZE postrider.dead_letter").await.expect("analysed");
        }
        let looked = rows_read_of(&client, "dead_letter", async {
            let found = world.store.blocked(&consumer(SINK), &p(0, 1), &keys).await;
            assert_eq!(found.expect("readable"), [key("hot")]);
        });
        let looked = looked.await;
        assert!(looked < 5_000, "{looked} rows, analysed: {analyse}");
    }
}
