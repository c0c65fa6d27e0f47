//! Outbox, feed and everything a relay keeps, in SQLite.
//!
//! What lives here: the store for databases that applications embed; any number of threads and
//! processes of one machine may share a file. What does not: sinks and the relay.
//! Invariant: SQLite has one writer at a time, so the order of writing under its lock is the order
//! of the feed; nothing is ordered by a clock.

mod append;
mod checkpoints;
mod clock;
mod config;
mod connections;
mod dead_letters;
mod documents;
mod error;
mod feed;
mod inbox;
mod leases;
mod migrate;
mod partitions;
mod positions;
mod retention;
mod row;
mod wakeup;

use std::sync::Arc;

use postrider_core::{Error, EventId, NewEvent, Result};
use rusqlite::Transaction;

pub use append::{OnDuplicate, append, append_with};
#[cfg(feature = "sqlx")]
pub use append::{append_sqlx, append_sqlx_with};
pub use clock::ClockOffset;
pub use config::{SchemaOnOpen, SqliteOptions, Synchronous};
pub use error::sqlite_error;
#[cfg(feature = "sqlx")]
pub use inbox::first_time_sqlx;
pub use inbox::{Handled, InboxOptions, SqliteInbox, first_time};
pub use migrate::{SCHEMA_VERSION, schema_sql};
pub use rusqlite;

use connections::Connections;
use wakeup::Wakeup;

/// A database with an outbox in it. Cloning shares its connections.
#[derive(Clone)]
pub struct SqliteStore {
    inner: Arc<Inner>,
}

struct Inner {
    connections: Connections,
    clock: clock::StoreClock,
    wakeup: Arc<Wakeup>,
    identity: String,
}

impl std::fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SqliteStore {{ {} }}", self.inner.identity)
    }
}

impl SqliteStore {
    /// Opens the database and brings its tables to this program's version; creates both where
    /// missing. Several processes may do so at once.
    ///
    /// # Errors
    /// `Corrupt` for tables of a newer version, a damaged file or another kind of file;
    /// `Permanent` for impossible options or a file that cannot be opened or written;
    /// `Transient` when the database stays locked or the disk is full.
    pub async fn open(options: SqliteOptions) -> Result<Self> {
        options.check()?;
        let opening = options.clone();
        let opened = tokio::task::spawn_blocking(move || {
            let mut writer = connections::connect(&opening)?;
            match opening.schema {
                SchemaOnOpen::Migrate => migrate::migrate(&mut writer, opening.partitions)?,
                SchemaOnOpen::Require => migrate::require(&writer)?,
            }
            let identity: String = writer
                .query_row("SELECT identity FROM postrider_state", [], |row| row.get(0))
                .map_err(error::failed("read the outbox's identity"))?;
            Ok((writer, identity))
        });
        let (writer, identity) = connections::joined(opened.await)?;
        Ok(Self {
            inner: Arc::new(Inner {
                connections: Connections::new(writer, &options),
                clock: clock::StoreClock::new(options.clock_offset.clone()),
                wakeup: Wakeup::new(&options),
                identity,
            }),
        })
    }

    /// Runs `work` in one transaction that holds the write lock, off the async runtime, commits
    /// it when `work` succeeds and wakes the readers: the place for a business row and its event.
    ///
    /// # Errors
    /// Those of `work`, and the store's own.
    ///
    /// # Cancellation
    /// A dropped call that has begun still runs to its end: committed or rolled back.
    pub async fn transaction<T, E>(
        &self,
        work: impl FnOnce(&Transaction<'_>) -> Result<T, E> + Send + 'static,
    ) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<Error> + Send + 'static,
    {
        let wakeup = Arc::clone(&self.inner.wakeup);
        let value = self.inner.connections.write(work).await?;
        wakeup.ring();
        Ok(value)
    }

    /// [`append_with`], with event times of this store's own clock, which
    /// [`SqliteOptions::clock_offset`] moves. `tx` must be one on this store's database.
    ///
    /// # Errors
    /// As [`append()`].
    pub fn append(
        &self,
        tx: &Transaction<'_>,
        events: &[NewEvent],
        on_duplicate: OnDuplicate,
    ) -> Result<Vec<EventId>> {
        append::append_at(tx, events, on_duplicate, self.inner.clock.wall_ms())
    }

    /// Wakes this process's readers: call it after committing an append of your own connection.
    pub fn ring(&self) {
        self.inner.wakeup.ring();
    }

    /// Raises the number of partitions to a multiple of the present one. Events appended from now
    /// on go to the new ones, which consumers read after they have finished the old.
    ///
    /// # Errors
    /// `Permanent` for a number that is no such multiple or too large.
    pub async fn raise_partitions(&self, count: u32) -> Result<()> {
        self.transaction(move |tx| partitions::raise(tx, count)).await
    }

    /// Writes of the relay's bookkeeping: they ring no bell.
    async fn write_tx<T, E>(
        &self,
        work: impl FnOnce(&Transaction<'_>) -> Result<T, E> + Send + 'static,
    ) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<Error> + Send + 'static,
    {
        self.inner.connections.write(work).await
    }

    async fn read_tx<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Transaction<'_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.inner.connections.read(work).await
    }
}
