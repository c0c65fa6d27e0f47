//! `kind = "postgres-feed"`.
//!
//! What lives here: its keys, and opening it. What does not: other kinds; what PostgreSQL's own
//! errors mean, which the store says.
//! Invariant: a URL is never shown: it may hold a password.

use std::sync::Arc;

use anyhow::Result;
use futures_util::FutureExt;
use postrider_core::{FeedSource, PollInterval};
use postrider_relay::SystemClock;
use postrider_store_postgres::{
    PayloadType, PostgresOptions, PostgresStore, SchemaOnOpen, schema_sql as sql_of,
};

use super::{Advice, OnSchema, Opened};
use crate::config::keys::{Kind, Need, Shape, key, ms, s};
use crate::config::{Problem, SourceConfig};
use crate::output::escape;

pub(super) const NAME: &str = "postgres-feed";

pub(super) const KIND: Kind = Kind {
    name: NAME,
    doc: "An outbox in a PostgreSQL database, read as a feed.",
    keys: &[
        key(
            "url",
            Shape::Secret,
            Need::Required,
            "The database: postgres://user:password@host:5432/name, or libpq's key=value words.",
        ),
        key(
            "schema",
            Shape::Text,
            Need::Default("\"postrider\""),
            "The schema that holds all of Postrider's tables and functions.",
        ),
        key("outbox", Shape::Text, Need::Default("\"outbox\""), "Which outbox of the schema."),
        key(
            "partitions",
            Shape::Integer { min: 1, max: postrider_core::limits::MAX_PARTITIONS as u64 },
            Need::Default("8"),
            "Partitions of an outbox that init creates; an existing one keeps its number.",
        ),
        key(
            "payload",
            Shape::Choice(&["bytea", "json"]),
            Need::Default("\"bytea\""),
            "How an outbox that init creates stores payloads; an existing one stays as it is.",
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
            "Longest time for one statement, and for getting a connection.",
        ),
        key(
            "tick_interval",
            Shape::Duration { min: ms(1), max: s(60) },
            Need::Default("\"20ms\""),
            "Least time between two ticks: an event waits up to this long before it can be read.",
        ),
        key(
            "ca_file",
            Shape::Text,
            Need::Optional,
            "PEM file with the certificate authorities to trust instead of the system's.",
        ),
    ],
};

fn options(config: &SourceConfig) -> PostgresOptions {
    let fields = &config.fields;
    let mut options = PostgresOptions::new(fields.text("url").unwrap_or_default())
        .schema(fields.text("schema").unwrap_or("postrider"))
        .outbox(fields.text("outbox").unwrap_or("outbox"))
        .payload(match fields.text("payload") {
            Some("json") => PayloadType::Json,
            _ => PayloadType::Bytea,
        });
    if let Some(count) = fields.number("partitions").and_then(|n| u32::try_from(n).ok()) {
        options = options.partitions(count);
    }
    if let Some(count) = fields.number("connections").and_then(|n| usize::try_from(n).ok()) {
        options = options.connections(count);
    }
    if let Some(timeout) = fields.duration("statement_timeout") {
        options = options.statement_timeout(timeout);
    }
    if let Some(interval) = fields.duration("tick_interval") {
        options = options.tick_interval(interval);
    }
    if let Some(file) = fields.text("ca_file") {
        options = options.ca_file(super::path(&config.folder, file));
    }
    options
}

pub(super) fn show(config: &SourceConfig) -> String {
    let name = |key| config.fields.text(key).unwrap_or_default().to_owned();
    format!("{NAME} {}", escape(&format!("{}.{}", name("schema"), name("outbox"))))
}

pub(super) fn schema_sql(config: &SourceConfig) -> String {
    sql_of(&options(config))
}

pub(super) fn check(config: &SourceConfig) -> Option<Problem> {
    // A reference that was left on purpose has no value to check.
    config.fields.text("url")?;
    let error = options(config).check().err()?;
    Some(super::problem(KIND.keys, &config.fields, config.place, "source", &error))
}

/// What the file asks of an outbox that has it otherwise.
fn ignored(config: &SourceConfig, payload: PayloadType) -> Option<String> {
    config.fields.place("payload")?;
    let has = match payload {
        PayloadType::Bytea => "bytea",
        PayloadType::Json => "json",
    };
    let asked = config.fields.text("payload").filter(|asked| *asked != has)?;
    Some(format!(
        "[source] payload = {asked:?} changes nothing: an outbox that exists stays {has:?}"
    ))
}

pub(super) async fn open(config: &SourceConfig, schema: OnSchema) -> Result<Opened> {
    let options = options(config).on_open(match schema {
        OnSchema::Create => SchemaOnOpen::Migrate,
        OnSchema::Require => SchemaOnOpen::Require,
    });
    let store = Arc::new(PostgresStore::open(options).await?);
    let source =
        FeedSource::new(Arc::clone(&store), Arc::new(SystemClock), PollInterval::default());
    let adviser = Arc::clone(&store);
    let ignored = ignored(config, store.payload());
    Ok(Opened {
        source: Arc::new(source),
        feed: Arc::clone(&store) as Arc<dyn postrider_core::Feed>,
        store,
        shown: show(config),
        schema_version: postrider_store_postgres::SCHEMA_VERSION,
        look: Box::new(move || {
            let (store, ignored) = (Arc::clone(&adviser), ignored.clone());
            async move {
                let mut weaker = store.adopted_warnings().await?;
                weaker.extend(ignored);
                weaker.extend(store.missing_bounds().await?);
                Ok(Advice { attention: store.warnings().await?, weaker })
            }
            .boxed()
        }),
    })
}
