//! `kind = "sqlserver"`.
//!
//! What lives here: its keys, and opening it. What does not: other kinds; what SQL Server's own
//! errors mean, which the store says.
//! Invariant: a connection string is never shown: it may hold a password.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use futures_util::FutureExt;
use postrider_core::{Error, FeedSource, PollInterval};
use postrider_relay::SystemClock;
use postrider_store_sqlserver::{
    AccessTokens, SchemaOnOpen, SqlServerOptions, SqlServerStore, schema_sql as sql_of,
};

use super::{Advice, OnSchema, Opened};
use crate::config::keys::{Kind, Need, Shape, key, ms, s};
use crate::config::{Problem, SourceConfig};
use crate::output::escape;

pub(super) const NAME: &str = "sqlserver";

/// The first wait after something came; each empty look doubles it.
const BUSY: Duration = Duration::from_millis(5);

pub(super) const KIND: Kind = Kind {
    name: NAME,
    doc: "An outbox in a SQL Server or Azure SQL database, read as a feed.",
    keys: &[
        key(
            "url",
            Shape::Secret,
            Need::Required,
            "A connection string: Server=host,1433;Database=name;User ID=…;Password=….",
        ),
        key(
            "auth",
            Shape::Choice(&["sql", "entra"]),
            Need::Default("\"sql\""),
            "By what the server believes the relay: the string's user and password, or tokens of \
             Microsoft Entra ID.",
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
        key(
            "schema",
            Shape::Text,
            Need::Default("\"postrider\""),
            "The schema that holds all of Postrider's tables and procedures.",
        ),
        key(
            "partitions",
            Shape::Integer { min: 1, max: postrider_core::limits::MAX_PARTITIONS as u64 },
            Need::Default("8"),
            "Partitions of an outbox that init creates; an existing one keeps its number.",
        ),
        key(
            "connections",
            Shape::Integer { min: 1, max: 1_000 },
            Need::Default("8"),
            "Most connections to the database at a time.",
        ),
        key(
            "statement_timeout",
            Shape::Duration { min: ms(100), max: s(3_600) },
            Need::Default("\"30s\""),
            "Longest time for one statement, for a lock, and for getting a connection.",
        ),
        key(
            "poll_interval",
            Shape::Duration { min: ms(5), max: s(60) },
            Need::Default("\"1s\""),
            "Longest wait between two looks at a partition in which nothing happens.",
        ),
        key(
            "ca_file",
            Shape::Text,
            Need::Optional,
            "PEM file with certificate authorities to trust besides the system's.",
        ),
    ],
};

/// Tokens, if the file asks for them.
#[cfg(feature = "entra")]
fn tokens(config: &SourceConfig) -> postrider_core::Result<Option<Arc<dyn AccessTokens>>> {
    use postrider_core::Secret;
    use postrider_store_sqlserver::{EntraCredential, entra_tokens};

    let fields = &config.fields;
    if fields.text("auth") != Some("entra") {
        return Ok(None);
    }
    let given = |key| fields.text(key).map(str::to_owned);
    let needed = |key: &'static str| {
        let text = format!("{key}: credential = \"client-secret\" needs it");
        given(key).ok_or_else(|| Error::permanent(text))
    };
    let credential = match fields.text("credential") {
        Some("managed-identity") => {
            EntraCredential::ManagedIdentity { client_id: given("client_id") }
        }
        Some("workload-identity") => {
            EntraCredential::WorkloadIdentity { client_id: given("client_id") }
        }
        Some("client-secret") => EntraCredential::ClientSecret {
            tenant_id: needed("tenant_id")?,
            client_id: needed("client_id")?,
            client_secret: fields
                .secret("client_secret")
                .cloned()
                .unwrap_or_else(|| Secret::new("")),
        },
        Some("azure-cli") => EntraCredential::AzureCli { tenant_id: given("tenant_id") },
        _ => return Err(Error::permanent("credential: auth = \"entra\" needs it")),
    };
    entra_tokens(&credential).map(Some)
}

/// Tokens, if the file asks for them.
#[cfg(not(feature = "entra"))]
fn tokens(config: &SourceConfig) -> postrider_core::Result<Option<Arc<dyn AccessTokens>>> {
    match config.fields.text("auth") {
        Some("entra") => Err(Error::permanent(
            "auth: this binary has no Entra ID; build it with the cargo feature entra",
        )),
        _ => Ok(None),
    }
}

fn options(config: &SourceConfig) -> SqlServerOptions {
    let fields = &config.fields;
    let url = fields.secret("url").map_or("", |url| url.expose());
    let mut options =
        SqlServerOptions::new(url).schema(fields.text("schema").unwrap_or("postrider"));
    if let Some(count) = fields.number("partitions").and_then(|n| u32::try_from(n).ok()) {
        options = options.partitions(count);
    }
    if let Some(count) = fields.number("connections").and_then(|n| usize::try_from(n).ok()) {
        options = options.connections(count);
    }
    if let Some(timeout) = fields.duration("statement_timeout") {
        options = options.statement_timeout(timeout);
    }
    if let Some(file) = fields.text("ca_file") {
        options = options.ca_file(super::path(&config.folder, file));
    }
    options
}

fn with_tokens(config: &SourceConfig) -> postrider_core::Result<SqlServerOptions> {
    let options = options(config);
    Ok(match tokens(config)? {
        Some(tokens) => options.access_tokens(tokens),
        None => options,
    })
}

pub(super) fn show(config: &SourceConfig) -> String {
    let schema = config.fields.text("schema").unwrap_or("postrider");
    format!("{NAME} {}", escape(&format!("{schema}.outbox")))
}

pub(super) fn schema_sql(config: &SourceConfig) -> String {
    sql_of(&options(config))
}

pub(super) fn check(config: &SourceConfig) -> Option<Problem> {
    // A reference that was left on purpose has no value to check.
    config.fields.secret("url")?;
    let error = with_tokens(config).and_then(|options| options.check()).err()?;
    Some(super::problem(KIND.keys, &config.fields, config.place, "source", &error))
}

pub(super) async fn open(config: &SourceConfig, schema: OnSchema) -> Result<Opened> {
    let schema = match schema {
        OnSchema::Create => SchemaOnOpen::Migrate,
        OnSchema::Require => SchemaOnOpen::Require,
    };
    let store = Arc::new(SqlServerStore::open(with_tokens(config)?.on_open(schema)).await?);
    let idle = config.fields.duration("poll_interval").unwrap_or(Duration::from_secs(1));
    let poll = PollInterval { busy: BUSY.min(idle), idle };
    let source = FeedSource::new(Arc::clone(&store), Arc::new(SystemClock), poll);
    let asked = Arc::clone(&store);
    Ok(Opened {
        source: Arc::new(source),
        feed: Arc::clone(&store) as _,
        store,
        shown: show(config),
        schema_version: postrider_store_sqlserver::SCHEMA_VERSION,
        log: None,
        look: Box::new(move || {
            let store = Arc::clone(&asked);
            async move {
                let (attention, weaker) = (store.warnings().await?, store.weaker().await?);
                Ok(Advice { attention, weaker })
            }
            .boxed()
        }),
    })
}
