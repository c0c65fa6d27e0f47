//! What a private server is to be like.
//!
//! What lives here: the options and the settings that every server gets. What does not: starting.
//! Invariant: the defaults allow logical replication and prepared transactions, and are fast rather
//! than durable; whoever pulls the plug asks for `durable`.

use super::server::Server;
use super::version::Version;
use crate::error::Result;

/// For every server. A standby needs old log of its primary; shared memory lives in the data folder
/// so that a killed server leaves none behind.
const ALWAYS: &str = "\
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
dynamic_shared_memory_type = mmap
shared_buffers = 32MB
max_connections = 200
wal_level = logical
max_wal_senders = 20
max_replication_slots = 20
max_prepared_transactions = 10
wal_keep_size = 256MB
log_line_prefix = '%m [%p] %a '
log_lock_waits = on
timezone = 'UTC'
";

/// For a server whose data may be lost with the machine.
const FAST: &str = "\
fsync = off
synchronous_commit = off
full_page_writes = off
max_wal_size = 256MB
";

/// A server that is to be started.
#[derive(Debug, Clone)]
pub struct Options {
    pub(super) version: Version,
    pub(super) settings: Vec<String>,
    pub(super) durable: bool,
    pub(super) password: Option<String>,
    pub(super) tls: bool,
}

impl Options {
    /// A server of this version with the defaults.
    pub fn new(version: Version) -> Self {
        Self { version, settings: Vec::new(), durable: false, password: None, tls: false }
    }

    /// Adds a line to `postgresql.conf`; a later one for the same name wins.
    #[must_use]
    pub fn setting(mut self, line: impl Into<String>) -> Self {
        self.settings.push(line.into());
        self
    }

    /// Keeps `fsync`, `synchronous_commit` and `full_page_writes` on, and the data on disk. Others
    /// may have theirs in memory.
    #[must_use]
    pub fn durable(mut self) -> Self {
        self.durable = true;
        self
    }

    /// Asks every user for a password by SCRAM; this one is the superuser's.
    #[must_use]
    pub fn password(mut self, password: impl Into<String>) -> Self {
        self.password = Some(password.into());
        self
    }

    /// Offers TLS, with a certificate for `localhost` and 127.0.0.1 (see
    /// [`Server::certificate_authority`]).
    #[must_use]
    pub fn tls(mut self) -> Self {
        self.tls = true;
        self
    }

    /// Starts it, and returns once it answers.
    ///
    /// # Errors
    ///
    /// If a program is missing or the server does not start; the text has its log.
    pub fn launch(self) -> Result<Server> {
        Server::launch(self)
    }

    /// What is added to `postgresql.conf`.
    pub(super) fn configuration(&self) -> String {
        let mut text = format!("\n{ALWAYS}");
        if !self.durable {
            text.push_str(FAST);
        }
        if self.tls {
            text.push_str("ssl = on\n");
        }
        for line in &self.settings {
            text.push_str(line);
            text.push('\n');
        }
        text
    }
}
