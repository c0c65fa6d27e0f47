//! A writer: an application of one thread that appends business rows with their events.
//!
//! What lives here: the body of a writer's process. What does not: starting and killing it.
//! Invariant: an event and its row of truth are written in one transaction or not at all; the
//! payload begins with the event's own id, so that two events never say the same.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use postrider_core::{ContentType, EventId, EventType, Headers, Key, NewEvent, Topic};
use postrider_store_sqlite::append;
use postrider_store_sqlite::rusqlite::{Connection, Transaction, TransactionBehavior};
use rand::RngExt;
use rand::rngs::StdRng;
use uuid::Uuid;

use crate::world::{WRITER_HEADER, connect};

/// Keys that most events share, and how many others there are.
const HOT_KEYS: u32 = 5;
const COLD_KEYS: u32 = 400;
const TOPIC: &str = "fault/events";
const BINARY: &str = "application/octet-stream";
const JSON: &str = "application/json";

/// What a writer is told.
#[derive(Debug, Clone, Copy)]
pub struct Task<'a> {
    /// Where it writes.
    pub database: &'a Path,
    /// Its own name, for the events' headers.
    pub name: &'a str,
    /// How long.
    pub length: Duration,
}

/// Writes until the time is over. Refusals of the database (locked, full) undo a transaction and
/// nothing else.
///
/// # Errors
/// When the database can't be opened.
pub fn run(task: Task<'_>, mut rng: StdRng) -> Result<()> {
    let mut connection = connect(task.database)?;
    let begun = Instant::now();
    let mut number = 0u64;
    while begun.elapsed() < task.length {
        number += 1;
        // A full disk or a lock that lasts: the application would tell its user, and go on.
        let _ = transaction(&mut connection, task.name, &mut rng);
        let pause = if number.is_multiple_of(40) { 60 } else { rng.random_range(1..12) };
        std::thread::sleep(Duration::from_millis(pause));
    }
    Ok(())
}

/// One business transaction; sometimes held open for a while, sometimes rolled back.
fn transaction(connection: &mut Connection, writer: &str, rng: &mut StdRng) -> Result<()> {
    // The append takes the write lock by itself; other applications begin with a read.
    let behavior = match rng.random_bool(0.5) {
        true => TransactionBehavior::Immediate,
        false => TransactionBehavior::Deferred,
    };
    let tx = connection.transaction_with_behavior(behavior)?;
    let events = if rng.random_bool(0.02) { 40 } else { rng.random_range(1..=4) };
    for _ in 0..events {
        event(&tx, &key(rng), writer, rng)?;
    }
    if rng.random_bool(0.2) {
        let longest = if rng.random_bool(0.05) { 150 } else { 15 };
        std::thread::sleep(Duration::from_millis(rng.random_range(1..longest)));
    }
    if rng.random_bool(0.1) {
        return tx.rollback().context("roll back");
    }
    tx.commit().context("commit")
}

fn key(rng: &mut StdRng) -> String {
    match rng.random_bool(0.6) {
        true => format!("hot {}", rng.random_range(0..HOT_KEYS)),
        false => format!("köld/{}", rng.random_range(0..COLD_KEYS)),
    }
}

fn payload(id: Uuid, json: bool, rng: &mut StdRng) -> Vec<u8> {
    if json {
        // Spaces, an escape and a number beyond 2^53 stay as they are.
        let number = rng.random::<u64>();
        return format!("{{ \"id\":\"{id}\", \"n\": {number}, \"t\":\"\\u00e9\\n é\"}}")
            .into_bytes();
    }
    let length = if rng.random_bool(0.01) {
        rng.random_range(50_000..200_000)
    } else {
        rng.random_range(0..400)
    };
    let mut bytes = id.as_bytes().to_vec();
    bytes.resize_with(16 + length, || rng.random());
    bytes
}

/// One event and its row of truth.
fn event(tx: &Transaction<'_>, key: &str, writer: &str, rng: &mut StdRng) -> Result<EventId> {
    let id = Uuid::now_v7();
    let json = rng.random_bool(0.3);
    let content_type = if json { JSON } else { BINARY };
    let payload = payload(id, json, rng);
    let event_type = if json { "ThingSaid" } else { "ThingDone" };
    if rng.random_bool(0.15) {
        let headers = format!("{{\"{WRITER_HEADER}\":\"{writer}\"}}");
        tx.prepare_cached(
            "INSERT INTO postrider_append (id, key, topic, type, content_type, headers, payload)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
        )?
        .execute((
            id.as_bytes(),
            key,
            TOPIC,
            event_type,
            content_type,
            headers,
            &payload,
        ))?;
    } else {
        let mut headers = Headers::new();
        headers.insert(WRITER_HEADER, writer)?;
        let (key, topic) = (Key::new(key)?, Topic::new(TOPIC)?);
        let event = NewEvent::builder(key, topic, EventType::new(event_type)?)
            .id(EventId::from_uuid(id))
            .headers(headers)
            .payload(ContentType::new(content_type)?, payload.clone())
            .build()?;
        append(tx, &[event])?;
    }
    tx.prepare_cached(
        "INSERT INTO fault_truth
             (id, key, topic, type, content_type, writer, payload, partition, seq)
         SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, partition, seq FROM postrider_outbox WHERE id = ?1",
    )?
    .execute((id.as_bytes(), key, TOPIC, event_type, content_type, writer, &payload))?;
    Ok(EventId::from_uuid(id))
}

/// Commits one event with its row of truth.
///
/// # Errors
/// The database's.
pub fn commit_event(connection: &mut Connection, key: &str, rng: &mut StdRng) -> Result<EventId> {
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let id = event(&tx, key, "load", rng)?;
    tx.commit().context("commit")?;
    Ok(id)
}

/// Holds the write lock for a while, as a neighbour's long transaction does.
///
/// # Errors
/// When the lock can't be taken.
pub fn hold_lock(database: &Path, length: Duration) -> Result<()> {
    let mut connection = connect(database)?;
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    std::thread::sleep(length);
    tx.rollback().context("let go of the lock")
}
