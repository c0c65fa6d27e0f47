//! From settings to a container.
//!
//! What lives here: the SDK's client, whom it signs in as, where it looks first. What does not:
//! what is asked of the container.
//! Invariant: a container whose partition key is another, or in which a time to live has no effect,
//! is refused before anything is written to it.

use std::sync::Arc;
use std::time::Duration;

use azure_core::credentials::Secret as AzureSecret;
use azure_data_cosmos::clients::ContainerClient;
use azure_data_cosmos::models::{ContainerProperties, TimeToLive};
use azure_data_cosmos::options::{OperationOptions, Region};
use azure_data_cosmos::{
    AccountEndpoint, AccountReference, CosmosClient, CosmosClientBuilder, CosmosRuntime,
    RoutingStrategy,
};
use postrider_core::{Error, Result};

use crate::Inner;
use crate::account;
use crate::advice::ClockSeen;
use crate::charge::Charges;
use crate::checkpoints::Known;
use crate::config::{Account, Auth, CosmosConfig};
use crate::connection::{Connection, Containers, Health};
use crate::control::Control;
use crate::error::failed;
use crate::expired::Expired;
use crate::feed::Ahead;
use crate::leases::Seen;
use crate::numbers::Numbers;
use crate::relays::Own;

const CONNECT: &str = "connect to the account";
/// The partition key of both containers.
pub(crate) const PARTITION_KEY: &str = "/partitionKey";
/// Longest time for one operation, the SDK's own repetitions included: twice what the service takes
/// for a batch at the longest. Without it the SDK goes on for most of a minute.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) async fn open(config: &CosmosConfig) -> Result<Inner> {
    config.check()?;
    account::check(config).await?;
    let health = Arc::new(Health::default());
    let containers = containers(client(config, &health).await?, config).await?;
    let read = containers.documents.read(None).await;
    let read = read.map_err(failed("read the container's settings"))?;
    let properties = read.into_model().map_err(failed("read the container's settings"))?;
    check(&config.container, &properties)?;
    check_leases(config, &containers.leases).await?;
    let connection = Arc::new(Connection::new(config.clone(), health, containers));
    let kept = format!("{}/{}", config.database, config.container);
    let control = Control::new(Arc::clone(&connection), kept);
    Ok(Inner {
        account: host(config)?,
        database_name: config.database.clone(),
        connection,
        container_name: config.container.clone(),
        container_rid: properties.system_properties.resource_id.unwrap_or_default(),
        default_topic: config.topic()?,
        event_ttl_seconds: config.event_ttl_seconds(),
        max_items: config.max_items,
        control,
        numbers: Numbers::default(),
        seen: Seen::default(),
        known: Known::default(),
        own: Own::default(),
        clock: ClockSeen::default(),
        ahead: Ahead::default(),
        expired: Expired::default(),
    })
}

/// The account's host, and its port where it is not the usual one.
fn host(config: &CosmosConfig) -> Result<String> {
    let account = config.account()?;
    let endpoint: AccountEndpoint =
        account.endpoint.parse().map_err(failed("read the account's address"))?;
    let host = endpoint.url().host_str().unwrap_or_default();
    Ok(match endpoint.url().port() {
        Some(port) => format!("{host}:{port}"),
        None => host.to_owned(),
    })
}

/// Both containers, by a client that has looked at the account just now.
pub(crate) async fn containers_anew(
    config: &CosmosConfig,
    health: &Arc<Health>,
) -> Result<Containers> {
    // What is known of accounts is shared by all clients of a runtime.
    let runtime = CosmosRuntime::builder().build().await.map_err(failed(CONNECT))?;
    let client = built(builder(health).with_runtime(runtime), config).await?;
    containers(client, config).await
}

async fn containers(client: CosmosClient, config: &CosmosConfig) -> Result<Containers> {
    let database = client.database_client(config.database.clone());
    let find = async |name: &str, place| {
        database.container_client(name.to_owned(), None).await.map_err(failed(place))
    };
    let documents = find(&config.container, "look the container up").await?;
    let leases = find(&config.lease_container, "look the lease container up").await?;
    Ok(Containers { documents, leases })
}

/// In the container of what relays keep documents name their own time to live or none.
async fn check_leases(config: &CosmosConfig, container: &ContainerClient) -> Result<()> {
    let place = "look the lease container up";
    let read = container.read(None).await.map_err(failed(place))?;
    let properties = read.into_model().map_err(failed(place))?;
    check_key(&config.lease_container, &properties)?;
    match properties.default_ttl {
        TimeToLive::NoDefault => Ok(()),
        _ => Err(Error::permanent(format!(
            "lease_container: {:?} would remove checkpoints and dead letters by age, or never what \
             relays leave behind; set its default time to live to \"On (no default)\", which is \
             defaultTtl -1",
            config.lease_container
        ))),
    }
}

/// Refuses a container in which documents would be apart from their events, or events live for
/// ever.
fn check(name: &str, properties: &ContainerProperties) -> Result<()> {
    check_key(name, properties)?;
    match properties.default_ttl {
        TimeToLive::NoDefault => Ok(()),
        TimeToLive::Forever => Err(Error::permanent(format!(
            "container {name:?} has no time to live, so that events would never be removed; set \
             its default to \"On (no default)\", which is defaultTtl -1"
        ))),
        _ => Err(Error::permanent(format!(
            "container {name:?} removes documents that name no time to live; set its default to \
             \"On (no default)\", which is defaultTtl -1"
        ))),
    }
}

fn check_key(name: &str, properties: &ContainerProperties) -> Result<()> {
    let paths = properties.partition_key.paths();
    if paths.len() != 1 || paths[0] != PARTITION_KEY {
        return Err(Error::permanent(format!(
            "container {name:?} has the partition key {}; it has to be {PARTITION_KEY}, which \
             can't be changed later: make another container",
            paths.join(", ")
        )));
    }
    Ok(())
}

pub(crate) async fn client(config: &CosmosConfig, health: &Arc<Health>) -> Result<CosmosClient> {
    built(builder(health), config).await
}

fn builder(health: &Arc<Health>) -> CosmosClientBuilder {
    let mut operations = OperationOptions::default();
    operations.end_to_end_latency_policy = Some(OPERATION_TIMEOUT.into());
    CosmosClient::builder()
        .with_default_operation_options(operations)
        .with_diagnostics_handler(Arc::new(Charges(Arc::clone(health))))
}

async fn built(builder: CosmosClientBuilder, config: &CosmosConfig) -> Result<CosmosClient> {
    let account = config.account()?;
    let reference = reference(config, account)?;
    let regions = config.preferred_regions.iter().map(|name| Region::new(name.clone()));
    let strategy = RoutingStrategy::PreferredRegions(regions.collect());
    builder.build(reference, strategy).await.map_err(failed(CONNECT))
}

fn reference(config: &CosmosConfig, account: Account) -> Result<AccountReference> {
    let endpoint: AccountEndpoint =
        account.endpoint.parse().map_err(failed("read the account's address"))?;
    match (config.auth, account.key) {
        (Auth::Key, Some(key)) => {
            let key = AzureSecret::new(key.expose().to_owned());
            Ok(AccountReference::with_authentication_key(endpoint, key))
        }
        (Auth::Key, None) => Err(Error::permanent("key: is missing")),
        #[cfg(feature = "entra")]
        (Auth::Entra, _) => {
            Ok(AccountReference::with_credential(endpoint, crate::entra::credential(config)?))
        }
        #[cfg(not(feature = "entra"))]
        (Auth::Entra, _) => Err(Error::permanent(
            "auth = \"entra\" is not in this build; build with the feature cosmos-entra",
        )),
    }
}
