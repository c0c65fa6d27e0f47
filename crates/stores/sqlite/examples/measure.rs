//! Measures this store by itself: the cost of an event beside its business row, the cost of a
//! row read from the feed, and that of waiting. Prints one line for each figure.
//!
//! `cargo run --release -p postrider-store-sqlite --example measure [folder]`; the folder should
//! be on a real disk. What it does not measure: a relay.

use std::time::{Duration, Instant};

use postrider_core::{
    BatchLimit, ContentType, EventType, Feed, Key, NewEvent, PartitionId, Position, Topic,
};
use postrider_store_sqlite::rusqlite::{Connection, TransactionBehavior};
use postrider_store_sqlite::{SqliteOptions, SqliteStore, append};

const PAIRS: usize = 11;
const TRANSACTIONS: usize = 150;
const ROWS: usize = 200_000;

type Anything = Result<(), Box<dyn std::error::Error>>;

fn event(number: usize) -> NewEvent {
    let payload = format!("{{\"number\":{number:0>186}}}");
    NewEvent::builder(
        Key::new(format!("key-{}", number % 10_000)).expect("valid"),
        Topic::new("orders").expect("valid"),
        EventType::new("OrderPlaced").expect("valid"),
    )
    .payload(ContentType::new("application/json").expect("valid"), payload)
    .build()
    .expect("within the limits")
}

/// Transactions of one business row, with or without its event; the time for all of them.
fn write(
    connection: &mut Connection,
    with_event: bool,
    first: usize,
) -> Result<Duration, Box<dyn std::error::Error>> {
    let begun = Instant::now();
    for number in first..first + TRANSACTIONS {
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        tx.prepare_cached("INSERT INTO business (name, note) VALUES (?1, ?2)")?
            .execute((format!("row {number}"), "x".repeat(200)))?;
        if with_event {
            append(&tx, &[event(number)])?;
        }
        tx.commit()?;
    }
    Ok(begun.elapsed())
}

fn append_cost(path: &std::path::Path) -> Anything {
    let mut connection = Connection::open(path)?;
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.execute_batch(
        "CREATE TABLE business (id INTEGER PRIMARY KEY, name TEXT NOT NULL, note TEXT NOT NULL)",
    )?;
    write(&mut connection, true, 0)?;
    let mut ratios = Vec::new();
    for pair in 0..PAIRS {
        let (alone, both) = match pair % 2 {
            0 => {
                let alone = write(&mut connection, false, 0)?;
                (alone, write(&mut connection, true, 0)?)
            }
            _ => {
                let both = write(&mut connection, true, 0)?;
                (write(&mut connection, false, 0)?, both)
            }
        };
        let per = |time: Duration| time.as_secs_f64() * 1e6 / TRANSACTIONS as f64;
        println!("  alone {:7.1} µs   with event {:7.1} µs", per(alone), per(both));
        ratios.push(both.as_secs_f64() / alone.as_secs_f64());
    }
    ratios.sort_by(f64::total_cmp);
    println!(
        "append: business row + event = {:.2} x the row alone (median of {PAIRS}; {:.2} to {:.2})",
        ratios[PAIRS / 2],
        ratios[0],
        ratios[PAIRS - 1]
    );
    Ok(())
}

async fn read_cost(store: &SqliteStore) -> Anything {
    for chunk in 0..ROWS / 10_000 {
        let events: Vec<NewEvent> = (0..10_000).map(|i| event(chunk * 10_000 + i)).collect();
        let begun = Instant::now();
        store.transaction(move |tx| append(tx, &events)).await?;
        if chunk == 0 {
            let per = begun.elapsed().as_secs_f64() * 1e6 / 10_000.0;
            println!("append: {per:.1} µs per event in one transaction of 10,000");
        }
    }
    for records in [512, 2_048] {
        let (mut read, begun) = (0usize, Instant::now());
        for index in 0..8 {
            let partition = PartitionId::numbered(index, 8);
            let mut after = Position::START;
            loop {
                let limit = BatchLimit { records, bytes: 8 << 20 };
                let page = store.read(&partition, &after, limit).await?;
                if page.entries.is_empty() {
                    break;
                }
                read += page.entries.len();
                after = page.position;
            }
        }
        let per = begun.elapsed().as_secs_f64() * 1e6 / read as f64;
        println!("feed: {per:.2} µs per row, pages of {records} ({read} rows)");
    }
    Ok(())
}

fn cpu_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split(' ').collect();
    let ticks = |at: usize| fields.get(at).and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
    Duration::from_millis((ticks(12) + ticks(13)) * 10)
}

async fn waiting_cost(store: &SqliteStore) {
    let waiters: Vec<_> = (0..8).map(|_| store.changed()).collect();
    let before = cpu_time();
    let wait = async {
        for waiter in waiters {
            waiter.await;
        }
    };
    let seconds = 10;
    let _ = tokio::time::timeout(Duration::from_secs(seconds), wait).await;
    let used = cpu_time() - before;
    println!(
        "waiting: {:.2} % of one core for a reader at the head",
        used.as_secs_f64() * 100.0 / seconds as f64
    );
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Anything {
    let parent = std::env::args().nth(1).unwrap_or_else(|| ".".into());
    let folder = tempfile::tempdir_in(parent)?;
    let path = folder.path().join("measure.db");
    let store = SqliteStore::open(SqliteOptions::new(&path)).await?;
    append_cost(&path)?;
    read_cost(&store).await?;
    waiting_cost(&store).await;
    Ok(())
}
