//! Retention and consumers of the log: what one has not had stays, what all have had goes.
//!
//! What lives here: schedules in which bases are written as a checkpoint writes them, each rule
//! shown by what is lost, or kept for ever, without it. What does not: consumers of the feed alone
//! (`retention.rs`).
//! Invariant: a row that no base sees is never deleted, whatever commits or stays open meanwhile.

use std::collections::BTreeMap;

use postrider_servers::postgres::{Version, shared};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use tokio_postgres::Client;

use crate::retention::{START, World, insert, mutate, run, unchanged};

/// A change of the SQL: a part, and what stands there instead.
type Change = (&'static str, &'static str);

const NOT_HAD: Change = (
    "WHERE t.system = b.system AND t.own < pg_snapshot_xmax(b.snapshot)
            AND pg_visible_in_snapshot(t.own, b.snapshot)",
    "WHERE t.system = b.system",
);
const OTHER_CLUSTER: Change = ("WHERE t.system = b.system AND t.own", "WHERE t.own");
const FROM_THE_FUTURE: Change =
    ("AND pg_snapshot_xmax(b.snapshot) <= pg_snapshot_xmax(pg_current_snapshot())", "");
const NOT_BEGUN: Change =
    ("min(coalesce(t.stamp, oldest)) INTO by_log", "min(t.stamp) INTO by_log");
const BOTH_KINDS: Change = ("RETURN least(passed, by_log);", "RETURN coalesce(passed, by_log);");
const NO_FEED: Change = ("AND partition <> 'wal') AS k", ") AS k");

async fn world(version: Version, change: Option<Change>) -> World {
    let mutated = |sql: String| match change {
        Some((part, by)) => mutate(&sql, part, by),
        None => unchanged(sql),
    };
    let database = tokio::task::spawn_blocking(move || shared(version).expect("a server"));
    World::on(database.await.expect("it does not panic"), mutated).await
}

/// A consumer of the log is known, as by its first dead letter.
async fn known(world: &World, consumer: &str) {
    let sql = format!(
        "INSERT INTO postrider.checkpoint (outbox, consumer, partition)
         VALUES ('outbox', '{consumer}', 'wal') ON CONFLICT DO NOTHING"
    );
    run(&world.session, &sql).await;
}

/// The consumer has had all that is visible now. `base` are the base's snapshot and cluster.
async fn write_base(world: &World, consumer: &str, base: (&str, &str)) {
    known(world, consumer).await;
    let (snapshot, system) = base;
    let sql = format!(
        "INSERT INTO postrider.wal_base AS b
            (outbox, consumer, snapshot, lsn, seq, floor, system, timeline, publication)
         SELECT 'outbox', '{consumer}', {snapshot}, pg_current_wal_insert_lsn(),
            coalesce(pg_sequence_last_value('postrider.outbox_seq'), 0), 0, {system}, 1, 'p'
         FROM pg_control_system() AS s
         ON CONFLICT (outbox, consumer) DO UPDATE SET snapshot = excluded.snapshot"
    );
    run(&world.session, &sql).await;
}

const HERE: (&str, &str) = ("pg_current_snapshot()", "s.system_identifier");

/// What is in the table after all that may go has gone.
async fn left(world: &World) -> Vec<String> {
    world.tick().await;
    for _ in 0..3 {
        world.prune_all().await;
    }
    let sql = "SELECT convert_from(payload, 'UTF8') FROM postrider.outbox ORDER BY seq";
    let rows = world.session.query(sql, &[]).await.expect("readable");
    rows.iter().map(|row| row.get(0)).collect()
}

/// A consumer has had the first row; the second one comes, and a tick has it, too.
async fn behind(world: &World) -> Vec<String> {
    insert(&world.session, "had").await;
    world.tick().await;
    write_base(world, "sink", HERE).await;
    // Into another segment than the first.
    left(world).await;
    insert(&world.session, "new").await;
    left(world).await
}

/// Nothing of another cluster's ids says anything here, however alike they look.
async fn of_another_cluster(world: &World) -> Vec<String> {
    insert(&world.session, "new").await;
    world.tick().await;
    write_base(world, "sink", ("pg_current_snapshot()", "1")).await;
    left(world).await
}

/// A dump of a later time was read into a cluster that was set back.
async fn from_the_future(world: &World) -> Vec<String> {
    insert(&world.session, "new").await;
    write_base(world, "sink", ("'9000000000:9000000000:'", "s.system_identifier")).await;
    left(world).await
}

/// One consumer has had all, another is only known.
async fn not_begun(world: &World) -> Vec<String> {
    insert(&world.session, "new").await;
    world.tick().await;
    write_base(world, "sink", HERE).await;
    known(world, "other").await;
    left(world).await
}

/// The feed's consumer has passed all, the log's has not.
async fn of_both_kinds(world: &World) -> Vec<String> {
    let mut after = START;
    write_base(world, "log", HERE).await;
    insert(&world.session, "new").await;
    world.read_all(&mut after).await;
    world.pass("feed", after).await;
    left(world).await
}

/// All have had all.
async fn all_had(world: &World) -> Vec<String> {
    insert(&world.session, "had").await;
    world.tick().await;
    write_base(world, "one", HERE).await;
    write_base(world, "two", HERE).await;
    left(world).await
}

macro_rules! shown_by {
    ($schedule:ident, $whole:expr, $change:expr, $broken:expr) => {
        let expected: &[&str] = &$whole;
        for version in Version::ALL {
            assert_eq!($schedule(&world(version, None).await).await, expected, "{version:?}");
        }
        let expected: &[&str] = &$broken;
        let broken = $schedule(&world(Version::V15, Some($change)).await).await;
        assert_eq!(broken, expected, "the schedule does not meet the hole");
    };
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_consumer_of_the_log_has_not_had_stays() {
    shown_by!(behind, ["new"], NOT_HAD, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_base_of_another_cluster_pins() {
    shown_by!(of_another_cluster, ["new"], OTHER_CLUSTER, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_base_from_the_future_pins() {
    shown_by!(from_the_future, ["new"], FROM_THE_FUTURE, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_of_the_log_that_has_not_begun_pins() {
    shown_by!(not_begun, ["new"], NOT_BEGUN, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_feed_does_not_speak_for_the_log() {
    shown_by!(of_both_kinds, ["new"], BOTH_KINDS, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_all_consumers_of_the_log_have_had_goes() {
    shown_by!(all_had, [], NO_FEED, ["had"]);
}

/// Writers with open transactions and rollbacks, bases and prunes in any order. Returns how many
/// rows were deleted that the base of the moment did not see, and how many went rightly.
async fn random_schedule(world: &World, seed: u64) -> (i64, i64) {
    let mut dice = StdRng::seed_from_u64(seed);
    let mut open: Vec<(Client, Vec<i64>)> = Vec::new();
    let mut committed: BTreeMap<i64, String> = BTreeMap::new();
    let (mut lost, mut gone) = (0, 0);
    let sql = "INSERT INTO postrider.outbox (key, topic, type, payload)
        VALUES ('k', 't', 'T', '') RETURNING seq, xid::text";
    for _ in 0..60 {
        match dice.random_range(0..10) {
            0 | 1 if open.len() < 4 => {
                let writer = world.session().await;
                run(&writer, "BEGIN").await;
                open.push((writer, Vec::new()));
            }
            0..=3 if !open.is_empty() => {
                let which = dice.random_range(0..open.len());
                let row = open[which].0.query_one(sql, &[]).await.expect("inserted");
                open[which].1.push(row.get(0));
            }
            4 if !open.is_empty() => {
                let (writer, seqs) = open.swap_remove(dice.random_range(0..open.len()));
                let ids = "SELECT pg_current_xact_id()::text";
                let xid: String = writer.query_one(ids, &[]).await.expect("an id").get(0);
                let keep = dice.random_range(0..4) > 0;
                run(&writer, if keep { "COMMIT" } else { "ROLLBACK" }).await;
                committed.extend(seqs.into_iter().filter(|_| keep).map(|seq| (seq, xid.clone())));
            }
            5 => {
                let row = world.session.query_one(sql, &[]).await.expect("inserted");
                committed.insert(row.get(0), row.get(1));
            }
            6 | 7 => world.tick().await,
            8 => write_base(world, "sink", HERE).await,
            _ => drop(world.prune_all().await),
        }
        let (seqs, xids): (Vec<i64>, Vec<String>) = committed.clone().into_iter().unzip();
        let missing = "SELECT count(*) FILTER (WHERE NOT coalesce(
                pg_visible_in_snapshot(c.xid::xid8, b.snapshot), false)), count(*)
            FROM unnest($1::bigint[], $2::text[]) AS c (seq, xid)
            LEFT JOIN postrider.wal_base AS b ON b.consumer = 'sink'
            WHERE NOT EXISTS (SELECT FROM postrider.outbox AS o WHERE o.seq = c.seq)";
        let row = world.session.query_one(missing, &[&seqs, &xids]).await.expect("counted");
        (lost, gone) = (lost + row.get::<_, i64>(0), row.get(1));
    }
    (lost, gone)
}

#[tokio::test(flavor = "multi_thread")]
async fn no_schedule_deletes_what_a_consumer_of_the_log_has_not_had() {
    for version in Version::ALL {
        let mut gone = 0;
        for seed in 0..6 {
            let world = world(version, None).await;
            known(&world, "sink").await;
            let outcome = random_schedule(&world, seed).await;
            assert_eq!(outcome.0, 0, "{version:?}, seed {seed}");
            gone += outcome.1;
        }
        assert!(gone > 0, "nothing was ever deleted");
    }
    let mut lost = 0;
    for seed in 0..6 {
        let world = world(Version::V15, Some(NOT_HAD)).await;
        known(&world, "sink").await;
        lost += random_schedule(&world, seed).await.0;
    }
    assert!(lost > 0, "the schedules do not meet the hole");
}
