//! An application's own table as an outbox, with added columns and without.
//!
//! What lives here: adoption, what both modes promise under a race and under faults, unreadable
//! rows, retention. What does not: the ordinary outbox's own tests.
//! Invariant: every committed row is read once, and a replay gives the same.

#![expect(clippy::disallowed_methods, reason = "sessions and writers end with their test")]

use std::collections::HashSet;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use postrider_core::*;
use postrider_servers::postgres::{Database, Options, Shutdown, Version};
use postrider_store_postgres::{PostgresOptions, PostgresStore, schema_sql};
use rand::RngExt as _;
use tokio_postgres::{Client, NoTls};

use crate::by_sql::{column, database, refusal, session};

/// Debezium's columns, and a number that its event router does not need.
const TABLE: &str = "CREATE SCHEMA app; CREATE TABLE app.outboxevent (
        number bigserial PRIMARY KEY, id uuid NOT NULL DEFAULT gen_random_uuid(),
        aggregatetype varchar(255) NOT NULL, aggregateid varchar(255) NOT NULL,
        type varchar(255) NOT NULL, payload jsonb)";

/// Which way the table is adopted.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mode {
    Columns,
    Ripe,
}

const MODES: [Mode; 2] = [Mode::Columns, Mode::Ripe];

impl Mode {
    fn adopt(self) -> &'static str {
        match self {
            Self::Columns => "SELECT postrider.adopt_table('app.outboxevent', add_columns => true)",
            Self::Ripe => {
                "SELECT postrider.adopt_table('app.outboxevent', '{\"number\": \"number\"}')"
            }
        }
    }
}

fn insert(key: i32, payload: &str) -> String {
    format!(
        "INSERT INTO app.outboxevent (aggregatetype, aggregateid, type, payload)
         VALUES ('order', 'order-{key}', 'OrderPlaced', '\"{payload}\"')"
    )
}

async fn store(database: &Database) -> PostgresStore {
    store_of(database.url()).await
}

async fn store_of(url: String) -> PostgresStore {
    let options = PostgresOptions::new(url).outbox("outboxevent").tick_interval(Duration::ZERO);
    PostgresStore::open(options).await.expect("open")
}

/// A reader of all partitions.
#[derive(Clone)]
pub(crate) struct Follower {
    store: PostgresStore,
    at: Vec<Position>,
}

impl Follower {
    pub(crate) fn new(store: PostgresStore) -> Self {
        Self { store, at: vec![Position::START; 8] }
    }

    /// What is new, partition by partition.
    pub(crate) async fn entries(&mut self) -> Result<Vec<Entry>> {
        let limit = BatchLimit { records: 50, bytes: 1 << 20 };
        let mut found = Vec::new();
        for (index, at) in (0..).zip(&mut self.at) {
            let partition = PartitionId::numbered(index, 8);
            loop {
                let page = Feed::read(&self.store, &partition, at, limit).await?;
                *at = page.position;
                if page.entries.is_empty() {
                    break;
                }
                found.extend(page.entries);
            }
        }
        Ok(found)
    }

    async fn payloads(&mut self) -> Result<Vec<String>> {
        let payload = |entry: Entry| match entry {
            Entry::Record(record) => {
                String::from_utf8_lossy(record.event.payload()).trim_matches('"').to_owned()
            }
            Entry::Malformed(malformed) => panic!("unreadable: {malformed:?}"),
        };
        Ok(self.entries().await?.into_iter().map(payload).collect())
    }

    /// Reads until as many are there as wanted; fails if they don't come.
    async fn wait_for(&mut self, count: usize) -> Vec<String> {
        let deadline = Instant::now() + Duration::from_secs(10);
        let mut found = Vec::new();
        while found.len() < count {
            assert!(Instant::now() < deadline, "only {found:?} of {count}");
            found.extend(self.payloads().await.expect("read"));
        }
        found
    }
}

/// The backlog of before is read once, by its time; the application's triggers sleep meanwhile.
#[tokio::test]
async fn rows_from_before_come_once_and_in_order() {
    for version in Version::ALL {
        let database = database(version);
        let session = session(&database.url()).await;
        session
            .batch_execute(
                "CREATE TABLE \"Old; Box\" (id text, aggregateid text, at timestamp,
                aggregatetype text, type text, payload text);
            CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN RAISE 'a trigger of the application'; END $$;
            CREATE TRIGGER no_update BEFORE UPDATE ON \"Old; Box\" FOR EACH ROW
                EXECUTE FUNCTION fail();
            ALTER TABLE \"Old; Box\" ENABLE ALWAYS TRIGGER no_update;
            INSERT INTO \"Old; Box\" SELECT gen_random_uuid(), 'k',
                timestamp '2024-01-01' - i * interval '1 s',
                'order', 'T', i FROM generate_series(1, 9) AS i",
            )
            .await
            .expect("a table");
        let adopt = "SELECT postrider.adopt_table('\"Old; Box\"', '{\"created_at\": \"at\"}', true,
            'outboxevent')";
        session.batch_execute(adopt).await.expect("adopt");
        session.batch_execute(adopt).await.expect("a second call changes nothing");
        let mut follower = Follower::new(store(&database).await);
        let all: Vec<String> = (1..10).rev().map(|n| n.to_string()).collect();
        assert_eq!(follower.payloads().await.expect("read"), all);
        session
            .batch_execute(
                "INSERT INTO \"Old; Box\"
            VALUES (gen_random_uuid(), 'k', now(), 'order', 'T', 'new')",
            )
            .await
            .expect("insert");
        assert_eq!(follower.payloads().await.expect("read"), ["new"]);
        let triggers = "SELECT tgenabled::text FROM pg_trigger WHERE tgname = 'no_update'";
        assert_eq!(column(&session, triggers).await, ["A"]);
        let times =
            "SELECT extract(year FROM appended_at)::text FROM postrider.read_feed('outboxevent',
            postrider.partition_of('k', 8), NULL, 1)";
        assert_eq!(column(&session, times).await, ["2023"]);
    }
}

/// The younger transaction commits first. With the columns it is read at once and the elder comes
/// later; without, it waits for the elder, and nothing is lost.
#[tokio::test]
async fn a_late_commit_is_not_skipped() {
    for (version, mode) in [
        (Version::V15, Mode::Columns),
        (Version::V18, Mode::Columns),
        (Version::V15, Mode::Ripe),
        (Version::V18, Mode::Ripe),
    ] {
        let database = database(version);
        let (elder, younger) = (session(&database.url()).await, session(&database.url()).await);
        younger.batch_execute(TABLE).await.expect("a table");
        younger.batch_execute(&insert(0, "before")).await.expect("insert");
        younger.batch_execute(mode.adopt()).await.expect("adopt");
        let mut follower = Follower::new(store(&database).await);
        assert_eq!(follower.wait_for(1).await, ["before"], "{mode:?}");
        elder.batch_execute("BEGIN").await.expect("begin");
        elder.batch_execute(&insert(0, "elder")).await.expect("insert");
        younger.batch_execute(&insert(0, "younger")).await.expect("insert");
        // Whoever reads and writes elsewhere is not waited for.
        let bystander = session(&database.url()).await;
        bystander
            .batch_execute("CREATE TABLE elsewhere (); BEGIN; INSERT INTO elsewhere DEFAULT VALUES")
            .await
            .expect("begin");
        let first = match mode {
            Mode::Columns => follower.wait_for(1).await,
            Mode::Ripe => follower.payloads().await.expect("read"),
        };
        assert_eq!(first, if mode == Mode::Columns { vec!["younger"] } else { vec![] });
        elder.batch_execute("COMMIT").await.expect("commit");
        let rest = follower.wait_for(2 - first.len()).await;
        assert_eq!(
            rest,
            if mode == Mode::Columns { vec!["elder"] } else { vec!["elder", "younger"] }
        );
        let mut replay = Follower::new(store(&database).await);
        assert_eq!(
            replay.payloads().await.expect("read"),
            [vec!["before".to_owned()], first, rest].concat()
        );
    }
}

/// Draws a number, is prepared while a cut waits for it, survives a restart under another name, and
/// commits later.
#[tokio::test]
async fn a_cut_waits_for_a_transaction_that_is_prepared_meanwhile() {
    for version in Version::ALL {
        let server = Options::new(version).launch().expect("a server");
        let database = server.create_database().expect("a database");
        let sql = schema_sql(&PostgresOptions::new(database.url()));
        database.psql(&sql).expect("the SQL is valid");
        let (elder, other) = (session(&database.url()).await, session(&database.url()).await);
        other.batch_execute(TABLE).await.expect("a table");
        other.batch_execute(Mode::Ripe.adopt()).await.expect("adopt");
        let mut follower = Follower::new(store(&database).await);
        // The number first, the transaction's id much later.
        let draw = "BEGIN; SELECT nextval('app.outboxevent_number_seq')";
        elder.batch_execute(draw).await.expect("draw");
        other.batch_execute(&insert(1, "other")).await.expect("insert");
        assert_eq!(follower.payloads().await.expect("read"), [""; 0]);
        let prepare =
            "INSERT INTO app.outboxevent (number, aggregatetype, aggregateid, type, payload)
            VALUES (currval('app.outboxevent_number_seq'), 'order', 'order-1', 'T', '\"elder\"');
            PREPARE TRANSACTION 'p'";
        elder.batch_execute(prepare).await.expect("prepare");
        assert_eq!(follower.payloads().await.expect("read"), [""; 0]);
        let server = tokio::task::spawn_blocking(move || {
            server.restart(Shutdown::Fast).expect("restart");
            server
        });
        let _server = server.await.expect("no panic");
        let mut follower = Follower::new(store(&database).await);
        for _ in 0..3 {
            assert_eq!(follower.payloads().await.expect("read"), [""; 0]);
        }
        let other = session(&database.url()).await;
        other.batch_execute("COMMIT PREPARED 'p'").await.expect("commit");
        assert_eq!(follower.wait_for(2).await, ["elder", "other"]);
    }
}

/// A transaction that began after the adoption's ends before it: the cut must not take the rows of
/// before for ones that were read already.
#[tokio::test]
async fn rows_from_before_come_also_when_younger_transactions_end_first() {
    for version in Version::ALL {
        let database = database(version);
        let (adopting, other) = (session(&database.url()).await, session(&database.url()).await);
        adopting.batch_execute(TABLE).await.expect("a table");
        adopting.batch_execute(&insert(1, "before")).await.expect("insert");
        adopting.batch_execute("BEGIN; SELECT pg_current_xact_id()").await.expect("begin");
        other.batch_execute("CREATE TABLE elsewhere ()").await.expect("a younger transaction");
        adopting.batch_execute(Mode::Columns.adopt()).await.expect("adopt");
        adopting.batch_execute("COMMIT").await.expect("commit");
        let mut follower = Follower::new(store(&database).await);
        assert_eq!(follower.wait_for(1).await, ["before"]);
        other.batch_execute(&insert(1, "after")).await.expect("insert");
        assert_eq!(follower.wait_for(1).await, ["after"]);
    }
}

const WRITERS: i32 = 8;
const RACE: Duration = Duration::from_secs(5);

pub(crate) async fn connect(url: &str) -> Option<Client> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.ok()?;
    tokio::spawn(connection);
    Some(client)
}

/// One transaction of a few events, with a random hold, a savepoint that is rolled back, and
/// sometimes no commit.
async fn one_transaction(
    session: &Client,
    writer: i32,
    number: i32,
) -> std::result::Result<(), tokio_postgres::Error> {
    let (key, rows, hold, keep) = {
        let mut random = rand::rng();
        (
            random.random_range(0..20),
            random.random_range(1..4),
            random.random_range(0..60),
            random.random_bool(0.9),
        )
    };
    session.batch_execute("BEGIN").await?;
    for row in 0..rows {
        session.batch_execute(&insert(key, &format!("{writer}-{number}-{row}"))).await?;
    }
    session.batch_execute("SAVEPOINT s").await?;
    session.batch_execute(&insert(key, "never")).await?;
    session.batch_execute("ROLLBACK TO s").await?;
    tokio::time::sleep(Duration::from_millis(hold)).await;
    session.batch_execute(if keep { "COMMIT" } else { "ROLLBACK" }).await
}

/// Writes until told to stop, over lost connections.
async fn write(url: String, writer: i32, stop: Arc<AtomicBool>) {
    let mut session = None;
    for number in 0.. {
        if stop.load(Ordering::SeqCst) {
            return;
        }
        let Some(present) = &session else {
            session = connect(&url).await;
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        if one_transaction(present, writer, number).await.is_err() {
            session = None;
        }
    }
}

/// Follows until told to stop and then to the head, over transient errors.
pub(crate) async fn follow(store: PostgresStore, stop: Arc<AtomicBool>) -> Vec<Entry> {
    let mut follower = Follower::new(store);
    let (mut seen, mut quiet) = (Vec::new(), 0);
    while quiet < 3 {
        let before = follower.clone();
        let last = stop.load(Ordering::SeqCst);
        match follower.entries().await {
            Ok(entries) => {
                quiet = if last && entries.is_empty() { quiet + 1 } else { 0 };
                seen.extend(entries);
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Transient, "{}", error.chain());
                follower = before;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
    seen
}

/// What the readers saw is what the table has, once; a replay is the same, partition by partition.
async fn judge(store: PostgresStore, table: &Client, seen: Vec<Vec<Entry>>, least: usize) {
    let rows = column(table, "SELECT id::text FROM app.outboxevent").await;
    let replay = Follower::new(store).entries().await.expect("read");
    let ids = |entries: &[Entry]| -> Vec<String> {
        let id = |entry: &Entry| match entry {
            Entry::Record(record) => record.event.id().to_string(),
            Entry::Malformed(malformed) => panic!("unreadable: {malformed:?}"),
        };
        entries.iter().map(id).collect()
    };
    assert!(rows.len() > least, "the writers were at work: {}", rows.len());
    for seen in seen {
        assert_eq!(seen.len(), rows.len(), "missing or twice");
        let distinct: HashSet<String> = ids(&seen).into_iter().collect();
        assert_eq!(distinct, rows.iter().cloned().collect());
        for index in 0..8 {
            let of_partition = |entries: &[Entry]| -> Vec<Entry> {
                let own =
                    |entry: &&Entry| entry.key().is_some_and(|key| key_hash(key) % 8 == index);
                entries.iter().filter(own).cloned().collect()
            };
            assert_eq!(ids(&of_partition(&seen)), ids(&of_partition(&replay)));
        }
    }
}

async fn race(version: Version, mode: Mode) {
    let database = database(version);
    let session = session(&database.url()).await;
    session.batch_execute(TABLE).await.expect("a table");
    let stop = Arc::new(AtomicBool::new(false));
    let writers: Vec<_> = (0..WRITERS)
        .map(|writer| tokio::spawn(write(database.url(), writer, Arc::clone(&stop))))
        .collect();
    // While they write: some rows are from before, some transactions are open.
    tokio::time::sleep(Duration::from_millis(300)).await;
    session.batch_execute(mode.adopt()).await.expect("adopt");
    let read_on = Arc::new(AtomicBool::new(false));
    let mut readers = Vec::new();
    for _ in 0..3 {
        readers.push(tokio::spawn(follow(store(&database).await, Arc::clone(&read_on))));
    }
    tokio::time::sleep(RACE).await;
    stop.store(true, Ordering::SeqCst);
    for writer in writers {
        writer.await.expect("a writer");
    }
    read_on.store(true, Ordering::SeqCst);
    let mut seen = Vec::new();
    for reader in readers {
        seen.push(reader.await.expect("a reader"));
    }
    judge(store(&database).await, &session, seen, 500).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_miss_nothing_of_a_table_with_added_columns_on_15() {
    race(Version::V15, Mode::Columns).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_miss_nothing_of_a_table_with_added_columns_on_18() {
    race(Version::V18, Mode::Columns).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_miss_nothing_of_a_table_as_it_is_on_15() {
    race(Version::V15, Mode::Ripe).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_miss_nothing_of_a_table_as_it_is_on_18() {
    race(Version::V18, Mode::Ripe).await;
}

/// Writers and two readers over terminated sessions and restarts, also from a crash.
async fn under_faults(version: Version, mode: Mode) {
    let server = Options::new(version).launch().expect("a server");
    let database = server.create_database().expect("a database");
    database.psql(&schema_sql(&PostgresOptions::new(database.url()))).expect("the SQL is valid");
    session(&database.url())
        .await
        .batch_execute(&format!("{TABLE}; {}", mode.adopt()))
        .await
        .expect("adopt");
    let (stop, read_on) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let writers: Vec<_> = (0..WRITERS)
        .map(|writer| tokio::spawn(write(database.url(), writer, Arc::clone(&stop))))
        .collect();
    let mut readers = Vec::new();
    for _ in 0..2 {
        readers.push(tokio::spawn(follow(store(&database).await, Arc::clone(&read_on))));
    }
    let server = Arc::new(server);
    for fault in 0..9 {
        tokio::time::sleep(Duration::from_millis(600)).await;
        let (server, url) = (Arc::clone(&server), database.url());
        match fault % 3 {
            0 | 1 => {
                let session = session(&url).await;
                let sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                    WHERE pid <> pg_backend_pid() AND datname = current_database()";
                session.batch_execute(sql).await.expect("terminate");
            }
            _ => {
                let how = if fault == 2 { Shutdown::Fast } else { Shutdown::Immediate };
                let restart = tokio::task::spawn_blocking(move || server.restart(how));
                restart.await.expect("no panic").expect("restart");
            }
        }
    }
    stop.store(true, Ordering::SeqCst);
    for writer in writers {
        writer.await.expect("a writer");
    }
    read_on.store(true, Ordering::SeqCst);
    let mut seen = Vec::new();
    for reader in readers {
        seen.push(reader.await.expect("a reader"));
    }
    let table = session(&database.url()).await;
    judge(store(&database).await, &table, seen, 200).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_lose_nothing_of_a_debezium_table_with_added_columns() {
    under_faults(Version::V15, Mode::Columns).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_lose_nothing_of_a_debezium_table_as_it_is() {
    under_faults(Version::V18, Mode::Ripe).await;
}

/// Rows that are no events are handed over as such and hold up nobody else.
#[tokio::test]
async fn unreadable_rows_become_malformed_entries() {
    for mode in MODES {
        let database = database(Version::V15);
        let session = session(&database.url()).await;
        session
            .batch_execute(
                "CREATE SCHEMA app; CREATE TABLE app.outboxevent (
                number bigserial PRIMARY KEY, id text, aggregatetype text, aggregateid text,
                type text, payload text, created_at timestamptz,
                headers text);
            INSERT INTO app.outboxevent
                (id, aggregatetype, aggregateid, type, payload, created_at, headers) VALUES
                ('no uuid', 'a', 'k', 'T', 'x', now(), NULL),
                (gen_random_uuid(), 'a', '', 'T', 'x', 'infinity', NULL),
                (gen_random_uuid(), 'a', NULL, 'T', 'x', '-infinity', NULL),
                (gen_random_uuid(), 'a', 'k', 'T', NULL, NULL, NULL),
                (gen_random_uuid(), NULL, 'k', 'T', 'x', '1950-01-01', ''),
                (gen_random_uuid(), 'a', 'k', E'T\\x01', 'x', now(), NULL),
                (gen_random_uuid(), 'a', 'k', 'T', 'x', now(), '[1'),
                ('018f0000-0000-7000-8000-000000000001', 'a', 'k', 'T', 'good', '1950-01-01',
                 '{\"h\": \"v\"}')",
            )
            .await
            .expect("a table");
        session.batch_execute(mode.adopt()).await.expect("adopt");
        let mut follower = Follower::new(store(&database).await);
        let (mut good, mut bad) = (Vec::new(), Vec::new());
        let deadline = Instant::now() + Duration::from_secs(10);
        while good.len() + bad.len() < 8 {
            assert!(Instant::now() < deadline);
            for entry in follower.entries().await.expect("read") {
                match entry {
                    Entry::Record(record) => good.push(record),
                    Entry::Malformed(malformed) => bad.push(malformed.reason),
                }
            }
        }
        assert_eq!(bad.len(), 7, "{bad:?}");
        assert_eq!(good[0].event.payload().as_ref(), b"good");
        assert_eq!(good[0].event.headers().get("h"), Some("v"));
        for reason in [
            "id is missing",
            "key is empty",
            "key is missing",
            "payload is missing",
            "topic is missing",
            "control character",
            "headers",
        ] {
            assert!(bad.iter().any(|bad| bad.contains(reason)), "{reason}: {bad:?}");
        }
        // The same by SQL: no row is an error.
        let sql = "SELECT count(*)::text FROM generate_series(0, 7) AS p
            CROSS JOIN LATERAL (SELECT FROM postrider.read_feed('outboxevent', p, NULL) AS r
                WHERE r.appended_at IS NOT NULL) AS r";
        assert_eq!(column(&session, sql).await, ["8"]);
    }
}

/// "For ever" is often written as the last time that the type has.
#[tokio::test]
async fn times_that_no_event_can_have_stop_nothing() {
    for (version, mode) in [(Version::V15, Mode::Columns), (Version::V18, Mode::Ripe)] {
        for kind in ["timestamptz", "timestamp"] {
            let database = database(version);
            let session = session(&database.url()).await;
            let rows = format!(
                "{TABLE}; ALTER TABLE app.outboxevent ADD created_at {kind};
                INSERT INTO app.outboxevent
                    (aggregatetype, aggregateid, type, payload, created_at)
                SELECT 'a', 'k', 'T', to_jsonb(at), at::{kind} FROM unnest(ARRAY[
                    '294276-12-31 23:59:59.999999+00', 'infinity', '-infinity',
                    '4714-11-24 00:00:00+00 BC', '0001-12-31 23:59:59.999999+00 BC',
                    '9999-12-31 00:00:00+00', '9999-12-30 22:00:00+00', '0001-01-01 00:00:00+00',
                    '2024-02-29 12:00:00+00']) AS at"
            );
            session.batch_execute("SET timezone = 'UTC'").await.expect("set");
            session.batch_execute(&rows).await.expect("rows");
            session.batch_execute(mode.adopt()).await.expect("adopt");
            let mut follower = Follower::new(store(&database).await);
            assert_eq!(follower.wait_for(9).await.len(), 9, "{mode:?} {kind}");
            let given = "SELECT to_char(appended_at, 'YYYY-MM-DD HH24:MI:SS')
                FROM postrider.read_feed('outboxevent', postrider.partition_of('k', 8), NULL)
                WHERE appended_at IS NOT NULL AND appended_at NOT BETWEEN now() - interval '1 day'
                    AND now() + interval '1 day' ORDER BY appended_at";
            assert_eq!(
                column(&session, given).await,
                ["0001-01-01 00:00:00", "2024-02-29 12:00:00", "9999-12-30 22:00:00"],
                "{mode:?} {kind}: others have the time of their tick"
            );
        }
    }
}

/// What is kept under an outbox's name, table by table.
const KEPT: &str =
    "SELECT c.relname::text FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
    WHERE c.relnamespace = 'postrider'::regnamespace AND c.relkind = 'r' AND a.attname = 'outbox'
    ORDER BY 1";

#[tokio::test]
async fn a_released_table_leaves_nothing_behind() {
    let database = database(Version::V15);
    let session = session(&database.url()).await;
    session.batch_execute(TABLE).await.expect("a table");
    session.batch_execute(Mode::Columns.adopt()).await.expect("adopt");
    let kept = column(&session, KEPT).await;
    assert!(kept.len() > 8 && kept.contains(&"wal_seal".to_owned()), "{kept:?}");
    session
        .batch_execute(
            "INSERT INTO postrider.wal_seal VALUES ('outboxevent', 'c', ARRAY[gen_random_uuid()]);
            INSERT INTO postrider.wal_recovery
                SELECT 'outboxevent', 'c', 0, pg_current_snapshot(), 0, 0;
            INSERT INTO postrider.checkpoint (outbox, consumer, partition)
                VALUES ('outboxevent', 'c', '0/8');
            SELECT postrider.release_table('outboxevent')",
        )
        .await
        .expect("release");
    for table in kept {
        let left =
            format!("SELECT count(*)::text FROM postrider.{table} WHERE outbox = 'outboxevent'");
        assert_eq!(column(&session, &left).await, ["0"], "{table}");
    }
    let left = "SELECT oid::regclass::text FROM pg_class WHERE relname LIKE 'outboxevent%'
            AND relnamespace = 'postrider'::regnamespace
        UNION ALL SELECT oid::regprocedure::text FROM pg_proc WHERE proname LIKE 'outboxevent%'
        UNION ALL SELECT signature FROM postrider.routine WHERE signature LIKE '%outboxevent%'";
    assert_eq!(column(&session, left).await, [""; 0]);
}

#[tokio::test]
async fn what_can_not_be_adopted_is_refused_with_the_remedy() {
    for version in Version::ALL {
        let database = database(version);
        let session = session(&database.url()).await;
        session.batch_execute(TABLE).await.expect("a table");
        session
            .batch_execute(
                "CREATE VIEW app.view AS SELECT * FROM app.outboxevent;
            CREATE TABLE app.parts (id bigserial, aggregatetype text, aggregateid text, type text,
                payload text)
                PARTITION BY LIST (type);
            CREATE SEQUENCE app.cached CACHE 20;
            CREATE TABLE app.other (id bigint DEFAULT nextval('app.cached'), aggregatetype text,
                aggregateid text, type text, payload text, at boolean)",
            )
            .await
            .expect("tables");
        for (call, code, text) in [
            ("'app.view', add_columns => true", "42809", "ordinary table"),
            ("'app.parts', add_columns => true", "42809", "partitioned"),
            ("'app.outboxevent'", "22023", "add_columns => true"),
            (
                "'app.outboxevent', '{\"number\": \"number\", \"key\": \"nope\"}'",
                "42703",
                "aggregateid",
            ),
            (
                "'app.outboxevent', '{\"number\": \"number\"}', outbox => 'outbox'",
                "42710",
                "and that name to the relay",
            ),
            (
                "'app.outboxevent', '{\"number\": \"number\", \"kee\": \"aggregateid\"}'",
                "22023",
                "no field \"kee\"",
            ),
            ("'app.outboxevent', '[]', true", "22023", "JSON object"),
            ("'app.other'", "22023", "CACHE 1"),
            ("'app.other', '{\"created_at\": \"at\"}', true", "42804", "timestamp"),
            ("'app.outboxevent', '{\"number\": \"number\"}', partitions => 0", "22023", "1024"),
        ] {
            let (found, message) =
                refusal(&session, &format!("SELECT postrider.adopt_table({call})")).await;
            assert!(found == code && message.contains(text), "{call}: {found} {message}");
        }
        let columns = "SELECT attname::text FROM pg_attribute WHERE attname LIKE 'postrider%'";
        assert_eq!(column(&session, columns).await, [""; 0], "a refusal adds nothing");
        // A partitioned table works as it is.
        session.batch_execute("SELECT postrider.adopt_table('app.parts')").await.expect("adopt");
        let text = column(&session, "SELECT postrider.adopted_warnings('parts')").await.join("\n");
        for part in [
            "one key",
            "holds up all its later events",
            "may be lost",
            "no index",
            "deletes no rows",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        session.batch_execute("SELECT postrider.release_table('parts')").await.expect("release");
        session
            .batch_execute("SELECT postrider.adopt_table('app.parts')")
            .await
            .expect("adopt again");
    }
}

/// A second call takes a changed mapping; the columns that must not be touched are watched.
#[tokio::test]
async fn a_mapping_can_be_changed_and_what_breaks_the_feed_is_named() {
    let database = database(Version::V15);
    let session = session(&database.url()).await;
    session.batch_execute(TABLE).await.expect("a table");
    session.batch_execute(Mode::Columns.adopt()).await.expect("adopt");
    session
        .batch_execute(
            "SELECT postrider.adopt_table('app.outboxevent', add_columns => true, mapping =>
        '{\"topic\": {\"value\": \"orders\"}, \"content_type\": {\"value\": \"text/x\"},
          \"headers\": {\"columns\": {\"kind\": \"aggregatetype\"}}, \"delete\": true}')",
        )
        .await
        .expect("adopt");
    session.batch_execute(&insert(1, "x")).await.expect("insert");
    let store = store(&database).await;
    let entries = Follower::new(store.clone()).entries().await.expect("read");
    let Entry::Record(record) = &entries[0] else { panic!("unreadable: {entries:?}") };
    assert_eq!(record.event.topic().as_str(), "orders");
    assert_eq!(record.event.content_type().as_str(), "text/x");
    assert_eq!(record.event.headers().get("kind"), Some("order"));
    let warnings = store.adopted_warnings().await.expect("ask");
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    session
        .batch_execute("ALTER TABLE app.outboxevent ALTER postrider_xid DROP DEFAULT")
        .await
        .expect("break");
    let warnings = store.adopted_warnings().await.expect("ask");
    assert!(warnings[1].contains("events may be lost"), "{warnings:?}");
    let options = || PostgresOptions::new(database.url()).outbox("outboxevent");
    session
        .batch_execute("ALTER SEQUENCE app.outboxevent_postrider_seq_seq CACHE 9")
        .await
        .expect("break");
    let refused = PostgresStore::open(options()).await.expect_err("refused");
    assert!(refused.chain().contains("CACHE 1 INCREMENT 1"), "{}", refused.chain());
}

/// Retention deletes what every consumer has passed and is old enough, and only where it may.
#[tokio::test]
async fn retention_deletes_passed_rows_only_where_the_mapping_says_so() {
    for (mode, delete) in [(Mode::Columns, true), (Mode::Ripe, true), (Mode::Columns, false)] {
        let database = database(Version::V15);
        let (session, open) = (session(&database.url()).await, session(&database.url()).await);
        session.batch_execute(TABLE).await.expect("a table");
        let (add, number) = (mode == Mode::Columns, "{\"number\": \"number\", \"delete\": DELETE}");
        let mapping = number.replace("DELETE", &delete.to_string());
        let sql = format!("SELECT postrider.adopt_table('app.outboxevent', '{mapping}', {add})");
        session.batch_execute(&sql).await.expect("adopt");
        for n in 0..20 {
            session.batch_execute(&insert(n, "x")).await.expect("insert");
        }
        let mut follower = Follower::new(store(&database).await);
        follower.wait_for(20).await;
        let prune = "SELECT segments::text FROM postrider.outboxevent_prune(0, 1000)";
        assert_eq!(column(&session, prune).await, ["{}"], "no consumer, nothing passed");
        for (index, at) in (0..8).zip(&follower.at) {
            let sql = format!(
                "INSERT INTO postrider.checkpoint (outbox, consumer, partition, position)
                VALUES ('outboxevent', 'c', '{index}/8', $1)"
            );
            session.execute(&sql, &[&at.as_bytes()]).await.expect("a checkpoint");
        }
        open.batch_execute("BEGIN").await.expect("begin");
        open.batch_execute(&insert(1, "open")).await.expect("insert");
        let segments = if delete { "{0}" } else { "{}" };
        assert_eq!(column(&session, prune).await, [segments], "{mode:?}");
        let empty = "SELECT postrider.outboxevent_empty(0)::text";
        assert_eq!(column(&session, empty).await, [if delete { "20" } else { "0" }]);
        open.batch_execute("COMMIT").await.expect("commit");
        assert_eq!(column(&session, empty).await, ["0"], "what came later stays");
        assert_eq!(follower.wait_for(1).await, ["open"]);
        let left = "SELECT count(*)::text FROM app.outboxevent";
        assert_eq!(column(&session, left).await, [if delete { "1" } else { "21" }]);
        // Before the horizon nothing is served any more.
        let (code, _) = refusal(
            &session,
            "SELECT FROM postrider.read_feed('outboxevent', 0, '01GNSG5PM80000000000000001')",
        )
        .await;
        assert_eq!(code, "PR003");
    }
}

/// Ids of transactions mean nothing in another cluster; a reader goes on there at its old places.
#[tokio::test]
async fn a_dump_goes_on_in_another_cluster() {
    for mode in MODES {
        let database = database(Version::V15);
        let old = session(&database.url()).await;
        old.batch_execute(TABLE).await.expect("a table");
        old.batch_execute(&insert(1, "one")).await.expect("insert");
        old.batch_execute(mode.adopt()).await.expect("adopt");
        let mut follower = Follower::new(store(&database).await);
        assert_eq!(follower.wait_for(1).await, ["one"]);
        old.batch_execute(&insert(1, "two")).await.expect("insert");
        assert_eq!(follower.wait_for(1).await, ["two"]);
        old.batch_execute(&insert(1, "three")).await.expect("insert");

        let dump = tempfile::NamedTempFile::new().expect("a file");
        let mut pg_dump = Command::new(Version::V18.program("pg_dump").expect("pg_dump"));
        pg_dump.arg("-f").arg(dump.path()).arg("-d").arg(database.url());
        assert!(pg_dump.status().expect("pg_dump runs").success());
        let server = Options::new(Version::V18).launch().expect("a server");
        let target = server.create_database().expect("a database");
        let mut psql = Command::new(Version::V18.program("psql").expect("psql"));
        psql.args(["-q", "-v", "ON_ERROR_STOP=1", "-d"]).arg(target.url());
        let restored = psql.arg("-f").arg(dump.path()).output().expect("psql runs");
        assert!(restored.status.success(), "{}", String::from_utf8_lossy(&restored.stderr));

        let new = session(&target.url()).await;
        new.batch_execute(&insert(1, "four")).await.expect("insert");
        follower.store = store(&target).await;
        assert_eq!(follower.wait_for(2).await, ["three", "four"], "{mode:?}");
        new.batch_execute(&insert(1, "five")).await.expect("insert");
        assert_eq!(follower.wait_for(1).await, ["five"]);
        let replay = Follower::new(store(&target).await).payloads().await.expect("read");
        assert_eq!(replay, ["one", "two", "three", "four", "five"]);
    }
}
