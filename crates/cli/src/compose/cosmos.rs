//! `kind = "cosmos"`.
//!
//! What lives here: its keys, and opening it. What does not: other kinds.
//! Invariant: containers are the account's owner's to make; nothing here creates one.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use futures_util::FutureExt;
use postrider_core::{FeedSource, PollInterval, Secret};
use postrider_relay::SystemClock;
use postrider_store_cosmos::{Auth, CosmosConfig, CosmosStore, EntraCredential};

use super::{Advice, OnSchema, Opened};
use crate::config::keys::{Kind, Need, Shape, key, ms, s};
use crate::config::{Problem, SourceConfig};
use crate::output::escape;

pub(super) const NAME: &str = "cosmos";

/// What stands in the lease container has had one layout so far.
const LAYOUT: i64 = 1;
/// The first wait after something came; each empty look doubles it.
const BUSY: Duration = Duration::from_millis(50);

pub(super) const KIND: Kind = Kind {
    name: NAME,
    doc: "Events beside their documents in an Azure Cosmos DB container, by its change feed.",
    keys: &[
        key(
            "url",
            Shape::Secret,
            Need::Required,
            "The account's address, such as https://shop.documents.azure.com/, or the portal's \
             whole connection string.",
        ),
        key(
            "key",
            Shape::Secret,
            Need::Optional,
            "The account's key, where url is an address and auth is \"key\".",
        ),
        key(
            "auth",
            Shape::Choice(&["key", "entra"]),
            Need::Default("\"key\""),
            "By what the account believes the relay: its key, or tokens of Microsoft Entra ID.",
        ),
        key(
            "credential",
            Shape::Choice(&["managed-identity", "workload-identity", "client-secret", "azure-cli"]),
            Need::Optional,
            "With auth = \"entra\": as whom to sign in; required.",
        ),
        key("tenant_id", Shape::Text, Need::Optional, "With auth = \"entra\": the directory's id."),
        key(
            "client_id",
            Shape::Text,
            Need::Optional,
            "With auth = \"entra\": the application's id, or a managed identity's.",
        ),
        key(
            "client_secret",
            Shape::Secret,
            Need::Optional,
            "With credential = \"client-secret\": the application's secret.",
        ),
        key("database", Shape::Text, Need::Required, "The database."),
        key(
            "container",
            Shape::Text,
            Need::Required,
            "The container with documents and events; its partition key is /partitionKey.",
        ),
        key(
            "lease_container",
            Shape::Text,
            Need::Default("\"leases\""),
            "The container for leases, checkpoints and dead letters; its partition key is \
             /partitionKey, too.",
        ),
        key(
            "preferred_regions",
            Shape::Text,
            Need::Optional,
            "Regions in the order in which they are tried, with commas between; the account's own \
             order without it.",
        ),
        key(
            "event_ttl",
            Shape::Duration { min: s(1), max: s(i32::MAX as u64) },
            Need::Default("\"10d\""),
            "How long writers let an event's document live; status warns before an unsent one \
             expires.",
        ),
        key(
            "topic",
            Shape::Text,
            Need::Default("\"events\""),
            "The topic of events whose documents name none.",
        ),
        key(
            "max_items",
            Shape::Integer { min: 1, max: 50 },
            Need::Default("50"),
            "Most documents in one page of the change feed.",
        ),
        key(
            "poll_interval",
            Shape::Duration { min: ms(50), max: s(60) },
            Need::Default("\"1s\""),
            "Longest wait between two looks at a range in which nothing happens; each look costs \
             a request unit.",
        ),
    ],
};

fn settings(config: &SourceConfig) -> CosmosConfig {
    let fields = &config.fields;
    let text = |key| fields.text(key).map(str::to_owned);
    let word = |key| text(key).unwrap_or_default();
    let mut settings = CosmosConfig::new("", word("database"), word("container"));
    settings.url = fields.secret("url").cloned().unwrap_or_else(|| Secret::new(""));
    settings.key = fields.secret("key").cloned();
    settings.auth = match fields.text("auth") {
        Some("entra") => Auth::Entra,
        _ => Auth::Key,
    };
    settings.credential = match fields.text("credential") {
        Some("managed-identity") => Some(EntraCredential::ManagedIdentity),
        Some("workload-identity") => Some(EntraCredential::WorkloadIdentity),
        Some("client-secret") => Some(EntraCredential::ClientSecret),
        Some("azure-cli") => Some(EntraCredential::AzureCli),
        _ => None,
    };
    settings.tenant_id = text("tenant_id");
    settings.client_id = text("client_id");
    settings.client_secret = fields.secret("client_secret").cloned();
    if let Some(name) = text("lease_container") {
        settings.lease_container = name;
    }
    if let Some(regions) = fields.text("preferred_regions") {
        let names = regions.split(',').map(str::trim).filter(|name| !name.is_empty());
        settings.preferred_regions = names.map(str::to_owned).collect();
    }
    if let Some(ttl) = fields.duration("event_ttl") {
        settings.event_ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
    }
    if let Some(topic) = text("topic") {
        settings.topic = topic;
    }
    if let Some(count) = fields.number("max_items") {
        settings.max_items = u32::try_from(count).unwrap_or(u32::MAX);
    }
    settings
}

pub(super) fn show(config: &SourceConfig) -> String {
    let name = |key| escape(config.fields.text(key).unwrap_or_default()).into_owned();
    format!("cosmos {}/{}", name("database"), name("container"))
}

pub(super) fn check(config: &SourceConfig) -> Option<Problem> {
    // A reference that was left on purpose has no value to check.
    config.fields.secret("url")?;
    let error = settings(config).check().err()?;
    Some(super::problem(KIND.keys, &config.fields, config.place, "source", &error))
}

pub(super) fn schema_sql() -> Result<String> {
    bail!(
        "a container has no tables; docs/stores/cosmos.md shows how to make both containers, for \
         example with Bicep"
    )
}

pub(super) async fn open(config: &SourceConfig, _schema: OnSchema) -> Result<Opened> {
    let store = Arc::new(CosmosStore::open(&settings(config)).await?);
    let idle = config.fields.duration("poll_interval").unwrap_or(Duration::from_secs(1));
    let poll = PollInterval { busy: BUSY.min(idle), idle };
    let source = FeedSource::new(Arc::clone(&store), Arc::new(SystemClock), poll);
    let asked = Arc::clone(&store);
    Ok(Opened {
        source: Arc::new(source),
        feed: Arc::clone(&store) as _,
        store,
        shown: show(config),
        schema_version: LAYOUT,
        log: None,
        look: Box::new(move || {
            let store = Arc::clone(&asked);
            async move { Ok(Advice { attention: store.advice().await?, weaker: Vec::new() }) }
                .boxed()
        }),
    })
}
