//! Serialised writers: ULIDs drawn under a lock, and the table that is read by them.
//!
//! What lives here: the allocator against its vectors, the race of writers and readers, a client
//! that vanishes. What does not: the guide (`by_sql.rs`).
//! Invariant: a reader that keeps the largest ULID it has seen in a partition misses nothing.

#![expect(clippy::disallowed_methods, reason = "sessions and writers end with their test")]

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use postrider_core::Timestamp;
use postrider_core::ulid::UlidAllocator;
use postrider_servers::postgres::{Database, Version};
use postrider_servers::proxy::Proxy;
use rand::RngExt as _;
use tokio_postgres::Client;
use uuid::Uuid;

use crate::by_sql::{column, database, refusal, session};

/// A feed of four partitions over a table of the application's own.
async fn feed(version: Version) -> Database {
    let database = database(version);
    let sql = "CREATE TABLE movement (partition integer, ulid uuid, writer integer, number integer,
            PRIMARY KEY (partition, ulid));
        SELECT postrider.setup_serialised_feed('movement', 4)";
    session(&database.url()).await.batch_execute(sql).await.expect("set up");
    database
}

/// 2023-01-02T15:04:05Z, ten 0xFF; 100 allocations later in the same millisecond.
#[tokio::test]
async fn the_vectors_hold() {
    let database = database(Version::V15);
    let session = session(&database.url()).await;
    let sql = "SELECT postrider.ulid_text(b.first) FROM
            postrider.ulid_range(0, 0, 1672671845000, 100, '\\xffffffffffffffffffff') AS a,
            postrider.ulid_range(a.high, a.next_low, 1672671845000, 1,
                '\\x00000000000000000000') AS b
        UNION ALL SELECT first::text FROM
            postrider.ulid_range(0, 0, 1672671845000, 100, '\\xffffffffffffffffffff')";
    let found = column(&session, sql).await;
    assert_eq!(found, ["01GNSG5PM8ZZZW000000000033", "01857302-da88-ffff-bfff-ffffffffffff"]);
}

/// Whatever the clock does, SQL allocates what the library's allocator does.
#[tokio::test]
async fn allocations_are_those_of_the_library() {
    let database = database(Version::V18);
    let session = session(&database.url()).await;
    let (mut high, mut next_low, mut own) = (0_i64, 0_i64, UlidAllocator::default());
    for n in 0..300 {
        let (time, count, random) = {
            let mut random = rand::rng();
            (
                random.random_range(1_000..1_030_u32),
                random.random_range(1..50_u32),
                random.random::<[u8; 10]>(),
            )
        };
        let sql = "SELECT high, next_low, postrider.ulid_text(first)
            FROM postrider.ulid_range($1, $2, $3, $4, $5)";
        let (time_ms, rows) = (i64::from(time), i64::from(count));
        let row = session.query_one(sql, &[&high, &next_low, &time_ms, &rows, &&random[..]]).await;
        let row = row.expect("allocate");
        (high, next_low) = (row.get(0), row.get(1));
        let wanted = own.allocate(Timestamp::from_millis(time.into()), count.into(), random);
        assert_eq!(row.get::<_, String>(2), wanted.to_string(), "{n}: {time} {count} {random:?}");
    }
}

#[tokio::test]
async fn ranges_of_a_transaction_are_contiguous_and_a_rollback_gives_them_back() {
    for version in Version::ALL {
        let database = feed(version).await;
        let session = session(&database.url()).await;
        let next = "SELECT postrider.ulid_text(postrider.next_ulid('movement', 2, 5))";
        session
            .batch_execute("BEGIN; SELECT postrider.lock_feed('movement', 2)")
            .await
            .expect("lock");
        let first = column(&session, next).await;
        let second = column(&session, next).await;
        let plus = format!(
            "SELECT postrider.ulid_text(postrider.ulid_plus(postrider.ulid_of_text('{}'), 5))",
            first[0]
        );
        assert_eq!(column(&session, &plus).await, second);
        session.batch_execute("SAVEPOINT s").await.expect("savepoint");
        let third = column(&session, next).await;
        session.batch_execute("ROLLBACK TO s").await.expect("roll back");
        assert_eq!(column(&session, next).await, third);
        session
            .batch_execute("COMMIT; BEGIN; SELECT postrider.lock_feed('movement', 2)")
            .await
            .expect("lock");
        let fourth = column(&session, next).await;
        assert!(third < fourth, "{third:?} {fourth:?}");
        session.batch_execute("ROLLBACK").await.expect("roll back");
    }
}

#[tokio::test]
async fn what_is_not_locked_or_not_there_is_refused() {
    let database = feed(Version::V15).await;
    let session = session(&database.url()).await;
    for (sql, code) in [
        ("SELECT postrider.next_ulid('movement', 0)", "PR007"),
        ("BEGIN; SELECT postrider.lock_feed('movement', 1);
          SELECT postrider.next_ulid('movement', 0)", "PR007"),
        ("ROLLBACK; BEGIN; SAVEPOINT s; SELECT postrider.lock_feed('movement', 1); ROLLBACK TO s;
          SELECT postrider.next_ulid('movement', 1)", "PR007"),
        ("ROLLBACK; BEGIN; SELECT postrider.lock_feed('movement', 1); COMMIT; BEGIN;
          SELECT postrider.next_ulid('movement', 1)", "PR007"),
        ("ROLLBACK; SELECT postrider.lock_feed('movement', 4)", "42704"),
        ("SELECT postrider.lock_feed('none', 0)", "42704"),
        ("SELECT postrider.setup_serialised_feed('movement', 2)", "22023"),
        ("SELECT postrider.setup_serialised_feed('', 2)", "22023"),
        ("BEGIN; SELECT postrider.lock_feed('movement', 1);
          SELECT postrider.next_ulid('movement', 1, 0)", "22023"),
    ] {
        let (found, text) = refusal(&session, sql).await;
        assert_eq!(found, code, "{sql}: {text}");
    }
    session
        .batch_execute("ROLLBACK; SELECT postrider.setup_serialised_feed('movement', 6)")
        .await
        .expect("raise");
    let feeds = "SELECT feed || ' ' || partitions FROM postrider.serialised_feeds()";
    assert_eq!(column(&session, feeds).await, ["movement 6"]);
    session
        .batch_execute("SELECT postrider.teardown_serialised_feed('movement')")
        .await
        .expect("end");
    assert_eq!(column(&session, feeds).await, [""; 0]);
}

const WRITERS: i32 = 8;
const RACE: Duration = Duration::from_secs(5);

/// Writes transactions of a few rows with random holds and rollbacks until told to stop; returns
/// what it has committed, by partition and in its order.
async fn write(url: String, writer: i32, stop: Arc<AtomicBool>) -> Vec<(i32, i32)> {
    let session = session(&url).await;
    let mut committed = Vec::new();
    let mut number = 0;
    while !stop.load(Ordering::SeqCst) {
        let (partition, rows, hold, keep) = {
            let mut random = rand::rng();
            (
                random.random_range(0..4),
                random.random_range(1..5),
                random.random_range(0..20),
                random.random_bool(0.9),
            )
        };
        let lock = format!("BEGIN; SELECT postrider.lock_feed('movement', {partition})");
        session.batch_execute(&lock).await.expect("lock");
        let sql = format!(
            "INSERT INTO movement SELECT {partition}, postrider.ulid_plus(first, n), {writer},
                 {number} + n
             FROM postrider.next_ulid('movement', {partition}, {rows}) AS first,
                 generate_series(0, {rows} - 1) AS n"
        );
        session.batch_execute(&sql).await.expect("insert");
        tokio::time::sleep(Duration::from_millis(hold)).await;
        session.batch_execute(if keep { "COMMIT" } else { "ROLLBACK" }).await.expect("end");
        if keep {
            committed.extend((number..number + rows).map(|number| (partition, number)));
        }
        number += rows;
    }
    committed
}

/// Follows one partition by the largest ULID seen, until it is at the head after `stop`.
async fn follow(url: String, partition: i32, stop: Arc<AtomicBool>) -> Vec<(i32, i32)> {
    let session = session(&url).await;
    let (mut cursor, mut seen) = (Uuid::nil(), Vec::new());
    loop {
        let last = stop.load(Ordering::SeqCst);
        let sql = "SELECT ulid, writer, number FROM movement WHERE partition = $1 AND ulid > $2
            ORDER BY ulid LIMIT 10";
        let rows = session.query(sql, &[&partition, &cursor]).await.expect("read");
        seen.extend(rows.iter().map(|row| (row.get::<_, i32>(1), row.get::<_, i32>(2))));
        match rows.last() {
            Some(row) => cursor = row.get(0),
            None if last => return seen,
            None => tokio::time::sleep(Duration::from_millis(1)).await,
        }
    }
}

async fn race(version: Version) {
    let database = feed(version).await;
    let (stop, readers_stop) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let readers: Vec<_> = (0..4)
        .map(|partition| tokio::spawn(follow(database.url(), partition, Arc::clone(&readers_stop))))
        .collect();
    let writers: Vec<_> = (0..WRITERS)
        .map(|writer| tokio::spawn(write(database.url(), writer, Arc::clone(&stop))))
        .collect();
    tokio::time::sleep(RACE).await;
    stop.store(true, Ordering::SeqCst);
    let mut wanted: HashMap<(i32, i32), Vec<i32>> = HashMap::new();
    for (writer, handle) in (0..).zip(writers) {
        for (partition, number) in handle.await.expect("a writer") {
            wanted.entry((partition, writer)).or_default().push(number);
        }
    }
    readers_stop.store(true, Ordering::SeqCst);
    let mut found: HashMap<(i32, i32), Vec<i32>> = HashMap::new();
    for (partition, handle) in (0..).zip(readers) {
        for (writer, number) in handle.await.expect("a reader") {
            found.entry((partition, writer)).or_default().push(number);
        }
    }
    // Of each writer and partition all, once, in order.
    assert!(wanted.values().map(Vec::len).sum::<usize>() > 200, "the writers were at work");
    assert_eq!(found, wanted);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_miss_nothing_while_writers_race_on_15() {
    race(Version::V15).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_miss_nothing_while_writers_race_on_18() {
    race(Version::V18).await;
}

/// How long it takes to write one row.
async fn time_of_a_write(session: &Client, partition: i32) -> Duration {
    let begun = Instant::now();
    let sql = format!(
        "BEGIN; SELECT postrider.lock_feed('movement', {partition});
         INSERT INTO movement
             SELECT {partition}, postrider.next_ulid('movement', {partition}), 0, 0;
         COMMIT"
    );
    session.batch_execute(&sql).await.expect("write");
    begun.elapsed()
}

/// The client's machine loses its power: no packet says so.
async fn vanish(version: Version) {
    let database = feed(version).await;
    let name = database.name();
    database
        .psql(&format!("ALTER DATABASE {name} SET idle_in_transaction_session_timeout = '1500ms'"))
        .expect("set");
    let address: tokio_postgres::Config = database.url().parse().expect("a URL");
    let upstream = SocketAddr::from((Ipv4Addr::LOCALHOST, address.get_ports()[0]));
    let proxy = Proxy::start(upstream).expect("a proxy");
    let through =
        database.url().replace(&format!(":{}/", upstream.port()), &format!(":{}/", proxy.port()));
    let vanished = session(&through).await;
    vanished.batch_execute("BEGIN; SELECT postrider.lock_feed('movement', 1)").await.expect("lock");
    let begun = Instant::now();
    proxy.black_hole();
    let other = session(&database.url()).await;
    for partition in [0, 2, 3] {
        let time = time_of_a_write(&other, partition).await;
        assert!(time < Duration::from_millis(1_000), "partition {partition} waited for {time:?}");
    }
    time_of_a_write(&other, 1).await;
    let bound = begun.elapsed();
    assert!(bound > Duration::from_millis(1_000), "its own partition waited: {bound:?}");
    assert!(bound < Duration::from_secs(10), "for the bounded time: {bound:?}");
    drop(vanished);
}

#[tokio::test]
async fn a_client_that_vanished_holds_up_its_own_partition_for_the_bounded_time() {
    for version in Version::ALL {
        vanish(version).await;
    }
}

#[tokio::test]
async fn missing_bounds_are_named() {
    for version in Version::ALL {
        let database = database(version);
        let session = session(&database.url()).await;
        let missing = "SELECT setting FROM postrider.check_settings()";
        let all = column(&session, missing).await;
        assert_eq!(
            all,
            [
                "client_connection_check_interval",
                "idle_in_transaction_session_timeout",
                "tcp_keepalives_idle",
                "tcp_user_timeout",
            ]
        );
        // A session's own setting is not what writers get.
        session
            .batch_execute("SET idle_in_transaction_session_timeout = '30s'")
            .await
            .expect("set");
        let sql = "SELECT value FROM postrider.check_settings() WHERE setting LIKE 'idle%'";
        assert_eq!(column(&session, sql).await, ["not to be seen from this connection"]);
        let name = database.name();
        for setting in &all {
            let sql = format!("ALTER DATABASE {name} SET {setting} = '30s'");
            session.batch_execute(&sql).await.expect("set");
        }
        assert_eq!(column(&session, missing).await, [""; 0]);
        // Too long is missing, and a role's own wins.
        let sql = format!("ALTER ROLE postgres IN DATABASE {name} SET tcp_user_timeout = '1h'");
        session.batch_execute(&sql).await.expect("set");
        assert_eq!(column(&session, missing).await, ["tcp_user_timeout"]);
    }
}
