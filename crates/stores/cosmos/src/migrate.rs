//! Making the database and its two containers.
//!
//! What lives here: their settings. What does not: rights, throughput, regions, which a template
//! sets (`docs/stores/cosmos.md`).
//! Invariant: what is there is left as it is; whether it will do is looked at when it is opened.

use std::sync::Arc;

use azure_data_cosmos::CosmosError;
use azure_data_cosmos::clients::DatabaseClient;
use azure_data_cosmos::models::{
    ContainerProperties, IndexingMode, IndexingPolicy, PartitionKeyDefinition, TimeToLive,
};
use postrider_core::Result;

use crate::config::CosmosConfig;
use crate::connect::{PARTITION_KEY, client};
use crate::error::{CONFLICT, cosmos_error, status};

/// What reading pages asks for; everything else would only make each write dearer.
const INDEXED: [&str; 3] = ["/type/?", "/deleted/?", "/data/deleted/?"];

/// Makes the database, the container and the lease container where they are missing, and returns
/// the names of what was made. Needs the account's key: the service gives no token of Entra ID the
/// right to make containers this way.
///
/// # Errors
/// `Permanent` for settings that can't be and a key that is refused; `Transient` if the account
/// can't be reached.
pub async fn create_containers(config: &CosmosConfig) -> Result<Vec<String>> {
    config.check()?;
    let client = client(config, &Arc::default()).await?;
    let mut made = Vec::new();
    let database = client.create_database(&config.database, None).await;
    if is_new("make the database", database.map(drop))? {
        made.push(config.database.clone());
    }
    let database = client.database_client(config.database.clone());
    let mut policy = IndexingPolicy::default().with_indexing_mode(IndexingMode::Consistent);
    policy.automatic = true;
    let policy = INDEXED.iter().fold(policy, |policy, path| policy.with_included_path(*path));
    let policy = policy.with_excluded_path("/*");
    let documents = properties(&config.container).with_indexing_policy(policy);
    for properties in [documents, properties(&config.lease_container)] {
        let name = properties.id.to_string();
        if create(&database, properties).await? {
            made.push(name);
        }
    }
    Ok(made)
}

/// Documents name their own time to live, or none.
fn properties(name: &str) -> ContainerProperties {
    let key = PartitionKeyDefinition::from(PARTITION_KEY);
    ContainerProperties::new(name.to_owned(), key).with_default_ttl(TimeToLive::NoDefault)
}

async fn create(database: &DatabaseClient, properties: ContainerProperties) -> Result<bool> {
    let created = database.create_container(properties, None).await;
    is_new("make the container", created.map(drop))
}

/// Whether something was made; if it was there before, that is well, too.
fn is_new(place: &str, made: Result<(), CosmosError>) -> Result<bool> {
    match made {
        Ok(()) => Ok(true),
        Err(error) if status(&error).0 == CONFLICT => Ok(false),
        Err(error) => Err(cosmos_error(place, &error)),
    }
}
