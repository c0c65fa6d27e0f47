//! Documents with their events, and everything a relay keeps, in Azure Cosmos DB.
//!
//! What lives here: business documents and events in one container, saved in one transactional
//! batch. What does not: sinks and the relay.
//! Invariant: an event and the change that it tells of are in one transactional batch, and so are
//! saved together or not at all.

mod account;
mod advice;
mod append;
mod batch;
mod batch_order;
mod charge;
mod checkpoints;
mod config;
mod connect;
mod connection;
mod control;
mod dead_letters;
mod document_json;
mod documents;
#[cfg(feature = "entra")]
mod entra;
mod error;
mod event_document;
mod expired;
mod feed;
mod inbox;
mod leases;
mod letter_parts;
mod letters;
mod migrate;
mod numbers;
mod pages;
mod position;
mod progress;
mod ranges;
mod relays;
mod retention;

use std::sync::Arc;

use azure_data_cosmos::clients::ContainerClient;
use postrider_core::{Result, Topic};

pub use append::Numbering;
pub use azure_data_cosmos;
pub use config::{Auth, CosmosConfig, EntraCredential};
pub use error::cosmos_error;
pub use inbox::{CosmosInbox, InboxOptions};
pub use migrate::create_containers;

/// A container with business documents and their events. Cloning shares its connections.
#[derive(Clone)]
pub struct CosmosStore {
    inner: Arc<Inner>,
}

struct Inner {
    /// The account's host.
    account: String,
    database_name: String,
    connection: Arc<connection::Connection>,
    container_name: String,
    /// The container's own identifier; one of the same name made anew has another.
    container_rid: String,
    /// Of events whose documents name none.
    default_topic: Topic,
    /// How long an event's document lives.
    event_ttl_seconds: i64,
    /// Most documents in one page of the change feed.
    max_items: u32,
    /// What relays keep, in the lease container.
    control: control::Control,
    /// The last numbers of documents that were read or written.
    numbers: numbers::Numbers,
    /// What was seen of leases.
    seen: leases::Seen,
    /// What this process knows of checkpoints.
    known: checkpoints::Known,
    /// This process's relays.
    own: relays::Own,
    /// What the database said of its time.
    clock: advice::ClockSeen,
    /// Pages of the change feed that were read ahead.
    ahead: feed::Ahead,
    /// What was seen of the events' numbers.
    expired: expired::Expired,
}

impl CosmosStore {
    /// Connects to the account and looks the container up.
    ///
    /// # Errors
    /// `Permanent` for settings that can't be, a key that is refused, or a container that does not
    /// exist; `Transient` if the account can't be reached.
    pub async fn open(config: &CosmosConfig) -> Result<Self> {
        let inner = connect::open(config).await?;
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The SDK's client of the container, for batches of the caller's own. Ask for it anew now and
    /// then: after a fail-over of the account there may be another
    /// ([`current_container`](Self::current_container)).
    pub fn container(&self) -> ContainerClient {
        self.inner.connection.containers().documents
    }

    /// The same, looked up anew where batches failed for seconds because nobody could be reached:
    /// the account may have failed over, of which the SDK by itself learns within five minutes.
    /// Takes ten seconds at the longest, and mostly no time. Cancel-safe.
    pub async fn current_container(&self) -> ContainerClient {
        self.inner.connection.mend().await;
        self.container()
    }
}

impl std::fmt::Debug for CosmosStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CosmosStore")
            .field("database", &self.inner.database_name)
            .field("container", &self.inner.container_name)
            .finish_non_exhaustive()
    }
}
