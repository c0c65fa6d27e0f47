//! The connections: one that writes, several that read.
//!
//! What lives here: opening them with their settings, and running work on them off the async
//! runtime. What does not: any statement of the seams.
//! Invariant: work that was begun runs to its end in a transaction that is committed or rolled
//! back, also when the future that asked for it is dropped.

use std::sync::{Arc, Mutex as StdMutex, PoisonError};
use std::time::{Duration, Instant};

use postrider_core::{Error, Result};
use rusqlite::{Connection, ErrorCode, Transaction, TransactionBehavior};
use tokio::sync::{Mutex, Semaphore};

use crate::config::{SqliteOptions, Synchronous};
use crate::error::failed;

/// Prepared statements kept per connection: all of this crate's, with room to spare.
const STATEMENTS: usize = 128;

/// A connection's page cache in KiB, negated as SQLite wants it: a quarter of SQLite's default.
/// Readers go through the outbox once, and a cache for each of them would be the larger part of a
/// small relay's memory; the operating system's own cache is shared.
const CACHE_SIZE: i64 = -512;

/// Opens a connection with the store's settings.
pub(crate) fn connect(options: &SqliteOptions) -> Result<Connection> {
    let connection = Connection::open(&options.path).map_err(failed("open the database"))?;
    configure(&connection, options)?;
    Ok(connection)
}

fn configure(connection: &Connection, options: &SqliteOptions) -> Result<()> {
    let place = "set up the connection";
    connection.set_prepared_statement_cache_capacity(STATEMENTS);
    connection.busy_timeout(options.busy_timeout).map_err(failed(place))?;
    use_write_ahead_log(connection, options.busy_timeout)?;
    let synchronous = match options.synchronous {
        Synchronous::Full => "FULL",
        Synchronous::Normal => "NORMAL",
    };
    connection.pragma_update(None, "synchronous", synchronous).map_err(failed(place))?;
    connection.pragma_update(None, "cache_size", CACHE_SIZE).map_err(failed(place))?;
    if let Some(bytes) = options.max_file_bytes {
        let page: i64 = connection
            .pragma_query_value(None, "page_size", |row| row.get(0))
            .map_err(failed(place))?;
        let pages = i64::try_from(bytes).unwrap_or(i64::MAX) / page.max(1);
        connection
            .pragma_update_and_check(None, "max_page_count", pages.max(1), |_| Ok(()))
            .map_err(failed(place))?;
    }
    Ok(())
}

/// SQLite does not ask its busy handler for every lock that this switch takes, so that several
/// processes which create one database together have to try again here.
fn use_write_ahead_log(connection: &Connection, patience: Duration) -> Result<()> {
    let begun = Instant::now();
    loop {
        let switched = connection
            .pragma_update_and_check(None, "journal_mode", "WAL", |row| row.get::<_, String>(0));
        match switched {
            Ok(_) => return Ok(()),
            Err(error) => {
                let busy = error.sqlite_error_code() == Some(ErrorCode::DatabaseBusy);
                if !busy || begun.elapsed() >= patience {
                    return Err(failed("switch to the write-ahead log")(error));
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

/// The store's connections.
pub(crate) struct Connections {
    writer: Arc<Mutex<Connection>>,
    free_readers: Arc<StdMutex<Vec<Connection>>>,
    permits: Arc<Semaphore>,
    options: SqliteOptions,
}

impl Connections {
    pub(crate) fn new(writer: Connection, options: &SqliteOptions) -> Self {
        Self {
            writer: Arc::new(Mutex::new(writer)),
            free_readers: Arc::default(),
            permits: Arc::new(Semaphore::new(options.readers)),
            options: options.clone(),
        }
    }

    /// Runs `work` in a transaction that holds the write lock from its first statement on, and
    /// commits it if `work` succeeds.
    pub(crate) async fn write<T, E>(
        &self,
        work: impl FnOnce(&Transaction<'_>) -> Result<T, E> + Send + 'static,
    ) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<Error> + Send + 'static,
    {
        let mut writer = Arc::clone(&self.writer).lock_owned().await;
        let done = tokio::task::spawn_blocking(move || {
            let tx = writer
                .transaction_with_behavior(TransactionBehavior::Immediate)
                .map_err(failed("begin a write"))?;
            let value = work(&tx)?;
            tx.commit().map_err(failed("commit"))?;
            Ok(value)
        });
        joined(done.await)
    }

    /// Runs `work` on one snapshot of the database.
    pub(crate) async fn read<T>(
        &self,
        work: impl FnOnce(&Transaction<'_>) -> Result<T> + Send + 'static,
    ) -> Result<T>
    where
        T: Send + 'static,
    {
        let permit =
            Arc::clone(&self.permits).acquire_owned().await.expect("the semaphore is never closed");
        let free = Arc::clone(&self.free_readers);
        let options = self.options.clone();
        let done = tokio::task::spawn_blocking(move || {
            let kept = free.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let mut reader = match kept {
                Some(reader) => reader,
                None => connect(&options)?,
            };
            let tx = reader.transaction().map_err(failed("begin a read"))?;
            let value = work(&tx);
            drop(tx);
            free.lock().unwrap_or_else(PoisonError::into_inner).push(reader);
            drop(permit);
            value
        });
        joined(done.await)
    }
}

/// A panic of the work goes on in the caller; a runtime that shuts down is a passing fault.
pub(crate) fn joined<T, E: From<Error>>(
    done: std::result::Result<Result<T, E>, tokio::task::JoinError>,
) -> Result<T, E> {
    match done {
        Ok(result) => result,
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        Err(error) => {
            Err(Error::transient("the runtime is shutting down").with_source(error).into())
        }
    }
}
