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
use crate::broker::Broker;
use crate::bus::Bus;
use crate::clock::MovedClock;
use crate::cluster::Templates;
use crate::deliveries::{Arrived, Mark};
use crate::lines;
use crate::receiver::Receiver;
use crate::relays::{QUICK_RETRIES, Setup, Target};
use crate::schedule::{LEASE_TTL, Outage, Schedule, SinkKind, SourceKind, generator};
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
    /// The emulator.
    Servicebus(Bus),
    /// A server of its own.
    Broker(Broker),
}

impl Ending {
    /// This moment; none while the sink can't tell, which is while nothing arrives there.
    ///
    /// # Errors
    /// The file system's.
    pub fn mark(&self) -> Result<Option<Mark>> {
        match self {
            Self::Webhook(receiver) => Ok(Some(receiver.mark())),
            Self::Jsonl(folder) => lines::mark(folder).map(Some),
            Self::Servicebus(bus) => Ok(Some(bus.mark())),
            Self::Broker(broker) => Ok(broker.mark()),
        }
    }

    /// Notes what only the sink's end sees of the faults.
    pub fn look(&self) {
        match self {
            Self::Broker(broker) => broker.look(),
            Self::Webhook(_) | Self::Jsonl(_) | Self::Servicebus(_) => {}
        }
    }

    /// Everything that arrived.
    ///
    /// # Errors
    /// The file system's, or a server's that does not answer.
    pub fn arrived(&self) -> Result<Arrived> {
        match self {
            Self::Webhook(receiver) => Ok(receiver.arrived()),
            Self::Jsonl(folder) => lines::read(folder),
            Self::Servicebus(bus) => bus.arrived(),
            Self::Broker(broker) => broker.arrived(),
        }
    }

    /// Begins or ends an outage, where there can be one.
    ///
    /// # Errors
    /// When a server does not stop or start.
    pub fn set_outage(&self, outage: Option<Outage>) -> Result<()> {
        match self {
            Self::Webhook(receiver) => receiver.set_outage(outage),
            Self::Jsonl(_) => {}
            Self::Servicebus(bus) => bus.set_outage(outage),
            Self::Broker(broker) => return broker.set_outage(outage),
        }
        Ok(())
    }

    /// From now on everything is taken and confirmed.
    ///
    /// # Errors
    /// When a server does not start.
    pub fn heal(&self) -> Result<()> {
        match self {
            Self::Webhook(receiver) => receiver.heal(),
            Self::Jsonl(_) => {}
            Self::Servicebus(bus) => bus.heal(),
            Self::Broker(broker) => return broker.heal(),
        }
        Ok(())
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
    if schedule.source == SourceKind::Cosmos {
        return crate::cosmos::play(schedule, binary);
    }
    let begun = Instant::now();
    let world = World::create(schedule, templates)?;
    let clock = schedule.movable_clock.then(|| MovedClock::new(world.folder())).transpose()?;
    let endings: Vec<Ending> = schedule
        .sinks()
        .into_iter()
        .map(|sink| ending(schedule, sink, &world))
        .collect::<Result<_>>()?;
    let setup = setup(schedule, binary, &world, &endings, clock);
    let mut stage = Stage::new(schedule, &world, endings, setup);
    let acted = act(&mut stage, schedule);
    let mut judgement = Judgement::default();
    let mut evidence = Vec::new();
    for (sink, consumer) in world.consumers().iter().enumerate() {
        let incidents = stage.incidents(sink)?;
        let accounts = accounts(&world, consumer)?;
        let arrived = stage.endings()[sink].arrived()?;
        judgement.add(judge(&accounts, &arrived, &incidents), (sink > 0).then_some(consumer));
        evidence.push(Evidence { incidents, arrived, accounts });
    }
    judgement.findings.extend(stage.findings());
    judgement.findings.extend(acted.err().map(|error| format!("{error:#}")));
    judgement.findings.extend(world.watched());
    let faults = stage.faults();
    drop(stage);
    let kept = match judgement.passed() {
        true => None,
        false => Some(keep(world, &judgement, &evidence)?),
    };
    Ok(Played { judgement, took: begun.elapsed(), faults, kept })
}

/// What a judgement was made of.
struct Evidence {
    incidents: Incidents,
    arrived: Arrived,
    accounts: Accounts,
}

fn ending(schedule: &Schedule, sink: SinkKind, world: &World) -> Result<Ending> {
    match sink {
        SinkKind::Jsonl => Ok(Ending::Jsonl(world.lines().to_owned())),
        SinkKind::Servicebus => Ok(Ending::Servicebus(Bus::start()?)),
        SinkKind::Nats | SinkKind::Rabbitmq | SinkKind::Kafka | SinkKind::Redis => {
            Ok(Ending::Broker(Broker::start(schedule, sink)?))
        }
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
    endings: &[Ending],
    clock: Option<MovedClock>,
) -> Setup {
    let target = |ending: &Ending| match ending {
        Ending::Webhook(receiver) => {
            Target::Webhook { address: receiver.address(), signing_key: SIGNING_KEY.to_owned() }
        }
        Ending::Jsonl(folder) => {
            Target::Jsonl { path: folder.join(lines::FILE), rotate_bytes: schedule.rotate_bytes }
        }
        Ending::Servicebus(bus) => {
            Target::Servicebus { connection_string: bus.connection_string() }
        }
        Ending::Broker(broker) => Target::Broker { settings: broker.settings().to_owned() },
    };
    Setup {
        binary: binary.to_owned(),
        folder: world.folder().to_owned(),
        source: world.relay_source(),
        targets: world.consumers().iter().copied().zip(endings.iter().map(target)).collect(),
        lease_ttl: LEASE_TTL,
        retention: schedule.retention,
        clock,
        retries: QUICK_RETRIES,
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
        if stage.world().may_be_settled()? && is_settled(stage.world())? {
            return Ok(());
        }
        if requeued.is_none_or(|at| at.elapsed() >= REQUEUE_EVERY) {
            // Its locks hold up writers that ended long ago, and they a slot that is made anew.
            stage.end_orphans()?;
            stage.world().requeue_all()?;
            requeued = Some(Instant::now());
        }
        if begun.elapsed() > SETTLE_WITHIN {
            anyhow::bail!("not settled within {SETTLE_WITHIN:?} of healing");
        }
        std::thread::sleep(TICK);
    }
}

fn is_settled(world: &World) -> Result<bool> {
    for consumer in world.consumers() {
        if world.unsettled(consumer)? != 0 {
            return Ok(false);
        }
    }
    Ok(true)
}

/// What the database says now of a sink.
///
/// # Errors
/// The database's.
pub fn accounts(world: &World, consumer: &str) -> Result<Accounts> {
    let (events_alone, rows_alone) = world.torn_transactions()?;
    Ok(Accounts {
        committed: world.truth()?,
        events_alone,
        rows_alone,
        published: world.published(consumer)?,
        unsettled: world.unsettled(consumer)?,
    })
}

/// Keeps the folder of a failed schedule, with what it takes to understand it.
fn keep(world: World, judgement: &Judgement, evidence: &[Evidence]) -> Result<PathBuf> {
    let mut text = format!("{judgement:#?}\n");
    for (consumer, evidence) in world.consumers().iter().zip(evidence) {
        text.push_str(&format!("\n{consumer}\n"));
        tell(&mut text, evidence);
    }
    let folder = world.keep()?;
    std::fs::write(folder.join("judgement.txt"), text).context("keep the judgement")?;
    Ok(folder)
}

fn tell(text: &mut String, Evidence { incidents, arrived, accounts }: &Evidence) {
    use std::fmt::Write as _;
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
}
