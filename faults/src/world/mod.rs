//! One schedule's folder: the database with the truth in it, the sink's files, a small disk.
//!
//! What lives here: the folder, what the truth is made of, and one face for every source. What does
//! not: how a source keeps it (`sqlite.rs`, `postgres.rs`), processes.
//! Invariant: each committed event has one row of truth, written in the same transaction; each
//! take-over of a lease leaves a row with the checkpoint of that very moment, written by a trigger
//! in the transaction that takes it.

pub mod postgres;
pub mod sqlite;
mod wal;

pub(crate) use wal::{SLOT, bound};

use std::collections::HashSet;
use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use postrider_conformance::sink::Delivered;
use postrider_core::EventId;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use tempfile::TempDir;
use uuid::Uuid;

use crate::cluster::Templates;
use crate::relays::RelaySource;
use crate::schedule::{Schedule, SmallDisk, SourceKind};
use postgres::PostgresData;
use sqlite::SqliteData;

/// Size of the small disk: the largest schedules write about a third of it.
const SMALL_DISK: &std::ffi::CStr = c"size=48m";
/// Name of the sink, and so of the consumer.
pub const SINK: &str = "sink";
/// Name of the sink beside it, if there is one.
pub const BESIDE: &str = "beside";
/// Name of the header that every event has: who wrote it.
pub const WRITER_HEADER: &str = "fault-writer";

/// Where an event stands in the feed: only ever compared with others of its source.
pub type Place = u128;

/// A committed event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    /// What must arrive.
    pub message: Delivered,
    /// Its partition.
    pub partition: String,
    /// Its place in the feed; the largest, while it has none.
    pub place: Place,
}

/// What was durable as delivered or parked.
#[derive(Clone, PartialEq, Eq)]
pub enum Covered {
    /// Everything up to here; 0 without a checkpoint.
    UpTo(Place),
    /// These.
    Events(HashSet<EventId>),
}

impl Covered {
    /// Whether an event was.
    pub fn has(&self, event: &Committed) -> bool {
        match self {
            Self::UpTo(place) => event.place <= *place,
            Self::Events(ids) => ids.contains(&event.message.id),
        }
    }
}

impl fmt::Debug for Covered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UpTo(place) => write!(f, "UpTo({place})"),
            Self::Events(ids) => write!(f, "Events({} of them)", ids.len()),
        }
    }
}

/// A lease that went from one holder to the next, or that PostgreSQL gave out for the first time:
/// by nobody (an empty name), in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Takeover {
    /// Numbers of one database differ, and are larger the later.
    pub number: i64,
    /// The partition.
    pub partition: String,
    /// Who held it before.
    pub old_holder: String,
    /// Whether it was handed over in order.
    pub released: bool,
    /// What was durable at that moment.
    pub covered: Covered,
    /// Events that were among the dead letters.
    pub letters: HashSet<EventId>,
}

/// What a database said when another one took its place.
#[derive(Debug, Clone, Default)]
pub struct Past {
    /// Every event committed in it, in the order of commits for each key.
    pub committed: Vec<Committed>,
    /// Every take-over in it.
    pub takeovers: Vec<Takeover>,
    /// The newest take-over that the other one has, too.
    pub shared_takeover: i64,
    /// Events that the other one has, too.
    pub shared: HashSet<EventId>,
}

/// The source's database.
pub enum Data {
    /// A file.
    Sqlite(Box<SqliteData>),
    /// A server of its own.
    Postgres(Box<PostgresData>),
}

/// The same question, whatever the source.
macro_rules! ask {
    ($world:expr, $data:ident => $asked:expr) => {
        match &$world.data {
            Data::Sqlite($data) => $asked,
            Data::Postgres($data) => $asked,
        }
    };
}

/// One schedule's folder and what is open in it.
pub struct World {
    // Dropped before the folder: fields drop in this order.
    data: Data,
    source: SourceKind,
    consumers: &'static [&'static str],
    folder: TempDir,
    disk: Option<PathBuf>,
    lines: PathBuf,
}

impl World {
    /// Makes the folder and the database.
    ///
    /// # Errors
    /// When the file system, a server or the store refuses.
    pub fn create(schedule: &Schedule, templates: &Templates) -> Result<Self> {
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
        let lines = on_small(SmallDisk::Lines).to_owned();
        let data = match schedule.source {
            SourceKind::Sqlite => {
                let path = on_small(SmallDisk::Database).join("app.db");
                Data::Sqlite(Box::new(SqliteData::create(path, schedule.partitions)?))
            }
            SourceKind::Cosmos => anyhow::bail!("an account has a world of its own"),
            SourceKind::PostgresFeed | SourceKind::PostgresWal => {
                Data::Postgres(Box::new(PostgresData::create(schedule, templates)?))
            }
        };
        let disk = mounted.then_some(disk);
        let (source, consumers) = (schedule.source, consumers(schedule));
        Ok(Self { data, source, consumers, folder, disk, lines })
    }

    /// The names of the sinks, the first one first.
    pub fn consumers(&self) -> &'static [&'static str] {
        self.consumers
    }

    /// The schedule's folder.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The file of a SQLite source.
    ///
    /// # Errors
    /// For another source.
    pub fn database(&self) -> Result<&Path> {
        match &self.data {
            Data::Sqlite(data) => Ok(data.path()),
            Data::Postgres(_) => anyhow::bail!("this schedule's database is no file"),
        }
    }

    /// The server of a PostgreSQL source.
    ///
    /// # Errors
    /// For another source.
    pub fn postgres(&self) -> Result<&PostgresData> {
        match &self.data {
            Data::Postgres(data) => Ok(data),
            Data::Sqlite(_) => anyhow::bail!("this schedule's database is no server"),
        }
    }

    /// Where relays find their source.
    pub fn relay_source(&self) -> RelaySource {
        match &self.data {
            Data::Sqlite(data) => RelaySource::Sqlite(data.path().to_owned()),
            Data::Postgres(data) => {
                RelaySource::Postgres { kind: self.source, urls: data.relay_urls() }
            }
        }
    }

    /// The role that a writer plays, with where it writes.
    pub fn writer_role(&self) -> Vec<OsString> {
        match &self.data {
            Data::Sqlite(data) => vec!["writer".into(), data.path().into()],
            Data::Postgres(data) => vec!["postgres-writer".into(), data.writer_url().into()],
        }
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
        if let Data::Postgres(data) = &self.data {
            return data.cluster().fill_disk();
        }
        let disk = self.disk.as_ref().context("this schedule has no small disk")?;
        fill(&disk.join("filler"))
    }

    /// Makes room again.
    ///
    /// # Errors
    /// When the disk was not filled.
    pub fn free_disk(&self) -> Result<()> {
        if let Data::Postgres(data) = &self.data {
            return data.cluster().free_disk();
        }
        let disk = self.disk.as_ref().context("this schedule has no small disk")?;
        std::fs::remove_file(disk.join("filler")).context("free the disk")
    }

    /// Numbers of all take-overs that are committed by now.
    ///
    /// # Errors
    /// The database's.
    pub fn takeover_numbers(&self) -> Result<Vec<i64>> {
        ask!(self, data => data.takeover_numbers())
    }

    /// Where the feed ends now.
    ///
    /// # Errors
    /// The database's.
    pub fn newest_place(&self) -> Result<Place> {
        ask!(self, data => data.newest_place())
    }

    /// Asks for every parked event to be sent again.
    ///
    /// # Errors
    /// The store's.
    pub fn requeue_all(&self) -> Result<u64> {
        ask!(self, data => data.requeue_all())
    }

    /// Whether it is worth while to count what is unsettled: a cheap guess.
    ///
    /// # Errors
    /// The database's.
    pub fn may_be_settled(&self) -> Result<bool> {
        match &self.data {
            Data::Sqlite(_) => Ok(true),
            Data::Postgres(data) => data.may_be_settled(),
        }
    }

    /// How many events are neither durable as delivered to a sink nor given up: pending or dead
    /// letters.
    ///
    /// # Errors
    /// The database's.
    pub fn unsettled(&self, consumer: &str) -> Result<i64> {
        match &self.data {
            Data::Sqlite(data) => data.unsettled(),
            Data::Postgres(data) => data.unsettled(consumer),
        }
    }

    /// How many events a sink's checkpoints count as published.
    ///
    /// # Errors
    /// The database's.
    pub fn published(&self, consumer: &str) -> Result<i64> {
        match &self.data {
            Data::Sqlite(data) => data.published(),
            Data::Postgres(data) => data.published(consumer),
        }
    }

    /// Every committed event, in the order of commits for each key.
    ///
    /// # Errors
    /// The database's.
    pub fn truth(&self) -> Result<Vec<Committed>> {
        ask!(self, data => data.truth())
    }

    /// Events of the outbox without a row of truth, and rows of truth whose event is gone although
    /// nothing allowed its deletion.
    ///
    /// # Errors
    /// The database's.
    pub fn torn_transactions(&self) -> Result<(i64, i64)> {
        ask!(self, data => data.torn_transactions())
    }

    /// Every take-over, in order, as it was for one sink.
    ///
    /// # Errors
    /// The database's.
    pub fn takeovers(&self, consumer: &str) -> Result<Vec<Takeover>> {
        match &self.data {
            Data::Sqlite(data) => data.takeovers(),
            Data::Postgres(data) => data.takeovers(consumer),
        }
    }

    /// What was seen of the slot, where there is one: whatever must never be.
    pub fn watched(&self) -> Vec<String> {
        match &self.data {
            Data::Sqlite(_) => Vec::new(),
            Data::Postgres(data) => data.cluster().watched(),
        }
    }

    /// Copies what stands on the small disk beside it, what a server logged, and keeps the folder.
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
        if let Data::Postgres(data) = &self.data {
            data.keep(self.folder.path())?;
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

/// Writes a file until its disk has no byte left.
pub(crate) fn fill(path: &Path) -> Result<()> {
    let mut file = File::create(path).context("fill the disk")?;
    for block in [1 << 20, 4096, 1] {
        let zeros = vec![0u8; block];
        while file.write_all(&zeros).is_ok() {}
    }
    Ok(())
}

fn consumers(schedule: &Schedule) -> &'static [&'static str] {
    if schedule.beside { &[SINK, BESIDE] } else { &[SINK] }
}

fn detach(disk: &Path) {
    // What can't be unmounted goes with this process's mount namespace.
    let _ = unmount(disk, UnmountFlags::DETACH);
}

fn event_id(bytes: [u8; 16]) -> EventId {
    EventId::from_uuid(Uuid::from_bytes(bytes))
}
