//! Draining a backlog from the log into a broker.
//!
//! What lives here: the rounds, and watching a process at work from outside. What does not: the two
//! sides (`peer.rs`, `wal/child.rs`).
//! Invariant: both sides are watched alike, as what their stream holds; the time is from the first
//! message to the last, so that no start counts; each goes first in turn.

use std::collections::HashSet;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::Setting;
use super::places::{JetStream, Place, Topics};
use crate::figure::{Goal, Report, Samples};
use crate::postgres::server::{Measured, Session};
use crate::wal::backlog::Backlog;
use crate::world::{PAYLOAD_BYTES, as_f64, per_second};

/// Rows of a transaction.
const PER_TRANSACTION: u64 = 100;
const KEYS: u64 = 10_000;
/// How often a stream is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(5);
const GIVE_UP: Duration = Duration::from_secs(300);
/// Linux counts a process's time in hundredths of a second.
const TICK: Duration = Duration::from_millis(10);

/// A broker that is drained into.
#[derive(Clone, Copy)]
pub(super) struct Into {
    pub(super) figure: &'static str,
    start: fn() -> Result<Box<dyn Place>>,
    goal: Goal,
}

pub(super) const PLACES: [Into; 2] = [
    Into {
        figure: "log to NATS JetStream",
        start: || Ok(Box::new(JetStream::start()?)),
        goal: Goal::AtLeast(1.0),
    },
    Into {
        figure: "log to Kafka",
        start: || Ok(Box::new(Topics::start()?)),
        goal: Goal::AtLeast(1.0),
    },
];

/// What a side came to.
#[derive(Debug, Clone, Copy)]
struct Side {
    /// Events a second.
    rate: f64,
    /// Microseconds of a processor for each event, of the side's process alone.
    cpu: f64,
    peak_mib: f64,
    lost: u64,
    /// Messages beyond one for each event.
    again: u64,
}

pub(super) async fn measure(
    report: &mut Report,
    measured: &Measured,
    setting: &Setting,
    into: Into,
) -> Result<()> {
    let mut backlog = super::outbox(measured).await?;
    load(&mut backlog, setting.events).await?;
    let place = (into.start)()?;
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    // The first round finds everything cold.
    let cold = usize::from(!setting.smoke);
    for round in 0..setting.runs + cold {
        let names = [format!("ours-{round}"), format!("theirs-{round}")];
        let peer = async || match &setting.peer {
            Some(peer) => {
                let slot = backlog.theirs().await?;
                let output = place.output(&names[1]);
                let route = peer.route(&backlog.database.url(), &slot, &output);
                watched(place.as_ref(), &names[1], route, (setting.events, true)).await.map(Some)
            }
            None => Ok(None),
        };
        let before = if round % 2 == 1 { peer().await? } else { None };
        backlog.begin_again().await?;
        let relay = relay(&backlog, &place.url(&names[0]))?;
        let own = watched(place.as_ref(), &names[0], relay, (setting.events, false)).await?;
        let after = if round % 2 == 0 { peer().await? } else { None };
        if round >= cold {
            ours.push(own);
            theirs.extend(before.or(after));
        }
    }
    tell(report, into, &ours, &theirs);
    let lost = |sides: &[Side]| sides.iter().map(|side| side.lost).sum::<u64>();
    ensure!(lost(&ours) == 0, "{} events are not in {}", lost(&ours), into.figure);
    Ok(())
}

/// The goal is judged where there is somebody to be judged against.
fn tell(report: &mut Report, into: Into, ours: &[Side], theirs: &[Side]) {
    let all = |sides: &[Side], what: fn(&Side) -> f64| sides.iter().map(what).collect::<Vec<_>>();
    let pairs = |what| all(ours, what).into_iter().zip(all(theirs, what)).collect::<Vec<_>>();
    let named = |what: &str| format!("{}, {what}", into.figure);
    let mut against = |what: &str, unit: &str, value: fn(&Side) -> f64, goal: Option<Goal>| match (
        theirs.is_empty(),
        goal,
    ) {
        (true, _) => report.absolute(&named(what), &Samples(all(ours, value)), unit, None),
        (false, Some(goal)) => report.ratio(&named(what), &pairs(value), unit, goal),
        (false, None) => report.ratio_without_goal(&named(what), &pairs(value), unit),
    };
    against("drain", "events/s", |side| side.rate, Some(into.goal));
    against("processor time an event", "us", |side| side.cpu, None);
    against("resident memory", "MiB", |side| side.peak_mib, None);
    let none = Some(Goal::AtMost(0.0));
    let sum = |sides: &[Side], what: fn(&Side) -> u64| {
        Samples(vec![as_f64(sides.iter().map(what).sum::<u64>())])
    };
    report.absolute(&named("lost"), &sum(ours, |side| side.lost), "events", none);
    report.absolute(&named("came again"), &sum(ours, |side| side.again), "events", none);
    if !theirs.is_empty() {
        report.absolute(&named("peer's lost"), &sum(theirs, |side| side.lost), "events", None);
        let again = sum(theirs, |side| side.again);
        report.absolute(&named("peer's came again"), &again, "events", None);
    }
}

/// Appends a backlog while nobody reads.
async fn load(backlog: &mut Backlog, events: u64) -> Result<()> {
    let session = Session::open(&backlog.database).await?;
    session.run("SET synchronous_commit = off").await?;
    session
        .run(&format!(
            "DO $body$
            BEGIN
                FOR n IN 0..{} LOOP
                    INSERT INTO postrider.outbox (key, topic, type, content_type, payload)
                    SELECT 'key-' || e % {KEYS}, 'orders', 'OrderPlaced', 'application/json',
                        ('{{\"text\":\"' || repeat('x', {}) || '\"}}')::json
                    FROM generate_series(n * {PER_TRANSACTION}::bigint,
                        least((n + 1) * {PER_TRANSACTION}::bigint, {events}) - 1) AS e;
                    COMMIT;
                END LOOP;
            END
            $body$",
            events.div_ceil(PER_TRANSACTION) - 1,
            PAYLOAD_BYTES - 11
        ))
        .await?;
    backlog.events += events;
    backlog.settle().await
}

/// The relay, in a process of its own that ends by itself.
fn relay(backlog: &Backlog, place: &str) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    let (url, events) = (backlog.database.url(), backlog.events.to_string());
    command.args(["wal-drain", &url, &backlog.ours, &events, "--to", place]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::inherit());
    Ok(command)
}

/// A process that ends with its watcher.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It fails only if the process has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a side until its stream holds all; one that goes on for ever is ended then.
async fn watched(
    place: &dyn Place,
    name: &str,
    mut command: Command,
    (events, is_endless): (u64, bool),
) -> Result<Side> {
    place.make(name).await?;
    let mut running = Running(command.spawn().context("start a side")?);
    let pid = running.0.id();
    let (mut first, give_up) = (None, Instant::now() + GIVE_UP);
    let (from, last) = loop {
        let (cpu, is_over) = cpu_of(pid)?;
        let held = place.held(name).await?;
        let now = (Instant::now(), held, cpu);
        if held > 0 {
            let from = *first.get_or_insert(now);
            if held >= events {
                break (from, now);
            }
        }
        ensure!(now.0 < give_up, "{held} of {events} events came into {name}");
        ensure!(!is_over, "a side ended with {held} of {events} events in {name}");
        tokio::time::sleep(LOOK_EVERY).await;
    };
    let peak_mib = peak_of(pid).unwrap_or(f64::NAN);
    if !is_endless {
        let ended = tokio::task::block_in_place(|| running.0.wait())?;
        ensure!(ended.success(), "the relay ended with {ended}");
    }
    drop(running);
    let messages = place.held(name).await?;
    let ids = place.ids(name, messages).await?;
    place.remove(name).await?;
    let distinct = ids.iter().collect::<HashSet<_>>().len() as u64;
    let counted = last.1 - from.1;
    Ok(Side {
        rate: per_second(counted, last.0 - from.0),
        cpu: (last.2 - from.2).as_secs_f64() * 1e6 / as_f64(counted),
        peak_mib,
        lost: events.saturating_sub(distinct),
        again: messages - distinct,
    })
}

/// The processors' time of a child, and whether it has ended, as long as nobody asked how.
fn cpu_of(pid: u32) -> Result<(Duration, bool)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).context("read /proc")?;
    let (_, after_name) = stat.rsplit_once(')').context("the system does not tell the time")?;
    let mut fields = after_name.split_whitespace();
    let is_over = fields.next() == Some("Z");
    let ticks = fields.skip(10).take(2).map(str::parse::<u32>);
    Ok((TICK * ticks.sum::<Result<u32, _>>()?, is_over))
}

/// A process's peak memory, if it runs.
fn peak_of(pid: u32) -> Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).context("read /proc")?;
    Ok(as_f64(crate::world::peak_in(&status)?) / 1_024.0)
}
