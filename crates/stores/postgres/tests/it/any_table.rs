//! Any table as a feed.
//!
//! What lives here: set-up and its refusals, what the triggers append, reading joined back, and all
//! of it under faults. What does not: the outbox itself.
//! Invariant: every change that is committed has one event, and a key's events come in order.

#![expect(clippy::disallowed_methods, reason = "sessions and writers end with their test")]

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use postrider_core::*;
use postrider_servers::postgres::Version;
use postrider_store_postgres::{PostgresOptions, PostgresStore};
use rand::RngExt as _;
use tokio_postgres::Client;

use crate::adopted::{Follower, connect, follow};
use crate::by_sql::{column, database, refusal, session};

async fn run(session: &Client, sql: &str) {
    session.batch_execute(sql).await.expect(sql);
}

/// `type key primary_key row` of all events of a table, in order of their positions.
async fn changes(session: &Client, table: &str) -> Vec<String> {
    run(session, "SELECT postrider.tick(min_interval_ms => 0)").await;
    let sql = format!(
        "SELECT concat_ws(' ', r.type, r.key, r.primary_key, coalesce(r.row::text, 'gone'))
         FROM generate_series(0, 7) AS p
         CROSS JOIN LATERAL postrider.read_table_feed('{table}', p, NULL) AS r
         WHERE r.appended_at IS NOT NULL ORDER BY r.position"
    );
    column(session, &sql).await
}

#[tokio::test]
async fn changes_are_read_joined_back_to_the_rows_of_now() {
    for version in Version::ALL {
        let database = database(version);
        let session = session(&database.url()).await;
        let table = "\"App; x\".\"Or'der\"";
        run(
            &session,
            &format!(
                "CREATE SCHEMA \"App; x\"; CREATE TABLE {table} (
                \"n o\" integer, who text, \"B\" numeric, PRIMARY KEY (\"B\", \"n o\"))"
            ),
        )
        .await;
        let source = table.replace('\'', "''");
        let setup = format!(
            "SELECT postrider.setup_feed('{source}', '{{who}}',
                events => '{{inserted,updated,deleted}}')"
        );
        run(&session, &setup).await;
        run(&session, &setup).await;
        run(&session, &format!("INSERT INTO {table} VALUES (1, 'ann', 1.50), (2, 'bob', 2)")).await;
        run(
            &session,
            &format!(
                "UPDATE {table} SET who = 'eve' WHERE \"n o\" = 1;
            UPDATE {table} SET who = 'x' WHERE false"
            ),
        )
        .await;
        run(&session, &format!("DELETE FROM {table} WHERE \"n o\" = 2")).await;
        run(&session, &format!("BEGIN; DELETE FROM {table}; ROLLBACK")).await;
        let now = "{\"B\": 1.50, \"n o\": 1, \"who\": \"eve\"}";
        let (one, two) = ("{\"B\": 1.50, \"n o\": 1}", "{\"B\": 2, \"n o\": 2}");
        assert_eq!(
            changes(&session, &source).await,
            [
                format!("inserted ann {one} {now}"),
                format!("inserted bob {two} gone"),
                format!("updated eve {one} {now}"),
                format!("deleted bob {two} gone"),
            ]
        );
        let sql = "SELECT topic || ' ' || postrider.payload_text(payload) || ' ' || content_type
            FROM postrider.read_feed('outbox', postrider.partition_of('ann', 8), NULL) LIMIT 1";
        assert_eq!(
            column(&session, sql).await,
            ["App; x.Or'der { \"B\" : 1.50, \"n o\" : 1 } application/json"]
        );
        run(&session, &format!("SELECT postrider.teardown_feed('{source}')")).await;
        run(&session, &format!("DELETE FROM {table}")).await;
        let (code, _) =
            refusal(&session, &format!("SELECT postrider.teardown_feed('{source}')")).await;
        assert_eq!(code, "42704");
    }
}

/// Written through the parent, directly, and in a partition that was attached later.
#[tokio::test]
async fn partitioned_tables_and_rows_as_payload() {
    for version in Version::ALL {
        let database = database(version);
        let session = session(&database.url()).await;
        run(
            &session,
            "CREATE TABLE reading (sensor integer, at integer, PRIMARY KEY (sensor, at))
                PARTITION BY RANGE (at);
            CREATE TABLE reading_1 PARTITION OF reading FOR VALUES FROM (0) TO (10);
            SELECT postrider.setup_feed('reading', payload => 'row', topic => 'readings');
            CREATE TABLE reading_2 PARTITION OF reading FOR VALUES FROM (10) TO (20);
            INSERT INTO reading VALUES (7, 1), (7, 11); INSERT INTO reading_1 VALUES (7, 2);
            INSERT INTO reading_2 VALUES (7, 12)",
        )
        .await;
        let found = changes(&session, "reading").await;
        let mut rows: Vec<_> =
            found.iter().map(|row| row.split_once('{').expect("a key").1).collect();
        rows.sort_unstable();
        let row =
            |at: i32| format!("\"at\": {at}, \"sensor\": 7}} {{\"at\": {at}, \"sensor\": 7}}");
        assert_eq!(rows, [row(1), row(11), row(12), row(2)]);
        assert!(found[0].starts_with("inserted [\"7\", \"1\"]"), "{found:?}");
    }
}

#[tokio::test]
async fn what_can_be_no_feed_is_refused_with_the_remedy() {
    let database = database(Version::V15);
    let session = session(&database.url()).await;
    run(
        &session,
        "CREATE TABLE bare (id integer); CREATE TABLE item (id integer PRIMARY KEY, owner text);
        CREATE VIEW seen AS SELECT * FROM item; CREATE TABLE other (id integer PRIMARY KEY);
        SELECT postrider.setup_feed('item', '{owner}')",
    )
    .await;
    for (sql, code, text) in [
        ("SELECT postrider.setup_feed('bare')", "55000", "primary key"),
        ("SELECT postrider.setup_feed('seen')", "42809", "no table"),
        ("SELECT postrider.setup_feed('item', '{nope}')", "42703", "nope"),
        ("SELECT postrider.setup_feed('item', outbox => 'none')", "42704", "none"),
        ("SELECT postrider.setup_feed('item', events => '{truncated}')", "22023", "inserted"),
        ("SELECT postrider.setup_feed('item', payload => 'both')", "22023", "key or row"),
        ("SELECT postrider.read_table_feed('other', 0, NULL)", "42704", "setup_feed"),
        ("INSERT INTO item VALUES (1, NULL)", "23502", "key"),
        (
            "DELETE FROM postrider.table_feed; INSERT INTO item VALUES (1, 'a')",
            "55000",
            "teardown_feed",
        ),
    ] {
        let (found, message) = refusal(&session, sql).await;
        assert!(found == code && message.contains(text), "{sql}: {found} {message}");
    }
}

/// One statement over more rows than there are locks; and a table without triggers.
#[tokio::test]
async fn bulk_loads_and_explicit_events() {
    let database = database(Version::V15);
    let session = session(&database.url()).await;
    run(
        &session,
        "CREATE TABLE item (id integer PRIMARY KEY); SELECT postrider.setup_feed('item');
        INSERT INTO item SELECT generate_series(1, 25000)",
    )
    .await;
    let sql = "SELECT count(*) || ' ' || count(DISTINCT key) || ' ' || bool_and(key::integer = seq)
        FROM postrider.outbox";
    assert_eq!(column(&session, sql).await, ["25000 25000 true"]);
    run(
        &session,
        "SELECT postrider.setup_feed('item', events => '{}'); INSERT INTO item VALUES (0);
        SELECT postrider.append_change('item', 'archived', '{\"id\": 0}')",
    )
    .await;
    let sql = "SELECT type || ' ' || key FROM postrider.outbox WHERE key = '0'";
    assert_eq!(column(&session, sql).await, ["archived 0"]);
}

/// Inserts, and raises versions of rows that others raise, too; over lost connections.
async fn write(url: String, stop: Arc<AtomicBool>) {
    let mut session = None;
    while !stop.load(Ordering::SeqCst) {
        let Some(present) = &session else {
            session = connect(&url).await;
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        let (hold, keep, insert, row) = {
            let mut random = rand::rng();
            (
                random.random_range(0..30),
                random.random_bool(0.9),
                random.random_bool(0.3),
                random.random_range(1..12),
            )
        };
        let change = match insert {
            true => "INSERT INTO item (version) SELECT 0 FROM generate_series(1, 3)".to_owned(),
            false => format!("UPDATE item SET version = version + 1 WHERE id = {row}"),
        };
        let whole = async {
            present.batch_execute(&format!("BEGIN; {change}")).await?;
            tokio::time::sleep(Duration::from_millis(hold)).await;
            present.batch_execute(if keep { "COMMIT" } else { "ROLLBACK" }).await
        };
        if whole.await.is_err() {
            session = None;
        }
    }
}

async fn under_faults(version: Version) {
    let database = database(version);
    let session = session(&database.url()).await;
    run(
        &session,
        "CREATE TABLE item (id bigserial PRIMARY KEY, version integer NOT NULL);
        SELECT postrider.setup_feed('item', events => '{inserted,updated}', payload => 'row');
        INSERT INTO item (version) SELECT 0 FROM generate_series(1, 12)",
    )
    .await;
    let options = PostgresOptions::new(database.url()).tick_interval(Duration::ZERO);
    let store = PostgresStore::open(options).await.expect("open");
    let (stop, read_on) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let writers: Vec<_> =
        (0..6).map(|_| tokio::spawn(write(database.url(), Arc::clone(&stop)))).collect();
    let reader = tokio::spawn(follow(store.clone(), Arc::clone(&read_on)));
    for _ in 0..6 {
        tokio::time::sleep(Duration::from_millis(500)).await;
        run(
            &session,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
            WHERE pid <> pg_backend_pid() AND datname = current_database()",
        )
        .await;
    }
    stop.store(true, Ordering::SeqCst);
    for writer in writers {
        writer.await.expect("a writer");
    }
    read_on.store(true, Ordering::SeqCst);
    let seen = reader.await.expect("a reader");
    let mut versions: HashMap<i64, i32> = HashMap::new();
    for entry in &seen {
        let Entry::Record(record) = entry else { panic!("unreadable: {entry:?}") };
        let row: serde_json::Value = serde_json::from_slice(record.event.payload()).expect("JSON");
        let (id, version) =
            (row["id"].as_i64().expect("an id"), row["version"].as_i64().expect("a version"));
        assert_eq!(record.event.key().as_str(), id.to_string());
        let next = versions.entry(id).or_insert(0);
        assert_eq!(version, i64::from(*next), "row {id}: each version once, in order");
        *next += 1;
    }
    let rows = session.query("SELECT id, version FROM item", &[]).await.expect("read");
    assert!(seen.len() > 100, "the writers were at work: {}", seen.len());
    assert_eq!(rows.len(), versions.len());
    for row in rows {
        let (id, version): (i64, i32) = (row.get(0), row.get(1));
        assert_eq!(versions[&id], version + 1, "row {id}: none is missing");
    }
    let replay = Follower::new(store).entries().await.expect("read");
    assert_eq!(replay.len(), seen.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_lose_and_reorder_no_change_of_a_table() {
    for version in Version::ALL {
        under_faults(version).await;
    }
}
