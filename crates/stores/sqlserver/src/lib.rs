//! Outbox, feed and everything a relay keeps, in Microsoft SQL Server and Azure SQL.
//!
//! What lives here: the client's half of the store, on top of the procedures in `migrations/`. What
//! does not: sinks and the relay, and what the procedures promise (docs/design/sqlserver-feed.md).
//! Invariant: an event gets its place in the feed when it is first read, after its transaction has
//! committed and under the lock of its partition: nothing committed is skipped.

mod address;
mod advice;
mod append;
mod checkpoints;
mod config;
mod connections;
mod dead_letters;
mod documents;
#[cfg(feature = "entra")]
mod entra;
mod error;
mod feed;
mod inbox;
mod leases;
mod letters;
mod migrate;
mod names;
mod retention;
mod row;
mod sql;

use std::sync::Arc;

use futures_util::future::BoxFuture;
use postrider_core::{Error, Result};

pub use append::{OnDuplicate, Outbox};
pub use config::{AccessTokens, MAX_SCHEMA_NAME_CHARS, SchemaOnOpen, SqlServerOptions};
#[cfg(feature = "entra")]
pub use entra::{EntraCredential, entra_tokens};
pub use error::sqlserver_error;
pub use inbox::{Handled, InboxOptions, SqlServerInbox};
pub use migrate::{SCHEMA_VERSION, schema_sql};
pub use tiberius;

use connections::{Connections, Param, Sets};
use names::Names;

/// The driver's client, as the store connects it: over TCP, on Tokio.
pub type SqlServerClient = connections::Session;

/// The outbox of one schema. Cloning shares its connections.
#[derive(Clone)]
pub struct SqlServerStore {
    inner: Arc<Inner>,
}

struct Inner {
    connections: Connections,
    names: Names,
    identity: String,
    page_size: feed::PageSize,
    bell: feed::Bell,
}

impl std::fmt::Debug for SqlServerStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SqlServerStore {{ {} }}", self.inner.connections.name())
    }
}

impl SqlServerStore {
    /// Connects, and brings the tables to this program's version or refuses, as the options ask.
    ///
    /// # Errors
    /// `Corrupt` for tables of a newer version; `Permanent` for impossible options, missing tables
    /// or a refused login; `Transient` when the server can't be reached.
    pub async fn open(options: SqlServerOptions) -> Result<Self> {
        options.check()?;
        let connections = Connections::new(&options)?;
        let names = Names::new(&options.schema);
        let id = migrate::open(&connections, &options, &names).await?;
        let identity = format!("sqlserver:{id}");
        let inner = Inner {
            connections,
            names,
            identity,
            page_size: feed::PageSize::new(),
            bell: feed::Bell::default(),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Lets this process's readers look at once: call it after the commit of an append. Without it
    /// they see the events after their next poll.
    pub fn ring(&self) {
        self.inner.bell.ring();
    }

    /// A connection of the caller's own to the store's database, set up as the store's are: an
    /// error rolls the open transaction back whole.
    ///
    /// # Errors
    /// As [`SqlServerStore::open`].
    pub async fn connect(&self) -> Result<SqlServerClient> {
        self.inner.connections.alone().await
    }

    /// Runs `work` in one transaction on a connection of the store's, commits it when `work`
    /// succeeds and wakes this process's readers: the place for a business row and its event.
    ///
    /// # Errors
    /// Those of `work`, and the store's own.
    ///
    /// # Cancellation
    /// A dropped call is rolled back, unless the commit was under way.
    pub async fn transaction<T, E: From<Error>>(
        &self,
        work: impl for<'c> FnOnce(&'c mut SqlServerClient) -> BoxFuture<'c, Result<T, E>> + Send,
    ) -> Result<T, E> {
        let value = self.inner.connections.transaction(work).await?;
        self.ring();
        Ok(value)
    }

    /// One batch about this store's schema.
    async fn run(&self, place: &'static str, sql: &str, params: &[Param<'_>]) -> Result<Sets> {
        self.inner.connections.run(place, &self.inner.names.fill(sql), params).await
    }
}
