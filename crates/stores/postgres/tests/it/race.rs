//! The race: many writers, few keys, long holds, rollbacks, readers of different speed.
//!
//! What lives here: the run and its judgement. What does not: single holes by schedule (`cut.rs`).
//! Invariant: what was committed, and in which order for each key, is told by a table of the
//! test's own that is written in the same transactions; all readers and a replay agree with it.
//!
//! `POSTRIDER_RACE_SECONDS` sets how long the writers write: 60 for the proof, a few by default.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use postrider_core::*;
use postrider_servers::postgres::{Database, Version, shared};
use postrider_store_postgres::{Outbox, PostgresOptions, PostgresStore};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use tokio::time::Instant;
use tokio_postgres::{Client, NoTls, Transaction};
use uuid::Uuid;

const WRITERS: u64 = 24;
const KEYS: u64 = 20;
const PARTITIONS: u32 = 4;
/// Longest time a transaction is held open after its append, in milliseconds.
const MAX_HOLD_MS: u64 = 500;

/// What was committed: each key's events, numbered while the key was locked.
const JOURNAL: &str = "CREATE TABLE journal (key text, n bigint, id uuid, PRIMARY KEY (key, n))";

fn seconds() -> u64 {
    std::env::var("POSTRIDER_RACE_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(4)
}

async fn connect(database: &Database) -> Client {
    let (client, connection) =
        tokio_postgres::connect(&database.url(), NoTls).await.expect("connect");
    tokio::spawn(connection);
    client
}

fn event(key: &str) -> NewEvent {
    let key = Key::new(key).expect("valid");
    let topic = Topic::new("race").expect("valid");
    NewEvent::builder(key, topic, EventType::new("Raced").expect("valid")).build().expect("small")
}

/// Appends, and notes it in the journal while the append's lock on the key is held.
async fn append(tx: &Transaction<'_>, key: &str) -> Result<(), Error> {
    let ids = Outbox::default().append(tx, &[event(key)]).await?;
    let note = "INSERT INTO journal SELECT $1, coalesce(max(n), 0) + 1, $2 FROM journal
        WHERE key = $1";
    tx.execute(note, &[&key, ids[0].as_uuid()]).await.expect("the key is locked by the append");
    Ok(())
}

/// One transaction: one or two keys in a fixed order, sometimes a savepoint that is rolled back,
/// a hold, and a commit, or one time in ten a rollback.
async fn transact(client: &mut Client, dice: &mut StdRng) {
    let tx = client.transaction().await.expect("begin");
    let first = dice.random_range(0..KEYS);
    append(&tx, &format!("key {first}")).await.expect("append");
    if dice.random_range(0..4) == 0 {
        tx.batch_execute("SAVEPOINT part").await.expect("savepoint");
        append(&tx, &format!("key {first}")).await.expect("append");
        if dice.random_range(0..2) == 0 {
            tx.batch_execute("ROLLBACK TO part").await.expect("rollback to");
        }
        append(&tx, &format!("key {first}")).await.expect("append");
    }
    // Half of them end at once, so that there is always something to overtake the others.
    let hold = dice.random_range(0..2) * dice.random_range(0..MAX_HOLD_MS);
    tokio::time::sleep(Duration::from_millis(hold)).await;
    match dice.random_range(0..10) {
        0 => tx.rollback().await.expect("rollback"),
        _ => tx.commit().await.expect("commit"),
    }
}

/// What a reader saw: each partition's ids and keys, in its order.
type Seen = Vec<Vec<(Uuid, String)>>;

async fn read_on(
    store: &PostgresStore,
    at: &mut [Position],
    seen: &mut Seen,
    limit: BatchLimit,
) -> usize {
    let mut found = 0;
    for index in 0..PARTITIONS {
        let partition = PartitionId::numbered(index, PARTITIONS);
        let place = &mut at[index as usize];
        let page = Feed::read(store, &partition, place, limit).await.expect("read");
        assert!(page.position.as_bytes() >= place.as_bytes(), "a position never moves back");
        *place = page.position;
        found += page.entries.len();
        for entry in page.entries {
            let Entry::Record(record) = entry else { panic!("unreadable: {entry:?}") };
            let key = record.event.key().as_str().to_owned();
            seen[index as usize].push((*record.event.id().as_uuid(), key));
        }
    }
    found
}

/// Reads with a speed of its own until the writers have ended and nothing is left.
async fn reader(store: PostgresStore, ended: Arc<AtomicBool>, number: u64) -> Seen {
    let records = [1_000, 1, 7, 100, 3][usize::try_from(number).expect("few")];
    let limit = BatchLimit { records, bytes: 1 << 20 };
    let mut at = vec![Position::START; PARTITIONS as usize];
    let mut seen: Seen = vec![Vec::new(); PARTITIONS as usize];
    loop {
        let last = ended.load(Ordering::SeqCst);
        let found = read_on(&store, &mut at, &mut seen, limit).await;
        if found == 0 && last {
            return seen;
        }
        if !last {
            tokio::time::sleep(Duration::from_millis(number * number * 10)).await;
        }
    }
}

async fn judge(database: &Database, all_seen: &[Seen]) -> usize {
    let journal = connect(database).await;
    let rows = journal.query("SELECT key, id FROM journal ORDER BY key, n", &[]).await;
    let mut committed: HashMap<String, Vec<Uuid>> = HashMap::new();
    for row in rows.expect("the journal") {
        committed.entry(row.get(0)).or_default().push(row.get(1));
    }
    let total: usize = committed.values().map(Vec::len).sum();
    for seen in all_seen {
        let mut by_key: HashMap<String, Vec<Uuid>> = HashMap::new();
        let mut ids = HashSet::new();
        for (id, key) in seen.iter().flatten() {
            assert!(ids.insert(*id), "event {id} was read twice");
            by_key.entry(key.clone()).or_default().push(*id);
        }
        assert_eq!(ids.len(), total, "events are missing, or some were never committed");
        assert_eq!(by_key, committed, "a key's order is the order of its commits");
        assert_eq!(seen, &all_seen[0], "all readers see one order");
    }
    total
}

async fn race(version: Version) {
    let database = shared(version).expect("a server");
    let options = PostgresOptions::new(database.url()).partitions(PARTITIONS).connections(2);
    let store = PostgresStore::open(options.clone()).await.expect("open");
    database.psql(JOURNAL).expect("the journal");
    let ended = Arc::new(AtomicBool::new(false));
    let mut readers = Vec::new();
    for number in 0..5 {
        // Two share a store, as the partitions of one relay do.
        let own = match number {
            0 | 1 => store.clone(),
            _ => PostgresStore::open(options.clone()).await.expect("open"),
        };
        readers.push(tokio::spawn(reader(own, Arc::clone(&ended), number)));
    }
    let until = Instant::now() + Duration::from_secs(seconds());
    let writers = (0..WRITERS).map(|number| {
        let database = database.url();
        tokio::spawn(async move {
            let (mut client, connection) =
                tokio_postgres::connect(&database, NoTls).await.expect("connect");
            tokio::spawn(connection);
            let mut dice = StdRng::seed_from_u64(number);
            while Instant::now() < until {
                transact(&mut client, &mut dice).await;
            }
        })
    });
    for writer in writers.collect::<Vec<_>>() {
        writer.await.expect("the writer ends well");
    }
    ended.store(true, Ordering::SeqCst);
    let mut all_seen = Vec::new();
    for reader in readers {
        all_seen.push(reader.await.expect("the reader ends well"));
    }
    // A replay, by a store that has seen nothing yet.
    let fresh = PostgresStore::open(options).await.expect("open");
    all_seen.push(reader(fresh, ended, 0).await);
    let total = judge(&database, &all_seen).await;
    let ticks = database.psql("SELECT count(*) FROM postrider.outbox_tick").expect("ticks");
    println!(
        "{version:?}: {total} committed, {} ticks, read alike by 5 readers and a replay",
        ticks.trim()
    );
    assert!(total > 100, "too little was written to prove anything: {total}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_missed_read_twice_or_out_of_order_on_15() {
    race(Version::V15).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_missed_read_twice_or_out_of_order_on_18() {
    race(Version::V18).await;
}
