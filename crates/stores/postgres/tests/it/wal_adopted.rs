//! An application's own table, read from the write-ahead log.
//!
//! What lives here: that a row is the same event whichever way it is read, what only the log has,
//! going on without the slot with transaction ids and without, and columns that change. What does
//! not: the feed of such a table (`adopted.rs`).
//! Invariant: a committed row is delivered, also if it is deleted in the transaction that made it.

use std::time::Duration;

use postrider_core::*;
use postrider_servers::postgres::Version;
use postrider_store_postgres::{PostgresOptions, PostgresStore, PostgresWal, WalOptions};
use tokio_postgres::Client;

use crate::adopted::Follower;
use crate::support::*;
use crate::wal_support::*;

on_both_versions! {
    rows_that_are_deleted_at_once_come_once_and_in_order
    a_row_is_the_same_event_from_the_log_and_from_the_table
    a_partitioned_table_is_read_as_its_root
    without_the_slot_exactly_what_is_missing_comes
    without_transaction_ids_all_rows_come_again_with_the_same_ids
    now_is_the_slots_beginning_where_rows_can_not_be_told_apart
    a_renamed_column_is_named_and_nothing_is_lost
    a_changed_mapping_counts_for_what_comes_next
    what_can_not_be_read_from_the_log_is_refused_with_the_remedy
}

/// Debezium's columns, and a number that its event router does not need.
const TABLE: &str = "CREATE SCHEMA app; CREATE TABLE app.outboxevent (
        number bigserial PRIMARY KEY, id uuid NOT NULL DEFAULT gen_random_uuid(),
        aggregatetype varchar(255) NOT NULL, aggregateid varchar(255) NOT NULL,
        type varchar(255) NOT NULL, payload text)";
const COLUMNS: &str = "SELECT postrider.adopt_table('app.outboxevent', add_columns => true)";
const NUMBERED: &str =
    "SELECT postrider.adopt_table('app.outboxevent', '{\"number\": \"number\"}')";

/// What only the log keeps.
fn passing(payload: &str) -> String {
    format!("BEGIN; {}; DELETE FROM app.outboxevent; COMMIT", insert(payload))
}

fn insert(payload: &str) -> String {
    format!(
        "INSERT INTO app.outboxevent (aggregatetype, aggregateid, type, payload)
         VALUES ('order', 'k', 'OrderPlaced', '{payload}')"
    )
}

async fn run(session: &Client, sql: &str) {
    session.batch_execute(sql).await.expect(sql);
}

/// A server on which the table was adopted.
async fn adopted(version: Version, adopt: &str) -> (Cluster, Client) {
    let cluster = Cluster::new(version).await;
    let session = cluster.session().await;
    run(&session, TABLE).await;
    run(&session, adopt).await;
    (cluster, session)
}

async fn store(cluster: &Cluster, outbox: &str) -> PostgresStore {
    let options = PostgresOptions::new(cluster.database.url()).outbox(outbox);
    PostgresStore::open(options.tick_interval(Duration::ZERO)).await.expect("open")
}

async fn wal(cluster: &Cluster, outbox: &str) -> PostgresWal {
    PostgresWal::new(store(cluster, outbox).await, WalOptions::new()).expect("options")
}

/// A consumer in a process of its own.
async fn rider(cluster: &Cluster) -> Rider {
    Rider::new(wal(cluster, "outboxevent").await, "sink").await
}

async fn drop_slot(session: &Client) {
    let sql = "SELECT pg_drop_replication_slot('postrider_outboxevent')";
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while session.execute(sql, &[]).await.is_err() {
        assert!(tokio::time::Instant::now() < deadline, "the slot is still read");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Takes what there is until the stream flows: from then on only the log has what is deleted. A
/// slot that is being made is active too, and has no place.
async fn streaming(rider: &mut Rider, session: &Client, outbox: &str) {
    let active = format!(
        "SELECT count(*) FROM pg_replication_slots
         WHERE active AND confirmed_flush_lsn IS NOT NULL AND slot_name = 'postrider_{outbox}'"
    );
    while one::<i64>(session, &active).await == 0 {
        rider.nothing_within(Duration::from_millis(20)).await;
    }
}

/// A consumer in a process of its own, in the stream.
async fn streamed(cluster: &Cluster, session: &Client) -> Rider {
    let mut rider = rider(cluster).await;
    streaming(&mut rider, session, "outboxevent").await;
    rider
}

/// The next events, not confirmed.
async fn records(rider: &mut Rider, count: usize) -> Vec<Record> {
    let mut found = Vec::new();
    while found.len() < count {
        found.extend(rider.next().await.entries.iter().map(|entry| record(entry).clone()));
    }
    found
}

async fn rows_that_are_deleted_at_once_come_once_and_in_order(version: Version) {
    for adopt in [COLUMNS, NUMBERED] {
        let (cluster, session) = adopted(version, adopt).await;
        let mut rider = streamed(&cluster, &session).await;
        let (one, two) = (passing("1"), passing("2").replace("BEGIN", "BEGIN; SAVEPOINT s"));
        for sql in [&one, &two, &format!("BEGIN; {}; ROLLBACK", insert("never"))] {
            run(&session, sql).await;
        }
        let update = "UPDATE app.outboxevent SET payload = 'changed'";
        let several = [insert("3"), insert("4"), update.to_owned(), insert("5")].join("; ");
        run(&session, &format!("BEGIN; {several}; DELETE FROM app.outboxevent; COMMIT")).await;
        assert_eq!(rider.take(5).await, ["1", "2", "3", "4", "5"], "{adopt}");
        rider.nothing_within(Duration::from_millis(300)).await;
        drop(rider);
        run(&session, &passing("6")).await;
        let mut rider = self::rider(&cluster).await;
        assert_eq!(rider.take(1).await, ["6"]);
        rider.nothing_within(Duration::from_millis(300)).await;
    }
}

/// No row of the test has a later time of its own: 2025, in milliseconds.
const NOW_MS: u64 = 1_735_689_600_000;

/// Everything of an entry but where it stands, and the time of one that has none of its own: that
/// of its commit, of the reading or of a tick stands in.
fn shape(entry: &Entry) -> String {
    match entry {
        Entry::Record(Record { event, appended_at, .. }) => format!(
            "good {} {} {} {} {} {:?} {:?} {}",
            event.id(),
            event.key(),
            event.topic(),
            event.event_type(),
            event.content_type(),
            event.headers().iter().collect::<Vec<_>>(),
            event.payload(),
            appended_at.as_millis().min(NOW_MS)
        ),
        Entry::Malformed(Malformed { key, reason, raw, .. }) => {
            format!("{key:?} {reason} {raw:?}")
        }
    }
}

/// One table and four mappings of it, which between them use every kind of column.
const ODD_TABLE: &str = r#"CREATE SCHEMA app;
    CREATE TYPE app.mood AS ENUM ('glad', 'very-sad');
    CREATE DOMAIN app.yes AS boolean;
    CREATE DOMAIN app.words AS text;
    CREATE TABLE app.odd (
        number integer GENERATED BY DEFAULT AS IDENTITY, id uuid DEFAULT gen_random_uuid(),
        texts text DEFAULT gen_random_uuid(), aggregatetype varchar(20), aggregateid text,
        type text DEFAULT 'T', json json, jsonb jsonb, bytea bytea, words app.words,
        amount numeric, padded char(8), flag boolean, yes app.yes, mood app.mood, ip inet,
        net cidr, tags text[], since timestamptz, at timestamp,
        ms bigint, span interval, share double precision, meta json, metab jsonb, plain text,
        kind text DEFAULT 'text/x');"#;

const MAPPINGS: [(&str, &str); 4] = [
    ("json", r#"{"payload": "json", "created_at": "since", "headers": "meta"}"#),
    (
        "jsonb",
        r#"{"payload": "jsonb", "id": "texts", "key": "padded", "created_at": "ms",
            "headers": "metab"}"#,
    ),
    (
        "bytea",
        r#"{"payload": "bytea", "id": "number", "topic": {"value": "constant"},
            "created_at": "at", "headers": {"columns": {"amount": "amount",
            "flag": "flag", "yes": "yes", "ip": "ip", "net": "net", "tags": "tags", "c":
            {"value": "x"}, "since": "since", "span": "span", "share": "share", "at": "at",
            "padded": "padded", "bytes": "bytea"}}}"#,
    ),
    (
        "words",
        r#"{"payload": "words", "key": "ip", "topic": "flag", "type": "mood",
            "headers": "plain", "content_type": "kind"}"#,
    ),
];

const ODD_ROWS: &str = r#"INSERT INTO app.odd (aggregatetype, aggregateid, json, jsonb, bytea,
        words, amount, padded, flag, yes, mood, ip, net, tags, since, at, ms, span, share, meta,
        metab, plain) VALUES
    ('order', 'k', ' { "b" : 1e2,"a":"\u00e9\n", "b":2 } ', '{"b": 1e2, "a": "\u00e9", "b": 2.50}',
        decode(repeat('00ff5c785c', 40), 'hex'), E' tail \n', 1.500, 'ab', true, false, 'very-sad',
        '10.0.0.1', '10.0.0.0/8', '{"a b",NULL}', '2024-02-29 12:00:00.123456+05',
        '1999-12-31 23:59:59.9996', 1700000000123, '1 day 02:03', 0.1,
        '{"n": 1.50, "s": "é\ttab", "o": {"k":[1,  2]}, "B": true}',
        '{"n": 1.50, "s": "é", "o": {"k":[1,  2]}, "B": true}', '{"p": "q"}'),
    ('order', 'ключ', 'null', '[1, 2]', '', '', 0, '', false, true, 'glad', '::1', '::/0', '{}',
        'infinity', '-infinity', -1, '-1 mon', 'NaN', '[1]', '"text"', ''),
    ('order', 'k', '"x"', '"x"', '\x00', 'x', 1e30, ' x', true, NULL, 'glad', '10.1.0.0/16', NULL,
        NULL, '1950-01-01', '1950-01-01', 100000000000001, NULL, -0.0, '{"x": null}',
        '{"x": null}', '[1'),
    ('order', 'k', '1', '1', '\xdeadbeef', 'y', NULL, 'x', true, NULL, 'glad', '10.1.2.3', NULL,
        NULL, '294276-12-31 23:59:59.999999+00', '0044-03-15 BC', 0, NULL, NULL,
        '{"z": "\u0000"}', '{}', NULL),
    ('order', 'k', '2', '2', '\xdeadbeef', 'y', NULL, 'x', true, NULL, 'glad', '10.1.2.3', NULL,
        NULL, now(), now(), 5, NULL, NULL, '{"z": "\ud83d\ude00", "z": "twice"}', '{}', NULL),
    (NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
        NULL, NULL, NULL, NULL, NULL, NULL)"#;

/// By the log, by a catch-up and by the feed: every value, to the byte.
async fn a_row_is_the_same_event_from_the_log_and_from_the_table(version: Version) {
    let cluster = Cluster::new(version).await;
    let session = cluster.session().await;
    run(&session, ODD_TABLE).await;
    let mut riders = Vec::new();
    for (outbox, mapping) in MAPPINGS {
        let sql = format!("SELECT postrider.adopt_table('app.odd', '{mapping}', true, '{outbox}')");
        run(&session, &sql).await;
        let mut rider = Rider::new(wal(&cluster, outbox).await, "sink").await;
        streaming(&mut rider, &session, outbox).await;
        riders.push((outbox, rider));
    }
    run(&session, ODD_ROWS).await;
    for ((outbox, mut rider), good) in riders.into_iter().zip([3, 3, 5, 4]) {
        let mut streamed = Vec::new();
        while streamed.len() < 6 {
            streamed.extend(rider.next().await.entries.iter().map(shape));
        }
        let mut later = rider.beside("later", StartFrom::Oldest).await;
        let mut from_table = Vec::new();
        while from_table.len() < 6 {
            from_table.extend(later.next().await.entries.iter().map(shape));
        }
        let mut follower = Follower::new(store(&cluster, outbox).await);
        let mut fed = Vec::new();
        while fed.len() < 6 {
            fed.extend(follower.entries().await.expect("read").iter().map(shape));
        }
        for shapes in [&mut streamed, &mut from_table, &mut fed] {
            shapes.sort();
        }
        assert_eq!(streamed, from_table, "{outbox}");
        assert_eq!(streamed, fed, "{outbox}");
        assert_eq!(streamed.iter().filter(|shape| shape.starts_with("good")).count(), good);
    }
}

async fn a_partitioned_table_is_read_as_its_root(version: Version) {
    let cluster = Cluster::new(version).await;
    let session = cluster.session().await;
    let table = "CREATE SCHEMA app; CREATE TABLE app.outboxevent (id bigserial, aggregatetype text,
            aggregateid text DEFAULT 'k', type text, payload text) PARTITION BY LIST (type);
        CREATE TABLE app.one PARTITION OF app.outboxevent FOR VALUES IN ('one');
        SELECT postrider.adopt_table('app.outboxevent')";
    run(&session, table).await;
    let mut rider = streamed(&cluster, &session).await;
    let insert = |of: &str| {
        format!(
            "INSERT INTO app.outboxevent (aggregatetype, type, payload)
             VALUES ('o', '{of}', '{of}')"
        )
    };
    run(&session, &insert("one")).await;
    // One that has another order of columns, and is written to by its own name.
    let attach = "CREATE TABLE app.two (payload text, type text, id bigint NOT NULL DEFAULT
            nextval('app.outboxevent_id_seq'), aggregateid text DEFAULT 'k', aggregatetype text);
        ALTER TABLE app.outboxevent ATTACH PARTITION app.two FOR VALUES IN ('two')";
    run(&session, attach).await;
    let into_part = insert("two").replace("app.outboxevent", "app.two");
    run(&session, &format!("BEGIN; {into_part}; DELETE FROM app.two; COMMIT")).await;
    run(&session, &insert("two")).await;
    let found = records(&mut rider, 3).await;
    assert_eq!(payloads(&found), ["one", "two", "two"]);
    let by_view = "SELECT string_agg(id::text, ' ' ORDER BY seq) FROM postrider.outboxevent";
    let ids = format!("{} {}", found[0].event.id(), found[2].event.id());
    assert_eq!(one::<String>(&session, by_view).await, ids);
}

async fn without_the_slot_exactly_what_is_missing_comes(version: Version) {
    let (cluster, session) = adopted(version, COLUMNS).await;
    run(&session, &insert("0")).await;
    let mut rider = rider(&cluster).await;
    assert_eq!(rider.take(1).await, ["0"]);
    let open = cluster.session().await;
    run(&open, &format!("BEGIN; {}", insert("late"))).await;
    run(&session, &insert("1")).await;
    assert_eq!(rider.take(1).await, ["1"]);
    // Half of a transaction is confirmed when all goes down.
    run(&session, &format!("BEGIN; {}; {}; COMMIT", insert("2"), insert("3"))).await;
    let half = records(&mut rider, 2).await;
    rider.confirm(&half[0].position, 1).await;
    drop(rider);
    drop_slot(&session).await;
    run(&open, "COMMIT").await;
    run(&session, &insert("4")).await;
    let mut rider = self::rider(&cluster).await;
    let mut came = rider.take(3).await;
    came.sort();
    assert_eq!(came, ["3", "4", "late"]);
    run(&session, &passing("5")).await;
    assert_eq!(rider.take(1).await, ["5"]);
    rider.nothing_within(Duration::from_millis(300)).await;
    let progress = rider.wal.progress().await.expect("asked");
    assert_eq!((progress[0].pending, progress[0].checkpoint.published), (0, 7));
}

async fn without_transaction_ids_all_rows_come_again_with_the_same_ids(version: Version) {
    let (cluster, session) = adopted(version, NUMBERED).await;
    let wal = wal(&cluster, "outboxevent").await;
    let report = wal.report().await.expect("asked");
    let told = wal.advice(&report, None).await.expect("asked").weaker.join("\n");
    for part in ["app.outboxevent has no transaction ids", "the same ids", "add_columns => true"] {
        assert!(told.contains(part), "{part}: {told}");
    }
    assert!(!told.contains("holds up"), "that is the feed: {told}");
    let mut rider = Rider::new(wal, "sink").await;
    streaming(&mut rider, &session, "outboxevent").await;
    for number in 0..3 {
        run(&session, &insert(&number.to_string())).await;
    }
    let first = records(&mut rider, 3).await;
    rider.confirm(&first[2].position, 3).await;
    drop(rider);
    let mut rider = self::rider(&cluster).await;
    rider.nothing_within(Duration::from_millis(300)).await;
    drop(rider);
    drop_slot(&session).await;
    run(&session, "DELETE FROM app.outboxevent WHERE payload = '1'").await;
    run(&session, &insert("3")).await;
    // A catch-up that was interrupted begins anew: it can't tell where it was.
    let mut rider = self::rider(&cluster).await;
    let begun = records(&mut rider, 3).await;
    rider.confirm(&begun[0].position, 1).await;
    drop(rider);
    let mut rider = self::rider(&cluster).await;
    let again = records(&mut rider, 3).await;
    assert_eq!(payloads(&again), ["0", "2", "3"]);
    let id = |record: &Record| record.event.id();
    assert_eq!([id(&again[0]), id(&again[1])], [id(&first[0]), id(&first[2])]);
    rider.confirm(&again[2].position, 3).await;
    run(&session, &passing("4")).await;
    assert_eq!(rider.take(1).await, ["4"]);
    drop(rider);
    let mut rider = self::rider(&cluster).await;
    rider.nothing_within(Duration::from_millis(300)).await;
}

async fn now_is_the_slots_beginning_where_rows_can_not_be_told_apart(version: Version) {
    let (cluster, session) = adopted(version, NUMBERED).await;
    run(&session, &insert("before")).await;
    let wal = wal(&cluster, "outboxevent").await;
    let mut rider = Rider::from(wal, "sink", StartFrom::Now).await;
    streaming(&mut rider, &session, "outboxevent").await;
    run(&session, &insert("after")).await;
    assert_eq!(rider.take(1).await, ["after"]);
}

/// Waits until the reader is told something that is to pass; confirms what comes before it, and
/// returns it.
async fn told(rider: &mut Rider, parts: &[&str]) -> Vec<String> {
    let mut had = Vec::new();
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        let next = tokio::time::timeout_at(deadline, rider.reader.next(LIMIT)).await;
        match next.expect("nothing is told") {
            Ok(ReadOutcome::Batch(batch)) => {
                let records: Vec<Record> =
                    batch.entries.iter().map(|entry| record(entry).clone()).collect();
                had.extend(payloads(&records));
                rider.confirm(&batch.position, records.len()).await;
            }
            Ok(ReadOutcome::Ended(_)) => panic!("the log never ends"),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Transient, "{error}");
                let text = error.chain();
                if parts.iter().all(|part| text.contains(part)) {
                    return had;
                }
            }
        }
    }
}

/// Rows of before have the old name, and no table has them any more.
async fn a_renamed_column_is_named_and_nothing_is_lost(version: Version) {
    let (cluster, session) = adopted(version, COLUMNS).await;
    let mut rider = streamed(&cluster, &session).await;
    run(&session, &passing("1")).await;
    assert_eq!(rider.take(1).await, ["1"]);
    drop(rider);
    run(&session, &passing("2")).await;
    run(&session, "ALTER TABLE app.outboxevent RENAME payload TO body").await;
    run(&session, &passing("3").replace("payload", "body")).await;
    let mut rider = self::rider(&cluster).await;
    let mut had = told(&mut rider, &[
        "app.outboxevent without a column",
        "\"payload\"",
        "SELECT \"postrider\".adopt_table('app.outboxevent', '{\"payload\":\"a_column\"}', true",
        "\"body\"",
    ])
    .await;
    let refused = rider.wal.ready().await.expect_err("it does not fit");
    assert_eq!(refused.kind(), ErrorKind::Permanent);
    assert!(refused.chain().contains("app.outboxevent without a column"), "{}", refused.chain());
    let repair = COLUMNS.replace("true", "true, mapping => '{\"payload\": \"body\"}'");
    run(&session, &repair).await;
    rider.wal.ready().await.expect("it fits");
    had.extend(rider.take(2 - had.len()).await);
    assert_eq!(had, ["2", "3"], "without a new start");
    // The mapping says it by name now, and the view goes with its column.
    run(&session, "ALTER TABLE app.outboxevent DROP body CASCADE, ADD message text").await;
    run(&session, &passing("4").replace("payload", "message")).await;
    let had = told(&mut rider, &["without its column \"body\"", "takes as \"payload\""]).await;
    assert!(had.is_empty(), "{had:?}");
    run(&session, &repair.replace("body", "message")).await;
    assert_eq!(rider.take(1).await, ["4"]);
    run(&session, "DROP VIEW postrider.outboxevent").await;
    let refused = rider.wal.ready().await.expect_err("the view is gone");
    assert!(refused.chain().contains("the view of outbox"), "{}", refused.chain());
    run(&session, &repair.replace("body", "message")).await;
    rider.wal.ready().await.expect("it is there again");
}

async fn a_changed_mapping_counts_for_what_comes_next(version: Version) {
    let (cluster, session) = adopted(version, COLUMNS).await;
    let mut rider = rider(&cluster).await;
    run(&session, &insert("1")).await;
    assert_eq!(rider.take(1).await, ["1"]);
    let mapping = "true, mapping => '{\"topic\": {\"value\": \"all\"}}'";
    run(&session, &COLUMNS.replace("true", mapping)).await;
    told(&mut rider, &["the mapping of the adopted table was changed"]).await;
    run(&session, &insert("2")).await;
    let found = records(&mut rider, 1).await;
    assert_eq!(found[0].event.topic().as_str(), "all");
    // The table may have another name for a while: its rows are known by its number.
    rider.confirm(&found[0].position, 1).await;
    run(&session, "ALTER TABLE app.outboxevent RENAME TO elsewhere").await;
    run(&session, &insert("3").replace("outboxevent", "elsewhere")).await;
    told(&mut rider, &["there is no table app.outboxevent", "give it its name back"]).await;
    // Another one takes its place: rows of both would be missed, one's by the stream, the other's
    // by a catch-up.
    let like = "CREATE TABLE app.outboxevent (LIKE app.elsewhere INCLUDING ALL);
        ALTER PUBLICATION postrider_outboxevent ADD TABLE app.outboxevent";
    run(&session, like).await;
    told(&mut rider, &["another table is called app.outboxevent", "adopt_table again"]).await;
    run(&session, "DROP TABLE app.outboxevent").await;
    run(&session, "ALTER TABLE app.elsewhere RENAME TO outboxevent").await;
    assert_eq!(rider.take(1).await, ["3"]);
}

async fn what_can_not_be_read_from_the_log_is_refused_with_the_remedy(version: Version) {
    let (cluster, session) = adopted(version, COLUMNS).await;
    let wal = wal(&cluster, "outboxevent").await;
    let refused = async |parts: &[&str]| {
        let error = wal.ready().await.expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Permanent);
        for part in parts {
            assert!(error.chain().contains(part), "{part}: {}", error.chain());
        }
    };
    refused(&["CREATE PUBLICATION", "FOR TABLE ONLY app.outboxevent"]).await;
    run(&session, "CREATE PUBLICATION postrider_outboxevent").await;
    refused(&["ADD TABLE ONLY app.outboxevent"]).await;
    run(&session, "DROP PUBLICATION postrider_outboxevent").await;
    run(&session, "ALTER TABLE app.outboxevent SET UNLOGGED").await;
    refused(&["app.outboxevent", "UNLOGGED"]).await;
    run(&session, "ALTER TABLE app.outboxevent SET LOGGED").await;
    wal.prepare().await.expect("made");
    wal.ready().await.expect("all is there");
    let odd = "ALTER TABLE app.outboxevent ADD document xml, ADD made text GENERATED ALWAYS AS
        (payload) STORED";
    run(&session, odd).await;
    let mapped = |to: &str| COLUMNS.replace("true", &format!("true, mapping => '{to}'"));
    run(&session, &mapped("{\"payload\": \"document\"}")).await;
    refused(&["column \"document\" of app.outboxevent", "postgres-feed"]).await;
    run(&session, &mapped("{\"payload\": \"made\"}")).await;
    refused(&["without its column \"made\"", "generated"]).await;
    run(&session, COLUMNS).await;
    wal.ready().await.expect("all is there");
}
