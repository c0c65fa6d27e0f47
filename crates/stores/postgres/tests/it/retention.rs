//! Retention: no schedule of commits, stalls and prunes deletes an unsent row.
//!
//! What lives here: single holes by schedule, each shown by what is lost from tables without the
//! rule in question, and random schedules of everything at once. What does not: what every store
//! promises of retention (the conformance suite), and restored databases (`restore.rs`).
//! Invariant: everything goes through the functions that a relay calls; a schedule that loses
//! nothing on mutilated tables as well would prove nothing, and fails.

#![expect(clippy::disallowed_methods, reason = "sessions and writers end with their test")]

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use postrider_servers::postgres::{Database, Version, shared};
use postrider_store_postgres::{PostgresOptions, schema_sql};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use tokio::task::JoinHandle;
use tokio_postgres::{Client, NoTls};

/// Where a reader stands, and where a record does.
pub(super) type Place = (i64, i64);

pub(super) const START: Place = (0, 0);

/// Holds a statement back until the lock of that number is free.
const GATE: &str =
    "CREATE FUNCTION gate(number bigint) RETURNS bytea LANGUAGE plpgsql VOLATILE AS $$
    BEGIN PERFORM pg_advisory_xact_lock_shared(number); RETURN 'late'; END $$";

pub(super) fn unchanged(sql: String) -> String {
    sql
}

/// Replaces a part of the SQL that must be there.
pub(super) fn mutate(sql: &str, part: &str, by: &str) -> String {
    assert!(sql.contains(part), "the SQL has no {part:?} any more; correct the mutation");
    sql.replace(part, by)
}

/// An outbox of two partitions and a session that reads and prunes.
pub(super) struct World {
    pub(super) database: Database,
    pub(super) session: Client,
}

pub(super) async fn connect(database: &Database) -> Client {
    let (client, connection) =
        tokio_postgres::connect(&database.url(), NoTls).await.expect("connect");
    tokio::spawn(connection);
    client
}

pub(super) async fn run(session: &Client, sql: &str) {
    session.batch_execute(sql).await.expect(sql);
}

pub(super) async fn insert(session: &Client, payload: &str) {
    let sql = format!(
        "INSERT INTO postrider.outbox (key, topic, type, payload)
         VALUES ('k{payload}', 't', 'T', '{payload}')"
    );
    run(session, &sql).await;
}

/// What one prune answered.
pub(super) struct Pruned {
    pub(super) horizon: Place,
    more: bool,
    segments: Vec<i32>,
}

impl World {
    async fn new(version: Version, change: impl Fn(String) -> String) -> Self {
        Self::on(shared(version).expect("a server"), change).await
    }

    pub(super) async fn on(database: Database, change: impl Fn(String) -> String) -> Self {
        let options = PostgresOptions::new(database.url()).partitions(2);
        let session = connect(&database).await;
        session.batch_execute(&change(schema_sql(&options))).await.expect("the SQL is valid");
        session.batch_execute(GATE).await.expect("the function is valid");
        Self { database, session }
    }

    pub(super) async fn session(&self) -> Client {
        connect(&self.database).await
    }

    pub(super) async fn tick(&self) {
        run(&self.session, "SELECT postrider.outbox_tick(0)").await;
    }

    /// Everything after a place and where it ends, or the code of the refusal.
    pub(super) async fn read(
        &self,
        after: Place,
        rows: i32,
    ) -> Result<(Vec<(Place, String)>, Place), String> {
        read(&self.session, after, rows).await
    }

    /// Cuts the feed and reads all of it.
    pub(super) async fn read_all(&self, after: &mut Place) -> Vec<String> {
        self.tick().await;
        let (records, end) = self.read(*after, 10_000).await.expect("readable");
        *after = end;
        records.into_iter().map(|(_, payload)| payload).collect()
    }

    /// Writes a consumer's checkpoint in one partition.
    pub(super) async fn advance(&self, consumer: &str, partition: &str, (stamp, seq): Place) {
        let sql = "INSERT INTO postrider.checkpoint AS c (outbox, consumer, partition, position)
            VALUES ('outbox', $1, $2, int8send($3) || int8send($4))
            ON CONFLICT (outbox, consumer, partition) DO UPDATE SET position = excluded.position
            WHERE c.position < excluded.position";
        let written = self.session.execute(sql, &[&consumer, &partition, &stamp, &seq]).await;
        written.expect("a checkpoint");
    }

    pub(super) async fn pass(&self, consumer: &str, place: Place) {
        self.advance(consumer, "0/2", place).await;
        self.advance(consumer, "1/2", place).await;
    }

    pub(super) async fn prune(&self, keep_ms: i64, most: i32) -> Pruned {
        let sql = "SELECT stamp, seq, more, segments FROM postrider.outbox_prune($1, $2)";
        let row = self.session.query_one(sql, &[&keep_ms, &most]).await.expect("pruned");
        Pruned { horizon: (row.get(0), row.get(1)), more: row.get(2), segments: row.get(3) }
    }

    async fn empty(&self, segment: i32) -> Option<i64> {
        let sql = "SELECT postrider.outbox_empty($1)";
        self.session.query_one(sql, &[&segment]).await.expect("an answer").get(0)
    }

    /// Prunes, and tries to empty all segments, also those that are not offered.
    pub(super) async fn prune_all(&self) -> i64 {
        self.prune(0, 10_000).await;
        let mut events = 0;
        for segment in 0..16 {
            events += self.empty(segment).await.unwrap_or(0);
        }
        events
    }

    pub(super) async fn number(&self, sql: &str) -> i64 {
        self.session.query_one(sql, &[]).await.expect(sql).get(0)
    }

    pub(super) async fn rows(&self) -> i64 {
        self.number("SELECT count(*) FROM postrider.outbox").await
    }

    async fn segment(&self) -> i64 {
        self.number("SELECT pg_sequence_last_value('postrider.outbox_segment')").await
    }

    /// Waits until so many sessions of this database wait for a lock of that kind.
    async fn until_waiting(&self, kind: &str, count: i64) {
        let sql = "SELECT count(*) FROM pg_stat_activity
            WHERE datname = current_database() AND wait_event_type = 'Lock' AND wait_event = $1";
        for _ in 0..2_000 {
            let row = self.session.query_one(sql, &[&kind]).await.expect("readable");
            if row.get::<_, i64>(0) >= count {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("no {count} sessions came to wait for a {kind} lock");
    }

    /// An insert that has chosen its segment and drawn its seq, and stands before the table.
    async fn stalled_insert(&self, lock: i64, payload: &str) -> (Client, JoinHandle<Client>) {
        let (holder, writer) = (self.session().await, self.session().await);
        run(&holder, &format!("SELECT pg_advisory_lock({lock})")).await;
        let sql = format!(
            "INSERT INTO postrider.outbox (key, topic, type, payload)
             VALUES ('k', 't', 'T', gate({lock}) || '{payload}')"
        );
        let stalled = tokio::spawn(async move {
            run(&writer, &sql).await;
            writer
        });
        self.until_waiting("advisory", 1).await;
        (holder, stalled)
    }
}

async fn read(
    session: &Client,
    (stamp, seq): Place,
    rows: i32,
) -> Result<(Vec<(Place, String)>, Place), String> {
    let sql = "SELECT stamp, seq, generation, convert_from(payload, 'UTF8')
        FROM postrider.outbox_read($1, $2, $3, 1000000000)";
    let found = session.query(sql, &[&stamp, &seq, &rows]).await.map_err(|error| {
        error.code().map_or_else(|| error.to_string(), |code| code.code().to_owned())
    })?;
    let mut records = Vec::new();
    for row in &found {
        if let Some(payload) = row.get::<_, Option<String>>(3) {
            records.push(((row.get(0), row.get(1)), payload));
        }
    }
    let end = found.last().map_or((stamp, seq), |row| (row.get(0), row.get(1)));
    Ok((records, end))
}

/// Runs a schedule on the tables as they are and on mutilated ones, which must lose something.
macro_rules! loses_without {
    ($schedule:ident, $([$part:expr => $by:expr]),+; whole $whole:expr; broken $broken:expr) => {
        for version in Version::ALL {
            let world = World::new(version, unchanged).await;
            assert_eq!($schedule(&world).await, $whole, "{version:?}");
        }
        let world = World::new(Version::V15, |sql| {
            $(let sql = mutate(&sql, $part, $by);)+
            sql
        })
        .await;
        assert_eq!($schedule(&world).await, $broken, "the schedule does not meet the hole");
    };
}

/// A transaction has a row in the segment, and its id stands in the horizon's list of open ones.
async fn open_at_the_horizon(world: &World) -> Vec<String> {
    let (a, mut after) = (world.session().await, START);
    run(&a, "BEGIN").await;
    insert(&a, "late").await;
    insert(&world.session, "early").await;
    let mut seen = world.read_all(&mut after).await;
    world.pass("sink", after).await;
    // Its own lock keeps the segment while it is open, whatever else is looked at.
    world.prune_all().await;
    run(&a, "COMMIT").await;
    world.prune_all().await;
    seen.extend(world.read_all(&mut after).await);
    seen
}

#[tokio::test]
async fn a_row_of_a_transaction_that_was_open_at_the_horizon_stays() {
    loses_without!(open_at_the_horizon,
        ["WHERE (l.xid, l.seq) > (e.x, 0)\n" => "WHERE false\n"];
        whole ["early", "late"]; broken ["early"]);
}

/// A row is committed after the newest tick and before its segment is sealed.
async fn after_the_horizon(world: &World) -> Vec<String> {
    let mut after = START;
    insert(&world.session, "sent").await;
    let mut seen = world.read_all(&mut after).await;
    world.pass("sink", after).await;
    insert(&world.session, "new").await;
    world.prune_all().await;
    world.prune_all().await;
    seen.extend(world.read_all(&mut after).await);
    seen
}

#[tokio::test]
async fn a_row_that_came_after_the_horizon_stays() {
    loses_without!(after_the_horizon,
        ["IF newest >= pg_snapshot_xmax(t.snap) THEN" => "IF false THEN"],
        ["IF highest > t.seq_hi THEN" => "IF false THEN"];
        whole ["sent", "new"]; broken ["sent"]);
}

/// A row that was not committed at the first look is when the lock is granted.
async fn committed_during_the_wait(world: &World) -> Vec<String> {
    let (a, pruner, mut after) = (world.session().await, world.session().await, START);
    insert(&world.session, "sent").await;
    run(&a, "BEGIN").await;
    insert(&a, "late").await;
    let mut seen = world.read_all(&mut after).await;
    world.pass("sink", after).await;
    assert_eq!(world.prune(0, 100).await.segments, [0]);
    let emptying = tokio::spawn(async move {
        run(&pruner, "SELECT postrider.outbox_empty(0)").await;
    });
    world.until_waiting("relation", 1).await;
    run(&a, "COMMIT").await;
    emptying.await.expect("emptied or not");
    seen.extend(world.read_all(&mut after).await);
    seen
}

#[tokio::test]
async fn the_look_is_repeated_under_the_lock() {
    const PATIENT: [&str; 2] = ["SET lock_timeout = '25ms'", "SET lock_timeout = '60s'"];
    const AGAIN: &str = "END;\n    IF NOT \"postrider\".\"outbox_settled\"(segment, horizon) THEN";
    for (change, expected) in [
        (&(|sql: String| mutate(&sql, PATIENT[0], PATIENT[1])) as &dyn Fn(String) -> String, 2),
        (&|sql| mutate(&mutate(&sql, PATIENT[0], PATIENT[1]), AGAIN, "END;\n    IF false THEN"), 1),
    ] {
        let world = World::new(Version::V15, change).await;
        assert_eq!(committed_during_the_wait(&world).await.len(), expected);
    }
}

/// Two consumers; the slow one has passed less.
async fn the_slow_one(world: &World) -> Vec<String> {
    let (mut fast, mut slow) = (START, START);
    insert(&world.session, "1").await;
    let mut seen = world.read_all(&mut slow).await;
    world.pass("slow", slow).await;
    world.read_all(&mut fast).await;
    for n in 2..5 {
        insert(&world.session, &n.to_string()).await;
        world.read_all(&mut fast).await;
        world.pass("fast", fast).await;
        world.prune_all().await;
    }
    match world.read(slow, 100).await {
        Ok((records, _)) => seen.extend(records.into_iter().map(|(_, payload)| payload)),
        Err(code) => seen.push(code),
    }
    seen
}

#[tokio::test]
async fn the_slowest_consumer_bounds_the_horizon() {
    loses_without!(the_slow_one,
        ["t.stamp <= passed AND t.stamp" => "passed > 0 AND t.stamp"];
        whole ["1", "2", "3", "4"]; broken ["1", "PR003"]);
}

/// What pins: no consumer at all, one that has not begun in a partition, a place within a tick.
#[tokio::test]
async fn what_is_not_passed_by_all_in_all_partitions_pins() {
    let world = World::new(Version::V15, unchanged).await;
    let mut after = START;
    for n in 0..4 {
        insert(&world.session, &n.to_string()).await;
        insert(&world.session, &n.to_string()).await;
        world.read_all(&mut after).await;
    }
    assert_eq!(world.prune_all().await, 0, "there is no consumer");
    let (records, end) = world.read(START, 100).await.expect("readable");
    world.advance("sink", "0/2", end).await;
    assert_eq!(world.prune_all().await, 0, "it has not begun in the other partition");
    world.advance("sink", "1/2", records[2].0).await;
    let pruned = world.prune(0, 100).await;
    assert_eq!(pruned.horizon, records[1].0, "a place within the second tick counts as the first");
    world.advance("sink", "1/2", records[3].0).await;
    assert_eq!(world.prune(0, 100).await.horizon, records[3].0, "the end of a tick is passed");
    world.advance("sink", "1/2", (records[6].0.0, 0)).await;
    assert_eq!(world.prune(0, 100).await.horizon, records[5].0, "a time counts as the tick before");
    world.pass("dead", records[5].0).await;
    world.pass("sink", end).await;
    assert_eq!(world.prune(0, 100).await.horizon, records[5].0, "a dead consumer pins");
    run(&world.session, "DELETE FROM postrider.checkpoint WHERE consumer = 'dead'").await;
    assert_eq!(world.prune_all().await, 8, "it pins nothing once it is removed");
    assert_eq!(world.rows().await, 0);
    let ticks = world.number("SELECT count(*) FROM postrider.outbox_tick").await;
    assert_eq!(ticks, 1, "an idle outbox keeps the horizon alone");
}

/// A finished partition pins nothing, an unfinished one also for its successors, and a successor
/// that was not begun although its predecessor is finished pins all.
#[tokio::test]
async fn raised_partitions_pin_where_they_are_read() {
    let world = World::new(Version::V15, unchanged).await;
    let mut after = START;
    insert(&world.session, "old").await;
    world.read_all(&mut after).await;
    let old = after;
    run(&world.session, "SELECT postrider.outbox_raise(4)").await;
    insert(&world.session, "new").await;
    world.read_all(&mut after).await;
    let first = world.prune(0, 100).await.horizon;
    world.pass("sink", old).await;
    assert_eq!(world.prune(0, 100).await.horizon, old, "the successors are not begun");
    // A place beyond the generation's end does not let the successors' records go.
    world.advance("sink", "0/2", after).await;
    world.advance("sink", "1/2", after).await;
    assert_eq!(world.prune(0, 100).await.horizon, old);
    run(&world.session, "UPDATE postrider.checkpoint SET ended = true WHERE partition = '0/2'")
        .await;
    world.advance("sink", "0/4", after).await;
    assert_eq!(world.prune(0, 100).await.horizon, old, "2/4 is missing, 1/2 unfinished");
    world.advance("sink", "2/4", after).await;
    run(&world.session, "UPDATE postrider.checkpoint SET ended = true WHERE partition = '1/2'")
        .await;
    for partition in ["1/4", "3/4"] {
        assert_eq!(world.prune(0, 100).await.horizon, old, "{partition} is missing");
        world.advance("sink", partition, after).await;
    }
    assert_eq!(world.prune(0, 100).await.horizon, after);
    assert!(first < old);
}

/// Records younger than asked stay readable, and so do all records of their tick.
#[tokio::test]
async fn a_young_tick_stays() {
    let world = World::new(Version::V15, unchanged).await;
    let mut after = START;
    insert(&world.session, "a").await;
    world.read_all(&mut after).await;
    world.pass("sink", after).await;
    let pruned = world.prune(3_600_000, 100).await;
    assert!(pruned.horizon < after && pruned.segments.is_empty() && !pruned.more);
    assert_eq!(world.segment().await, 0, "a young segment is not sealed");
    assert_eq!(world.prune(i64::MAX, 100).await.horizon, pruned.horizon);
    assert_eq!(world.prune_all().await, 1);
}

/// An event is appended late by its own clock's age, but was visible only just now.
#[tokio::test]
async fn the_age_is_the_ticks_and_not_the_rows() {
    let world = World::new(Version::V15, unchanged).await;
    let mut after = START;
    insert(&world.session, "a").await;
    run(&world.session, "UPDATE postrider.outbox SET created_at = created_at - interval '2 hours'")
        .await;
    world.read_all(&mut after).await;
    world.pass("sink", after).await;
    let pruned = world.prune(3_600_000, 100).await;
    assert_eq!(world.segment().await, 1, "the segment is old");
    assert!(pruned.horizon < after, "and what became visible just now stays");
    assert_eq!(world.read(START, 10).await.expect("readable").0.len(), 1);
}

/// A writer chooses its segment, stalls, and inserts when that segment was sealed and emptied.
#[tokio::test]
async fn a_row_that_comes_late_to_an_emptied_segment_is_read() {
    for version in Version::ALL {
        let world = World::new(version, unchanged).await;
        let mut after = START;
        insert(&world.session, "sent").await;
        let (holder, stalled) = world.stalled_insert(1, "").await;
        world.read_all(&mut after).await;
        world.pass("sink", after).await;
        assert_eq!(world.prune_all().await, 1, "the stalled one has no lock on the segment yet");
        insert(&world.session, "next").await;
        let mut seen = world.read_all(&mut after).await;
        world.pass("sink", after).await;
        world.prune_all().await;
        run(&holder, "SELECT pg_advisory_unlock_all()").await;
        stalled.await.expect("inserted");
        assert_eq!(world.number("SELECT count(*) FROM postrider.outbox_s0").await, 1);
        assert_eq!(world.prune_all().await, 0, "it is in no tick");
        seen.extend(world.read_all(&mut after).await);
        assert_eq!(seen, ["next", "late"]);
        assert_eq!(world.prune_all().await, 0, "it is not passed");
        world.pass("sink", after).await;
        assert_eq!(world.prune_all().await, 1);
        assert_eq!(world.rows().await, 0);
    }
}

/// A prepared transaction keeps its segment like an open one, for as long as it takes.
#[tokio::test]
async fn a_prepared_transaction_keeps_its_segment() {
    let world = World::new(Version::V15, unchanged).await;
    let (a, mut after) = (world.session().await, START);
    run(&a, "BEGIN").await;
    insert(&a, "prepared").await;
    let name = format!("{}-p", world.database.name());
    run(&a, &format!("PREPARE TRANSACTION '{name}'")).await;
    drop(a);
    insert(&world.session, "sent").await;
    let mut seen = world.read_all(&mut after).await;
    world.pass("sink", after).await;
    world.prune(0, 100).await;
    assert_eq!(world.empty(0).await, None, "it holds its lock");
    run(&world.session, &format!("COMMIT PREPARED '{name}'")).await;
    world.prune_all().await;
    seen.extend(world.read_all(&mut after).await);
    assert_eq!(seen, ["sent", "prepared"]);
}

/// Nobody reads for so long that all segments are full: appends go on in the last one.
#[tokio::test]
async fn without_a_relay_appends_go_on_and_nothing_is_lost() {
    let world = World::new(Version::V15, unchanged).await;
    world.pass("sink", START).await;
    for n in 0..40 {
        insert(&world.session, &format!("{n:02}")).await;
        assert_eq!(world.prune_all().await, 0);
    }
    assert_eq!(world.segment().await, 15);
    let mut after = START;
    let seen = world.read_all(&mut after).await;
    assert_eq!(seen, (0..40).map(|n| format!("{n:02}")).collect::<Vec<_>>());
    world.pass("sink", after).await;
    assert_eq!(world.prune_all().await, 15, "the present one is never emptied");
    assert_eq!(world.prune_all().await, 25, "it is sealed once there is an empty one again");
    assert_eq!(world.rows().await, 0);
}

/// The horizon moves past a reader that is between its look for the ticks and its rows.
async fn overtaken(world: &World) -> String {
    let (holder, reader, mut after) = (world.session().await, world.session().await, START);
    for payload in ["a", "b"] {
        insert(&world.session, payload).await;
        world.read_all(&mut after).await;
    }
    world.pass("sink", after).await;
    run(&holder, "SELECT pg_advisory_lock(7)").await;
    let reading = tokio::spawn(async move { read(&reader, START, 2).await });
    world.until_waiting("advisory", 1).await;
    world.prune_all().await;
    insert(&world.session, "c").await;
    world.tick().await;
    run(&holder, "SELECT pg_advisory_unlock_all()").await;
    match reading.await.expect("an answer") {
        Ok((records, _)) => format!("{} records", records.len()),
        Err(code) => code,
    }
}

#[tokio::test]
async fn a_reader_that_the_horizon_overtakes_is_told() {
    const GATED: [&str; 2] = [
        "    base := p.stamp;\n",
        "    base := p.stamp;\n    PERFORM pg_advisory_xact_lock_shared(7) WHERE after_stamp = 0
            AND (SELECT count(*) FROM \"postrider\".\"outbox_tick\") > 2;\n",
    ];
    let gated = |sql: String| mutate(&sql, GATED[0], GATED[1]);
    let blind = |sql: String| {
        mutate(&gated(sql), "AS b WHERE b.stamp = base)", "AS b WHERE b.stamp >= base)")
    };
    for (change, expected) in [
        (&gated as &dyn Fn(String) -> String, "40001"),
        // Silently the third one alone.
        (&blind, "1 records"),
    ] {
        let world = World::new(Version::V15, change).await;
        assert_eq!(overtaken(&world).await, expected);
    }
}

#[tokio::test]
async fn a_snapshot_that_truncate_would_show_through_is_refused() {
    let world = World::new(Version::V15, unchanged).await;
    run(&world.session, "BEGIN ISOLATION LEVEL REPEATABLE READ").await;
    assert_eq!(world.read(START, 1).await.expect_err("refused"), "25000");
}

/// A reader that stays keeps its segments, and neither it nor the attempt holds writers up.
#[tokio::test]
async fn writers_go_on_while_a_segment_is_waited_for() {
    let patient = |sql: String| mutate(&sql, "lock_timeout = '25ms'", "lock_timeout = '60s'");
    let world = World::new(Version::V15, patient).await;
    let (a, pruner, mut after) = (world.session().await, world.session().await, START);
    insert(&world.session, "sent").await;
    world.read_all(&mut after).await;
    world.pass("sink", after).await;
    run(&a, "BEGIN; SELECT count(*) FROM postrider.outbox").await;
    assert_eq!(world.prune(0, 100).await.segments, [0]);
    let emptying = tokio::spawn(async move {
        let sql = "SELECT postrider.outbox_empty(0)";
        pruner.query_one(sql, &[]).await.expect("done").get::<_, Option<i64>>(0)
    });
    world.until_waiting("relation", 1).await;
    run(&world.session, "SET statement_timeout = '5s'").await;
    insert(&world.session, "next").await;
    run(&a, "COMMIT").await;
    assert_eq!(emptying.await.expect("emptied"), Some(1));
    assert_eq!(world.read_all(&mut after).await, ["next"]);
}

/// Ticks and the ids that callers gave go by batches, the oldest first.
#[tokio::test]
async fn rows_go_by_batches() {
    let world = World::new(Version::V15, unchanged).await;
    let mut after = START;
    let mut ends = vec![START];
    for n in 0..6 {
        insert(&world.session, &n.to_string()).await;
        world.read_all(&mut after).await;
        ends.push(after);
    }
    run(
        &world.session,
        "INSERT INTO postrider.outbox_given (id, created_at)
         SELECT gen_random_uuid(), clock_timestamp() - interval '1 day' FROM generate_series(1, 5)",
    )
    .await;
    world.pass("sink", after).await;
    for expected in [2, 4] {
        let pruned = world.prune(0, 2).await;
        assert_eq!((pruned.horizon, pruned.more), (ends[expected], true));
    }
    assert_eq!(world.number("SELECT count(*) FROM postrider.outbox_given").await, 1);
    assert!(world.prune(0, 2).await.more || world.prune(0, 2).await.horizon == ends[6]);
    while world.prune(0, 2).await.more {}
    assert_eq!(world.number("SELECT count(*) FROM postrider.outbox_given").await, 0);
    assert_eq!(world.prune(0, 2).await.horizon, ends[6]);
}

/// Sessions of the random schedules.
const WRITERS: usize = 5;
const CONSUMERS: usize = 3;

/// A consumer of both partitions that may be restarted from its checkpoints.
struct Consumer {
    name: String,
    at: Place,
    checkpoints: [Place; 2],
    seen: BTreeMap<String, Place>,
    order: Vec<Place>,
}

impl Consumer {
    fn new(number: usize) -> Self {
        let name = format!("consumer{number}");
        Self { name, at: START, checkpoints: [START; 2], seen: BTreeMap::new(), order: Vec::new() }
    }

    async fn read(&mut self, world: &World, rows: i32) {
        let (records, end) = world.read(self.at, rows).await.expect("its place is kept for it");
        for (place, payload) in records {
            assert!(place > self.at, "{payload} appears behind the reader");
            let before = self.seen.insert(payload.clone(), place);
            assert!(before.is_none_or(|before| before == place), "{payload} has moved");
            self.order.push(place);
            self.at = place;
        }
        self.at = end.max(self.at);
    }
}

/// One writer: idle, or in a transaction with these rows.
struct Writer {
    session: Client,
    open: Option<Vec<String>>,
}

/// Everything at once, chosen by a seed.
struct Schedule {
    world: World,
    dice: StdRng,
    writers: Vec<Writer>,
    consumers: Vec<Consumer>,
    committed: BTreeSet<String>,
    stalled: Vec<(String, Client, JoinHandle<Client>)>,
    rows: u32,
}

impl Schedule {
    async fn new(world: World, seed: u64) -> Self {
        let mut writers = Vec::new();
        for _ in 0..WRITERS {
            writers.push(Writer { session: world.session().await, open: None });
        }
        let consumers: Vec<_> = (0..CONSUMERS).map(Consumer::new).collect();
        for consumer in &consumers {
            world.pass(&consumer.name, START).await;
        }
        let dice = StdRng::seed_from_u64(seed);
        let (committed, stalled) = (BTreeSet::new(), Vec::new());
        Self { world, dice, writers, consumers, committed, stalled, rows: 0 }
    }

    fn payload(&mut self) -> String {
        self.rows += 1;
        format!("{}", self.rows)
    }

    async fn write(&mut self, by: usize) {
        let payload = self.payload();
        let savepoint = self.dice.random_range(0..6);
        let writer = &mut self.writers[by];
        if writer.open.is_none() {
            run(&writer.session, "BEGIN").await;
            // Some are open for the sake of it, and have drawn an id elsewhere.
            if savepoint == 0 {
                run(&writer.session, "SELECT pg_current_xact_id()").await;
                writer.open = Some(Vec::new());
                return;
            }
        }
        let open = writer.open.get_or_insert_default();
        if savepoint == 1 {
            run(&writer.session, "SAVEPOINT part").await;
            insert(&writer.session, &payload).await;
            run(&writer.session, "ROLLBACK TO part").await;
        } else {
            insert(&writer.session, &payload).await;
            open.push(payload);
        }
    }

    async fn end(&mut self, by: usize, commit: bool) {
        let writer = &mut self.writers[by];
        let Some(rows) = writer.open.take() else { return };
        match commit {
            true => {
                run(&writer.session, "COMMIT").await;
                self.committed.extend(rows);
            }
            false => run(&writer.session, "ROLLBACK").await,
        }
    }

    async fn stall(&mut self) {
        if self.stalled.len() < 2 {
            let payload = self.payload();
            let lock = i64::from(self.rows) + 1_000;
            let (holder, stalled) = self.world.stalled_insert(lock, &payload).await;
            self.stalled.push((format!("late{payload}"), holder, stalled));
        }
    }

    async fn release(&mut self) {
        if self.stalled.is_empty() {
            return;
        }
        let which = self.dice.random_range(0..self.stalled.len());
        let (payload, holder, stalled) = self.stalled.swap_remove(which);
        run(&holder, "SELECT pg_advisory_unlock_all()").await;
        stalled.await.expect("inserted");
        self.committed.insert(payload);
    }

    async fn consume(&mut self, which: usize) {
        let rows = self.dice.random_range(1..8);
        let (index, restart) = (self.dice.random_range(0..2), self.dice.random_range(0..8) == 0);
        let consumer = &mut self.consumers[which];
        if restart {
            consumer.at = consumer.checkpoints[0].min(consumer.checkpoints[1]);
        }
        consumer.read(&self.world, rows).await;
        if consumer.at > consumer.checkpoints[index] {
            consumer.checkpoints[index] = consumer.at;
            let partition = format!("{index}/2");
            self.world.advance(&consumer.name, &partition, consumer.at).await;
        }
    }

    async fn prune(&mut self) -> i64 {
        let most = self.dice.random_range(1..20);
        let pruned = self.world.prune(0, most).await;
        let mut segments = pruned.segments;
        segments.push(self.dice.random_range(0..16));
        let mut events = 0;
        for segment in segments {
            events += self.world.empty(segment).await.unwrap_or(0);
        }
        events
    }

    /// One step; returns how many events it pruned.
    async fn step(&mut self) -> i64 {
        let writer = self.dice.random_range(0..WRITERS);
        // The first reads most, the last one seldom.
        let consumer = self.dice.random_range(0..CONSUMERS * 2).saturating_sub(CONSUMERS);
        match self.dice.random_range(0..100) {
            0..30 => self.write(writer).await,
            30..45 => self.end(writer, true).await,
            45..48 => self.end(writer, false).await,
            48..51 => self.stall().await,
            51..54 => self.release().await,
            54..68 => self.world.tick().await,
            68..88 => self.consume(consumer).await,
            _ => return self.prune().await,
        }
        0
    }

    /// Ends all that is open, reads the rest, and compares.
    async fn judge(mut self, seed: u64) {
        for writer in 0..WRITERS {
            self.end(writer, true).await;
        }
        while !self.stalled.is_empty() {
            self.prune().await;
            self.release().await;
        }
        self.prune().await;
        self.world.tick().await;
        let mut places = BTreeMap::new();
        for consumer in &mut self.consumers {
            consumer.at = consumer.checkpoints[0].min(consumer.checkpoints[1]);
            consumer.read(&self.world, 1_000_000).await;
            let seen: BTreeSet<_> = consumer.seen.keys().cloned().collect();
            let missing: Vec<_> = self.committed.difference(&seen).collect();
            assert!(missing.is_empty(), "seed {seed}: {} never saw {missing:?}", consumer.name);
            assert_eq!(seen, self.committed, "seed {seed}: what was rolled back was seen");
            let distinct: BTreeSet<_> = consumer.seen.values().collect();
            assert_eq!(distinct.len(), seen.len(), "seed {seed}: two records at one place");
            for (payload, place) in &consumer.seen {
                let known = *places.entry(payload.clone()).or_insert(*place);
                assert_eq!(known, *place, "seed {seed}: consumers disagree on {payload}");
            }
        }
    }
}

/// Runs one schedule; returns how many events were pruned meanwhile.
async fn random_schedule(
    version: Version,
    change: &(dyn Fn(String) -> String + Sync),
    seed: u64,
) -> i64 {
    let world = World::new(version, |sql| {
        // Segments that somebody has open are met often, and need not be waited for long here.
        change(mutate(&sql, "lock_timeout = '25ms'", "lock_timeout = '2ms'"))
    })
    .await;
    let mut schedule = Schedule::new(world, seed).await;
    let mut pruned = 0;
    for _ in 0..600 {
        pruned += schedule.step().await;
    }
    schedule.judge(seed).await;
    pruned
}

fn schedules() -> u64 {
    let set = std::env::var("POSTRIDER_RETENTION_SCHEDULES").ok();
    set.and_then(|text| text.parse().ok()).unwrap_or(3)
}

#[tokio::test]
async fn no_schedule_deletes_an_unsent_row() {
    for version in Version::ALL {
        let mut pruned = 0;
        for seed in 0..schedules() {
            pruned += random_schedule(version, &unchanged, seed).await;
        }
        assert!(pruned > 0, "{version:?}: nothing was ever pruned");
    }
}

/// The schedules are rich enough to meet what each rule is for: without it, one of them loses.
#[tokio::test]
async fn without_any_one_rule_a_schedule_loses_a_row() {
    for [part, by] in [
        ["WHERE (l.xid, l.seq) > (e.x, 0)\n", "WHERE false\n"],
        ["IF newest >= pg_snapshot_xmax(t.snap) THEN", "IF false THEN"],
        ["t.stamp <= passed AND t.stamp", "passed > 0 AND t.stamp"],
        ["(t.stamp < at_stamp OR at_seq > 0 AND t.seq_hi = at_seq)", "true"],
    ] {
        let mut lost = false;
        for seed in 0..40 {
            let schedule = tokio::spawn(async move {
                // Most of what the others are for is noticed by its number as well.
                let by_id =
                    |sql: String| mutate(&sql, "IF highest > t.seq_hi THEN", "IF false THEN");
                random_schedule(Version::V15, &|sql| mutate(&by_id(sql), part, by), seed).await
            });
            lost = schedule.await.is_err();
            if lost {
                break;
            }
        }
        assert!(lost, "no schedule meets what {part:?} is for");
    }
}
