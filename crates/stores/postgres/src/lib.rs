//! Outbox, feed and everything a relay keeps, in PostgreSQL.
//!
//! What lives here: the store for PostgreSQL 14 and newer. What does not: sinks and the relay.
//! Invariant: the feed is a chain of ticks over snapshots (docs/design/postgres-feed.md): nothing
//! committed is skipped, whatever order transactions commit in and however long they stay open.

mod address;
mod adopted;
mod advice;
mod append;
#[cfg(feature = "sqlx")]
mod append_sqlx;
mod checkpoints;
mod chunks;
mod config;
mod connections;
mod dead_letters;
mod documents;
mod error;
mod feed;
mod head;
mod inbox;
mod leases;
mod letters;
mod migrate;
mod names;
mod partitions;
mod positions;
mod retention;
mod row;
mod server;
mod tls;
mod transactions;
mod wal;
mod world;

use std::sync::Arc;

use postrider_core::Result;

pub use append::{OnDuplicate, Outbox};
pub use config::{
    MAX_OUTBOX_NAME_BYTES, MAX_SCHEMA_NAME_BYTES, PayloadType, PostgresOptions, SchemaOnOpen,
};
pub use deadpool_postgres;
pub use error::postgres_error;
pub use inbox::{Handled, InboxOptions, PostgresInbox};
pub use migrate::{SCHEMA_VERSION, schema_sql};
pub use tokio_postgres;
pub use wal::{
    MAX_SLOT_NAME_BYTES, MirrorReport, MirroredConsumer, PostgresWal, Recover, SlotStanding,
    WalAdvice, WalConsumer, WalCounts, WalOptions, WalReport, wal_schema_sql,
};

use connections::Connections;
use names::Names;

/// The decoders of bytes from a server, for `cargo xtask fuzz`: no part of the interface.
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing {
    /// One message of `pgoutput`.
    pub fn pgoutput(bytes: &[u8]) {
        crate::wal::fuzzing::pgoutput(bytes);
    }

    /// A stream of the server's messages.
    pub fn frames(bytes: &[u8]) {
        crate::wal::fuzzing::frames(bytes);
    }
}

/// One outbox of a database. Cloning shares its connections.
#[derive(Clone)]
pub struct PostgresStore {
    inner: Arc<Inner>,
}

struct Inner {
    connections: Connections,
    names: Names,
    identity: String,
    chunks: chunks::Chunks,
    head: head::Head,
    partitions: partitions::Partitions,
}

impl std::fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names = &self.inner.names;
        write!(f, "PostgresStore {{ {:?}.{:?} }}", names.schema(), names.outbox())
    }
}

impl PostgresStore {
    /// Connects, and brings the tables to this program's version or refuses, as the options ask.
    ///
    /// # Errors
    /// `Corrupt` for tables of a newer version; `Permanent` for impossible options, missing tables,
    /// a refused login, a server older than 14, or a sequence that would lose events; `Transient`
    /// when the server can't be reached.
    pub async fn open(options: PostgresOptions) -> Result<Self> {
        options.check()?;
        let connections = Connections::new(&options)?;
        let names = migrate::open(&connections, &options).await?;
        let identity = feed::identity(&connections, &names).await?;
        let inner = Inner {
            connections,
            names,
            identity,
            chunks: chunks::Chunks::new(),
            head: head::Head::new(options.tick_interval),
            partitions: partitions::Partitions::new(),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// How this outbox stores payloads, whatever the options asked for.
    pub fn payload(&self) -> PayloadType {
        self.inner.names.payload()
    }

    /// Lets this process's readers look at once: call it after the commit of an append. Without it
    /// they see the events after their next poll.
    pub fn ring(&self) {
        self.inner.head.ring();
    }
}
