//! The cut: what makes a tick right, each part shown by what is lost without it.
//!
//! What lives here: schedules of a few transactions against the tables as they are, and against the
//! same tables with one part of the algorithm taken out. What does not: races (`race.rs`).
//! Invariant: whatever is committed is read once, at the first or a later tick; a schedule that
//! reads all of it from mutilated tables as well would prove nothing, and fails.

use std::sync::Arc;
use std::time::Duration;

use postrider_core::*;
use postrider_servers::postgres::{Database, Options, Server, Version, shared};
use postrider_store_postgres::{PostgresOptions, PostgresStore, SchemaOnOpen, schema_sql};
use tokio_postgres::{Client, NoTls};

/// A fresh outbox of one partition whose SQL was changed.
struct World {
    database: Database,
    store: PostgresStore,
    /// Kept for its life: transactions of other databases would blur the snapshots.
    _server: Option<Server>,
}

/// Replaces a part of the SQL that must be there.
fn mutate(sql: &str, part: &str, by: &str) -> String {
    assert!(sql.contains(part), "the SQL has no {part:?} any more; correct the mutation");
    sql.replace(part, by)
}

impl World {
    async fn new(version: Version, change: impl Fn(String) -> String) -> Self {
        Self::on(shared(version).expect("a server"), None, change).await
    }

    /// On a server that runs nothing else.
    async fn alone(version: Version, change: impl Fn(String) -> String) -> Self {
        let server = Options::new(version).setting("autovacuum = off").launch().expect("a server");
        Self::on(server.create_database().expect("a database"), Some(server), change).await
    }

    async fn on(
        database: Database,
        server: Option<Server>,
        change: impl Fn(String) -> String,
    ) -> Self {
        let options = PostgresOptions::new(database.url()).partitions(1);
        let (client, connection) =
            tokio_postgres::connect(&database.url(), NoTls).await.expect("connect");
        tokio::spawn(connection);
        run(&client, &change(schema_sql(&options))).await;
        let options = options.on_open(SchemaOnOpen::Require).tick_interval(Duration::ZERO);
        let store = PostgresStore::open(options).await.expect("open");
        Self { database, store, _server: server }
    }

    async fn session(&self) -> Client {
        let (client, connection) =
            tokio_postgres::connect(&self.database.url(), NoTls).await.expect("connect");
        tokio::spawn(connection);
        client
    }

    /// The payloads of all that is new after `after`, which moves on.
    async fn read(&self, after: &mut Position) -> Vec<String> {
        let limit = BatchLimit { records: 100, bytes: 1 << 20 };
        let partition = PartitionId::numbered(0, 1);
        let page = Feed::read(&self.store, &partition, after, limit).await.expect("read");
        *after = page.position;
        let payload = |entry: &Entry| match entry {
            Entry::Record(record) => String::from_utf8_lossy(record.event.payload()).into_owned(),
            Entry::Malformed(malformed) => panic!("unreadable: {malformed:?}"),
        };
        page.entries.iter().map(payload).collect()
    }
}

async fn insert(session: &Client, payload: &str) {
    let sql = format!(
        "INSERT INTO postrider.outbox (key, topic, type, payload) \
         VALUES ('k', 't', 'T', '{payload}')"
    );
    session.batch_execute(&sql).await.expect("insert");
}

async fn run(session: &Client, sql: &str) {
    let done = session.batch_execute(sql).await;
    done.unwrap_or_else(|error| panic!("{error:?} of {:.100}", sql.trim()));
}

fn unchanged(sql: String) -> String {
    sql
}

/// A transaction that is open at a tick, with an id that is neither in the snapshot's list nor
/// below its end, because nothing with a larger id has completed.
async fn late_beyond_the_snapshot(world: &World) -> Vec<String> {
    let (a, mut after) = (world.session().await, Position::START);
    run(&a, "BEGIN").await;
    insert(&a, "late").await;
    let mut seen = world.read(&mut after).await;
    run(&a, "COMMIT").await;
    seen.extend(world.read(&mut after).await);
    seen
}

#[tokio::test]
async fn a_transaction_beyond_the_snapshots_end_is_read_once_it_commits() {
    for version in Version::ALL {
        let world = World::alone(version, unchanged).await;
        assert_eq!(late_beyond_the_snapshot(&world).await, ["late"]);
    }
}

#[tokio::test]
async fn without_the_second_half_of_late_it_is_lost() {
    let world =
        World::alone(Version::V15, |sql| mutate(&sql, "p.own::text::bigint - 1) AS x", "0) AS x"))
            .await;
    // Something later, so that a tick comes at all.
    let (a, mut after) = (world.session().await, Position::START);
    run(&a, "BEGIN").await;
    insert(&a, "late").await;
    let mut seen = world.read(&mut after).await;
    run(&a, "COMMIT").await;
    insert(&a, "next").await;
    seen.extend(world.read(&mut after).await);
    assert_eq!(seen, ["next"], "the schedule does not meet the hole");
}

/// A transaction that is open at a tick, with a smaller id than one that has completed.
#[tokio::test]
async fn a_transaction_in_the_snapshots_list_is_read_once_it_commits() {
    let lost = |sql: String| {
        mutate(&sql, "WHERE (o.xid, o.seq) > (e.x, gr", "WHERE false AND (o.xid, o.seq) > (e.x, gr")
    };
    for (change, expected) in [
        (&unchanged as &dyn Fn(String) -> String, &["early", "late", "next"][..]),
        (&lost, &["early", "next"]),
    ] {
        let world = World::new(Version::V15, change).await;
        let (a, b, mut after) = (world.session().await, world.session().await, Position::START);
        run(&a, "BEGIN").await;
        insert(&a, "late").await;
        insert(&b, "early").await;
        let mut seen = world.read(&mut after).await;
        assert_eq!(seen, ["early"], "nobody waits for an open transaction");
        run(&a, "COMMIT").await;
        insert(&b, "next").await;
        seen.extend(world.read(&mut after).await);
        assert_eq!(seen, expected);
    }
}

/// Where a tick stops until the test lets it go on.
const PAUSE: &str = "PERFORM pg_advisory_lock_shared(4711);
    PERFORM pg_advisory_unlock_shared(4711);\n    ";
const NO_GUARD: &str = "IF pg_current_xact_id_if_assigned() IS NOT NULL AND false THEN
        RAISE EXCEPTION 'tick has a transaction id before its cut";
const GUARD: &str = "IF pg_current_xact_id_if_assigned() IS NOT NULL THEN
        RAISE EXCEPTION 'tick has a transaction id before its cut";

/// Lets a tick stop in its middle, does something, lets it go on, does something else, reads on.
async fn around_a_paused_tick(
    world: &World,
    meanwhile: &[&str],
    afterwards: &[&str],
) -> Vec<String> {
    let (gate, a) = (world.session().await, world.session().await);
    // Something that makes a tick due.
    insert(&a, "first").await;
    run(&gate, "SELECT pg_advisory_lock(4711)").await;
    let store = world.store.clone();
    let partition = PartitionId::numbered(0, 1);
    let reading = tokio::spawn(async move {
        let limit = BatchLimit { records: 100, bytes: 1 << 20 };
        Feed::read(&store, &partition, &Position::START, limit).await.expect("read")
    });
    let waits = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
    while gate.query_one(waits, &[]).await.expect("pg_locks").get::<_, i64>(0) == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for sql in meanwhile {
        run(&a, sql).await;
    }
    run(&gate, "SELECT pg_advisory_unlock(4711)").await;
    let page = reading.await.expect("the reader ends");
    let mut after = page.position;
    let mut seen: Vec<String> = page.entries.iter().map(payload).collect();
    for sql in afterwards {
        run(&a, sql).await;
    }
    seen.extend(world.read(&mut after).await);
    seen
}

fn payload(entry: &Entry) -> String {
    match entry {
        Entry::Record(record) => String::from_utf8_lossy(record.event.payload()).into_owned(),
        Entry::Malformed(malformed) => panic!("unreadable: {malformed:?}"),
    }
}

const INSERT: &str = "INSERT INTO postrider.outbox (key, topic, type, payload)
    VALUES ('k', 't', 'T', 'slow')";
const NEXT: &str = "INSERT INTO postrider.outbox (key, topic, type, payload)
    VALUES ('k', 't', 'T', 'next')";

/// The tick stops before it reads the sequence; a transaction begins and draws a number; the tick
/// goes on; the transaction commits.
#[tokio::test]
async fn an_id_drawn_before_the_sequence_was_read_loses_what_began_in_between() {
    let read = "seq_lo := coalesce(";
    let paused = |sql: String| mutate(&sql, read, &format!("{PAUSE}{read}"));
    let early_own = |sql: String| {
        let sql = mutate(&sql, GUARD, NO_GUARD);
        mutate(&sql, read, &format!("PERFORM pg_current_xact_id();\n    {PAUSE}{read}"))
    };
    let (meanwhile, afterwards) = (["BEGIN", INSERT], ["COMMIT", NEXT]);
    let world = World::alone(Version::V15, paused).await;
    let seen = around_a_paused_tick(&world, &meanwhile, &afterwards).await;
    assert_eq!(seen, ["first", "slow", "next"]);
    let world = World::alone(Version::V15, early_own).await;
    let seen = around_a_paused_tick(&world, &meanwhile, &afterwards).await;
    assert_eq!(seen, ["first", "next"], "the schedule does not meet the hole");
}

/// A guard in the tick's own function refuses an id that was drawn too early.
#[tokio::test]
async fn a_tick_with_an_id_before_its_cut_is_refused() {
    let read = "seq_lo := coalesce(";
    let early =
        |sql: String| mutate(&sql, read, &format!("PERFORM pg_current_xact_id();\n    {read}"));
    let world = World::new(Version::V15, early).await;
    insert(&world.session().await, "x").await;
    let error = world.database.psql("SELECT postrider.outbox_tick()").expect_err("refused");
    assert!(error.to_string().contains("before its cut"), "{error}");
}

/// The tick stops between its last look at the sequence and its snapshot; a row is drawn and
/// committed in between.
#[tokio::test]
async fn a_sequence_read_before_the_snapshot_alone_loses_what_came_in_between() {
    let snap = "snap := pg_current_snapshot();\n    seq_hi := coalesce(pg_sequence_last_value(";
    let in_between = |sql: String| mutate(&sql, snap, &format!("{PAUSE}{snap}"));
    let too_early = |sql: String| {
        let sql = mutate(&sql, snap, &format!("{PAUSE}{snap}"));
        let hi = "INSERT INTO \"postrider\".\"outbox_tick\" AS t";
        mutate(&sql, hi, &format!("seq_hi := seq_lo;\n    {hi}"))
    };
    let world = World::new(Version::V15, in_between).await;
    let seen = around_a_paused_tick(&world, &[INSERT], &[NEXT]).await;
    assert_eq!(seen, ["first", "slow", "next"]);
    let world = World::new(Version::V15, too_early).await;
    let seen = around_a_paused_tick(&world, &[INSERT], &[NEXT]).await;
    assert_eq!(seen, ["first", "next"], "the schedule does not meet the hole");
}

/// Makes the drawing of a transaction id slow: it waits for the gate first.
const SLOW_ID: &str = "
    CREATE FUNCTION postrider.slow_id() RETURNS xid8 LANGUAGE plpgsql AS $x$ BEGIN
        PERFORM pg_advisory_lock_shared(4711);
        PERFORM pg_advisory_unlock_shared(4711);
        RETURN pg_current_xact_id();
    END $x$;
    ALTER TABLE postrider.outbox ALTER COLUMN xid SET DEFAULT postrider.slow_id();";

/// An insert stops where it draws its transaction id; a tick is made; the insert goes on.
async fn around_a_slow_id(world: &World) -> Vec<String> {
    let (gate, a, b) =
        (world.session().await, Arc::new(world.session().await), world.session().await);
    insert(&b, "first").await;
    run(&gate, "SELECT pg_advisory_lock(4711)").await;
    let slow = Arc::clone(&a);
    let inserting = tokio::spawn(async move { run(&slow, INSERT).await });
    let waits = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
    while gate.query_one(waits, &[]).await.expect("pg_locks").get::<_, i64>(0) == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut after = Position::START;
    let mut seen = world.read(&mut after).await;
    run(&gate, "SELECT pg_advisory_unlock(4711)").await;
    inserting.await.expect("the insert ends");
    run(&b, NEXT).await;
    seen.extend(world.read(&mut after).await);
    seen
}

/// Defaults are evaluated in the order of the columns, on every server version.
#[tokio::test]
async fn a_number_drawn_before_the_transaction_id_is_lost() {
    let swapped = |sql: String| {
        let xid = "    xid          xid8        NOT NULL DEFAULT pg_current_xact_id(),\n";
        let sql = mutate(&sql, xid, "");
        let place = "    created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),\n    id   ";
        mutate(&sql, place, &format!("{xid}{place}"))
    };
    for version in Version::ALL {
        let world = World::alone(version, |sql| sql).await;
        world.database.psql(SLOW_ID).expect("slow ids: the first insert waits for nobody");
        let seen = around_a_slow_id(&world).await;
        assert_eq!(seen, ["first", "slow", "next"], "{version:?}");
    }
    let world = World::alone(Version::V15, swapped).await;
    world.database.psql(SLOW_ID).expect("slow ids");
    let seen = around_a_slow_id(&world).await;
    assert_eq!(seen, ["first", "next"], "the schedule does not meet the hole");
}

/// O5: a sequence with a cache hands numbers to sessions ahead of their transactions.
#[tokio::test]
async fn o5_a_sequence_with_a_cache_loses_events_and_is_refused() {
    for (cache, expected) in [(1, &["a1", "b1", "a2", "next"][..]), (32, &["a1", "b1"])] {
        let world = World::new(Version::V15, unchanged).await;
        let cached = format!("ALTER SEQUENCE postrider.outbox_seq CACHE {cache}");
        world.database.psql(&cached).expect("alter");
        let (a, b, mut after) = (world.session().await, world.session().await, Position::START);
        insert(&a, "a1").await;
        insert(&b, "b1").await;
        let mut seen = world.read(&mut after).await;
        insert(&a, "a2").await;
        insert(&b, "next").await;
        seen.extend(world.read(&mut after).await);
        assert_eq!(seen, expected);
        let again = PostgresOptions::new(world.database.url());
        let opened = PostgresStore::open(again).await;
        if cache > 1 {
            let error = opened.expect_err("refused").to_string();
            assert!(error.contains("CACHE 32") && error.contains("ALTER SEQUENCE"), "{error}");
        } else {
            opened.expect("a sequence without a cache is fine");
        }
    }
}

/// A transaction that drew numbers and rolled back leaves nothing, neither does a savepoint.
#[tokio::test]
async fn what_was_rolled_back_is_never_read_and_the_rest_of_its_transaction_is() {
    let world = World::new(Version::V18, unchanged).await;
    let (a, mut after) = (world.session().await, Position::START);
    run(&a, "BEGIN").await;
    insert(&a, "kept 1").await;
    run(&a, "SAVEPOINT s").await;
    insert(&a, "undone").await;
    run(&a, "ROLLBACK TO s").await;
    insert(&a, "kept 2").await;
    let mut seen = world.read(&mut after).await;
    run(&a, "COMMIT; BEGIN").await;
    insert(&a, "never").await;
    run(&a, "ROLLBACK").await;
    seen.extend(world.read(&mut after).await);
    assert_eq!(seen, ["kept 1", "kept 2"]);
}

/// A prepared transaction stays open over the end of its session and over a restart of the server.
#[tokio::test]
async fn a_prepared_transaction_is_read_once_it_commits() {
    for version in Version::ALL {
        let world = World::alone(version, unchanged).await;
        let (a, b, mut after) = (world.session().await, world.session().await, Position::START);
        run(&a, "BEGIN").await;
        insert(&a, "prepared").await;
        run(&a, "PREPARE TRANSACTION 'p'").await;
        insert(&b, "other").await;
        let mut seen = world.read(&mut after).await;
        assert_eq!(seen, ["other"]);
        let server = world._server.as_ref().expect("a server of its own");
        server.restart(postrider_servers::postgres::Shutdown::Fast).expect("restart");
        let b = world.session().await;
        run(&b, "COMMIT PREPARED 'p'").await;
        // The pool's connections are gone; a reader tries again.
        let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
        loop {
            let limit = BatchLimit { records: 100, bytes: 1 << 20 };
            match Feed::read(&world.store, &PartitionId::numbered(0, 1), &after, limit).await {
                Ok(page) => {
                    seen.extend(page.entries.iter().map(payload));
                    break;
                }
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Transient, "{error}");
                    assert!(tokio::time::Instant::now() < deadline, "{error}");
                }
            }
        }
        assert_eq!(seen, ["other", "prepared"]);
    }
}

/// A dump loaded into a cluster that has not come to its transaction ids yet, as after a restore of
/// the cluster's own older backup: the same system, ticks of a later time.
#[tokio::test]
async fn ticks_of_a_later_time_than_the_cluster_are_settled_anew() {
    let blind =
        |sql: String| mutate(&sql, "p.own >= pg_snapshot_xmax(pg_current_snapshot())", "false");
    for (change, expected) in
        [(&unchanged as &dyn Fn(String) -> String, &["b", "c"][..]), (&blind, &["c"])]
    {
        let world = World::new(Version::V15, change).await;
        let (a, mut after) = (world.session().await, Position::START);
        insert(&a, "a").await;
        assert_eq!(world.read(&mut after).await, ["a"]);
        let later = "UPDATE postrider.outbox_tick SET own = '900000000000',
            snap = '900000000000:900000000000:' WHERE seq_hi > 0";
        world.database.psql(later).expect("update");
        insert(&a, "b").await;
        let mut seen = world.read(&mut after).await;
        insert(&a, "c").await;
        seen.extend(world.read(&mut after).await);
        assert_eq!(seen, expected);
    }
}

/// What will be read counts as pending, also of a transaction beyond the end of the checkpoint's
/// own snapshot.
#[tokio::test]
async fn a_late_row_behind_a_checkpoint_is_pending_once_it_commits() {
    let world = World::alone(Version::V15, unchanged).await;
    let (a, mut after) = (world.session().await, Position::START);
    run(&a, "BEGIN").await;
    insert(&a, "late").await;
    assert!(world.read(&mut after).await.is_empty());
    let partition = PartitionId::numbered(0, 1);
    let group = GroupName::new("group").expect("valid");
    let (me, relay) = (ConsumerName::new("me").expect("valid"), RelayId::new("r").expect("valid"));
    let acquired = world.store.acquire(&group, &partition, &relay, Duration::from_secs(60)).await;
    let Acquired::Held(lease) = acquired.expect("the store answers") else {
        panic!("nobody else asked for the lease");
    };
    world.store.advance(&lease, &me, &after, Tally::default()).await.expect("moved");
    let pending = async || world.store.progress().await.expect("progress")[0].pending;
    assert_eq!(pending().await, 0);
    run(&a, "COMMIT").await;
    assert_eq!(pending().await, 1);
    assert_eq!(world.read(&mut after).await, ["late"]);
}
