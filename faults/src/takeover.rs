//! How fast another relay serves everything: after kill -9, and after SIGTERM.
//!
//! What lives here: the two measurements, in real time with the default lease. What does not:
//! faults in general.
//! Invariant: a relay "serves all partitions" when an event of every partition that was committed
//! after the signal has arrived at the sink; writers never pause, so that a hand-over happens under
//! load.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use postrider_core::limits::LEASE_TTL_MS;
use postrider_core::{Key, key_hash};
use postrider_store_sqlite::rusqlite::Connection;
use rustix::process::Signal;

use crate::allowance::Incidents;
use crate::cluster::Templates;
use crate::figure::Figure;
use crate::lines;
use crate::play::accounts;
use crate::relays::{QUICK_RETRIES, Relay, Setup, Target};
use crate::schedule::{Schedule, SinkKind, SourceKind, generator};
use crate::verdict::judge;
use crate::world::sqlite::connect;
use crate::world::{SINK, World};
use crate::writer::sqlite::commit_event;

const PARTITIONS: u32 = 8;
const LEASE_TTL: Duration = Duration::from_millis(LEASE_TTL_MS);
/// A killed relay's partitions are served again within its lease and this.
const AFTER_LEASE: Duration = Duration::from_secs(1);
/// A planned hand-over takes no longer.
const HAND_OVER: Duration = Duration::from_millis(200);
/// Longest wait for anything here.
const PATIENCE: Duration = Duration::from_secs(30);
/// Pause between two events of the background load.
const LOAD_EVERY: Duration = Duration::from_millis(4);

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Departure {
    Killed,
    HandedOver,
}

impl Departure {
    fn goal(self) -> Duration {
        match self {
            Self::Killed => LEASE_TTL + AFTER_LEASE,
            Self::HandedOver => HAND_OVER,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Killed => "kill-9",
            Self::HandedOver => "sigterm",
        }
    }
}

/// Measures both, `rounds` times each.
///
/// # Errors
/// When the machine refuses, or a relay never gets where it should.
pub fn run(binary: &Path, rounds: usize, as_json: bool) -> Result<ExitCode> {
    let killed = measure(Departure::Killed, binary, rounds)?;
    let handed = measure(Departure::HandedOver, binary, rounds)?;
    let mut met = true;
    for measured in [killed, handed] {
        met &= measured.met();
        measured.print(as_json);
    }
    Ok(if met { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

struct Measured {
    departure: Departure,
    times: Vec<Duration>,
    duplicates: u64,
    findings: Vec<String>,
}

impl Measured {
    fn worst(&self) -> Duration {
        self.times.last().copied().unwrap_or(Duration::MAX)
    }

    fn median(&self) -> Duration {
        self.times[self.times.len() / 2]
    }

    /// What decides: a lease bounds every take-over; a hand-over is judged by its median, because a
    /// busy machine may delay any single one.
    fn judged(&self) -> Duration {
        match self.departure {
            Departure::Killed => self.worst(),
            Departure::HandedOver => self.median(),
        }
    }

    fn met(&self) -> bool {
        let none_twice = self.departure == Departure::Killed || self.duplicates == 0;
        self.judged() <= self.departure.goal() && none_twice && self.findings.is_empty()
    }

    fn print(&self, as_json: bool) {
        let goal = self.departure.goal();
        let median = self.median();
        for finding in &self.findings {
            eprintln!("{}: {finding}", self.departure.name());
        }
        if !as_json {
            let times: Vec<String> =
                self.times.iter().map(|time| format!("{:.0}", ms(*time))).collect();
            println!(
                "{}: all partitions served again after {:.0} ms (median), goal {:.0} ms, {} \
                 duplicates; each round: {} ms",
                self.departure.name(),
                ms(median),
                ms(goal),
                self.duplicates,
                times.join(", ")
            );
            return;
        }
        let line = |figure: &str, value: f64, unit: &'static str, goal: f64| {
            println!("{}", Figure::at_most("takeover", figure, value, unit, Some(goal)).json());
        };
        let name = self.departure.name();
        let which = if self.departure == Departure::Killed { "worst" } else { "median" };
        line(&format!("{name} {which}"), ms(self.judged()), "ms", ms(goal));
        if self.departure == Departure::HandedOver {
            line(&format!("{name} duplicates"), self.duplicates as f64, "events", 0.0);
        }
    }
}

fn ms(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 10_000.0).round() / 10.0
}

/// A key of every partition.
fn keys() -> Result<Vec<Key>> {
    (0..PARTITIONS)
        .map(|partition| {
            let mut candidates = (0u32..).map(|number| Key::new(format!("probe {number}")));
            let found = candidates
                .find(|key| key.as_ref().is_ok_and(|key| key_hash(key) % PARTITIONS == partition));
            Ok(found.context("some key falls into every partition")??)
        })
        .collect()
}

fn measure(departure: Departure, binary: &Path, rounds: usize) -> Result<Measured> {
    let schedule = calm();
    let world = World::create(&schedule, &Templates::default())?;
    let setup = Setup {
        binary: binary.to_owned(),
        folder: world.folder().to_owned(),
        source: world.relay_source(),
        targets: vec![(SINK, lines_of(&world))],
        lease_ttl: LEASE_TTL,
        retention: None,
        clock: None,
        retries: QUICK_RETRIES,
    };
    let stop = AtomicBool::new(false);
    let mut relays = Vec::new();
    let database = world.database()?.to_owned();
    let times = std::thread::scope(|scope| {
        let (database, stop) = (database.as_path(), &stop);
        let load = scope.spawn(move || load(database, stop));
        let times = go_round(departure, &world, &setup, rounds, &mut relays);
        stop.store(true, Ordering::SeqCst);
        let loaded = load.join().map_err(|_| anyhow::anyhow!("the load panicked"))?;
        loaded.and(times)
    })?;
    eventually("everything is delivered", || Ok(world.unsettled(SINK)? == 0))?;
    for relay in &mut relays {
        relay.signal(Signal::TERM)?;
        relay.finish(PATIENCE)?;
    }
    let judgement =
        judge(&accounts(&world, SINK)?, &lines::read(world.lines())?, &Incidents::default());
    // Duplicates are judged here by the kind of departure; the rest by the oracle.
    let about_duplicates = |finding: &String| finding.contains("duplicates");
    let findings =
        judgement.findings.into_iter().filter(|finding| !about_duplicates(finding)).collect();
    Ok(Measured { departure, times, duplicates: judgement.verdict.duplicates, findings })
}

fn lines_of(world: &World) -> Target {
    Target::Jsonl { path: world.lines().join(lines::FILE), rotate_bytes: None }
}

/// A schedule in which nothing goes wrong by itself.
fn calm() -> Schedule {
    let mut schedule = Schedule::derive(1, 0, SourceKind::Sqlite, SinkKind::Jsonl);
    schedule.partitions = PARTITIONS;
    schedule.small_disk = None;
    schedule.movable_clock = false;
    schedule.steps.clear();
    schedule
}

/// Events of all partitions, without a pause, until told to stop.
fn load(database: &Path, stop: &AtomicBool) -> Result<()> {
    let mut connection = connect(database)?;
    let mut rng = generator(1, 0, "load");
    let keys = keys()?;
    for key in keys.iter().cycle() {
        if stop.load(Ordering::SeqCst) {
            return Ok(());
        }
        commit_event(&mut connection, key.as_str(), &mut rng)?;
        std::thread::sleep(LOAD_EVERY);
    }
    Ok(())
}

fn go_round(
    departure: Departure,
    world: &World,
    setup: &Setup,
    rounds: usize,
    relays: &mut Vec<Relay>,
) -> Result<Vec<Duration>> {
    let mut connection = connect(world.database()?)?;
    relays.push(setup.start(1, 0, None)?);
    let mut times = Vec::new();
    for round in 0..rounds {
        // The one that is there longest leaves; the other takes over.
        relays.push(setup.start(2 + round, 0, None)?);
        wait_for_balance(&connection, relays)?;
        let mut leaving = relays.remove(0);
        times.push(one_round(departure, world, &mut connection, &mut leaving)?);
    }
    times.sort();
    Ok(times)
}

/// From the signal until an event of every partition, committed after it, has arrived.
fn one_round(
    departure: Departure,
    world: &World,
    connection: &mut Connection,
    leaving: &mut Relay,
) -> Result<Duration> {
    let mut rng = generator(1, 0, "probe");
    let keys = keys()?;
    let begun = Instant::now();
    match departure {
        Departure::Killed => leaving.kill()?,
        Departure::HandedOver => leaving.signal(Signal::TERM)?,
    }
    let gone = leaving.process_id();
    eventually("its leases are taken over", || Ok(holders(connection, gone)? == 0))?;
    let mut file = File::open(world.lines().join(lines::FILE)).context("read the sink's file")?;
    let end = file.metadata().context("read the sink's file")?.len();
    let mut probes = Vec::new();
    for key in &keys {
        probes.push(commit_event(connection, key.as_str(), &mut rng)?);
    }
    eventually("all partitions are served", || {
        let mut text = Vec::new();
        file.seek(SeekFrom::Start(end)).context("read the sink's file")?;
        file.read_to_end(&mut text).context("read the sink's file")?;
        let text = String::from_utf8_lossy(&text);
        Ok(probes.iter().all(|id| text.contains(&id.to_string())))
    })?;
    let took = begun.elapsed();
    if departure == Departure::HandedOver {
        leaving.finish(PATIENCE)?;
    }
    Ok(took)
}

/// How many partitions the last word says are held by a process, or by nobody any more.
fn holders(connection: &Connection, process_id: u32) -> Result<usize> {
    let sql = "SELECT count(*) FROM postrider_lease WHERE released = 1 OR holder LIKE ?1";
    let held: i64 = connection
        .prepare_cached(sql)?
        .query_row([format!("%-{process_id}-%")], |row| row.get(0))?;
    usize::try_from(held).context("a count is not negative")
}

fn wait_for_balance(connection: &Connection, relays: &[Relay]) -> Result<()> {
    let sql = "SELECT count(*) FROM postrider_lease WHERE released = 0 AND holder LIKE ?1";
    eventually("both relays hold their share", || {
        let mut balanced = true;
        for relay in relays {
            let held: i64 = connection
                .prepare_cached(sql)?
                .query_row([format!("%-{}-%", relay.process_id())], |row| row.get(0))?;
            balanced &= held == i64::from(PARTITIONS / 2) && relay.listens()?;
        }
        Ok(balanced)
    })
}

fn eventually(what: &str, mut attempt: impl FnMut() -> Result<bool>) -> Result<()> {
    let until = Instant::now() + PATIENCE;
    while !attempt()? {
        ensure!(Instant::now() < until, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}
