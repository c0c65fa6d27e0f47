//! A writer on SQLite: an application of one thread.
//!
//! What lives here: the body of a writer's process, and of one that holds the write lock. What does
//! not: starting and killing it.
//! Invariant: an event and its row of truth are written in one transaction or not at all.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use postrider_core::{ContentType, EventId, EventType, Headers, Key, NewEvent, Topic};
use postrider_store_sqlite::append;
use postrider_store_sqlite::rusqlite::{Connection, Transaction, TransactionBehavior};
use rand::RngExt;
use rand::rngs::StdRng;
use uuid::Uuid;

use super::{LARGEST, TOPIC, key, payload, what};
use crate::world::WRITER_HEADER;
use crate::world::sqlite::connect;

/// What a writer is told.
#[derive(Debug, Clone, Copy)]
pub struct Task<'a> {
    /// Where it writes.
    pub database: &'a Path,
    /// Its own name, for the events' headers.
    pub name: &'a str,
    /// How long.
    pub length: Duration,
    /// The largest payload, in bytes.
    pub largest: usize,
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
        let _ = transaction(&mut connection, task, &mut rng);
        let pause = if number.is_multiple_of(40) { 60 } else { rng.random_range(1..12) };
        std::thread::sleep(Duration::from_millis(pause));
    }
    Ok(())
}

/// One business transaction; sometimes held open for a while, sometimes rolled back.
fn transaction(connection: &mut Connection, task: Task<'_>, rng: &mut StdRng) -> Result<()> {
    // The append takes the write lock by itself; other applications begin with a read.
    let behavior = match rng.random_bool(0.5) {
        true => TransactionBehavior::Immediate,
        false => TransactionBehavior::Deferred,
    };
    let tx = connection.transaction_with_behavior(behavior)?;
    let events = if rng.random_bool(0.02) { 40 } else { rng.random_range(1..=4) };
    for _ in 0..events {
        event(&tx, &key(rng), task.name, task.largest, rng)?;
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

/// One event and its row of truth.
fn event(
    tx: &Transaction<'_>,
    key: &str,
    writer: &str,
    largest: usize,
    rng: &mut StdRng,
) -> Result<EventId> {
    let id = Uuid::now_v7();
    let json = rng.random_bool(0.3);
    let (event_type, content_type) = what(json);
    let payload = payload(id, json, largest, rng);
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
    let id = event(&tx, key, "load", LARGEST, rng)?;
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
