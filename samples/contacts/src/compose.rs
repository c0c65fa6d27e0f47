//! The service put together: the only file that names concrete stores.
//!
//! What lives here: one arm for each kind of store. What does not: anything that uses them; the
//! rest of the service sees `DocumentStore` and `Journal`.
//! Invariant: a service that opened can serve; whatever is wrong with its store shows here.

use std::sync::Arc;

use anyhow::Context as _;
#[cfg(feature = "cosmos")]
use postrider::cosmos::{CosmosConfig, CosmosStore, create_containers};
use postrider::postgres::{PostgresOptions, PostgresStore};
use postrider::sinks::webhook::verify::Verifier;
use postrider::sqlite::{SqliteOptions, SqliteStore};
#[cfg(feature = "sqlserver")]
use postrider::sqlserver::{SqlServerOptions, SqlServerStore};
use postrider::{DocumentStore, SystemClock};
use tokio_util::sync::CancellationToken;

use crate::config::{Config, StoreConfig};
use crate::receiver::{Journal, PostgresJournal, Receiver, SqliteJournal};
use crate::service::{Parts, Service};

/// Where all of the contacts' events go.
#[cfg(feature = "cosmos")]
const TOPIC: &str = "contacts";

/// Opens the store and puts the service together.
///
/// # Errors
/// The store cannot be opened, or a secret has not the form of one.
pub async fn open(config: Config) -> anyhow::Result<Service> {
    let (documents, journal) = open_store(config.store).await?;
    let secrets = &config.webhook_secrets;
    let verifier = (!secrets.is_empty()).then(|| Verifier::new(secrets)).transpose();
    let verifier = verifier.context("read the webhook secrets")?;
    Ok(Service::new(Parts {
        documents,
        clock: Arc::new(SystemClock),
        preconditions: config.preconditions,
        receiver: Receiver::new(verifier, journal),
        draining: CancellationToken::new(),
    }))
}

/// The service's own store, and where its receiver keeps what arrived: another service would have
/// a database of its own for that.
async fn open_store(
    store: StoreConfig,
) -> anyhow::Result<(Arc<dyn DocumentStore>, Arc<dyn Journal>)> {
    match store {
        StoreConfig::Sqlite { path, busy_timeout } => {
            let options = SqliteOptions::new(&path).busy_timeout(busy_timeout);
            let place = || format!("open the database {}", path.display());
            let store = SqliteStore::open(options).await.with_context(place)?;
            let journal = SqliteJournal::open(store.clone(), path.clone()).await;
            Ok((Arc::new(store), Arc::new(journal.with_context(place)?)))
        }
        StoreConfig::Postgres { url, busy_timeout } => {
            let options = PostgresOptions::new(url.expose()).statement_timeout(busy_timeout);
            let store = PostgresStore::open(options).await.context("open the database")?;
            let journal = PostgresJournal::open(store.clone()).await;
            Ok((Arc::new(store), Arc::new(journal.context("open the journal")?)))
        }
        #[cfg(feature = "sqlserver")]
        StoreConfig::SqlServer { url, busy_timeout, journal } => {
            let options = SqlServerOptions::new(url.expose()).statement_timeout(busy_timeout);
            let store = SqlServerStore::open(options).await.context("open the database")?;
            Ok((Arc::new(store), open_journal(journal).await?))
        }
        #[cfg(feature = "cosmos")]
        StoreConfig::Cosmos { url, database, container, journal } => {
            let mut config = CosmosConfig::new(url.expose(), database, container);
            // Of every event here: documents need not name it.
            config.topic = TOPIC.to_owned();
            create_containers(&config).await.context("make the container")?;
            let store = CosmosStore::open(&config).await.context("open the container")?;
            Ok((Arc::new(store), open_journal(journal).await?))
        }
    }
}

/// A file of its own for the receiver, beside a store that this service keeps no tables in.
#[cfg(any(feature = "cosmos", feature = "sqlserver"))]
async fn open_journal(path: std::path::PathBuf) -> anyhow::Result<Arc<dyn Journal>> {
    let place = || format!("open the journal {}", path.display());
    let file = SqliteStore::open(SqliteOptions::new(&path)).await.with_context(place)?;
    Ok(Arc::new(SqliteJournal::open(file, path.clone()).await.with_context(place)?))
}
