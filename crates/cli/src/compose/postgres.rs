//! What the kinds of PostgreSQL have in common.
//!
//! What lives here: their shared keys, the options that these make, and opening the store. What
//! does not: a kind by itself (`postgres_feed.rs`, `postgres_wal.rs`); what PostgreSQL's own errors
//! mean, which the store says.
//! Invariant: a URL is never shown: it may hold a password.

use postrider_core::Result;
use postrider_store_postgres::{PayloadType, PostgresOptions, PostgresStore, SchemaOnOpen};

use super::OnSchema;
use crate::config::SourceConfig;
use crate::config::keys::{Key, Need, Shape, key, ms, s};
use crate::output::escape;

pub(super) const URL: Key = key(
    "url",
    Shape::Secret,
    Need::Required,
    "The database: postgres://user:password@host:5432/name, or libpq's key=value words.",
);
pub(super) const SCHEMA: Key = key(
    "schema",
    Shape::Text,
    Need::Default("\"postrider\""),
    "The schema that holds all of Postrider's tables and functions.",
);
pub(super) const OUTBOX: Key =
    key("outbox", Shape::Text, Need::Default("\"outbox\""), "Which outbox of the schema.");
pub(super) const PAYLOAD: Key = key(
    "payload",
    Shape::Choice(&["bytea", "json"]),
    Need::Default("\"bytea\""),
    "How an outbox that init creates stores payloads; an existing one stays as it is.",
);
pub(super) const CONNECTIONS: Key = key(
    "connections",
    Shape::Integer { min: 1, max: 1_000 },
    Need::Default("8"),
    "Most connections to the database at a time.",
);
pub(super) const STATEMENT_TIMEOUT: Key = key(
    "statement_timeout",
    Shape::Duration { min: ms(100), max: s(3_600) },
    Need::Default("\"30s\""),
    "Longest time for one statement, and for getting a connection.",
);
pub(super) const CA_FILE: Key = key(
    "ca_file",
    Shape::Text,
    Need::Optional,
    "PEM file with the certificate authorities to trust instead of the system's.",
);

/// What the shared keys ask for.
pub(super) fn options(config: &SourceConfig) -> PostgresOptions {
    let fields = &config.fields;
    let mut options = PostgresOptions::new(fields.text(URL.name).unwrap_or_default())
        .schema(fields.text(SCHEMA.name).unwrap_or("postrider"))
        .outbox(outbox(config))
        .payload(match fields.text(PAYLOAD.name) {
            Some("json") => PayloadType::Json,
            _ => PayloadType::Bytea,
        });
    if let Some(count) = fields.number(CONNECTIONS.name).and_then(|n| usize::try_from(n).ok()) {
        options = options.connections(count);
    }
    if let Some(timeout) = fields.duration(STATEMENT_TIMEOUT.name) {
        options = options.statement_timeout(timeout);
    }
    if let Some(file) = fields.text(CA_FILE.name) {
        options = options.ca_file(super::path(&config.folder, file));
    }
    options
}

pub(super) fn outbox(config: &SourceConfig) -> &str {
    config.fields.text(OUTBOX.name).unwrap_or("outbox")
}

/// The kind, and which outbox.
pub(super) fn show(kind: &str, config: &SourceConfig) -> String {
    let schema = config.fields.text(SCHEMA.name).unwrap_or_default();
    format!("{kind} {}", escape(&format!("{schema}.{}", outbox(config))))
}

/// Connects, and looks at the tables or makes them.
pub(super) async fn open(options: PostgresOptions, schema: OnSchema) -> Result<PostgresStore> {
    let schema = match schema {
        OnSchema::Create => SchemaOnOpen::Migrate,
        OnSchema::Require => SchemaOnOpen::Require,
    };
    PostgresStore::open(options.on_open(schema)).await
}

/// What the file asks of an outbox that has it otherwise.
pub(super) fn ignored(config: &SourceConfig, payload: PayloadType) -> Option<String> {
    config.fields.place(PAYLOAD.name)?;
    let has = match payload {
        PayloadType::Bytea => "bytea",
        PayloadType::Json => "json",
    };
    let asked = config.fields.text(PAYLOAD.name).filter(|asked| *asked != has)?;
    Some(format!(
        "[source] payload = {asked:?} changes nothing: an outbox that exists stays {has:?}"
    ))
}

/// What a person should look at, whichever way the outbox is read; `weaker` is what that way knows.
pub(super) async fn advice(
    store: &PostgresStore,
    mut weaker: Vec<String>,
    ignored: Option<String>,
) -> Result<super::Advice> {
    weaker.extend(ignored);
    weaker.extend(store.missing_bounds().await?);
    Ok(super::Advice { attention: store.warnings().await?, weaker })
}
