//! `kind = "postgres-feed"`.
//!
//! What lives here: the keys that it alone has, and opening it. What does not: what it shares with
//! the log (`postgres.rs`).
//! Invariant: none of its own.

use std::sync::Arc;

use anyhow::Result;
use futures_util::FutureExt;
use postrider_core::{FeedSource, PollInterval};
use postrider_relay::SystemClock;
use postrider_store_postgres::{PostgresOptions, schema_sql as sql_of};

use super::postgres::{
    self, CA_FILE, CONNECTIONS, OUTBOX, PAYLOAD, SCHEMA, STATEMENT_TIMEOUT, URL,
};
use super::{OnSchema, Opened};
use crate::config::keys::{Kind, Need, Shape, key, ms, s};
use crate::config::{Problem, SourceConfig};

pub(super) const NAME: &str = "postgres-feed";

pub(super) const KIND: Kind = Kind {
    name: NAME,
    doc: "An outbox in a PostgreSQL database, read as a feed.",
    keys: &[
        URL,
        SCHEMA,
        OUTBOX,
        key(
            "partitions",
            Shape::Integer { min: 1, max: postrider_core::limits::MAX_PARTITIONS as u64 },
            Need::Default("8"),
            "Partitions of an outbox that init creates; an existing one keeps its number.",
        ),
        PAYLOAD,
        CONNECTIONS,
        STATEMENT_TIMEOUT,
        key(
            "tick_interval",
            Shape::Duration { min: ms(1), max: s(60) },
            Need::Default("\"20ms\""),
            "Least time between two ticks: an event waits up to this long before it can be read.",
        ),
        CA_FILE,
    ],
};

fn options(config: &SourceConfig) -> PostgresOptions {
    let fields = &config.fields;
    let mut options = postgres::options(config);
    if let Some(count) = fields.number("partitions").and_then(|n| u32::try_from(n).ok()) {
        options = options.partitions(count);
    }
    if let Some(interval) = fields.duration("tick_interval") {
        options = options.tick_interval(interval);
    }
    options
}

pub(super) fn schema_sql(config: &SourceConfig) -> String {
    sql_of(&options(config))
}

pub(super) fn check(config: &SourceConfig) -> Option<Problem> {
    // A reference that was left on purpose has no value to check.
    config.fields.text(URL.name)?;
    let error = options(config).check().err()?;
    Some(super::problem(KIND.keys, &config.fields, config.place, "source", &error))
}

pub(super) async fn open(config: &SourceConfig, schema: OnSchema) -> Result<Opened> {
    let store = Arc::new(postgres::open(options(config), schema).await?);
    let source =
        FeedSource::new(Arc::clone(&store), Arc::new(SystemClock), PollInterval::default());
    let adviser = Arc::clone(&store);
    let ignored = postgres::ignored(config, store.payload());
    Ok(Opened {
        source: Arc::new(source),
        feed: Arc::clone(&store) as Arc<dyn postrider_core::Feed>,
        store,
        shown: postgres::show(NAME, config),
        schema_version: postrider_store_postgres::SCHEMA_VERSION,
        log: None,
        look: Box::new(move || {
            let (store, ignored) = (Arc::clone(&adviser), ignored.clone());
            async move {
                let weaker = store.adopted_warnings().await?;
                postgres::advice(&store, weaker, ignored).await
            }
            .boxed()
        }),
    })
}
