//! Appending events inside the caller's own transaction.
//!
//! What lives here: `append` for `rusqlite` and, with the feature, for `sqlx`. What does not:
//! reading, and waking readers (`SqliteStore::ring`).
//! Invariant: the first statement is a write, so that it takes SQLite's one write lock before
//! `seq` and `at_ms` are chosen: the order of writing is the order of the feed.

use postrider_core::limits::MAX_APPEND_EVENTS;
use postrider_core::{Error, EventId, NewEvent, Result, key_hash};
use rusqlite::{Connection, Transaction};
use uuid::Uuid;

use crate::clock::wall_ms;
use crate::error::{failed, is_duplicate, sqlite_error};
use crate::row::headers_text;

/// What `append` does with an event whose id is in the outbox already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnDuplicate {
    /// Fails with `Permanent`, and nothing of this `append` stays.
    #[default]
    Fail,
    /// Leaves the first one as it is.
    Ignore,
}

/// Takes the write lock if it is not held, then chooses: `seq` is one above the largest (the
/// largest row is never deleted), `at_ms` never falls behind the last one, and the partition is
/// of the generation that is current under this lock.
const APPEND: &str = "INSERT INTO postrider_outbox
        (partition, id, key, topic, type, content_type, headers, payload, at_ms)
    VALUES ((SELECT first_partition + ?1 % partition_count FROM postrider_state),
        ?2, ?3, ?4, ?5, ?6, ?7, ?8,
        max(?9, ifnull((SELECT at_ms FROM postrider_outbox ORDER BY seq DESC LIMIT 1), 0)))";

/// [`APPEND`], but an id that is there already is passed over; other refusals stay errors.
const APPEND_OR_IGNORE: &str = "INSERT INTO postrider_outbox
        (partition, id, key, topic, type, content_type, headers, payload, at_ms)
    VALUES ((SELECT first_partition + ?1 % partition_count FROM postrider_state),
        ?2, ?3, ?4, ?5, ?6, ?7, ?8,
        max(?9, ifnull((SELECT at_ms FROM postrider_outbox ORDER BY seq DESC LIMIT 1), 0)))
    ON CONFLICT (id) DO NOTHING";

const fn statement(on_duplicate: OnDuplicate) -> &'static str {
    match on_duplicate {
        OnDuplicate::Fail => APPEND,
        OnDuplicate::Ignore => APPEND_OR_IGNORE,
    }
}

/// Appends events in the given order and returns their ids; they appear in the feed when `tx`
/// commits and never if it does not.
///
/// Begin the transaction as IMMEDIATE when it reads before it writes: SQLite refuses to write
/// after another connection wrote in between. Call [`SqliteStore::ring`](crate::SqliteStore::ring)
/// after the commit, or let the store see it by itself a few milliseconds later.
///
/// # Errors
/// `Permanent` for an id that is in the outbox already or too many events, `Transient` when the
/// database is locked or full. Nothing of this call stays, whatever becomes of `tx`.
pub fn append(tx: &Transaction<'_>, events: &[NewEvent]) -> Result<Vec<EventId>> {
    append_with(tx, events, OnDuplicate::Fail)
}

/// [`append`], with a choice for ids that are there already.
///
/// # Errors
/// As [`append`].
pub fn append_with(
    tx: &Transaction<'_>,
    events: &[NewEvent],
    on_duplicate: OnDuplicate,
) -> Result<Vec<EventId>> {
    append_at(tx, events, on_duplicate, wall_ms())
}

fn check_count(events: &[NewEvent]) -> Result<()> {
    if events.len() > MAX_APPEND_EVENTS {
        return Err(Error::permanent(format!(
            "{} events in one append; {MAX_APPEND_EVENTS} are allowed: append in parts",
            events.len()
        )));
    }
    Ok(())
}

pub(crate) fn append_at(
    tx: &Connection,
    events: &[NewEvent],
    on_duplicate: OnDuplicate,
    now_ms: i64,
) -> Result<Vec<EventId>> {
    check_count(events)?;
    if tx.is_autocommit() {
        return Err(Error::permanent(
            "append outside a transaction; it was committed or rolled back before",
        ));
    }
    if events.len() < 2 {
        // One statement is undone by SQLite itself when it fails.
        return insert_all(tx, events, on_duplicate, now_ms);
    }
    let place = "append events";
    tx.execute_batch("SAVEPOINT postrider_append").map_err(failed(place))?;
    let appended = insert_all(tx, events, on_duplicate, now_ms);
    let end = match &appended {
        Ok(_) => "RELEASE postrider_append",
        Err(_) => "ROLLBACK TO postrider_append; RELEASE postrider_append",
    };
    match tx.execute_batch(end) {
        Ok(()) => appended,
        // Some failures (a full disk) make SQLite roll back the whole transaction by itself.
        Err(_) if tx.is_autocommit() && appended.is_err() => appended,
        Err(error) => Err(sqlite_error(place, error)),
    }
}

fn insert_all(
    tx: &Connection,
    events: &[NewEvent],
    on_duplicate: OnDuplicate,
    now_ms: i64,
) -> Result<Vec<EventId>> {
    let place = "append events";
    let mut statement = tx.prepare_cached(statement(on_duplicate)).map_err(failed(place))?;
    let mut ids = Vec::with_capacity(events.len());
    for event in events {
        let id = event.id().unwrap_or_else(|| EventId::from_uuid(Uuid::now_v7()));
        let event = event.clone().identified(|| id);
        let inserted = statement.execute((
            key_hash(event.key()),
            id.as_uuid().as_bytes().as_slice(),
            event.key().as_str(),
            event.topic().as_str(),
            event.event_type().as_str(),
            event.content_type().as_str(),
            headers_text(event.headers()),
            event.payload().as_ref(),
            now_ms,
        ));
        inserted.map_err(|error| {
            if is_duplicate(&error) { duplicate(id) } else { sqlite_error(place, error) }
        })?;
        ids.push(id);
    }
    Ok(ids)
}

fn duplicate(id: EventId) -> Error {
    Error::permanent(format!("event {id} was appended before; give each event an id of its own"))
}

/// [`append`] inside a transaction of `sqlx`.
///
/// # Errors
/// As [`append`].
///
/// # Cancellation
/// A dropped future may leave some of the events in the transaction: roll it back, as dropping it
/// does.
#[cfg(feature = "sqlx")]
pub async fn append_sqlx(
    tx: &mut sqlx::Transaction<'_, sqlx::Sqlite>,
    events: &[NewEvent],
) -> Result<Vec<EventId>> {
    append_sqlx_with(tx, events, OnDuplicate::Fail).await
}

/// [`append_sqlx`], with a choice for ids that are there already.
///
/// # Errors
/// As [`append`].
#[cfg(feature = "sqlx")]
pub async fn append_sqlx_with(
    tx: &mut sqlx::Transaction<'_, sqlx::Sqlite>,
    events: &[NewEvent],
    on_duplicate: OnDuplicate,
) -> Result<Vec<EventId>> {
    use sqlx::Acquire as _;

    use crate::error::sqlx_error;
    check_count(events)?;
    let place = "append events";
    // A savepoint, so that a failure in the middle leaves nothing; undone when dropped.
    let mut part = tx.begin().await.map_err(|error| sqlx_error(place, error))?;
    let now_ms = wall_ms();
    let mut ids = Vec::with_capacity(events.len());
    for event in events {
        let id = event.id().unwrap_or_else(|| EventId::from_uuid(Uuid::now_v7()));
        let event = event.clone().identified(|| id);
        let inserted = sqlx::query(statement(on_duplicate))
            .bind(i64::from(key_hash(event.key())))
            .bind(id.as_uuid().as_bytes().as_slice())
            .bind(event.key().as_str())
            .bind(event.topic().as_str())
            .bind(event.event_type().as_str())
            .bind(event.content_type().as_str())
            .bind(headers_text(event.headers()))
            .bind(event.payload().as_ref())
            .bind(now_ms)
            .execute(&mut *part)
            .await;
        inserted.map_err(|error| {
            let twice = error.as_database_error().is_some_and(|e| e.is_unique_violation());
            if twice { duplicate(id) } else { sqlx_error(place, error) }
        })?;
        ids.push(id);
    }
    part.commit().await.map_err(|error| sqlx_error(place, error))?;
    Ok(ids)
}
