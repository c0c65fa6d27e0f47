//! How to open the store.
//!
//! What lives here: the options, their defaults and their checks. What does not: connecting.
//! Invariant: every default is safe; impossible values are refused before any connection.

use std::path::PathBuf;
use std::time::Duration;

use postrider_core::limits::MAX_PARTITIONS;
use postrider_core::{Error, Result, Secret};

use crate::address::Address;

/// Longest name of an outbox, in bytes: PostgreSQL cuts names at 63, and the names of an outbox's
/// parts are longer by up to 15.
pub const MAX_OUTBOX_NAME_BYTES: usize = 48;
/// Longest name of a schema, in bytes: PostgreSQL's own limit.
pub const MAX_SCHEMA_NAME_BYTES: usize = 63;

/// How a new outbox stores payloads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PayloadType {
    /// Any bytes, as they are.
    #[default]
    Bytea,
    /// JSON text, kept as it was given; anything else is refused at append.
    Json,
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

/// Which outbox of which database, and how to reach it.
#[derive(Debug, Clone)]
pub struct PostgresOptions {
    pub(crate) url: Secret,
    pub(crate) schema: String,
    pub(crate) outbox: String,
    pub(crate) partitions: u32,
    pub(crate) payload: PayloadType,
    pub(crate) on_open: SchemaOnOpen,
    pub(crate) connections: usize,
    pub(crate) statement_timeout: Duration,
    pub(crate) connect_timeout: Duration,
    pub(crate) ca_file: Option<PathBuf>,
    pub(crate) tick_interval: Duration,
}

impl PostgresOptions {
    /// The outbox `postrider.outbox` of the database at `url`
    /// (`postgres://user:password@host:5432/database`, or libpq's `host=… dbname=…`).
    ///
    /// Several hosts (`postgres://user@a,b:6432/database`) are tried in their order; a server that
    /// takes no writes is passed over, unless the URL says `target_session_attrs=any`. Off the own
    /// machine a connection is encrypted and the certificate checked (`sslmode=verify-full`) unless
    /// the URL says otherwise: `verify-ca`, `require` (any certificate) or `disable`. The URL also
    /// takes `sslrootcert`, `sslcert` and `sslkey`, `channel_binding`, `application_name`,
    /// `connect_timeout` and what else libpq knows of keepalives. Nothing is read from `PG…`
    /// variables or `.pgpass`.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: Secret::new(url.into()),
            schema: "postrider".to_owned(),
            outbox: "outbox".to_owned(),
            partitions: 8,
            payload: PayloadType::default(),
            on_open: SchemaOnOpen::default(),
            connections: 8,
            statement_timeout: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(10),
            ca_file: None,
            tick_interval: Duration::from_millis(20),
        }
    }

    /// The schema that holds all of Postrider's tables; any name, it is always quoted.
    #[must_use]
    pub fn schema(mut self, name: impl Into<String>) -> Self {
        self.schema = name.into();
        self
    }

    /// Which outbox of the schema; any name, it is always quoted.
    #[must_use]
    pub fn outbox(mut self, name: impl Into<String>) -> Self {
        self.outbox = name.into();
        self
    }

    /// Partitions of an outbox that opening creates; an existing one keeps its number.
    #[must_use]
    pub fn partitions(mut self, count: u32) -> Self {
        self.partitions = count;
        self
    }

    /// How an outbox that opening creates stores payloads; an existing one stays as it is.
    #[must_use]
    pub fn payload(mut self, payload: PayloadType) -> Self {
        self.payload = payload;
        self
    }

    /// What to do about missing or older tables.
    #[must_use]
    pub fn on_open(mut self, what: SchemaOnOpen) -> Self {
        self.on_open = what;
        self
    }

    /// Most connections held at a time.
    #[must_use]
    pub fn connections(mut self, count: usize) -> Self {
        self.connections = count;
        self
    }

    /// A file of certificates (PEM) of the authorities that may vouch for the server, instead of
    /// the system's own. Giving one asks for TLS, also on the own machine.
    #[must_use]
    pub fn ca_file(mut self, file: impl Into<PathBuf>) -> Self {
        self.ca_file = Some(file.into());
        self
    }

    /// Longest time to connect to one host, login included. The URL's own `connect_timeout` wins.
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Longest time for one statement or one transaction, for a lock, and for a connection to be
    /// free. The server ends what takes longer; a server that does not answer at all is given up a
    /// second later.
    #[must_use]
    pub fn statement_timeout(mut self, timeout: Duration) -> Self {
        self.statement_timeout = timeout;
        self
    }

    /// Least time between two ticks: an event waits up to this long before it can be read.
    #[must_use]
    pub fn tick_interval(mut self, interval: Duration) -> Self {
        self.tick_interval = interval;
        self
    }

    /// Refuses what can't work, before anything is connected to.
    ///
    /// # Errors
    /// `Permanent`, naming the option.
    pub fn check(&self) -> Result<()> {
        self.check_names()?;
        if self.partitions == 0 || self.partitions > MAX_PARTITIONS {
            return Err(Error::permanent(format!(
                "partitions: {} is not between 1 and {MAX_PARTITIONS}",
                self.partitions
            )));
        }
        if self.connections == 0 {
            return Err(Error::permanent("connections: at least 1 is needed"));
        }
        if self.statement_timeout < Duration::from_millis(100) {
            return Err(Error::permanent("statement_timeout: give at least 100 ms"));
        }
        if self.connect_timeout < Duration::from_millis(100) {
            return Err(Error::permanent("connect_timeout: give at least 100 ms"));
        }
        self.address().map(drop)
    }

    pub(crate) fn check_names(&self) -> Result<()> {
        check_name("schema", &self.schema, MAX_SCHEMA_NAME_BYTES)?;
        check_name("outbox", &self.outbox, MAX_OUTBOX_NAME_BYTES)
    }

    pub(crate) fn address(&self) -> Result<Address> {
        Address::parse(self.url.expose(), self.ca_file.as_ref())
    }
}

fn check_name(what: &str, name: &str, most: usize) -> Result<()> {
    if name.is_empty() || name.len() > most {
        return Err(Error::permanent(format!(
            "{what}: the name has {} bytes; 1 to {most} are allowed",
            name.len()
        )));
    }
    if name.chars().any(char::is_control) {
        return Err(Error::permanent(format!("{what}: the name has a control character")));
    }
    if name.matches('$').count() > 1 {
        return Err(Error::permanent(format!(
            "{what}: the name has $ twice; SQL takes what is between them for a quotation mark"
        )));
    }
    if what == "schema" && name.starts_with("pg_") {
        return Err(Error::permanent("schema: PostgreSQL keeps names that begin with pg_"));
    }
    Ok(())
}
