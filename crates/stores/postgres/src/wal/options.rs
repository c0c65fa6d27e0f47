//! How to read the log.
//!
//! What lives here: the options, their defaults and their checks. What does not: the database's own
//! options (`config.rs`).
//! Invariant: a slot's name is one that the server takes as it is.

use std::path::PathBuf;

use postrider_core::{Error, Result};

use super::mirror::MirrorOption;
use crate::config::PostgresOptions;

/// Longest name of a slot or a publication, in bytes: the server's own limit.
pub const MAX_SLOT_NAME_BYTES: usize = 63;

/// What to do when the slot can't give what comes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Recover {
    /// Read from the table exactly what is missing, and go on.
    #[default]
    Auto,
    /// Stop, and say what is missing.
    Halt,
}

/// Which slot, and what to do without it.
#[derive(Debug, Clone, Default)]
pub struct WalOptions {
    pub(super) slot: String,
    pub(super) publication: String,
    pub(super) recover: Recover,
    pub(super) messages: Option<String>,
    pub(super) mirror: Option<MirrorOption>,
}

impl WalOptions {
    /// Slot and publication `postrider_<outbox>`; recovery by itself.
    pub fn new() -> Self {
        Self::default()
    }

    /// The replication slot; one for each outbox. Small letters, digits and `_`.
    #[must_use]
    pub fn slot(mut self, name: impl Into<String>) -> Self {
        self.slot = name.into();
        self
    }

    /// The publication that has the outbox; any name, it is always quoted.
    #[must_use]
    pub fn publication(mut self, name: impl Into<String>) -> Self {
        self.publication = name.into();
        self
    }

    /// What to do when the slot can't give what comes next.
    #[must_use]
    pub fn recover(mut self, what: Recover) -> Self {
        self.recover = what;
        self
    }

    /// Reads the messages of this prefix instead of the outbox's rows: what the SQL function `emit`
    /// writes, to the log and to no table. They cost no row and no retention, and **what a lost
    /// slot took along is lost**: then reading halts, whatever `recover` says, and tells where.
    #[must_use]
    pub fn messages(mut self, prefix: impl Into<String>) -> Self {
        self.messages = Some(prefix.into());
        self
    }

    /// Keeps a copy of the checkpoints in a file, which only its owner may read: for each consumer
    /// all that the source's database has of it, written after that, at most once a second and at
    /// the end. At the next start the copy counts where the database has less, and shares its
    /// history up to the copy's place. One file for an outbox; the last of this and
    /// [`mirror_database`](Self::mirror_database) counts.
    #[must_use]
    pub fn mirror_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.mirror = Some(MirrorOption::File(path.into()));
        self
    }

    /// The same in the table `postrider.wal_checkpoint_mirror` of a second database, which is made
    /// when it is missing. Of the options, only those of the connection count: the URL and the
    /// authorities.
    #[must_use]
    pub fn mirror_database(mut self, options: PostgresOptions) -> Self {
        self.mirror = Some(MirrorOption::Database(Box::new(options)));
        self
    }

    /// With names for what has none.
    pub(super) fn checked(mut self, outbox: &str) -> Result<Self> {
        if self.slot.is_empty() {
            let plain =
                |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '_' };
            self.slot = format!("postrider_{}", outbox.chars().map(plain).collect::<String>());
        }
        if self.publication.is_empty() {
            self.publication = format!("postrider_{outbox}");
        }
        if self.messages.as_deref().is_some_and(str::is_empty) {
            return Err(Error::permanent("messages: the prefix is empty; give it a name"));
        }
        match &self.mirror {
            Some(MirrorOption::File(path)) if path.file_name().is_none() => {
                return Err(Error::permanent("mirror_file: the path has no name of a file"));
            }
            Some(MirrorOption::Database(options)) => {
                let address = options.address();
                // It says which part of the URL, and never repeats it.
                address.map_err(|error| Error::permanent(format!("mirror_url: {error}")))?;
            }
            Some(MirrorOption::File(_)) | None => {}
        }
        let legal = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_';
        if self.slot.len() > MAX_SLOT_NAME_BYTES || !self.slot.bytes().all(legal) {
            return Err(Error::permanent(format!(
                "slot: {:?} is no slot's name: up to {MAX_SLOT_NAME_BYTES} small letters, digits \
                 and _",
                self.slot
            )));
        }
        let control = self.publication.chars().any(char::is_control);
        if self.publication.len() > MAX_SLOT_NAME_BYTES || control {
            return Err(Error::permanent(format!(
                "publication: the name has {} bytes; up to {MAX_SLOT_NAME_BYTES} are allowed, \
                 without control characters",
                self.publication.len()
            )));
        }
        Ok(self)
    }
}
