//! `kind = "postgres-wal"`.
//!
//! What lives here: the keys that it alone has, what it asks of sinks, and opening it. What does
//! not: what it shares with the feed (`postgres.rs`).
//! Invariant: a sink's first place in the log is one that the file names.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use postrider_core::{ConsumerName, StartFrom};
use postrider_store_postgres::{
    MirrorReport, PostgresOptions, PostgresStore, PostgresWal, Recover, SlotStanding, WalOptions,
    WalReport, wal_schema_sql,
};

use super::log::{Log, LogConsumer, LogMirror, LogStanding, MirrorConsumer};
use super::postgres::{
    self, CA_FILE, CONNECTIONS, OUTBOX, PAYLOAD, SCHEMA, STATEMENT_TIMEOUT, URL,
};
use super::{OnSchema, Opened};
use crate::config::keys::{Key, Kind, Need, Shape, key};
use crate::config::{Problem, SinkConfig, SourceConfig};

pub(super) const NAME: &str = "postgres-wal";

pub(super) const KIND: Kind = Kind {
    name: NAME,
    doc: "An outbox in a PostgreSQL database, read from the server's write-ahead log.",
    keys: &[
        URL,
        SCHEMA,
        OUTBOX,
        PAYLOAD,
        key(
            "slot",
            Shape::Text,
            Need::Optional,
            "The replication slot, which the first run makes; postrider_ and the outbox's name, \
             when left out.",
        ),
        key(
            "publication",
            Shape::Text,
            Need::Optional,
            "The publication, which init makes; postrider_ and the outbox's name, when left out.",
        ),
        key(
            "recover",
            Shape::Choice(&["auto", "halt"]),
            Need::Default("\"auto\""),
            "When the slot can't give what comes next: auto reads it from the table, halt stops \
             and says what is missing.",
        ),
        key(
            "messages",
            Shape::Text,
            Need::Optional,
            "Read the messages of this prefix, which the SQL function emit writes to the log \
             alone, instead of the outbox's rows. What a lost slot took along is lost then.",
        ),
        key(
            "mirror_file",
            Shape::Text,
            Need::Optional,
            "Keep a copy of the checkpoints in this file, for a database that loses its own.",
        ),
        MIRROR_URL,
        CONNECTIONS,
        STATEMENT_TIMEOUT,
        CA_FILE,
    ],
};

const MIRROR_URL: Key = key(
    "mirror_url",
    Shape::Secret,
    Need::Optional,
    "Keep a copy of the checkpoints in this second database instead, in a table of its own.",
);

/// How long it is watched, at least, how fast the log grows. What was seen is good for as long.
const WATCHED: Duration = Duration::from_secs(1);

fn wal_options(config: &SourceConfig) -> WalOptions {
    let fields = &config.fields;
    let mut options = WalOptions::new().recover(match fields.text("recover") {
        Some("halt") => Recover::Halt,
        _ => Recover::Auto,
    });
    if let Some(name) = fields.text("slot") {
        options = options.slot(name);
    }
    if let Some(name) = fields.text("publication") {
        options = options.publication(name);
    }
    if let Some(prefix) = fields.text("messages") {
        options = options.messages(prefix);
    }
    if let Some(file) = fields.text("mirror_file") {
        options = options.mirror_file(super::path(&config.folder, file));
    }
    if let Some(url) = fields.text(MIRROR_URL.name) {
        let mut database = PostgresOptions::new(url);
        if let Some(file) = fields.text(CA_FILE.name) {
            database = database.ca_file(super::path(&config.folder, file));
        }
        options = options.mirror_database(database);
    }
    options
}

pub(super) fn schema_sql(config: &SourceConfig) -> postrider_core::Result<String> {
    wal_schema_sql(&postgres::options(config), &wal_options(config))
}

pub(super) fn check(config: &SourceConfig) -> Option<Problem> {
    if let (Some(_), Some(place)) =
        (config.fields.place("mirror_file"), config.fields.place(MIRROR_URL.name))
    {
        return Some(Problem {
            place: Some(place),
            key: format!("source.{}", MIRROR_URL.name),
            text: "mirror_file is given, too, and there is one copy; take one of them out"
                .to_owned(),
        });
    }
    // A reference that was left on purpose has no value to check.
    config.fields.text(URL.name)?;
    let checked = postgres::options(config)
        .check()
        .and_then(|()| wal_options(config).check(postgres::outbox(config)));
    let error = checked.err()?;
    Some(super::problem(KIND.keys, &config.fields, config.place, "source", &error))
}

/// A sink begins where its section says, and only there where the log can be entered.
pub(super) fn check_sink(sink: &SinkConfig) -> Option<Problem> {
    let given = sink.fields.place("from");
    let text = match (given, &sink.from) {
        (None, _) => {
            "is missing; with kind = \"postgres-wal\" each sink says where it begins: \
             from = \"oldest\" (all that the outbox holds) or from = \"now\""
        }
        (Some(_), StartFrom::Oldest | StartFrom::Now) => return None,
        (Some(_), StartFrom::Time(_)) => {
            "is a time, and the log can't be entered by one: what was written before the slot was \
             made is in the table alone; write \"oldest\" or \"now\""
        }
        (Some(_), StartFrom::After(_)) => {
            "is a position, and the log can't be entered by one: only a checkpoint tells what was \
             delivered before it; write \"oldest\" or \"now\""
        }
    };
    let place = Some(given.unwrap_or(sink.place));
    Some(Problem { place, key: format!("{}.from", sink.prefix), text: text.to_owned() })
}

pub(super) async fn open(config: &SourceConfig, schema: OnSchema) -> Result<Opened> {
    let store = postgres::open(postgres::options(config), schema).await?;
    let ignored = postgres::ignored(config, store.payload());
    let wal = PostgresWal::new(store.clone(), wal_options(config))?;
    if schema == OnSchema::Create {
        wal.prepare().await?;
    }
    let watch = Arc::new(Watch { wal: wal.clone(), seen: Mutex::default() });
    let log: Arc<dyn Log> = Arc::clone(&watch) as _;
    Ok(Opened {
        source: Arc::new(wal.clone()),
        feed: Arc::new(store),
        store: Arc::new(wal),
        shown: postgres::show(NAME, config),
        schema_version: postrider_store_postgres::SCHEMA_VERSION,
        log: Some(log),
        look: Box::new(move || {
            let (watch, ignored) = (Arc::clone(&watch), ignored.clone());
            async move {
                let store: &PostgresStore = watch.wal.store();
                let (report, lost_in) = watch.look().await?;
                let of_log = watch.wal.advice(&report, lost_in).await?;
                let mut advice = postgres::advice(store, of_log.weaker, ignored).await?;
                advice.attention.extend(of_log.attention);
                let mirror = watch.wal.mirror().await;
                advice.attention.extend(mirror.and_then(|mirror| untold(&mirror)));
                Ok(advice)
            }
            .boxed()
        }),
    })
}

/// The log, and what was seen of it last.
struct Watch {
    wal: PostgresWal,
    seen: Mutex<Option<Seen>>,
}

#[derive(Clone)]
struct Seen {
    at: Instant,
    report: WalReport,
    /// When the slot will be lost, by the rate since the report before.
    lost_in: Option<Duration>,
}

impl Watch {
    /// A report, not older than a second, and when the slot will be lost.
    async fn look(&self) -> postrider_core::Result<(WalReport, Option<Duration>)> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut before = match seen {
            Some(seen) if seen.at.elapsed() < WATCHED => return Ok((seen.report, seen.lost_in)),
            Some(seen) => Some(seen.report),
            None => None,
        };
        let mut report = self.wal.report().await?;
        if before.is_none() && report.safe_bytes.is_some() {
            tokio::time::sleep(WATCHED).await;
            before = Some(std::mem::replace(&mut report, self.wal.report().await?));
        }
        let lost_in = before.and_then(|before| report.lost_in(&before));
        let seen = Seen { at: Instant::now(), report: report.clone(), lost_in };
        *self.seen.lock().unwrap_or_else(PoisonError::into_inner) = Some(seen);
        Ok((report, lost_in))
    }
}

/// What a person should look at.
fn untold(mirror: &MirrorReport) -> Option<String> {
    let why = mirror.trouble.as_ref()?;
    Some(format!("{} can't be read: {why}", mirror.place))
}

impl Log for Watch {
    fn made(&self) -> String {
        format!(
            "publication {:?} has it; replication slot {:?} is made by the first run",
            self.wal.publication(),
            self.wal.slot()
        )
    }

    fn ready(&self) -> BoxFuture<'_, postrider_core::Result<()>> {
        self.wal.ready().boxed()
    }

    fn mirror(&self) -> BoxFuture<'_, Option<LogMirror>> {
        async move {
            let report = self.wal.mirror().await?;
            let consumers = report.consumers.into_iter().map(|one| MirrorConsumer {
                name: one.consumer,
                place: one.place,
                age: one.age,
            });
            let consumers = consumers.collect();
            Some(LogMirror { place: report.place, consumers, trouble: report.trouble })
        }
        .boxed()
    }

    fn mirror_behind(&self) -> Vec<(String, Duration)> {
        let name =
            |(consumer, behind): (ConsumerName, Duration)| (consumer.as_str().to_owned(), behind);
        self.wal.mirror_behind().into_iter().map(name).collect()
    }

    fn standing(&self) -> BoxFuture<'_, postrider_core::Result<LogStanding>> {
        async move {
            let (report, lost_in) = self.look().await?;
            Ok(self.standing_of(report, lost_in))
        }
        .boxed()
    }
}

impl Watch {
    fn standing_of(&self, report: WalReport, lost_in: Option<Duration>) -> LogStanding {
        let counts = self.wal.counts();
        let state = report.slot.word();
        let (reader, detail) = match report.slot {
            SlotStanding::Active(pid) => (Some(pid), None),
            SlotStanding::Lost(text) | SlotStanding::Foreign(text) => (None, Some(text)),
            SlotStanding::Idle | SlotStanding::Missing | SlotStanding::Forming => (None, None),
        };
        let consumers = report.consumers.into_iter().map(|one| LogConsumer {
            name: one.consumer.as_str().to_owned(),
            place: one.place,
            lag_bytes: one.lag_bytes,
            catches_up: one.catches_up,
        });
        LogStanding {
            slot: self.wal.slot().to_owned(),
            state,
            detail,
            reader,
            wal_status: report.wal_status,
            head: report.head,
            retained_bytes: report.retained_bytes,
            safe_bytes: report.safe_bytes,
            lag_bytes: report.lag_bytes,
            lost_in,
            consumers: consumers.collect(),
            catch_ups: counts.catch_ups,
            reconnects: counts.reconnects,
            unknown_messages: counts.unknown_messages,
        }
    }
}
