//! The measured server, its databases, and sessions on them.
//!
//! What lives here: starting PostgreSQL as a production server is set up, fresh databases, the
//! server's own log as a measuring device. What does not: any figure.
//! Invariant: fsync, synchronous_commit and full_page_writes are on, and every table is logged.

use std::ops::Deref;
use std::path::PathBuf;

use anyhow::{Context, Result};
use postrider_servers::postgres::{Database, Options, Server, Version};
use postrider_store_postgres::tokio_postgres::{Client, NoTls};
use postrider_store_postgres::{PostgresOptions, PostgresStore};
use tokio::task::JoinSet;

/// Memory and log as for a server that does something; checkpoints so seldom that none falls into
/// one half of a pair only. The log in one file that the figures can read.
const SETTINGS: [&str; 7] = [
    "shared_buffers = 1GB",
    "max_wal_size = 16GB",
    "checkpoint_timeout = 1h",
    "logging_collector = on",
    "log_directory = 'log'",
    "log_filename = 'server.log'",
    "log_rotation_size = 0",
];

/// What the server writes into its log.
#[derive(Debug, Clone, Copy)]
pub(crate) enum WalLevel {
    /// PostgreSQL's default.
    Replica,
    /// What reading the log needs.
    Logical,
}

pub(crate) struct Measured {
    server: Server,
}

impl Measured {
    pub(crate) fn launch(version: Version, level: WalLevel) -> Result<Self> {
        let options = Options::new(version).durable().setting(match level {
            WalLevel::Replica => "wal_level = replica",
            WalLevel::Logical => "wal_level = logical",
        });
        let options = SETTINGS.into_iter().fold(options, Options::setting);
        Ok(Self { server: options.launch().context("start PostgreSQL")? })
    }

    /// A fresh database; the server must outlive it.
    pub(crate) fn database(&self) -> Result<Database> {
        Ok(self.server.create_database()?)
    }

    /// Where the server writes its log.
    pub(crate) fn log(&self) -> PathBuf {
        self.server.data().join("log").join("server.log")
    }
}

/// The store of a database, with an outbox of eight partitions and ticks of 20 ms: the defaults.
pub(crate) async fn store(database: &Database) -> Result<PostgresStore> {
    let options = PostgresOptions::new(database.url());
    PostgresStore::open(options).await.context("open the store")
}

/// One connection. It ends with this value.
pub(crate) struct Session {
    client: Client,
    _driver: JoinSet<()>,
}

impl Session {
    pub(crate) async fn open(database: &Database) -> Result<Self> {
        let connected =
            postrider_store_postgres::tokio_postgres::connect(&database.url(), NoTls).await;
        let (client, connection) = connected.context("connect")?;
        let mut driver = JoinSet::new();
        driver.spawn(async {
            // An error of the connection is met by the call that needs it.
            let _ = connection.await;
        });
        Ok(Self { client, _driver: driver })
    }

    /// The single value of a query without parameters.
    pub(crate) async fn number(&self, sql: &str) -> Result<i64> {
        Ok(self.client.query_one(sql, &[]).await.with_context(|| sql.to_owned())?.get(0))
    }

    /// Runs statements without parameters.
    pub(crate) async fn run(&self, sql: &str) -> Result<()> {
        self.client.batch_execute(sql).await.with_context(|| sql.to_owned())
    }
}

impl Deref for Session {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}
