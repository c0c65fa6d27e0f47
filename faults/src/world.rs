//! One schedule's folder: the database with the truth in it, the sink's files, a small disk.
//!
//! What lives here: making all of that, and reading the truth at the end. What does not: processes.
//! Invariant: each committed event has one row of truth, written in the same transaction; each
//! take-over of a lease leaves a row with the checkpoint of that very moment, written by a trigger
//! in the transaction that takes it.

use std::collections::HashSet;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use postrider_conformance::sink::Delivered;
use postrider_core::ulid::Ulid;
use postrider_core::{DeadLetterFilter, DeadLetters, EventId, PartitionId};
use postrider_store_sqlite::rusqlite::{Connection, OpenFlags};
use postrider_store_sqlite::{SqliteOptions, SqliteStore};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use tempfile::TempDir;
use uuid::Uuid;

use crate::schedule::{Schedule, SmallDisk};

/// Size of the small disk: the largest schedules write about a third of it.
const SMALL_DISK: &std::ffi::CStr = c"size=48m";
/// Name of the sink, and so of the consumer.
pub const SINK: &str = "sink";
/// Name of the header that every event has: who wrote it.
pub const WRITER_HEADER: &str = "fault-writer";

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

/// A committed event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    /// What must arrive.
    pub message: Delivered,
    /// Its partition.
    pub partition: String,
    /// Its place in the order of commits.
    pub seq: i64,
}

/// A lease that went from one holder to the next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Takeover {
    /// The partition.
    pub partition: String,
    /// Who held it before.
    pub old_holder: String,
    /// Whether it was handed over in order.
    pub released: bool,
    /// Everything up to here was durable as delivered or parked; 0 without a checkpoint.
    pub after_seq: i64,
    /// Events that were among the dead letters.
    pub letters: HashSet<EventId>,
}

/// One schedule's folder and what is open in it.
pub struct World {
    folder: TempDir,
    disk: Option<PathBuf>,
    database: PathBuf,
    lines: PathBuf,
    connection: Connection,
    store: SqliteStore,
    runtime: tokio::runtime::Runtime,
}

impl World {
    /// Makes the folder and the database.
    ///
    /// # Errors
    /// When the file system or the store refuses.
    pub fn create(schedule: &Schedule) -> Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix(&format!("postrider-faults-{}-{}-", schedule.sink, schedule.index))
            .tempdir()
            .context("make the schedule's folder")?;
        let disk = folder.path().join("disk");
        let plain = folder.path().join("plain");
        for path in [&disk, &plain] {
            std::fs::create_dir(path).context("make the schedule's folder")?;
        }
        let text = serde_json::to_string_pretty(schedule).context("write the schedule")?;
        std::fs::write(folder.path().join("schedule.json"), text).context("write the schedule")?;
        let mounted = schedule.small_disk.is_some();
        if mounted {
            mount("tmpfs", &disk, "tmpfs", MountFlags::empty(), SMALL_DISK)
                .context("mount a small disk: run in a mount namespace of one's own")?;
        }
        let on_small = |kind| if schedule.small_disk == Some(kind) { &disk } else { &plain };
        let database = on_small(SmallDisk::Database).join("app.db");
        let lines = on_small(SmallDisk::Lines).to_owned();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("start the runtime")?;
        let options = SqliteOptions::new(&database).partitions(schedule.partitions).readers(1);
        let store = runtime.block_on(SqliteStore::open(options)).context("open the store")?;
        let connection = connect(&database)?;
        connection.execute_batch(TABLES).context("make the truth's tables")?;
        let disk = mounted.then_some(disk);
        Ok(Self { folder, disk, database, lines, connection, store, runtime })
    }

    /// The schedule's folder.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The database.
    pub fn database(&self) -> &Path {
        &self.database
    }

    /// The folder with the sink's files.
    pub fn lines(&self) -> &Path {
        &self.lines
    }

    /// Fills the small disk to the last byte.
    ///
    /// # Errors
    /// When there is none.
    pub fn fill_disk(&self) -> Result<()> {
        let disk = self.disk.as_ref().context("this schedule has no small disk")?;
        let mut file = File::create(disk.join("filler")).context("fill the disk")?;
        for block in [1 << 20, 4096, 1] {
            let zeros = vec![0u8; block];
            while file.write_all(&zeros).is_ok() {}
        }
        Ok(())
    }

    /// Makes room again.
    ///
    /// # Errors
    /// When the disk was not filled.
    pub fn free_disk(&self) -> Result<()> {
        let disk = self.disk.as_ref().context("this schedule has no small disk")?;
        std::fs::remove_file(disk.join("filler")).context("free the disk")
    }

    /// Number of the newest take-over.
    ///
    /// # Errors
    /// The database's.
    pub fn newest_takeover(&self) -> Result<i64> {
        let sql = "SELECT ifnull(max(n), 0) FROM fault_takeover";
        self.connection.query_row(sql, [], |row| row.get(0)).context("look for take-overs")
    }

    /// `seq` of the newest committed event.
    ///
    /// # Errors
    /// The database's.
    pub fn newest_seq(&self) -> Result<i64> {
        let sql = "SELECT ifnull(max(seq), 0) FROM fault_truth";
        self.connection.query_row(sql, [], |row| row.get(0)).context("look for events")
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
            Ok(Committed { message, partition: row.get(7)?, seq: row.get(8)? })
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
                partition: row.get(1)?,
                old_holder: row.get(2)?,
                released: row.get(3)?,
                after_seq: covered_seq(position.as_deref())?,
                letters: ids.map(|id| id.map(event_id)).collect::<std::result::Result<_, _>>()?,
            });
        }
        Ok(takeovers)
    }

    /// Copies what stands on the small disk beside it and keeps the folder.
    ///
    /// # Errors
    /// When copying fails.
    pub fn keep(mut self) -> Result<PathBuf> {
        if let Some(disk) = self.disk.take() {
            let kept = self.folder.path().join("disk-kept");
            std::fs::create_dir(&kept).context("keep the small disk")?;
            for entry in std::fs::read_dir(&disk).context("keep the small disk")? {
                let entry = entry.context("keep the small disk")?;
                std::fs::copy(entry.path(), kept.join(entry.file_name()))
                    .context("keep the small disk")?;
            }
            detach(&disk);
        }
        self.folder.disable_cleanup(true);
        Ok(self.folder.path().to_owned())
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Some(disk) = &self.disk {
            detach(disk);
        }
    }
}

fn detach(disk: &Path) {
    // What can't be unmounted goes with this process's mount namespace.
    let _ = unmount(disk, UnmountFlags::DETACH);
}

fn event_id(bytes: [u8; 16]) -> EventId {
    EventId::from_uuid(Uuid::from_bytes(bytes))
}

fn numbers(partition: &str) -> Result<(u32, u32)> {
    let id = PartitionId::new(partition)?;
    id.to_numbers().context("a partition is named index/count")
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
