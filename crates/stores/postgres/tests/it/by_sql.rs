//! Following a feed by SQL alone.
//!
//! What lives here: the walk-through of the guide, run by `psql`, and the edges of `tick` and
//! `read_feed`. What does not: the cut itself (`cut.rs`).
//! Invariant: what the guide shows is what the server answers.

#![expect(clippy::disallowed_methods, reason = "sessions and writers end with their test")]

use std::process::Command;
use std::time::{Duration, Instant};

use postrider_servers::postgres::{Database, Options, Version, shared};
use postrider_store_postgres::{PostgresOptions, schema_sql};
use tokio_postgres::{Client, NoTls};

const GUIDE: &str = include_str!("../../../../../docs/stores/postgres-sql.md");

/// A database with an outbox of eight partitions.
pub(crate) fn database(version: Version) -> Database {
    let database = shared(version).expect("a server");
    database.psql(&schema_sql(&PostgresOptions::new(database.url()))).expect("the SQL is valid");
    database
}

pub(crate) async fn session(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("connect");
    tokio::spawn(connection);
    client
}

/// The SQLSTATE and the text of a refusal.
pub(crate) async fn refusal(session: &Client, sql: &str) -> (String, String) {
    let error = session.batch_execute(sql).await.expect_err("refused");
    let cause = error.as_db_error().expect("a refusal of the server");
    let hint = cause.hint().unwrap_or_default();
    (cause.code().code().to_owned(), format!("{}; {hint}", cause.message()))
}

/// The texts of a query's only column.
pub(crate) async fn column(session: &Client, sql: &str) -> Vec<String> {
    let rows = session.query(sql, &[]).await.expect("query");
    rows.iter().map(|row| row.get(0)).collect()
}

/// The guide's code blocks with this tag, in order.
fn blocks(tag: &str) -> Vec<&'static str> {
    let mut found = Vec::new();
    let mut rest = GUIDE;
    while let Some(begin) = rest.find("```") {
        rest = &rest[begin + 3..];
        let end = rest.find("```").expect("a block ends");
        if let Some(block) = rest[..end].strip_prefix(tag).and_then(|b| b.strip_prefix('\n')) {
            found.push(block);
        }
        rest = &rest[end + 3..];
    }
    found
}

fn walk_through(version: Version) {
    let database = database(version);
    let mut psql = Command::new(version.program("psql").expect("psql"));
    psql.args(["--no-psqlrc", "--quiet", "--no-align", "--pset=footer=off"]);
    psql.args(["-v", "ON_ERROR_STOP=1", "-d"]).arg(database.url());
    let script = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(script.path(), blocks("sql").concat()).expect("write the script");
    let answer = psql.arg("-f").arg(script.path()).output().expect("psql runs");
    let (out, err) =
        (String::from_utf8_lossy(&answer.stdout), String::from_utf8_lossy(&answer.stderr));
    assert!(answer.status.success(), "{out}{err}");
    assert_eq!(out, blocks("text").concat());
}

#[test]
fn the_guides_walk_through_by_psql_alone_on_15() {
    walk_through(Version::V15);
}

#[test]
fn the_guides_walk_through_by_psql_alone_on_18() {
    walk_through(Version::V18);
}

/// Appends an event to each of these keys and cuts the feed.
async fn append(session: &Client, keys: &[&str]) {
    for key in keys {
        let sql = "SELECT postrider.append($1, 't', 'T', $2::bytea)";
        session.query(sql, &[key, &key.as_bytes()]).await.expect("append");
    }
    let sql = "SELECT outcome FROM postrider.tick(min_interval_ms => 0)";
    assert_eq!(column(session, sql).await, ["made"]);
}

#[tokio::test]
async fn every_record_is_in_one_partition_and_pages_of_any_size_give_the_same() {
    for version in Version::ALL {
        let database = database(version);
        let session = session(&database.url()).await;
        let keys: Vec<String> = (0..40).map(|n| format!("schlüssel-{n}")).collect();
        for part in keys.chunks(7) {
            append(&session, &part.iter().map(String::as_str).collect::<Vec<_>>()).await;
        }
        let mut seen = Vec::new();
        for partition in 0..8 {
            for max in [1, 3, 100] {
                let mut after: Option<String> = None;
                let mut found = Vec::new();
                loop {
                    let sql = "SELECT position, key, appended_at IS NULL
                        FROM postrider.read_feed('outbox', $1, $2, $3)";
                    let rows = session.query(sql, &[&partition, &after, &max]).await.expect("read");
                    let Some(last) = rows.last() else { break };
                    assert!(rows.len() <= usize::try_from(max).expect("small") + 1);
                    assert!(after < Some(last.get(0)), "a position moves on");
                    after = Some(last.get(0));
                    let records = rows.iter().filter(|row| !row.get::<_, bool>(2));
                    found.extend(records.map(|row| row.get::<_, String>(1)));
                }
                let head = column(&session, "SELECT postrider.head()").await;
                assert_eq!(after.as_ref(), head.first(), "a quiet partition moves on, too");
                match max {
                    1 => seen.push(found),
                    _ => assert_eq!(seen.last(), Some(&found)),
                }
            }
        }
        let mut all: Vec<String> = seen.concat();
        all.sort();
        let mut keys = keys;
        keys.sort();
        assert_eq!(all, keys);
        assert!(seen.iter().filter(|partition| !partition.is_empty()).count() > 3);
    }
}

#[tokio::test]
async fn what_can_not_be_read_is_refused_by_code() {
    for version in Version::ALL {
        let database = database(version);
        let session = session(&database.url()).await;
        append(&session, &["a"]).await;
        let read = |partition: i32, after: &str| {
            format!("SELECT FROM postrider.read_feed('outbox', {partition}, '{after}')")
        };
        for (sql, code) in [
            (read(0, "7ZZZZZZZZZZZZZZZZZZZZZZZZZ"), "PR001"),
            (read(0, "0ZZZZZZZZZZZZZZZZZZZZZZZZZ"), "PR001"),
            (read(0, "01GNSG5PM80000000000000001"), "PR003"),
            (read(0, "nonsense"), "22023"),
            (read(8, "01GNSG5PM80000000000000000"), "22023"),
            (read(-1, "01GNSG5PM80000000000000000"), "22023"),
            ("SELECT FROM postrider.read_feed('outbox', 0, NULL, 0)".into(), "22023"),
            ("SELECT FROM postrider.read_feed('outbox', 0, NULL, 1, 9)".into(), "22023"),
            ("SELECT FROM postrider.read_feed('o\"; drop', 0, NULL)".into(), "42704"),
            ("SELECT postrider.head('none')".into(), "42704"),
            ("BEGIN; SELECT pg_current_xact_id(); SELECT postrider.tick()".into(), "25000"),
            (
                "ROLLBACK; BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT postrider.tick()".into(),
                "25000",
            ),
            ("ROLLBACK; SELECT postrider.raise_partitions('outbox', 12)".into(), "22023"),
        ] {
            let (found, text) = refusal(&session, &sql).await;
            assert_eq!(found, code, "{sql}: {text}");
            assert!(!text.contains("NULL>"), "{sql}: {text}");
        }
    }
}

/// A payload that is not UTF-8, and times at both ends.
#[tokio::test]
async fn payloads_are_bytes_and_times_are_clamped() {
    let database = database(Version::V15);
    let session = session(&database.url()).await;
    let sql = "SELECT postrider.append('k', 't', 'T', '\\xff00'::bytea)";
    session.batch_execute(sql).await.expect("append");
    session.batch_execute("SELECT postrider.tick(min_interval_ms => 0)").await.expect("tick");
    let sql = "SELECT encode(payload, 'hex') || coalesce(postrider.payload_text(payload), '-')
        FROM postrider.read_feed('outbox', postrider.partition_of('k', 8), NULL)
        WHERE appended_at IS NOT NULL";
    assert_eq!(column(&session, sql).await, ["ff00-"]);
    let at = |time: &str| format!("SELECT postrider.position_at('outbox', '{time}')");
    let head = column(&session, "SELECT postrider.head()").await;
    assert_eq!(column(&session, &at("infinity")).await, head);
    assert_eq!(column(&session, &at("-infinity")).await, ["00000000000000000000000000"]);
    assert_eq!(column(&session, &at("2023-01-02 15:04:05Z")).await, ["01GNSG5PM80000000000000000"]);
}

#[tokio::test]
async fn raised_partitions_end_and_name_their_successors() {
    for version in Version::ALL {
        let database = database(version);
        let session = session(&database.url()).await;
        append(&session, &["a", "b", "c"]).await;
        session
            .batch_execute("SELECT postrider.raise_partitions('outbox', 24)")
            .await
            .expect("raise");
        append(&session, &["a", "b", "c"]).await;
        let (code, text) =
            refusal(&session, "SELECT FROM postrider.read_feed('outbox', 0, NULL)").await;
        assert_eq!(code, "PR004", "{text}");
        let mut seen = Vec::new();
        for partition in 0..8 {
            let sql = format!(
                "SELECT position || ' ' || coalesce(key, '')
                 FROM postrider.read_feed('outbox', {partition}, NULL, partitions => 8)"
            );
            let rows = column(&session, &sql).await;
            let last = rows.last().expect("at least a position").split(' ').next().expect("a word");
            seen.extend(rows.iter().filter_map(|row| row.split(' ').nth(1)).map(str::to_owned));
            let sql =
                format!("SELECT FROM postrider.read_feed('outbox', {partition}, '{last}', 10, 8)");
            let (code, text) = refusal(&session, &sql).await;
            let successors =
                format!("{last} in {partition}, {}, {} of 24", partition + 8, partition + 16);
            assert!(code == "PR005" && text.contains(&successors), "{code} {text}");
            for successor in [partition, partition + 8, partition + 16] {
                // From the end of the old one, and from the start: the same.
                let sql = |after: &str| {
                    format!(
                    "SELECT key FROM postrider.read_feed('outbox', {successor}, {after}, 10, 24)
                     WHERE appended_at IS NOT NULL"
                )
                };
                let keys = column(&session, &sql(&format!("'{last}'"))).await;
                assert_eq!(column(&session, &sql("NULL")).await, keys);
                seen.extend(keys);
            }
        }
        seen.retain(|key| !key.is_empty());
        seen.sort();
        assert_eq!(seen, ["a", "a", "b", "b", "c", "c"]);
        let sql = "SELECT outbox || ' ' || partitions FROM postrider.outboxes()";
        assert_eq!(column(&session, sql).await, ["outbox 24"]);
    }
}

/// The generation between has no tick, and so no record.
#[tokio::test]
async fn partitions_that_were_raised_twice_at_once_lie_end_to_end() {
    for version in Version::ALL {
        let database = database(version);
        let session = session(&database.url()).await;
        append(&session, &["a"]).await;
        let head = column(&session, "SELECT postrider.head()").await.concat();
        let raise = "SELECT postrider.raise_partitions('outbox', 16),
            postrider.raise_partitions('outbox', 32)";
        session.batch_execute(raise).await.expect("raise");
        let listed = "SELECT format('%s of %s %s to %s', count(*), partitions, begins, ends)
            FROM postrider.partitions() GROUP BY partitions, begins, ends ORDER BY partitions";
        assert_eq!(column(&session, listed).await, ["8 of 8  to "], "no tick has them yet");
        append(&session, &["a"]).await;
        let wanted = [
            format!("8 of 8  to {head}"),
            format!("16 of 16 {head} to {head}"),
            format!("32 of 32 {head} to "),
        ];
        assert_eq!(column(&session, listed).await, wanted);
        // The same way as read_feed leads.
        let (mut at, mut partitions) = ("NULL".to_owned(), 8);
        while partitions < 32 {
            let read = format!(
                "SELECT FROM postrider.read_feed('outbox', 0, {at}, partitions => {partitions})"
            );
            if partitions == 8 && at == "NULL" {
                at = format!("'{head}'");
                continue;
            }
            let (code, text) = refusal(&session, &read).await;
            let says = format!("position {head} in 0, {partitions} of {}", partitions * 2);
            assert!(code == "PR005" && text.contains(&says), "{code} {text}");
            partitions *= 2;
        }
    }
}

/// A standby serves what was cut on the primary; it makes no ticks itself. A reader has no right on
/// anything but reading.
#[tokio::test]
async fn a_reader_follows_the_feed_on_a_standby() {
    for version in Version::ALL {
        let server = Options::new(version).launch().expect("a server");
        let database = server.create_database().expect("a database");
        let sql = schema_sql(&PostgresOptions::new(database.url()));
        database.psql(&sql).expect("the SQL is valid");
        let primary = session(&database.url()).await;
        let role = "CREATE ROLE following LOGIN; SELECT postrider.grant_reader('following');
            CREATE TABLE item (id integer PRIMARY KEY); GRANT SELECT ON item TO following;
            SELECT postrider.setup_feed('item')";
        primary.batch_execute(role).await.expect("a role");
        append(&primary, &["k"]).await;
        primary.batch_execute("INSERT INTO item VALUES (7)").await.expect("insert");
        let tick = "SELECT postrider.tick(min_interval_ms => 0)";
        primary.batch_execute(tick).await.expect("tick");
        let standby = tokio::task::spawn_blocking(move || {
            let standby = server.standby().expect("a standby");
            (server, standby)
        });
        let (server, standby) = standby.await.expect("no panic");
        let reader = session(&standby.url("following", database.name())).await;
        let read = "SELECT key FROM postrider.read_feed('outbox',
            postrider.partition_of('k', 8), postrider.position_at('outbox', now() - interval '1 h'))
            WHERE appended_at IS NOT NULL";
        let deadline = Instant::now() + Duration::from_secs(20);
        while column(&reader, read).await != ["k"] {
            assert!(Instant::now() < deadline, "the standby has it");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let joined = "SELECT r.row::text FROM postrider.read_table_feed('item',
            postrider.partition_of('7', 8), NULL) AS r WHERE r.appended_at IS NOT NULL";
        while column(&reader, joined).await != ["{\"id\": 7}"] {
            assert!(Instant::now() < deadline, "the standby has it");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let (code, text) = refusal(&reader, tick).await;
        assert!(code == "25006" && text.contains("primary"), "{code} {text}");
        // On the primary the same role may cut, and neither append nor raise.
        let reader = session(&server.url("following", database.name())).await;
        reader.batch_execute(tick).await.expect("tick");
        for sql in [
            "SELECT postrider.append('k', 't', 'T', 'x'::text)",
            "SELECT postrider.raise_partitions('outbox', 16)",
            "SELECT postrider.adopt_table('item', '{\"key\": \"id\"}')",
            "SELECT postrider.setup_feed('item', '{id}', events => '{deleted}')",
            "SELECT postrider.lock_feed('f', 0)",
        ] {
            let (code, text) = refusal(&reader, sql).await;
            assert_eq!(code, "42501", "{sql}: {text}");
        }
    }
}
