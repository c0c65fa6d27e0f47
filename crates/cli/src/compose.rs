//! The only place that names concrete stores and sinks: here the list, below one file a kind.
//!
//! What lives here: which kinds there are, and the way from a section of the file to the seam. What
//! does not: a kind's own keys (`compose/`), commands, which know the seams alone.
//! Invariant: making a sink connects to nothing; what is impossible is a problem with its place.

#[cfg(feature = "cosmos")]
mod cosmos;
#[cfg(feature = "jsonl")]
mod jsonl;
#[cfg(feature = "kafka")]
mod kafka;
mod log;
#[cfg(any(
    feature = "kafka",
    feature = "nats",
    feature = "rabbitmq",
    feature = "redis",
    feature = "webhook"
))]
#[allow(dead_code, reason = "no kind has all of the keys, and a build may have one kind")]
mod message;
#[cfg(feature = "nats")]
mod nats;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "postgres")]
mod postgres_feed;
#[cfg(feature = "postgres")]
mod postgres_wal;
#[cfg(feature = "rabbitmq")]
mod rabbitmq;
#[cfg(feature = "rabbitmq")]
mod rabbitmq_stream;
#[cfg(feature = "redis")]
mod redis;
#[cfg(feature = "servicebus")]
mod servicebus;
#[cfg(feature = "sqlite")]
mod sqlite;
#[cfg(feature = "sqlserver")]
mod sqlserver;
#[cfg(feature = "webhook")]
mod webhook;

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use futures_util::future::BoxFuture;
use postrider_core::{Feed, RelayStore, Sink, Source};

use crate::config::keys::{Key, Kind};
use crate::config::value::Fields;
use crate::config::{Place, Problem, SinkConfig, SourceConfig};

pub(crate) use log::{Log, LogMirror, LogStanding, MirrorConsumer, STATES};

#[cfg(not(any(
    feature = "cosmos",
    feature = "postgres",
    feature = "sqlite",
    feature = "sqlserver"
)))]
compile_error!(
    "postrider needs a source: build with --features sqlite, postgres, sqlserver or cosmos"
);
#[cfg(not(any(
    feature = "jsonl",
    feature = "kafka",
    feature = "nats",
    feature = "rabbitmq",
    feature = "redis",
    feature = "servicebus",
    feature = "webhook"
)))]
compile_error!(
    "postrider needs a sink: build with --features jsonl, kafka, nats, rabbitmq, redis, servicebus \
     or webhook"
);

/// What to do about missing or older tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnSchema {
    /// Create or upgrade them, and the database if need be.
    Create,
    /// Refuse.
    Require,
}

/// What the source itself asks a person to look at, a sentence each, with the remedy.
#[derive(Debug, Default)]
pub(crate) struct Advice {
    /// Trouble now.
    pub(crate) attention: Vec<String>,
    /// What is weaker than it could be, by the way in which the database is set up.
    pub(crate) weaker: Vec<String>,
}

/// Asks the source for its advice.
pub(crate) type Look =
    Box<dyn Fn() -> BoxFuture<'static, postrider_core::Result<Advice>> + Send + Sync>;

/// An open source and everything kept beside it.
pub(crate) struct Opened {
    /// What a relay reads.
    pub(crate) source: Arc<dyn Source>,
    /// What people read.
    pub(crate) feed: Arc<dyn Feed>,
    /// Leases, checkpoints, dead letters, retention.
    pub(crate) store: Arc<dyn RelayStore>,
    /// For messages, without secrets.
    pub(crate) shown: String,
    /// The version of the tables.
    pub(crate) schema_version: i64,
    /// The database's log, where the source is read from it.
    pub(crate) log: Option<Arc<dyn Log>>,
    /// Beside what every source has in common.
    look: Look,
}

impl Opened {
    /// What the source asks a person to look at. That it can't be asked is trouble as well, and no
    /// reason to show nothing else.
    pub(crate) async fn advice(&self) -> Advice {
        (self.look)().await.unwrap_or_else(|error| Advice {
            attention: vec![format!("the source can't say what is in trouble: {}", error.chain())],
            weaker: Vec::new(),
        })
    }
}

/// The sources of this build.
pub(crate) const SOURCE_KINDS: &[Kind] = &[
    #[cfg(feature = "sqlite")]
    sqlite::KIND,
    #[cfg(feature = "postgres")]
    postgres_feed::KIND,
    #[cfg(feature = "postgres")]
    postgres_wal::KIND,
    #[cfg(feature = "sqlserver")]
    sqlserver::KIND,
    #[cfg(feature = "cosmos")]
    cosmos::KIND,
];

/// The sinks of this build.
pub(crate) const SINK_KINDS: &[Kind] = &[
    #[cfg(feature = "webhook")]
    webhook::KIND,
    #[cfg(feature = "servicebus")]
    servicebus::KIND,
    #[cfg(feature = "kafka")]
    kafka::KIND,
    #[cfg(feature = "nats")]
    nats::KIND,
    #[cfg(feature = "rabbitmq")]
    rabbitmq::KIND,
    #[cfg(feature = "rabbitmq")]
    rabbitmq_stream::KIND,
    #[cfg(feature = "redis")]
    redis::KIND,
    #[cfg(feature = "jsonl")]
    jsonl::KIND,
];

/// Kinds that exist and are not in this build, with the cargo feature that adds them.
pub(crate) const ABSENT: &[(&str, &str)] = &[
    #[cfg(not(feature = "sqlite"))]
    ("sqlite", "sqlite"),
    #[cfg(not(feature = "postgres"))]
    ("postgres-feed", "postgres"),
    #[cfg(not(feature = "postgres"))]
    ("postgres-wal", "postgres"),
    #[cfg(not(feature = "sqlserver"))]
    ("sqlserver", "sqlserver"),
    #[cfg(not(feature = "cosmos"))]
    ("cosmos", "cosmos"),
    #[cfg(not(feature = "webhook"))]
    ("webhook", "webhook"),
    #[cfg(not(feature = "servicebus"))]
    ("servicebus", "servicebus"),
    #[cfg(not(feature = "kafka"))]
    ("kafka", "kafka"),
    #[cfg(not(feature = "nats"))]
    ("nats", "nats"),
    #[cfg(not(feature = "rabbitmq"))]
    ("rabbitmq", "rabbitmq"),
    #[cfg(not(feature = "rabbitmq"))]
    ("rabbitmq-stream", "rabbitmq"),
    #[cfg(not(feature = "redis"))]
    ("redis", "redis"),
    #[cfg(not(feature = "jsonl"))]
    ("jsonl", "jsonl"),
];

/// The source, for messages, without secrets.
pub(crate) fn show_source(config: &SourceConfig) -> String {
    match config.kind {
        #[cfg(feature = "sqlite")]
        sqlite::NAME => sqlite::show(config),
        #[cfg(feature = "postgres")]
        postgres_feed::NAME | postgres_wal::NAME => postgres::show(config.kind, config),
        #[cfg(feature = "sqlserver")]
        sqlserver::NAME => sqlserver::show(config),
        #[cfg(feature = "cosmos")]
        cosmos::NAME => cosmos::show(config),
        kind => kind.to_owned(),
    }
}

/// The SQL that `init` would run, for review.
///
/// # Errors
/// What the source's own rules refuse.
pub(crate) fn schema_sql(config: &SourceConfig) -> Result<String> {
    match config.kind {
        #[cfg(feature = "sqlite")]
        sqlite::NAME => Ok(sqlite::schema_sql()),
        #[cfg(feature = "postgres")]
        postgres_feed::NAME => Ok(postgres_feed::schema_sql(config)),
        #[cfg(feature = "postgres")]
        postgres_wal::NAME => Ok(postgres_wal::schema_sql(config)?),
        #[cfg(feature = "sqlserver")]
        sqlserver::NAME => Ok(sqlserver::schema_sql(config)),
        #[cfg(feature = "cosmos")]
        cosmos::NAME => cosmos::schema_sql(),
        kind => unknown(kind),
    }
}

/// How many partitions the file asks for, if it says so.
pub(crate) fn partitions_asked(config: &SourceConfig) -> Option<u64> {
    config.fields.place("partitions").and(config.fields.number("partitions"))
}

/// Refuses what the source's own rules refuse, without opening it.
pub(crate) fn check_source(config: &SourceConfig, problems: &mut Vec<Problem>) {
    match config.kind {
        #[cfg(feature = "sqlite")]
        sqlite::NAME => problems.extend(sqlite::check(config)),
        #[cfg(feature = "postgres")]
        postgres_feed::NAME => problems.extend(postgres_feed::check(config)),
        #[cfg(feature = "postgres")]
        postgres_wal::NAME => problems.extend(postgres_wal::check(config)),
        #[cfg(feature = "sqlserver")]
        sqlserver::NAME => problems.extend(sqlserver::check(config)),
        #[cfg(feature = "cosmos")]
        cosmos::NAME => problems.extend(cosmos::check(config)),
        kind => unknown(kind),
    }
}

/// Refuses sinks that can't be fed from this source, or not beside each other.
#[cfg_attr(
    not(any(
        feature = "postgres",
        feature = "kafka",
        feature = "nats",
        feature = "rabbitmq",
        feature = "redis"
    )),
    expect(unused_variables, reason = "the rules of the log and of some brokers alone")
)]
pub(crate) fn check_sinks(
    source: &SourceConfig,
    sinks: &[SinkConfig],
    problems: &mut Vec<Problem>,
) {
    match source.kind {
        #[cfg(feature = "postgres")]
        postgres_wal::NAME => problems.extend(sinks.iter().filter_map(postgres_wal::check_sink)),
        _ => {}
    }
    #[cfg(feature = "kafka")]
    problems.extend(kafka::check_sinks(sinks));
    #[cfg(feature = "nats")]
    problems.extend(nats::check_sinks(sinks));
    #[cfg(feature = "rabbitmq")]
    problems.extend(rabbitmq_stream::check_sinks(source, sinks));
    #[cfg(feature = "redis")]
    problems.extend(redis::check_sinks(sinks));
}

/// Opens the source.
///
/// # Errors
/// When it can't be reached, or its tables are missing, older or newer.
pub(crate) async fn open_source(config: &SourceConfig, schema: OnSchema) -> Result<Opened> {
    match config.kind {
        #[cfg(feature = "sqlite")]
        sqlite::NAME => sqlite::open(config, schema).await,
        #[cfg(feature = "postgres")]
        postgres_feed::NAME => postgres_feed::open(config, schema).await,
        #[cfg(feature = "postgres")]
        postgres_wal::NAME => postgres_wal::open(config, schema).await,
        #[cfg(feature = "sqlserver")]
        sqlserver::NAME => sqlserver::open(config, schema).await,
        #[cfg(feature = "cosmos")]
        cosmos::NAME => cosmos::open(config, schema).await,
        kind => unknown(kind),
    }
}

/// Makes the sink; nothing is connected to.
///
/// # Errors
/// A problem with the place of the key, or of the section.
pub(crate) fn open_sink(config: &SinkConfig) -> Result<Arc<dyn Sink>, Problem> {
    let made = match config.kind {
        #[cfg(feature = "webhook")]
        webhook::NAME => webhook::open(config),
        #[cfg(feature = "servicebus")]
        servicebus::NAME => servicebus::open(config),
        #[cfg(feature = "kafka")]
        kafka::NAME => kafka::open(config),
        #[cfg(feature = "nats")]
        nats::NAME => nats::open(config),
        #[cfg(feature = "rabbitmq")]
        rabbitmq::NAME => rabbitmq::open(config),
        #[cfg(feature = "rabbitmq")]
        rabbitmq_stream::NAME => rabbitmq_stream::open(config),
        #[cfg(feature = "redis")]
        redis::NAME => redis::open(config),
        #[cfg(feature = "jsonl")]
        jsonl::NAME => jsonl::open(config),
        kind => unknown(kind),
    };
    made.map_err(|error| sink_problem(config, &error))
}

fn unknown(kind: &str) -> ! {
    panic!("the parser takes only kinds of the tables above, and {kind} is none")
}

/// A sink's own refusal, at the first of its keys that the text names.
fn sink_problem(config: &SinkConfig, error: &postrider_core::Error) -> Problem {
    let keys = SINK_KINDS.iter().find(|kind| kind.name == config.kind).map(|kind| kind.keys);
    problem(keys.unwrap_or_default(), &config.fields, config.place, &config.prefix, error)
}

fn problem(
    keys: &[Key],
    fields: &Fields,
    section: Place,
    prefix: &str,
    error: &postrider_core::Error,
) -> Problem {
    let text = error.chain();
    let separators = |c: char| !c.is_ascii_alphanumeric() && c != '_';
    let named = text.split(separators).find_map(|word| keys.iter().find(|key| key.name == word));
    match named {
        Some(key) => Problem {
            place: Some(fields.place(key.name).unwrap_or(section)),
            key: format!("{prefix}.{}", key.name),
            // The key stands before the text already.
            text: match text.strip_prefix(key.name).and_then(|rest| rest.strip_prefix(": ")) {
                Some(rest) => rest.to_owned(),
                None => text,
            },
        },
        None => Problem { place: Some(section), key: prefix.to_owned(), text },
    }
}

/// A path of the file; relative ones begin at the file's own folder.
fn path(folder: &Path, text: &str) -> std::path::PathBuf {
    folder.join(text)
}
