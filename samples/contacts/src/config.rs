//! What the service can be told.
//!
//! What lives here: the configuration and its safe defaults. What does not: flags and environment
//! (`main.rs`), and what is made of it (`compose.rs`).
//! Invariant: a configuration without secrets still runs; it only receives nothing.

use std::path::PathBuf;
use std::time::Duration;

use postrider::Secret;

/// Where contacts and their events are kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreConfig {
    /// One SQLite file, made when it is missing.
    Sqlite {
        /// The file.
        path: PathBuf,
        /// How long a write waits for another one before the answer is 503.
        busy_timeout: Duration,
    },
    /// A PostgreSQL database; its tables are made when they are missing.
    Postgres {
        /// Its URL.
        url: Secret,
        /// How long a write waits for another one before the answer is 503.
        busy_timeout: Duration,
    },
    /// A database of SQL Server or Azure SQL; its tables are made when they are missing.
    #[cfg(feature = "sqlserver")]
    SqlServer {
        /// Its connection string.
        url: Secret,
        /// How long a write waits for another one before the answer is 503.
        busy_timeout: Duration,
        /// The SQLite file in which the receiver keeps what arrived.
        journal: PathBuf,
    },
    /// A container of Azure Cosmos DB; it is made when it is missing.
    #[cfg(feature = "cosmos")]
    Cosmos {
        /// The account's connection string.
        url: Secret,
        /// The database.
        database: String,
        /// The container.
        container: String,
        /// The SQLite file in which the receiver keeps what arrived.
        journal: PathBuf,
    },
}

impl StoreConfig {
    /// A SQLite file with the default wait of 5 s.
    pub fn sqlite(path: impl Into<PathBuf>) -> Self {
        Self::Sqlite { path: path.into(), busy_timeout: Duration::from_secs(5) }
    }

    /// A PostgreSQL database with the default wait of 5 s.
    pub fn postgres(url: impl Into<String>) -> Self {
        Self::Postgres { url: Secret::new(url), busy_timeout: Duration::from_secs(5) }
    }
}

/// Whether a change needs the header `If-Match`. Lost updates are impossible either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Preconditions {
    /// A change without it is made on the current version.
    #[default]
    Optional,
    /// A change without it is answered with 428.
    Required,
}

/// What the service can be told.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where contacts and their events are kept.
    pub store: StoreConfig,
    /// Whether a change needs the header `If-Match`.
    pub preconditions: Preconditions,
    /// The secrets that the sender of webhooks signs with; several while they are rotated. Without
    /// any, the receiver's path answers 404.
    pub webhook_secrets: Vec<Secret>,
}

impl Config {
    /// A store, and the defaults.
    pub fn new(store: StoreConfig) -> Self {
        Self { store, preconditions: Preconditions::default(), webhook_secrets: Vec::new() }
    }
}
