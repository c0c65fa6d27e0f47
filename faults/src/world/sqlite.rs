//! The truth in SQLite: one file, one writer at a time.
//!
//! What lives here: making the database and asking it. What does not: what the answers are for.
//! Invariant: the write order is the order of commits and of the feed, so `seq` is a place.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use postrider_conformance::sink::Delivered;
use postrider_core::ulid::Ulid;
use postrider_core::{DeadLetterFilter, DeadLetters, PartitionId};
use postrider_store_sqlite::rusqlite::{Connection, OpenFlags};
use postrider_store_sqlite::{SqliteOptions, SqliteStore};

use super::{Committed, Covered, Place, SINK, Takeover, WRITER_HEADER, event_id};

/// The truth, the take-overs, and what waited among the dead letters at each.
const TABLES: &str = "
    CREATE TABLE fault_truth (
        n            INTEGER PRIMARY KEY AUTOINCREMENT,
        id           BLOB NOT NULL UNIQUE,
        key          TEXT NOT NULL,
        topic        TEXT NOT NULL,
        type         TEXT NOT NULL,
        content_type TEXT NOT NULL,
        writer       TEXT NOT NULL,
        payload      BLOB NOT NULL,
        partition    INTEGER NOT NULL,
        seq          INTEGER NOT NULL UNIQUE
    ) STRICT;
    CREATE TABLE fault_takeover (
        n          INTEGER PRIMARY KEY AUTOINCREMENT,
        partition  TEXT NOT NULL,
        old_holder TEXT NOT NULL,
        released   INTEGER NOT NULL,
        position   BLOB
    ) STRICT;
    CREATE TABLE fault_takeover_letter (takeover INTEGER NOT NULL, id BLOB NOT NULL) STRICT;
    CREATE TRIGGER fault_takeover_written AFTER UPDATE OF epoch ON postrider_lease
    WHEN NEW.epoch <> OLD.epoch
    BEGIN
        INSERT INTO fault_takeover (partition, old_holder, released, position)
        VALUES (NEW.partition, OLD.holder, OLD.released,
            (SELECT position FROM postrider_checkpoint WHERE partition = NEW.partition));
        INSERT INTO fault_takeover_letter (takeover, id)
        SELECT (SELECT max(n) FROM fault_takeover), id FROM postrider_dead_letter
        WHERE partition = NEW.partition AND id IS NOT NULL;
    END;";

/// The database of one schedule.
pub struct SqliteData {
    path: PathBuf,
    connection: Connection,
    store: SqliteStore,
    runtime: tokio::runtime::Runtime,
}

impl SqliteData {
    /// Makes the database.
    ///
    /// # Errors
    /// When the file system or the store refuses.
    pub fn create(path: PathBuf, partitions: u32) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("start the runtime")?;
        let options = SqliteOptions::new(&path).partitions(partitions).readers(1);
        let store = runtime.block_on(SqliteStore::open(options)).context("open the store")?;
        let connection = connect(&path)?;
        connection.execute_batch(TABLES).context("make the truth's tables")?;
        Ok(Self { path, connection, store, runtime })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Numbers of all take-overs.
    ///
    /// # Errors
    /// The database's.
    pub fn takeover_numbers(&self) -> Result<Vec<i64>> {
        let mut statement = self.connection.prepare_cached("SELECT n FROM fault_takeover")?;
        let numbers = statement.query_map([], |row| row.get(0))?;
        numbers.collect::<std::result::Result<_, _>>().context("look for take-overs")
    }

    /// Place of the newest committed event.
    ///
    /// # Errors
    /// The database's.
    pub fn newest_place(&self) -> Result<Place> {
        let sql = "SELECT ifnull(max(seq), 0) FROM fault_truth";
        let seq = self.connection.query_row(sql, [], |row| row.get(0));
        Ok(place(seq.context("look for events")?))
    }

    /// Asks for every parked event to be sent again.
    ///
    /// # Errors
    /// The store's.
    pub fn requeue_all(&self) -> Result<u64> {
        let filter = DeadLetterFilter::default();
        let requeued = self.runtime.block_on(self.store.requeue(&filter));
        requeued.context("requeue the dead letters")
    }

    /// How many events are neither durable as delivered nor given up: pending or dead letters.
    ///
    /// # Errors
    /// The database's.
    pub fn unsettled(&self) -> Result<i64> {
        let letters: i64 = self
            .connection
            .query_row("SELECT count(*) FROM postrider_dead_letter", [], |row| row.get(0))
            .context("count the dead letters")?;
        let mut statement = self.connection.prepare_cached(
            "SELECT count(*) FROM fault_truth t JOIN postrider_partition p ON p.number = t.partition
             WHERE p.index_no = ?1 AND p.count_no = ?2 AND t.seq > ?3",
        )?;
        let mut pending = 0;
        for (partition, after) in self.checkpoints()? {
            let (index, count) = numbers(&partition)?;
            pending += statement.query_row((index, count, after), |row| row.get::<_, i64>(0))?;
        }
        Ok(letters + pending)
    }

    /// Every partition with the `seq` that its checkpoint covers.
    fn checkpoints(&self) -> Result<Vec<(String, i64)>> {
        let mut statement = self.connection.prepare_cached(
            "SELECT p.index_no || '/' || p.count_no, c.position FROM postrider_partition p
             LEFT JOIN postrider_checkpoint c
                 ON c.partition = p.index_no || '/' || p.count_no AND c.consumer = ?1",
        )?;
        let rows = statement.query_map([SINK], |row| {
            Ok((row.get::<_, String>(0)?, row.get::<_, Option<Vec<u8>>>(1)?))
        })?;
        rows.map(|row| {
            let (partition, position) = row?;
            Ok((partition, covered_seq(position.as_deref())?))
        })
        .collect()
    }

    /// How many events the checkpoints count as published.
    ///
    /// # Errors
    /// The database's.
    pub fn published(&self) -> Result<i64> {
        let sql = "SELECT ifnull(sum(published), 0) FROM postrider_checkpoint WHERE consumer = ?1";
        self.connection.query_row(sql, [SINK], |row| row.get(0)).context("read the checkpoints")
    }

    /// Every committed event, in the order of commits.
    ///
    /// # Errors
    /// The database's.
    pub fn truth(&self) -> Result<Vec<Committed>> {
        let mut statement = self.connection.prepare(
            "SELECT t.id, t.key, t.topic, t.type, t.content_type, t.writer, t.payload,
                 p.index_no || '/' || p.count_no, t.seq
             FROM fault_truth t JOIN postrider_partition p ON p.number = t.partition
             ORDER BY t.seq",
        )?;
        let rows = statement.query_map([], |row| {
            let message = Delivered {
                id: event_id(row.get(0)?),
                key: row.get(1)?,
                topic: row.get(2)?,
                event_type: row.get(3)?,
                content_type: row.get(4)?,
                headers: vec![(WRITER_HEADER.to_owned(), row.get(5)?)],
                payload: row.get(6)?,
            };
            Ok(Committed { message, partition: row.get(7)?, place: place(row.get(8)?) })
        })?;
        rows.collect::<std::result::Result<_, _>>().context("read the truth")
    }

    /// Events of the outbox without a row of truth, and rows of truth whose event is gone although
    /// nothing allowed its deletion.
    ///
    /// # Errors
    /// The database's.
    pub fn torn_transactions(&self) -> Result<(i64, i64)> {
        let count = |sql| self.connection.query_row(sql, [], |row| row.get(0));
        let alone = count(
            "SELECT count(*) FROM postrider_outbox o
             WHERE NOT EXISTS (SELECT 1 FROM fault_truth t WHERE t.id = o.id AND t.seq = o.seq)",
        )?;
        let lacking = count(
            "SELECT count(*) FROM fault_truth t JOIN postrider_partition p ON p.number = t.partition
             WHERE t.seq > ifnull(p.horizon_seq, 0)
                 AND NOT EXISTS (SELECT 1 FROM postrider_outbox o WHERE o.id = t.id)",
        )?;
        Ok((alone, lacking))
    }

    /// Every take-over, in order.
    ///
    /// # Errors
    /// The database's.
    pub fn takeovers(&self) -> Result<Vec<Takeover>> {
        let mut letters =
            self.connection.prepare("SELECT id FROM fault_takeover_letter WHERE takeover = ?1")?;
        let mut statement = self.connection.prepare(
            "SELECT n, partition, old_holder, released, position FROM fault_takeover ORDER BY n",
        )?;
        let mut rows = statement.query([])?;
        let mut takeovers = Vec::new();
        while let Some(row) = rows.next()? {
            let number: i64 = row.get(0)?;
            let ids = letters.query_map([number], |row| row.get::<_, [u8; 16]>(0))?;
            let position: Option<Vec<u8>> = row.get(4)?;
            takeovers.push(Takeover {
                number,
                partition: row.get(1)?,
                old_holder: row.get(2)?,
                released: row.get(3)?,
                covered: Covered::UpTo(place(covered_seq(position.as_deref())?)),
                letters: ids.map(|id| id.map(event_id)).collect::<std::result::Result<_, _>>()?,
            });
        }
        Ok(takeovers)
    }
}

fn numbers(partition: &str) -> Result<(u32, u32)> {
    let id = PartitionId::new(partition)?;
    id.to_numbers().context("a partition is named index/count")
}

fn place(seq: i64) -> Place {
    Place::from(seq.unsigned_abs())
}

/// The low half of a position is its event's `seq`.
fn covered_seq(position: Option<&[u8]>) -> Result<i64> {
    let Some(position) = position else { return Ok(0) };
    let bytes: [u8; 16] = position.try_into().context("a checkpoint has 16 bytes")?;
    i64::try_from(Ulid::from_bytes(bytes).low()).context("read a checkpoint")
}

/// A connection as an application would open it.
///
/// # Errors
/// SQLite's.
pub fn connect(database: &Path) -> Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(database, flags).context("open the database")?;
    connection.busy_timeout(Duration::from_secs(5)).context("open the database")?;
    connection.pragma_update(None, "synchronous", "FULL").context("open the database")?;
    Ok(connection)
}
