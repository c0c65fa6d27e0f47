//! `kind = "sqlite"`.
//!
//! What lives here: its keys, and opening it. What does not: other kinds.
//! Invariant: a database that is missing is made by `init` alone.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Result, bail};
use futures_util::FutureExt;
use postrider_core::{FeedSource, PollInterval};
use postrider_relay::SystemClock;
use postrider_store_sqlite::{SchemaOnOpen, SqliteOptions, SqliteStore, Synchronous};

use super::{Advice, OnSchema, Opened};
use crate::config::keys::{Kind, LONGEST, Need, Shape, key, ms};
use crate::config::{Problem, SourceConfig};
use crate::output::escape;

pub(super) const NAME: &str = "sqlite";

pub(super) const KIND: Kind = Kind {
    name: NAME,
    doc: "An outbox in a SQLite database, beside the application's own tables.",
    keys: &[
        key("url", Shape::Secret, Need::Required, "The database file: a path or sqlite:PATH."),
        key(
            "partitions",
            Shape::Integer { min: 1, max: postrider_core::limits::MAX_PARTITIONS as u64 },
            Need::Default("8"),
            "Partitions of an outbox that init creates; an existing one keeps its number.",
        ),
        key(
            "busy_timeout",
            Shape::Duration { min: ms(0), max: LONGEST },
            Need::Default("\"5s\""),
            "How long to wait for another connection's write lock.",
        ),
        key(
            "synchronous",
            Shape::Choice(&["full", "normal"]),
            Need::Default("\"full\""),
            "When a commit is durable: full survives a power cut, normal a crash only.",
        ),
    ],
};

fn database(config: &SourceConfig) -> PathBuf {
    let url = config.fields.text("url").unwrap_or_default();
    let path = url.strip_prefix("sqlite://").or_else(|| url.strip_prefix("sqlite:"));
    let path = path.unwrap_or(url);
    // SQLite reads a name that begins so as a URI with options of its own.
    if path.starts_with("file:") { PathBuf::from(path) } else { super::path(&config.folder, path) }
}

pub(super) fn show(config: &SourceConfig) -> String {
    // Another database's URL, given by mistake, may hold a password.
    if check(config).is_some() {
        return NAME.to_owned();
    }
    format!("sqlite {}", escape(&database(config).to_string_lossy()))
}

pub(super) fn schema_sql() -> String {
    postrider_store_sqlite::schema_sql()
}

pub(super) fn check(config: &SourceConfig) -> Option<Problem> {
    let refused = |text: &str| Problem {
        place: Some(config.fields.place("url").unwrap_or(config.place)),
        key: "source.url".to_owned(),
        text: text.to_owned(),
    };
    let url = config.fields.text("url")?;
    if url.contains("://") && !url.starts_with("sqlite://") {
        return Some(refused(
            "names another kind of database; write a path or sqlite:PATH, or a configuration file \
             with another kind",
        ));
    }
    if url.ends_with(":memory:") {
        let text = "an in-memory database is seen by its own process alone; name a file";
        return Some(refused(text));
    }
    None
}

pub(super) async fn open(config: &SourceConfig, schema: OnSchema) -> Result<Opened> {
    if let Some(problem) = check(config) {
        bail!("{}: {}", problem.key, problem.text);
    }
    let path = database(config);
    let uri = path.to_string_lossy().starts_with("file:");
    if schema == OnSchema::Require && !uri && !path.exists() {
        bail!("there is no such file; run postrider init, or correct the path");
    }
    let fields = &config.fields;
    let mut options = SqliteOptions::new(&path)
        .schema(match schema {
            OnSchema::Create => SchemaOnOpen::Migrate,
            OnSchema::Require => SchemaOnOpen::Require,
        })
        .synchronous(match fields.text("synchronous") {
            Some("normal") => Synchronous::Normal,
            _ => Synchronous::Full,
        });
    if let Some(partitions) = fields.number("partitions") {
        options = options.partitions(u32::try_from(partitions)?);
    }
    if let Some(timeout) = fields.duration("busy_timeout") {
        options = options.busy_timeout(timeout);
    }
    let store = Arc::new(SqliteStore::open(options).await?);
    let feed = Arc::clone(&store);
    let source =
        FeedSource::new(Arc::clone(&store), Arc::new(SystemClock), PollInterval::default());
    Ok(Opened {
        source: Arc::new(source),
        feed,
        store,
        shown: show(config),
        schema_version: postrider_store_sqlite::SCHEMA_VERSION,
        log: None,
        look: Box::new(|| std::future::ready(Ok(Advice::default())).boxed()),
    })
}
