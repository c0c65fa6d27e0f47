//! A broker that is away while a backlog grows, and what a relay makes of it.
//!
//! What lives here: the measurement: the same backlog with the broker there, then without it. What
//! does not: brokers (`broker/`), and the judgement of each event, which schedules do.
//! Invariant: the relay has the settings of users, save that an event would be parked after three
//! attempts of its own; so an outage that used them up would show. Times are judged only where the
//! machine is quiet (`judges_times`).

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use postrider_core::{ContentType, EventType, Key, NewEvent, Topic};
use postrider_store_sqlite::rusqlite::{Connection, OpenFlags, TransactionBehavior};
use postrider_store_sqlite::{SqliteOptions, SqliteStore, append};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::broker::Broker;
use crate::figure::Figure;
use crate::relays::{Relay, RelaySource, Setup, Target};
use crate::schedule::{Outage, SinkKind};
use crate::world::SINK;

const PARTITIONS: u32 = 4;
const KEYS: u64 = 10_000;
const PAYLOAD_BYTES: usize = 200;
/// Of events in one transaction.
const BATCH: u64 = 5_000;
/// The default's `base_delay`, and how long an open circuit waits at most.
const FIRST_STEP: Duration = Duration::from_millis(100);
const LONGEST_STEP: Duration = Duration::from_secs(4);
/// Everything flows again so soon.
const FLOWS_WITHIN_S: f64 = 5.0;
/// How much longer than without an outage the same backlog may take, beside that.
const SLOWER: f64 = 1.5;
/// Peak resident memory: the budget of 32 MiB in flight, once more in a client library, and the
/// program.
const MEMORY_MIB: f64 = 128.0;
/// Longest wait for anything here.
const PATIENCE: Duration = Duration::from_secs(300);
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// What is measured.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// The broker.
    pub sink: SinkKind,
    /// How long it is away.
    pub length: Duration,
    /// How many events are appended meanwhile.
    pub events: u64,
    /// Whether times have goals.
    pub judges_times: bool,
}

/// Measures one outage.
///
/// # Errors
/// When the machine refuses, or an event does not arrive at all.
pub fn run(plan: Plan, binary: &Path) -> Result<Vec<Figure>> {
    let broker = Broker::calm(plan.sink)?;
    let folder = tempfile::tempdir().context("make a folder")?;
    let backlog = Backlog::create(&folder)?;
    let mut relay = setup(binary, &folder, &broker, &backlog).start(1, 0, None)?;
    let calm = drain(&broker, &backlog, plan.events)?.whole;
    let found = away(plan, &broker, &backlog, &relay)?;
    relay.signal(Signal::TERM)?;
    relay.finish(PATIENCE)?;
    // A stop in order loses no confirmation that a broker gave; it may lose what it was about to.
    let held = broker.held_now()?;
    ensure!(held >= 2 * plan.events, "{held} events are there of {}", 2 * plan.events);
    Ok(found.figures(plan, calm))
}

/// What an outage came to.
struct Found {
    dead_letters: u64,
    log_lines: usize,
    memory_mib: f64,
    drained: Drained,
}

struct Drained {
    first: Duration,
    whole: Duration,
}

fn away(plan: Plan, broker: &Broker, backlog: &Backlog, relay: &Relay) -> Result<Found> {
    let before = relay.log_lines()?;
    broker.set_outage(Some(Outage::ServerError))?;
    let begun = Instant::now();
    eventually("the broker is away", || Ok(broker.mark().is_none()))?;
    backlog.append(plan.events)?;
    while begun.elapsed() < plan.length {
        std::thread::sleep(LOOK_EVERY);
    }
    let log_lines = relay.log_lines()? - before;
    ensure!(backlog.open()? >= plan.events, "events were delivered to a broker that is away");
    broker.set_outage(None)?;
    let drained = drain(broker, backlog, 0)?;
    let dead_letters = backlog.dead_letters()?;
    let memory_mib = relay.peak_memory_kib()? as f64 / 1_024.0;
    Ok(Found { dead_letters, log_lines, memory_mib, drained })
}

/// Appends so many more, and waits until everything is delivered. The time begins when the broker
/// is there.
fn drain(broker: &Broker, backlog: &Backlog, events: u64) -> Result<Drained> {
    backlog.append(events)?;
    eventually("the broker is there", || Ok(broker.mark().is_some()))?;
    let (begun, all) = (Instant::now(), backlog.open()?);
    eventually("something is delivered", || Ok(backlog.open()? < all.max(1)))?;
    let first = begun.elapsed();
    eventually("everything is delivered", || Ok(backlog.open()? == 0))?;
    Ok(Drained { first, whole: begun.elapsed() })
}

fn eventually(what: &str, mut attempt: impl FnMut() -> Result<bool>) -> Result<()> {
    let until = Instant::now() + PATIENCE;
    while !attempt()? {
        ensure!(Instant::now() < until, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

impl Found {
    fn figures(&self, plan: Plan, calm: Duration) -> Vec<Figure> {
        let sink = plan.sink;
        let figure = |what: &str, value: f64, unit: &'static str, goal: Option<f64>| {
            Figure::at_most("outage", format!("{sink}, {what}"), value, unit, goal)
        };
        let timed = |goal: f64| plan.judges_times.then_some(goal);
        let (calm, whole) = (calm.as_secs_f64(), self.drained.whole.as_secs_f64());
        let lines = steps(plan.length) * f64::from(PARTITIONS);
        vec![
            figure("dead letters", self.dead_letters as f64, "events", Some(0.0)),
            figure("log lines meanwhile", self.log_lines as f64, "lines", Some(lines)),
            figure("peak memory", self.memory_mib, "MiB", Some(MEMORY_MIB)),
            figure(
                "first event after its return",
                self.drained.first.as_secs_f64(),
                "s",
                timed(FLOWS_WITHIN_S),
            ),
            figure("the same backlog without an outage", calm, "s", None),
            figure(
                "the backlog after its return",
                whole,
                "s",
                timed(FLOWS_WITHIN_S + SLOWER * calm),
            ),
        ]
    }
}

/// Back-off steps of one circuit within a time, at their longest.
fn steps(length: Duration) -> f64 {
    let (mut passed, mut step, mut steps) = (Duration::ZERO, FIRST_STEP, 0.0);
    while passed < length {
        passed += step;
        step = (2 * step).min(LONGEST_STEP);
        steps += 1.0;
    }
    steps
}

fn setup(binary: &Path, folder: &TempDir, broker: &Broker, backlog: &Backlog) -> Setup {
    let target = Target::Broker { settings: broker.settings().to_owned() };
    Setup {
        binary: binary.to_owned(),
        folder: folder.path().to_owned(),
        source: RelaySource::Sqlite(backlog.path.clone()),
        targets: vec![(SINK, target)],
        lease_ttl: Duration::from_secs(5),
        retention: None,
        clock: None,
        retries: "max_attempts = 3\n",
    }
}

/// An outbox in SQLite.
struct Backlog {
    path: PathBuf,
}

impl Backlog {
    fn create(folder: &TempDir) -> Result<Self> {
        let path = folder.path().join("app.db");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.context("start a runtime")?;
        let options = SqliteOptions::new(&path).partitions(PARTITIONS);
        drop(runtime.block_on(SqliteStore::open(options)).context("open the store")?);
        Ok(Self { path })
    }

    fn append(&self, events: u64) -> Result<()> {
        let mut connection = Connection::open(&self.path).context("open the database")?;
        connection.busy_timeout(PATIENCE).context("open the database")?;
        let (topic, kind) = (Topic::new("orders")?, EventType::new("OrderPlaced")?);
        let json = ContentType::new("application/json")?;
        let payload = Bytes::from(vec![b' '; PAYLOAD_BYTES]);
        let mut at = 0;
        while at < events {
            let to = (at + BATCH).min(events);
            let batch: Vec<NewEvent> = (at..to)
                .map(|n| {
                    let key = Key::new(format!("key-{}", n % KEYS))?;
                    let new = NewEvent::builder(key, topic.clone(), kind.clone());
                    Ok(new.payload(json.clone(), payload.clone()).build()?)
                })
                .collect::<Result<_>>()?;
            let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            append(&tx, &batch).context("append a backlog")?;
            tx.commit().context("append a backlog")?;
            at = to;
        }
        Ok(())
    }

    fn number(&self, sql: &str) -> Result<u64> {
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY;
        let connection = Connection::open_with_flags(&self.path, flags)?;
        connection.busy_timeout(PATIENCE)?;
        let number: i64 = connection.query_row(sql, [], |row| row.get(0)).context("ask")?;
        u64::try_from(number).context("a count is not negative")
    }

    /// Events that no checkpoint counts as published.
    fn open(&self) -> Result<u64> {
        self.number(
            "SELECT (SELECT count(*) FROM postrider_outbox)
                - (SELECT coalesce(sum(published), 0) FROM postrider_checkpoint)",
        )
    }

    fn dead_letters(&self) -> Result<u64> {
        self.number("SELECT count(*) FROM postrider_dead_letter")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_minute_has_twenty_steps_at_their_longest() {
        // 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, then 4 each.
        assert_eq!(steps(Duration::from_millis(100)), 1.0);
        assert_eq!(steps(Duration::from_millis(6_300)), 6.0);
        assert_eq!(steps(Duration::from_secs(60)), 20.0);
    }
}
