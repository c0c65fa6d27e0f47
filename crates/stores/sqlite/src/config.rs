//! How to open the store.
//!
//! What lives here: the options, their defaults and their checks. What does not: opening.
//! Invariant: every default is safe; impossible values are refused before any file is touched.

use std::path::{Path, PathBuf};
use std::time::Duration;

use postrider_core::limits::MAX_PARTITIONS;
use postrider_core::{Error, Result};

use crate::ClockOffset;

/// When a commit counts as durable: SQLite's `PRAGMA synchronous`, in WAL mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Synchronous {
    /// On the disk: survives a power cut. The default, and what the guarantees ask for.
    #[default]
    Full,
    /// With the operating system: survives `kill -9`; a power cut may undo the last commits.
    Normal,
}

/// What opening does when the tables are missing or of an older version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SchemaOnOpen {
    /// Create or upgrade them.
    #[default]
    Migrate,
    /// Refuse.
    Require,
}

/// How to open a [`SqliteStore`](crate::SqliteStore).
#[derive(Debug, Clone)]
pub struct SqliteOptions {
    pub(crate) path: PathBuf,
    pub(crate) partitions: u32,
    pub(crate) busy_timeout: Duration,
    pub(crate) synchronous: Synchronous,
    pub(crate) readers: usize,
    pub(crate) max_file_bytes: Option<u64>,
    pub(crate) schema: SchemaOnOpen,
    pub(crate) clock_offset: ClockOffset,
}

impl SqliteOptions {
    /// Options for the database at `path`, which is created if it is missing. A path that starts
    /// with `file:` is read as SQLite's URI.
    pub fn new(path: impl AsRef<Path>) -> Self {
        Self {
            path: path.as_ref().to_owned(),
            partitions: 8,
            busy_timeout: Duration::from_secs(5),
            synchronous: Synchronous::Full,
            readers: 4,
            max_file_bytes: None,
            schema: SchemaOnOpen::Migrate,
            clock_offset: ClockOffset::default(),
        }
    }

    /// Partitions of a new outbox (8 by default). An existing one keeps its number; see
    /// [`raise_partitions`](crate::SqliteStore::raise_partitions).
    #[must_use]
    pub fn partitions(mut self, count: u32) -> Self {
        self.partitions = count;
        self
    }

    /// How long to wait for another connection's write lock (5 s by default).
    #[must_use]
    pub fn busy_timeout(mut self, timeout: Duration) -> Self {
        self.busy_timeout = timeout;
        self
    }

    /// When a commit counts as durable.
    #[must_use]
    pub fn synchronous(mut self, synchronous: Synchronous) -> Self {
        self.synchronous = synchronous;
        self
    }

    /// Reading connections (4 by default).
    #[must_use]
    pub fn readers(mut self, count: usize) -> Self {
        self.readers = count;
        self
    }

    /// Largest size of the database file; a write beyond it fails as on a full disk.
    #[must_use]
    pub fn max_file_bytes(mut self, bytes: u64) -> Self {
        self.max_file_bytes = Some(bytes);
        self
    }

    /// What to do when the tables are missing or of an older version.
    #[must_use]
    pub fn schema(mut self, schema: SchemaOnOpen) -> Self {
        self.schema = schema;
        self
    }

    /// Lets a test move the store's clocks.
    #[must_use]
    pub fn clock_offset(mut self, offset: ClockOffset) -> Self {
        self.clock_offset = offset;
        self
    }

    pub(crate) fn check(&self) -> Result<()> {
        if !(1..=MAX_PARTITIONS).contains(&self.partitions) {
            return Err(Error::permanent(format!(
                "{} partitions are impossible; 1 to {MAX_PARTITIONS} are allowed",
                self.partitions
            )));
        }
        if self.readers == 0 {
            return Err(Error::permanent("0 readers are impossible; give the store at least 1"));
        }
        Ok(())
    }
}
