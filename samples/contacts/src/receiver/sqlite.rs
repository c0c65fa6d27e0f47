//! The journal in SQLite, beside the inbox, so that one transaction writes both.
//!
//! What lives here: two tables and their statements. What does not: verifying deliveries, and
//! following the journal.
//! Invariant: a number is given once in the life of the database, under its write lock.

use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use postrider::sqlite::rusqlite::{Connection, OpenFlags, Row, Transaction, params};
use postrider::sqlite::{Handled, InboxOptions, SqliteInbox, SqliteStore, sqlite_error};
use postrider::{ConsumerName, Error, Result};
use serde_json::value::RawValue;
use uuid::Uuid;

use super::journal::{Arrival, Journal, KEPT_EVENTS, Receipt, ReceivedEvent};

const SCHEMA: &str = "
    CREATE TABLE IF NOT EXISTS contacts_journal (
        number  INTEGER PRIMARY KEY AUTOINCREMENT,
        id      TEXT NOT NULL,
        type    TEXT NOT NULL,
        key     TEXT NOT NULL,
        payload TEXT NOT NULL
    );
    CREATE TABLE IF NOT EXISTS contacts_journal_identity (
        one      INTEGER PRIMARY KEY CHECK (one = 1),
        identity TEXT NOT NULL
    );";

/// Takes the write lock; of several processes that open one file, the first one's name stays.
const NAME: &str = "INSERT INTO contacts_journal_identity (one, identity) VALUES (1, ?1)
    ON CONFLICT (one) DO NOTHING";
/// Runs under the write lock that the inbox's note took before it.
const ADD: &str = "INSERT INTO contacts_journal (id, type, key, payload) VALUES (?1, ?2, ?3, ?4)";
/// Under the same lock; `AUTOINCREMENT` keeps the numbers of removed rows from coming back.
const REMOVE_OLD: &str = "DELETE FROM contacts_journal
    WHERE number <= (SELECT max(number) FROM contacts_journal) - ?1";
/// Takes no lock: a snapshot of the write-ahead log.
const AFTER: &str = "SELECT number, id, type, key, payload FROM contacts_journal
    WHERE number > ?1 ORDER BY number LIMIT ?2";

/// The name under which this receiver's inbox remembers events.
const CONSUMER: &str = "contacts-page";
/// Remembered events that are forgotten at a time once they are old enough.
const PRUNE_BATCH: u32 = 1_000;

/// The journal, its inbox, and a connection that reads.
pub(crate) struct SqliteJournal {
    inbox: SqliteInbox,
    consumer: ConsumerName,
    reader: Arc<Mutex<Connection>>,
    identity: Uuid,
    opened_at: u64,
}

impl SqliteJournal {
    /// Opens the journal in the store's own file; `path` names it.
    pub(crate) async fn open(store: SqliteStore, path: std::path::PathBuf) -> Result<Self> {
        let (identity, opened_at) = store.transaction(prepare).await?;
        let opened = tokio::task::spawn_blocking(move || {
            let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_URI;
            Connection::open_with_flags(path, flags).map_err(failed("open the journal"))
        });
        let reader = opened.await.map_err(stopping)??;
        let inbox = SqliteInbox::new(store, InboxOptions::default())?;
        let consumer = ConsumerName::new(CONSUMER)?;
        inbox.prune(&consumer, None, PRUNE_BATCH).await?;
        Ok(Self { inbox, consumer, reader: Arc::new(Mutex::new(reader)), identity, opened_at })
    }
}

#[async_trait]
impl Journal for SqliteJournal {
    fn identity(&self) -> Uuid {
        self.identity
    }

    fn opened_at(&self) -> u64 {
        self.opened_at
    }

    async fn receive(&self, arrival: Arrival) -> Result<Receipt> {
        let id = arrival.id;
        let handled = self.inbox.handle(&self.consumer, id, move |tx| add(tx, &arrival)).await?;
        match handled {
            Handled::Now(number) => {
                // Once in a thousand events, so that the inbox is bounded by its window.
                if number % i64::from(PRUNE_BATCH) == 0 {
                    self.inbox.prune(&self.consumer, None, 2 * PRUNE_BATCH).await?;
                }
                Ok(Receipt::First)
            }
            Handled::Before => Ok(Receipt::Repeated),
        }
    }

    async fn after(&self, number: u64, limit: u32) -> Result<Vec<ReceivedEvent>> {
        let reader = Arc::clone(&self.reader);
        let page = tokio::task::spawn_blocking(move || {
            let reader = reader.lock().unwrap_or_else(PoisonError::into_inner);
            read(&reader, number, limit)
        });
        page.await.map_err(stopping)?
    }
}

/// The journal's name and its last number.
fn prepare(tx: &Transaction<'_>) -> Result<(Uuid, u64)> {
    tx.execute_batch(SCHEMA).map_err(failed("create the journal"))?;
    tx.execute(NAME, [Uuid::new_v4().to_string()]).map_err(failed("name the journal"))?;
    let identity: String = tx
        .query_row("SELECT identity FROM contacts_journal_identity", [], |row| row.get(0))
        .map_err(failed("read the journal's name"))?;
    let identity = identity
        .parse()
        .map_err(|error| Error::corrupt("the journal's name is no UUID").with_source(error))?;
    let last: i64 = tx
        .query_row("SELECT coalesce(max(number), 0) FROM contacts_journal", [], |row| row.get(0))
        .map_err(failed("read the journal's last number"))?;
    Ok((identity, u64::try_from(last).unwrap_or_default()))
}

fn add(tx: &Transaction<'_>, arrival: &Arrival) -> Result<i64> {
    let Arrival { id, event_type, key, payload } = arrival;
    tx.execute(ADD, params![id.to_string(), event_type, key, payload.get()])
        .map_err(failed("add to the journal"))?;
    let number = tx.last_insert_rowid();
    tx.execute(REMOVE_OLD, [KEPT_EVENTS]).map_err(failed("remove old events"))?;
    Ok(number)
}

fn read(reader: &Connection, number: u64, limit: u32) -> Result<Vec<ReceivedEvent>> {
    // Numbers are SQLite's, so that one beyond them has nothing after it.
    let number = i64::try_from(number).unwrap_or(i64::MAX);
    let place = "read the journal";
    let mut statement = reader.prepare_cached(AFTER).map_err(failed(place))?;
    let rows = statement.query_map(params![number, limit], columns).map_err(failed(place))?;
    rows.map(|row| event(row.map_err(failed(place))?)).collect()
}

type Columns = (i64, String, String, String, String);

fn columns(row: &Row<'_>) -> postrider::sqlite::rusqlite::Result<Columns> {
    Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?))
}

fn event((number, id, event_type, key, payload): Columns) -> Result<ReceivedEvent> {
    let damaged = || format!("event {number} of the journal is damaged");
    let id = id.parse().map_err(|error| Error::corrupt(damaged()).with_source(error))?;
    let payload = RawValue::from_string(payload)
        .map_err(|error| Error::corrupt(damaged()).with_source(error))?;
    let number = u64::try_from(number).unwrap_or_default();
    Ok(ReceivedEvent { number, id, event_type, key, payload })
}

fn failed(place: &'static str) -> impl Fn(postrider::sqlite::rusqlite::Error) -> Error {
    move |error| sqlite_error(place, error)
}

fn stopping(error: tokio::task::JoinError) -> Error {
    Error::transient("the runtime is shutting down").with_source(error)
}
