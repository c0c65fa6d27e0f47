//! Plays one schedule with real processes.
//!
//! What lives here: a schedule from its first process to its judgement. What does not: what each
//! fault does to the processes (`stage.rs`).
//! Invariant: one thread does everything in turn, so that it sees each death and take-over; after
//! the faults all is healed, and only then is anything judged.
//!
//! ```text
//! world made ▸ relays and writers start ▸ faults ▸ healed ▸ settled ▸ SIGTERM ▸ judged
//! ```

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use postrider_core::Secret;
use postrider_sink_webhook::verify::Verifier;

use crate::allowance::Incidents;
use crate::answer::Answers;
use crate::clock::MovedClock;
use crate::cluster::Templates;
use crate::deliveries::{Arrived, Mark};
use crate::lines;
use crate::receiver::Receiver;
use crate::relays::{Setup, Target};
use crate::schedule::{LEASE_TTL, Schedule, SinkKind, generator};
use crate::stage::Stage;
use crate::verdict::{Accounts, Judgement, judge};
use crate::world::{Past, World};

/// Signs and verifies in every schedule: 32 bytes of no secrecy at all.
const SIGNING_KEY: &str = "whsec_ZmF1bHRzZmF1bHRzZmF1bHRzZmF1bHRzZmF1bHRzISE=";
/// A moved clock signs with its own time.
const MOVED_TOLERANCE: Duration = Duration::from_secs(60 * 86_400);
/// Longest that a healed relay may need for everything left over, also on a busy machine.
const SETTLE_WITHIN: Duration = Duration::from_secs(60);
/// How often the stage is looked at: bounds how late a take-over is noticed.
const TICK: Duration = Duration::from_millis(5);
/// How often parked events are asked to be sent again while settling.
const REQUEUE_EVERY: Duration = Duration::from_millis(150);
/// A drained stop ends well within the relay's own limit of ten seconds.
const STOP_WITHIN: Duration = Duration::from_secs(15);

/// The sink's end.
pub enum Ending {
    /// A receiver.
    Webhook(Receiver),
    /// Files in a folder.
    Jsonl(PathBuf),
}

impl Ending {
    /// This moment.
    ///
    /// # Errors
    /// The file system's.
    pub fn mark(&self) -> Result<Mark> {
        match self {
            Self::Webhook(receiver) => Ok(receiver.mark()),
            Self::Jsonl(folder) => lines::mark(folder),
        }
    }

    /// Everything that arrived.
    ///
    /// # Errors
    /// The file system's.
    pub fn arrived(&self) -> Result<Arrived> {
        match self {
            Self::Webhook(receiver) => Ok(receiver.arrived()),
            Self::Jsonl(folder) => lines::read(folder),
        }
    }
}

/// What became of a schedule.
pub struct Played {
    /// The counts.
    pub judgement: Judgement,
    /// How long it took.
    pub took: Duration,
    /// How many faults were really made.
    pub faults: usize,
    /// Where everything about it was left, if it failed.
    pub kept: Option<PathBuf>,
}

/// Plays a schedule with the relay `binary`.
///
/// # Errors
/// When the machine refuses what the schedule needs; never for what the relay does.
pub fn play(schedule: &Schedule, templates: &Templates, binary: &Path) -> Result<Played> {
    let begun = Instant::now();
    let world = World::create(schedule, templates)?;
    let clock = schedule.movable_clock.then(|| MovedClock::new(world.folder())).transpose()?;
    let ending = ending(schedule, &world)?;
    let setup = setup(schedule, binary, &world, &ending, clock);
    let mut stage = Stage::new(schedule, &world, ending, setup);
    let acted = act(&mut stage, schedule);
    let (accounts, arrived, incidents, mut findings) = {
        let faults = acted.as_ref().err().map(|error| format!("{error:#}"));
        let (incidents, mut findings) = stage.incidents()?;
        findings.extend(faults);
        (accounts(&world)?, stage.ending().arrived()?, incidents, findings)
    };
    let faults = stage.faults();
    drop(stage);
    let mut judgement = judge(&accounts, &arrived, &incidents);
    judgement.findings.append(&mut findings);
    let kept = match judgement.passed() {
        true => None,
        false => Some(keep(world, &judgement, &incidents, &arrived, &accounts)?),
    };
    Ok(Played { judgement, took: begun.elapsed(), faults, kept })
}

fn ending(schedule: &Schedule, world: &World) -> Result<Ending> {
    match schedule.sink {
        SinkKind::Jsonl => Ok(Ending::Jsonl(world.lines().to_owned())),
        SinkKind::Webhook => {
            let mut verifier = Verifier::new(&[Secret::new(SIGNING_KEY)])?;
            if schedule.movable_clock {
                verifier = verifier.tolerance(MOVED_TOLERANCE);
            }
            let rng = generator(schedule.seed, schedule.index, "answers");
            Ok(Ending::Webhook(Receiver::start(verifier, Answers::new(schedule.moods, rng))?))
        }
    }
}

fn setup(
    schedule: &Schedule,
    binary: &Path,
    world: &World,
    ending: &Ending,
    clock: Option<MovedClock>,
) -> Setup {
    let target = match ending {
        Ending::Webhook(receiver) => {
            Target::Webhook { address: receiver.address(), signing_key: SIGNING_KEY.to_owned() }
        }
        Ending::Jsonl(folder) => {
            Target::Jsonl { path: folder.join(lines::FILE), rotate_bytes: schedule.rotate_bytes }
        }
    };
    Setup {
        binary: binary.to_owned(),
        folder: world.folder().to_owned(),
        source: world.relay_source(),
        target,
        lease_ttl: LEASE_TTL,
        retention: schedule.retention,
        clock,
    }
}

/// From the first process to the last.
fn act(stage: &mut Stage<'_>, schedule: &Schedule) -> Result<()> {
    stage.open(schedule.relays, schedule.writers)?;
    while stage.faults_are_left() || stage.writers_are_left()? {
        stage.tick()?;
        std::thread::sleep(TICK);
    }
    stage.heal()?;
    settle(stage)?;
    stage.close(STOP_WITHIN)
}

/// Waits until nothing is pending and nothing is among the dead letters.
fn settle(stage: &mut Stage<'_>) -> Result<()> {
    let begun = Instant::now();
    let mut requeued: Option<Instant> = None;
    loop {
        stage.tick()?;
        if stage.world().may_be_settled()? && stage.world().unsettled()? == 0 {
            return Ok(());
        }
        if requeued.is_none_or(|at| at.elapsed() >= REQUEUE_EVERY) {
            stage.world().requeue_all()?;
            requeued = Some(Instant::now());
        }
        if begun.elapsed() > SETTLE_WITHIN {
            anyhow::bail!("not settled within {SETTLE_WITHIN:?} of healing");
        }
        std::thread::sleep(TICK);
    }
}

/// What the database says now.
///
/// # Errors
/// The database's.
pub fn accounts(world: &World) -> Result<Accounts> {
    let (events_alone, rows_alone) = world.torn_transactions()?;
    Ok(Accounts {
        committed: world.truth()?,
        events_alone,
        rows_alone,
        published: world.published()?,
        unsettled: world.unsettled()?,
    })
}

/// Keeps the folder of a failed schedule, with what it takes to understand it.
fn keep(
    world: World,
    judgement: &Judgement,
    incidents: &Incidents,
    arrived: &Arrived,
    accounts: &Accounts,
) -> Result<PathBuf> {
    use std::fmt::Write as _;
    let mut text = format!("{judgement:#?}\n");
    let written = "writing to memory does not fail";
    for (takeover, mark) in &incidents.takeovers {
        let shown = if let Mark::Count(count) = mark { *count } else { 0 };
        writeln!(text, "{takeover:?} at {shown}").expect(written);
    }
    if let Some(replaced) = &incidents.replaced {
        for (takeover, mark) in replaced.past.takeovers.iter().zip(&replaced.marks) {
            writeln!(text, "replaced: {takeover:?} at {mark:?}").expect(written);
        }
        let Past { shared, shared_takeover, .. } = &replaced.past;
        let shared = shared.len();
        writeln!(text, "replaced at {:?}: {shared} events, {shared_takeover}", replaced.at)
            .expect(written);
    }
    writeln!(text, "{:?}\nwithheld {:?}", incidents.pauses, arrived.withheld).expect(written);
    let places: std::collections::HashMap<_, _> = accounts
        .committed
        .iter()
        .map(|event| (event.message.id, (event.place, event.partition.as_str())))
        .collect();
    for delivery in &arrived.deliveries {
        let (id, key) = (delivery.id(), &delivery.message.key);
        let place = places.get(&id);
        writeln!(text, "{id} {key:?} {place:?} {:?}", delivery.place).expect(written);
    }
    let folder = world.keep()?;
    std::fs::write(folder.join("judgement.txt"), text).context("keep the judgement")?;
    Ok(folder)
}
