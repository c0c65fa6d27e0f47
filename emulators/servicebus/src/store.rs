//! The file in which entities outlive the emulator.
//!
//! What lives here: its tables, reading all of it at the start, writing what has changed. What does
//! not: what changes when (`broker/`).
//! Invariant: a change is written whole or not at all, and one emulator at a time has the file.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rusqlite::{Connection, OptionalExtension, Row, Transaction, params};

use crate::broker::Letter;
use crate::broker::message::Message;
use crate::broker::queue::{Queue, State, Stored};
use crate::error::{Error, Result};

/// "PSBE": a file that says so is an emulator's.
const APPLICATION: i32 = 0x5053_4245;
/// Of the tables.
const VERSION: i32 = 1;
/// How long an emulator that is just ending may still have the file.
const BUSY: Duration = Duration::from_secs(2);

/// Runs once, in a transaction that has the file for itself.
const TABLES: &str = "
create table entities (path text primary key, next_sequence_number integer not null) strict;
create table messages (
    path text not null, sequence_number integer not null,
    state integer not null, due_ms integer, enqueued_ms integer not null, expires_ms integer,
    delivery_count integer not null, size integer not null, content blob not null,
    letter_source text, letter_reason text, letter_description text,
    primary key (path, sequence_number)
) strict;
create table sessions (path text not null, id text not null, state blob not null,
    primary key (path, id)) strict;
create table seen (path text not null, id text not null, until_ms integer not null,
    primary key (path, id)) strict;
create index seen_by_end on seen (path, until_ms);";

// None of the following locks anything by itself: the file belongs to this emulator alone from its
// start to its end.
const PUT_MESSAGE: &str = "insert or replace into messages (path, sequence_number, state, due_ms, \
    enqueued_ms, expires_ms, delivery_count, size, content, letter_source, letter_reason, \
    letter_description) values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)";
const DROP_MESSAGE: &str = "delete from messages where path = ?1 and sequence_number = ?2";
const MESSAGES: &str = "select path, sequence_number, state, due_ms, enqueued_ms, expires_ms, \
    delivery_count, size, content, letter_source, letter_reason, letter_description \
    from messages order by path, sequence_number";
const PUT_NUMBER: &str = "insert or replace into entities values (?1, ?2)";
const NUMBERS: &str = "select path, next_sequence_number from entities";
const PUT_SESSION: &str = "insert or replace into sessions values (?1, ?2, ?3)";
const DROP_SESSION: &str = "delete from sessions where path = ?1 and id = ?2";
const SESSIONS: &str = "select path, id, state from sessions";
const PUT_SEEN: &str = "insert or replace into seen values (?1, ?2, ?3)";
const FORGET_SEEN: &str = "delete from seen where path = ?1 and until_ms <= ?2";
const SEEN: &str = "select path, id, until_ms from seen order by until_ms";

const READY: i64 = 0;
const DEFERRED: i64 = 1;
const SCHEDULED: i64 = 2;

/// See the module.
#[derive(Debug)]
pub(crate) struct Store {
    connection: Connection,
}

impl Store {
    /// Opens the file or makes it, and takes it for this emulator alone.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let failed = |source| Error::Data {
            path: path.to_owned(),
            problem: "open it",
            source: Some(source),
        };
        let mut connection = Connection::open(path).map_err(failed)?;
        connection.busy_timeout(BUSY).map_err(failed)?;
        connection.pragma_update(None, "locking_mode", "exclusive").map_err(failed)?;
        let tx = connection.transaction_with_behavior(rusqlite::TransactionBehavior::Exclusive);
        let tx = tx.map_err(failed)?;
        let (application, version) = (number(&tx, "application_id"), number(&tx, "user_version"));
        let (application, version) = (application.map_err(failed)?, version.map_err(failed)?);
        let foreign = |problem| Error::Data { path: path.to_owned(), problem, source: None };
        match (application, version) {
            (APPLICATION, VERSION) => {}
            (APPLICATION, _) => return Err(foreign("it was written by another version")),
            _ if !is_empty(&tx).map_err(failed)? => {
                return Err(foreign("it is another program's database"));
            }
            _ => {
                tx.execute_batch(TABLES).map_err(failed)?;
                tx.pragma_update(None, "application_id", APPLICATION).map_err(failed)?;
                tx.pragma_update(None, "user_version", VERSION).map_err(failed)?;
            }
        }
        tx.commit().map_err(failed)?;
        let journal = connection
            .pragma_update_and_check(None, "journal_mode", "wal", |row| row.get::<_, String>(0));
        journal.map_err(failed)?;
        connection.pragma_update(None, "synchronous", "full").map_err(failed)?;
        Ok(Self { connection })
    }

    /// Gives every queue back what was saved of it. What belongs to an entity that is not there
    /// now stays in the file.
    pub(crate) fn load(&self, queues: &mut HashMap<String, Queue>, path: &Path) -> Result<()> {
        let failed = |source| Error::Data {
            path: path.to_owned(),
            problem: "read it",
            source: Some(source),
        };
        self.each(NUMBERS, queues, |queue, row| {
            queue.restore_number(row.get(1)?);
            Ok(())
        })
        .map_err(failed)?;
        self.each(MESSAGES, queues, |queue, row| {
            queue.restore(stored(row)?);
            Ok(())
        })
        .map_err(failed)?;
        self.each(SESSIONS, queues, |queue, row| {
            let state: Vec<u8> = row.get(2)?;
            queue.restore_session(&row.get::<_, String>(1)?, Bytes::from(state));
            Ok(())
        })
        .map_err(failed)?;
        self.each(SEEN, queues, |queue, row| {
            queue.restore_seen(row.get(1)?, row.get(2)?);
            Ok(())
        })
        .map_err(failed)
    }

    fn each(
        &self,
        sql: &str,
        queues: &mut HashMap<String, Queue>,
        mut give: impl FnMut(&mut Queue, &Row<'_>) -> rusqlite::Result<()>,
    ) -> rusqlite::Result<()> {
        let mut statement = self.connection.prepare(sql)?;
        let mut rows = statement.query([])?;
        while let Some(row) = rows.next()? {
            if let Some(queue) = queues.get_mut(&row.get::<_, String>(0)?) {
                give(queue, row)?;
            }
        }
        Ok(())
    }

    /// Writes what has changed in these queues, all of it or nothing; it is durable afterwards.
    pub(crate) fn save<'a>(
        &mut self,
        queues: impl Iterator<Item = (&'a String, &'a Queue)>,
        now_ms: i64,
    ) -> rusqlite::Result<()> {
        let tx = self.connection.transaction()?;
        for (path, queue) in queues {
            write(&tx, path, queue, now_ms)?;
        }
        tx.commit()
    }
}

fn number(tx: &Transaction<'_>, pragma: &str) -> rusqlite::Result<i32> {
    tx.pragma_query_value(None, pragma, |row| row.get(0))
}

fn is_empty(tx: &Transaction<'_>) -> rusqlite::Result<bool> {
    let any = tx.query_row("select 1 from sqlite_schema limit 1", [], |_| Ok(())).optional()?;
    Ok(any.is_none())
}

fn write(tx: &Transaction<'_>, path: &str, queue: &Queue, now_ms: i64) -> rusqlite::Result<()> {
    let Some(unsaved) = queue.unsaved() else { return Ok(()) };
    let mut put = tx.prepare_cached(PUT_MESSAGE)?;
    let mut drop = tx.prepare_cached(DROP_MESSAGE)?;
    for number in &unsaved.messages {
        let Some(stored) = queue.message(*number) else {
            drop.execute(params![path, number])?;
            continue;
        };
        let (state, due_ms) = match queue.lasting_state(stored) {
            State::Ready | State::Locked { .. } => (READY, None),
            State::Deferred => (DEFERRED, None),
            State::Scheduled { due_ms } => (SCHEDULED, Some(due_ms)),
        };
        let content = stored
            .message
            .to_bytes()
            .map_err(|error| rusqlite::Error::ToSqlConversionFailure(error.to_string().into()))?;
        let letter = stored.letter.as_ref();
        put.execute(params![
            path,
            number,
            state,
            due_ms,
            stored.enqueued_ms,
            stored.expires_ms,
            stored.delivery_count,
            i64::try_from(stored.message.size).unwrap_or(i64::MAX),
            content,
            letter.map(|letter| &letter.source),
            letter.and_then(|letter| letter.reason.as_ref()),
            letter.and_then(|letter| letter.description.as_ref()),
        ])?;
    }
    if !unsaved.messages.is_empty() {
        tx.prepare_cached(PUT_NUMBER)?.execute(params![path, queue.next_sequence_number()])?;
    }
    for id in &unsaved.sessions {
        match queue.session_state(id) {
            Some(state) => {
                tx.prepare_cached(PUT_SESSION)?.execute(params![path, id, &state[..]])?;
            }
            None => {
                tx.prepare_cached(DROP_SESSION)?.execute(params![path, id])?;
            }
        }
    }
    if !unsaved.seen.is_empty() {
        tx.prepare_cached(FORGET_SEEN)?.execute(params![path, now_ms])?;
    }
    for (id, until_ms) in &unsaved.seen {
        tx.prepare_cached(PUT_SEEN)?.execute(params![path, id, until_ms])?;
    }
    Ok(())
}

fn stored(row: &Row<'_>) -> rusqlite::Result<Stored> {
    let content: Vec<u8> = row.get(8)?;
    let mut message = Message::decode(&content).map_err(|error| {
        let text = error.to_string().into();
        rusqlite::Error::FromSqlConversionFailure(8, rusqlite::types::Type::Blob, text)
    })?;
    message.size = usize::try_from(row.get::<_, i64>(7)?).unwrap_or_default();
    let due_ms: Option<i64> = row.get(3)?;
    let state = match (row.get(2)?, due_ms) {
        (DEFERRED, _) => State::Deferred,
        (SCHEDULED, Some(due_ms)) => State::Scheduled { due_ms },
        _ => State::Ready,
    };
    let source: Option<String> = row.get(9)?;
    let (reason, description) = (row.get(10)?, row.get(11)?);
    Ok(Stored {
        sequence_number: row.get(1)?,
        message: Arc::new(message),
        enqueued_ms: row.get(4)?,
        expires_ms: row.get(5)?,
        delivery_count: row.get(6)?,
        state,
        letter: source.map(|source| Letter { source, reason, description }),
    })
}
