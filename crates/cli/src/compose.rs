//! The only place that names concrete stores and sinks.
//!
//! What lives here: each kind's keys, and the way from its section of the file to the seam. What
//! does not: commands, which know the seams alone.
//! Invariant: making a sink connects to nothing; what is impossible is a problem with its place.

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use postrider_core::{Feed, RelayStore, Sink, Source};

use crate::config::keys::{Key, Kind};
use crate::config::value::Fields;
use crate::config::{Place, Problem, SinkConfig, SourceConfig};

#[cfg(not(feature = "sqlite"))]
compile_error!("postrider needs a source: build with --features sqlite");
#[cfg(not(any(feature = "jsonl", feature = "webhook")))]
compile_error!("postrider needs a sink: build with --features jsonl or webhook");

/// What to do about missing or older tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnSchema {
    /// Create or upgrade them, and the database if need be.
    Create,
    /// Refuse.
    Require,
}

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
}

/// The sources of this build.
pub(crate) const SOURCE_KINDS: &[Kind] = &[
    #[cfg(feature = "sqlite")]
    sqlite::KIND,
];

/// The sinks of this build.
pub(crate) const SINK_KINDS: &[Kind] = &[
    #[cfg(feature = "webhook")]
    webhook::KIND,
    #[cfg(feature = "jsonl")]
    jsonl::KIND,
];

/// Kinds that exist and are not in this build, with the cargo feature that adds them.
pub(crate) const ABSENT: &[(&str, &str)] = &[
    #[cfg(not(feature = "sqlite"))]
    ("sqlite", "sqlite"),
    #[cfg(not(feature = "webhook"))]
    ("webhook", "webhook"),
    #[cfg(not(feature = "jsonl"))]
    ("jsonl", "jsonl"),
];

/// The source, for messages, without secrets.
pub(crate) fn show_source(config: &SourceConfig) -> String {
    match config.kind {
        #[cfg(feature = "sqlite")]
        sqlite::NAME => sqlite::show(config),
        kind => kind.to_owned(),
    }
}

/// The SQL that `init` would run, for review.
pub(crate) fn schema_sql(config: &SourceConfig) -> String {
    match config.kind {
        #[cfg(feature = "sqlite")]
        sqlite::NAME => sqlite::schema_sql(),
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
        kind => unknown(kind),
    }
}

/// Opens the source.
///
/// # Errors
/// When it can't be reached, or its tables are missing, older or newer.
pub(crate) async fn open_source(config: &SourceConfig, schema: OnSchema) -> Result<Opened> {
    match config.kind {
        #[cfg(feature = "sqlite")]
        sqlite::NAME => sqlite::open(config, schema).await,
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

#[cfg(feature = "sqlite")]
mod sqlite {
    //! `kind = "sqlite"`.

    use std::path::PathBuf;
    use std::sync::Arc;

    use anyhow::{Result, bail};
    use postrider_core::{FeedSource, PollInterval};
    use postrider_relay::SystemClock;
    use postrider_store_sqlite::{SchemaOnOpen, SqliteOptions, SqliteStore, Synchronous};

    use super::{OnSchema, Opened};
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
        if path.starts_with("file:") {
            PathBuf::from(path)
        } else {
            super::path(&config.folder, path)
        }
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
            return Some(refused("names another kind of database; write a path or sqlite:PATH"));
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
        })
    }
}

#[cfg(feature = "webhook")]
mod webhook {
    //! `kind = "webhook"`.

    use std::sync::Arc;

    use postrider_core::{Result, Secret, Sink};
    use postrider_encoding::Encoding;
    use postrider_relay::SystemClock;
    use postrider_sink_webhook::{Webhook, WebhookConfig};

    use crate::config::SinkConfig;
    use crate::config::keys::{Kind, Need, Shape, key};

    pub(super) const NAME: &str = "webhook";

    pub(super) const KIND: Kind = Kind {
        name: NAME,
        doc: "Each event as a signed HTTP request (Standard Webhooks).",
        keys: &[
            key(
                "url",
                Shape::Secret,
                Need::Required,
                "Where to send: https://…, with placeholders such as {topic} after the host.",
            ),
            key(
                "signing_keys",
                Shape::Secrets,
                Need::Optional,
                "Keys to sign with, each of which adds a signature: whsec_… or whsk_….",
            ),
            key(
                "unsigned",
                Shape::Switch,
                Need::Default("false"),
                "Sends without signatures; has to be said when there are no signing_keys.",
            ),
            key(
                "headers",
                Shape::SecretTable,
                Need::Optional,
                "Fixed headers, such as { authorization = \"env:TOKEN\" }.",
            ),
            key(
                "encoding",
                Shape::Choice(&["plain", "cloudevents-binary", "cloudevents-structured"]),
                Need::Default("\"plain\""),
                "How an event becomes a message.",
            ),
            key(
                "source",
                Shape::Text,
                Need::Optional,
                "The source attribute of CloudEvents; /postrider without it.",
            ),
            key(
                "allow_private",
                Shape::Switch,
                Need::Default("false"),
                "Permits private, loopback and link-local addresses.",
            ),
            key(
                "allow_http",
                Shape::Switch,
                Need::Default("false"),
                "Permits http:// to hosts other than loopback.",
            ),
            key(
                "concurrency",
                Shape::Integer { min: 1, max: 1_024 },
                Need::Default("16"),
                "Requests at a time to this host, over all sinks of the process.",
            ),
            key(
                "timeout_ms",
                Shape::Integer { min: 1, max: 600_000 },
                Need::Default("10000"),
                "Time for one request, in milliseconds.",
            ),
            key(
                "connect_timeout_ms",
                Shape::Integer { min: 1, max: 600_000 },
                Need::Default("5000"),
                "Time for connecting, in milliseconds.",
            ),
            key(
                "ca_file",
                Shape::Text,
                Need::Optional,
                "PEM file with further certificate authorities to trust.",
            ),
            key(
                "proxy",
                Shape::Secret,
                Need::Optional,
                "Proxy to send through; variables such as HTTPS_PROXY are never read.",
            ),
        ],
    };

    pub(super) fn settings(config: &SinkConfig) -> WebhookConfig {
        let fields = &config.fields;
        let url = fields.secret("url").cloned().unwrap_or_else(|| Secret::new(""));
        let mut settings = WebhookConfig::new(url, fields.secrets("signing_keys").to_vec());
        settings.unsigned = fields.switch("unsigned");
        settings.headers = fields.secret_table("headers").iter().cloned().collect();
        settings.encoding = match fields.text("encoding") {
            Some("cloudevents-binary") => Encoding::CloudEventsBinary,
            Some("cloudevents-structured") => Encoding::CloudEventsStructured,
            _ => Encoding::Plain,
        };
        settings.source = fields.text("source").map(str::to_owned);
        settings.allow_private = fields.switch("allow_private");
        settings.allow_http = fields.switch("allow_http");
        if let Some(requests) = fields.number("concurrency") {
            settings.concurrency = usize::try_from(requests).unwrap_or(usize::MAX);
        }
        settings.timeout_ms = fields.number("timeout_ms").unwrap_or(settings.timeout_ms);
        settings.connect_timeout_ms =
            fields.number("connect_timeout_ms").unwrap_or(settings.connect_timeout_ms);
        settings.ca_file = fields.text("ca_file").map(|text| super::path(&config.folder, text));
        settings.proxy = fields.secret("proxy").cloned();
        settings
    }

    pub(super) fn open(config: &SinkConfig) -> Result<Arc<dyn Sink>> {
        Ok(Arc::new(Webhook::new(&settings(config), Arc::new(SystemClock))?))
    }
}

#[cfg(feature = "jsonl")]
mod jsonl {
    //! `kind = "jsonl"`.

    use std::path::PathBuf;
    use std::sync::Arc;

    use postrider_core::{Result, Sink};
    use postrider_relay::SystemClock;
    use postrider_sink_jsonl::{JsonLines, JsonlConfig};

    use crate::config::SinkConfig;
    use crate::config::keys::{Kind, Need, Shape, key};

    pub(super) const NAME: &str = "jsonl";

    pub(super) const KIND: Kind = Kind {
        name: NAME,
        doc: "Each event as a line of JSON, in a file or on standard output.",
        keys: &[
            key("path", Shape::Text, Need::Required, "The file, or - for standard output."),
            key(
                "fsync",
                Shape::Switch,
                Need::Default("true"),
                "Whether a confirmation waits until the disk has the lines.",
            ),
            key(
                "rotate_bytes",
                Shape::Size { min: 1, max: 1 << 50 },
                Need::Optional,
                "Start a new file before this one would pass this size.",
            ),
            key(
                "rotate_seconds",
                Shape::Integer { min: 1, max: 10 * 365 * 86_400 },
                Need::Optional,
                "Start a new file once this one is so many seconds old.",
            ),
            key(
                "keep",
                Shape::Integer { min: 0, max: 1_000_000 },
                Need::Optional,
                "How many rotated files to keep; all of them without it.",
            ),
        ],
    };

    pub(super) fn settings(config: &SinkConfig) -> JsonlConfig {
        let fields = &config.fields;
        let path = fields.text("path").unwrap_or_default();
        JsonlConfig {
            path: if path == "-" { PathBuf::from(path) } else { super::path(&config.folder, path) },
            fsync: fields.switch("fsync"),
            rotate_bytes: fields.number("rotate_bytes"),
            rotate_seconds: fields.number("rotate_seconds"),
            keep: fields.number("keep").map(|keep| usize::try_from(keep).unwrap_or(usize::MAX)),
        }
    }

    pub(super) fn open(config: &SinkConfig) -> Result<Arc<dyn Sink>> {
        Ok(Arc::new(JsonLines::new(&settings(config), Arc::new(SystemClock))?))
    }
}
