//! Schedules from Azure Cosmos DB to Azure Service Bus: the article's system under faults.
//!
//! What lives here: carrying a plan out with real relays, from the first process to the judgement.
//! What does not: the plan (`plan.rs`), writers and the truth (`account.rs`), take-overs
//! (`takeover.rs`), the other sources, whose databases tell of each take-over by triggers of their
//! own.
//! Invariant: the account is Microsoft's own emulator, the bus's messages are received by their own
//! SDK; the bus drops repetitions, so that no event at all may arrive twice.

mod account;
mod plan;
mod takeover;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;

use crate::allowance::Incidents;
use crate::bus::Bus;
use crate::deliveries::{Arrived, Delivery};
use crate::play::Played;
use crate::relays::{Failpoint, QUICK_RETRIES, Relay, RelaySource, Setup, Target};
use crate::schedule::{LEASE_TTL, Schedule, SinkKind};
use crate::verdict::{Judgement, judge};
use crate::world::SINK;
use account::{Account, Task};
use plan::{Plan, REGIONS, Trouble};

pub(crate) use plan::THEMES;
pub use takeover::takeover;

/// A supervisor's pause before it starts a dead process again.
const RESTART_AFTER: Duration = Duration::from_millis(100);
/// `postrider run` ends with it when the account can't be used for now.
const NOT_READY: i32 = 3;
/// Longest that healed relays may need for everything left over, also on a busy machine.
const SETTLE_WITHIN: Duration = Duration::from_secs(90);
/// A drained stop ends well within the relay's own limit of ten seconds.
const STOP_WITHIN: Duration = Duration::from_secs(15);
/// Longest wait for anything that is measured.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often the relays are looked after.
const TICK: Duration = Duration::from_millis(10);
/// How often it is asked whether everything is settled.
const ASK_EVERY: Duration = Duration::from_millis(200);

/// Where one of the relays stands.
enum Slot {
    Up(Relay),
    /// Stopped by SIGSTOP, until then.
    Frozen(Relay, Instant),
    /// Told to end; starts again so long after.
    Leaving(Relay, Duration),
    /// Starts again then.
    Down(Instant),
}

struct Stage<'a> {
    setup: Setup,
    account: &'a Account,
    bus: &'a Bus,
    slots: Vec<Slot>,
    starts: usize,
    outage_until: Option<Instant>,
    region_until: Option<Instant>,
    /// The container's ranges, in the order of their hashes.
    ranges: Vec<u32>,
    findings: Vec<String>,
    faults: usize,
}

/// Plays a schedule with the relay `binary`.
///
/// # Errors
/// When the machine refuses what the schedule needs; never for what the relay does.
pub fn play(schedule: &Schedule, binary: &Path) -> Result<Played> {
    ensure!(
        schedule.sink == SinkKind::Servicebus,
        "from cosmos the faults go to servicebus: --sink servicebus"
    );
    let begun = Instant::now();
    let plan = Plan::derive(schedule.seed, schedule.index);
    let folder = tempfile::Builder::new()
        .prefix(&format!("postrider-faults-cosmos-{}-", schedule.index))
        .tempdir()
        .context("make the schedule's folder")?;
    let account = Account::start(plan.ranges, plan.regions())?;
    let bus = Bus::start()?;
    let setup = setup(binary, folder.path(), &account, &bus);
    let mut stage = Stage {
        setup,
        account: &account,
        bus: &bus,
        slots: Vec::new(),
        starts: 0,
        outage_until: None,
        region_until: None,
        ranges: (0..plan.ranges).collect(),
        findings: Vec::new(),
        faults: 0,
    };
    let acted = stage.act(schedule, &plan);
    let (findings, faults) = (std::mem::take(&mut stage.findings), stage.faults);
    drop(stage);
    let accounts = account.accounts()?;
    let arrived = bus.arrived()?;
    let mut judgement: Judgement = judge(&accounts, &arrived, &Incidents::default());
    judgement.findings.extend(findings);
    judgement.findings.extend(acted.err().map(|error| format!("{error:#}")));
    let kept = (!judgement.passed()).then(|| {
        let kept = folder.keep();
        let text = format!("{judgement:#?}\n{plan:#?}\n");
        std::fs::write(kept.join("judgement.txt"), text).context("keep the judgement")?;
        std::fs::write(kept.join("arrived.txt"), listed(&arrived)).context("keep the messages")?;
        anyhow::Ok(kept)
    });
    let kept = kept.transpose()?;
    Ok(Played { judgement, took: begun.elapsed(), faults, kept })
}

/// A line for each message in the order of arrival: its key, the number of its event, its place.
fn listed(arrived: &Arrived) -> String {
    let line = |delivery: &Delivery| {
        let data: serde_json::Value =
            serde_json::from_slice(&delivery.message.payload).unwrap_or_default();
        format!("{:?} {} {:?}\n", delivery.message.key, data["n"], delivery.place)
    };
    arrived.deliveries.iter().map(line).collect()
}

/// What all relays of a schedule share.
fn setup(binary: &Path, folder: &Path, account: &Account, bus: &Bus) -> Setup {
    Setup {
        binary: binary.to_owned(),
        folder: folder.to_owned(),
        source: RelaySource::Cosmos(account.emulator.connection_string().to_owned()),
        targets: vec![(SINK, Target::Servicebus { connection_string: bus.connection_string() })],
        lease_ttl: LEASE_TTL,
        retention: None,
        clock: None,
        retries: QUICK_RETRIES,
    }
}

impl Stage<'_> {
    /// From the first process to the last.
    fn act(&mut self, schedule: &Schedule, plan: &Plan) -> Result<()> {
        for slot in 0..plan.relays {
            let failpoint = plan.failpoints.iter().find(|(of, ..)| *of == slot);
            let failpoint = failpoint.map(|(_, name, count)| Failpoint { name, count: *count });
            self.faults += usize::from(failpoint.is_some());
            let relay = self.start(slot, failpoint)?;
            self.slots.push(Slot::Up(relay));
        }
        let account = self.account;
        std::thread::scope(|scope| {
            let writers: Vec<_> = (0..plan.writers)
                .map(|writer| {
                    let Schedule { seed, index, .. } = *schedule;
                    let (keys, length) = (plan.keys, plan.writing);
                    scope.spawn(move || account.write(&Task { seed, index, writer, keys, length }))
                })
                .collect();
            let begun = Instant::now();
            let mut troubles = plan.troubles.iter().peekable();
            while troubles.peek().is_some() || writers.iter().any(|writer| !writer.is_finished()) {
                while let Some((_, trouble)) = troubles.next_if(|(at, _)| *at <= begun.elapsed()) {
                    self.begin(trouble)?;
                }
                self.tick()?;
                std::thread::sleep(TICK);
            }
            for writer in writers {
                match writer.join() {
                    Ok(written) => drop(written?),
                    Err(_) => bail!("a writer panicked"),
                }
            }
            Ok(())
        })?;
        self.heal()?;
        self.settle()?;
        self.close()
    }

    fn start(&mut self, slot: usize, failpoint: Option<Failpoint>) -> Result<Relay> {
        self.starts += 1;
        self.setup.start(self.starts, slot, failpoint)
    }

    fn begin(&mut self, trouble: &Trouble) -> Result<()> {
        self.faults += 1;
        let now = Instant::now();
        match trouble {
            Trouble::Kill { slot } => {
                let found = std::mem::replace(&mut self.slots[*slot], Slot::Down(now));
                self.slots[*slot] = match found {
                    Slot::Up(mut relay) | Slot::Frozen(mut relay, _) => {
                        relay.kill()?;
                        Slot::Down(now + RESTART_AFTER)
                    }
                    other => other,
                };
            }
            Trouble::Freeze { slot, length } => {
                let found = std::mem::replace(&mut self.slots[*slot], Slot::Down(now));
                self.slots[*slot] = match found {
                    Slot::Up(relay) => {
                        // It may have died at its failpoint just now.
                        let _ = relay.signal(Signal::STOP);
                        Slot::Frozen(relay, now + *length)
                    }
                    other => other,
                };
            }
            Trouble::Leave { slot, away } => {
                let found = std::mem::replace(&mut self.slots[*slot], Slot::Down(now));
                self.slots[*slot] = match found {
                    Slot::Up(relay) if relay.listens()? => {
                        let _ = relay.signal(Signal::TERM);
                        Slot::Leaving(relay, *away)
                    }
                    other => other,
                };
            }
            Trouble::Account(fault) => {
                self.account.emulator.fault(fault).context("trouble an account")?;
            }
            Trouble::Split { at, locked } => {
                let at = at % self.ranges.len();
                let next = self.account.change("split", &self.ranges[at..=at], *locked)?;
                self.ranges.splice(at..=at, next);
            }
            Trouble::Merge { at, locked } => {
                self.merge(*at, *locked)?;
            }
            Trouble::Region { length } => {
                // The one that takes writes: the other one does then.
                let gone = self.account.emulator.region_offline(REGIONS[0]);
                gone.context("take a region away")?;
                self.region_until = Some(now + *length);
            }
            Trouble::Outage { kind, length } => {
                self.bus.set_outage(Some(*kind));
                self.outage_until = Some(now + *length);
            }
        }
        Ok(())
    }

    /// Merges two neighbours, the next ones if the emulator can't merge those.
    fn merge(&mut self, at: usize, locked: Duration) -> Result<()> {
        let neighbours = self.ranges.len() - 1;
        for at in (at..at + neighbours).map(|at| at % neighbours) {
            match self.account.change("merge", &self.ranges[at..at + 2], locked) {
                Ok(next) => {
                    self.ranges.splice(at..at + 2, next);
                    return Ok(());
                }
                Err(error) if format!("{error:#}").contains(account::OUT_OF_ORDER) => {}
                Err(error) => return Err(error),
            }
        }
        // None was carried out.
        self.faults -= 1;
        Ok(())
    }

    /// Looks after the relays, as a supervisor does.
    fn tick(&mut self) -> Result<()> {
        let now = Instant::now();
        if self.outage_until.is_some_and(|until| until <= now) {
            self.bus.set_outage(None);
            self.outage_until = None;
        }
        if self.region_until.is_some_and(|until| until <= now) {
            self.bring_region_back()?;
        }
        for slot in 0..self.slots.len() {
            let found = std::mem::replace(&mut self.slots[slot], Slot::Down(now));
            self.slots[slot] = match found {
                Slot::Up(mut relay) => match relay.ended()? {
                    None => Slot::Up(relay),
                    Some(status) => {
                        let expected = status.code() == Some(NOT_READY) || relay.is_armed();
                        if !expected {
                            let number = relay.number;
                            self.findings.push(format!("relay {number} ended with {status}"));
                        }
                        Slot::Down(now + RESTART_AFTER)
                    }
                },
                Slot::Frozen(relay, until) if until <= now => {
                    let _ = relay.signal(Signal::CONT);
                    Slot::Up(relay)
                }
                Slot::Leaving(mut relay, away) => match relay.ended()? {
                    None => Slot::Leaving(relay, away),
                    Some(status) => {
                        if !status.success() && !relay.is_armed() {
                            let number = relay.number;
                            self.findings
                                .push(format!("relay {number} ended with {status} after SIGTERM"));
                        }
                        Slot::Down(now + away)
                    }
                },
                Slot::Down(at) if at <= now => Slot::Up(self.start(slot, None)?),
                other => other,
            };
        }
        Ok(())
    }

    fn bring_region_back(&mut self) -> Result<()> {
        if self.region_until.take().is_some() {
            self.account.emulator.region_online(REGIONS[0]).context("bring a region back")?;
        }
        Ok(())
    }

    fn heal(&mut self) -> Result<()> {
        self.bring_region_back()?;
        self.account.emulator.clear_faults().context("heal the account")?;
        self.bus.heal();
        self.outage_until = None;
        for slot in &mut self.slots {
            if let Slot::Frozen(_, until) = slot {
                *until = Instant::now();
            }
        }
        Ok(())
    }

    /// Waits until nothing is pending and nothing is among the dead letters.
    fn settle(&mut self) -> Result<()> {
        let begun = Instant::now();
        let mut asked: Option<Instant> = None;
        loop {
            self.tick()?;
            if asked.is_none_or(|at| at.elapsed() >= ASK_EVERY) {
                if self.account.unsettled()? == 0 {
                    return Ok(());
                }
                self.account.requeue_all()?;
                asked = Some(Instant::now());
            }
            ensure!(begun.elapsed() < SETTLE_WITHIN, "not settled within {SETTLE_WITHIN:?}");
            std::thread::sleep(TICK);
        }
    }

    fn close(&mut self) -> Result<()> {
        let mut relays = Vec::new();
        for slot in std::mem::take(&mut self.slots) {
            let (Slot::Up(relay) | Slot::Frozen(relay, _) | Slot::Leaving(relay, _)) = slot else {
                continue;
            };
            let _ = relay.signal(Signal::CONT);
            if relay.listens()? {
                let _ = relay.signal(Signal::TERM);
                relays.push(relay);
            }
        }
        relays.iter_mut().try_for_each(|relay| relay.finish(STOP_WITHIN))
    }
}
