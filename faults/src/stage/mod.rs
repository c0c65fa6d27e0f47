//! The processes of one schedule, and what each fault does to them.
//!
//! What lives here: starting, watching and disturbing relays, writers and their surroundings. What
//! does not: what is done to a PostgreSQL server (`postgres.rs`), when a schedule is over and what
//! it proves (`play.rs`).
//! Invariant: a relay that ends is started again, as any supervisor would; only a death that was
//! asked for, or the code for "not ready", is taken as normal.

mod postgres;

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::process::Child;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::Signal;

use crate::allowance::{Incidents, Pause, Replaced};
use crate::deliveries::Mark;
use crate::lines;
use crate::play::Ending;
use crate::relays::{Failpoint, Relay, Setup, bound_to_us};
use crate::schedule::{Fault, Schedule, Side, WireFault};
use crate::world::{Place, World};

/// A supervisor's pause before it starts a dead process again.
const RESTART_AFTER: Duration = Duration::from_millis(100);
/// `postrider run` ends with it when the database can't be used for now.
const NOT_READY: i32 = 3;

/// Where one of the relays stands.
enum Slot {
    /// It runs.
    Up(Relay),
    /// It was stopped by SIGSTOP.
    Stopped(Relay),
    /// It was told to end.
    Leaving(Relay),
    /// It is dead; its start is due.
    Down,
}

/// What is to be done at its time.
enum Action {
    Begin(Fault),
    Start {
        slot: usize,
        failpoint: Option<Failpoint>,
    },
    Resume {
        slot: usize,
    },
    FreeDisk,
    EndOutage,
    /// Put a way to the database right.
    Restore {
        whose: Side,
        how: WireFault,
    },
    /// Look whether the copy stands.
    AwaitCopy {
        lag: Duration,
    },
    Replace,
}

/// One schedule's processes.
pub struct Stage<'a> {
    schedule: &'a Schedule,
    world: &'a World,
    /// Of each sink, in the order of the consumers.
    endings: Vec<Ending>,
    setup: Setup,
    slots: Vec<Slot>,
    starts: usize,
    writers: Vec<Child>,
    /// Processes that hold a lock or a transaction for a while, and end by themselves.
    holders: Vec<Child>,
    due: Vec<(Duration, Action)>,
    begun: Instant,
    /// The moment of each take-over at each sink, by its number.
    marks: BTreeMap<i64, Vec<Mark>>,
    pauses: Vec<Pause>,
    replaced: Option<Replaced>,
    findings: Vec<String>,
    clock_seconds: i64,
    faults: usize,
}

impl<'a> Stage<'a> {
    /// A stage with nobody on it.
    pub fn new(
        schedule: &'a Schedule,
        world: &'a World,
        endings: Vec<Ending>,
        setup: Setup,
    ) -> Self {
        let steps = schedule.steps.iter();
        Self {
            schedule,
            world,
            endings,
            setup,
            slots: Vec::new(),
            starts: 0,
            writers: Vec::new(),
            holders: Vec::new(),
            due: steps.map(|step| (step.at, Action::Begin(step.fault.clone()))).collect(),
            begun: Instant::now(),
            marks: BTreeMap::new(),
            pauses: Vec::new(),
            replaced: None,
            findings: Vec::new(),
            clock_seconds: 0,
            faults: 0,
        }
    }

    /// The schedule's world.
    pub fn world(&self) -> &World {
        self.world
    }

    /// Each sink's end, in the order of the consumers.
    pub fn endings(&self) -> &[Ending] {
        &self.endings
    }

    /// This moment at each sink, unless one of them can't tell.
    fn now(&self) -> Result<Option<Vec<Mark>>> {
        self.endings.iter().map(Ending::mark).collect()
    }

    /// How many faults were made.
    pub fn faults(&self) -> usize {
        self.faults
    }

    /// Starts everybody.
    ///
    /// # Errors
    /// When a process can't be started.
    pub fn open(&mut self, relays: usize, writers: usize) -> Result<()> {
        for slot in 0..relays {
            self.slots.push(Slot::Down);
            self.start(slot, None)?;
        }
        for writer in 0..writers {
            let child = self.writer(writer)?;
            self.writers.push(child);
        }
        self.begun = Instant::now();
        Ok(())
    }

    fn writer(&self, writer: usize) -> Result<Child> {
        let own = std::env::current_exe().context("find the own binary")?;
        let mut command = bound_to_us(&own);
        command.args(self.world.writer_role());
        if self.schedule.postgres.is_some_and(|plan| !plan.replaced) {
            command.arg("--retries");
        }
        command.arg("--largest").arg(self.schedule.largest_payload().to_string());
        command.arg("--length-ms").arg(self.schedule.writing.as_millis().to_string());
        if let Some(events) = self.schedule.events {
            let own = events.div_ceil(self.schedule.writers as u64);
            command.arg("--events").arg(own.to_string());
        }
        command.arg("--name").arg(format!("writer-{writer}"));
        command.arg("--seed").arg(self.schedule.seed.to_string());
        command.arg("--index").arg(self.schedule.index.to_string());
        if let Some(clock) = &self.setup.clock {
            clock.show_to(&mut command);
        }
        command.spawn().context("start a writer")
    }

    fn start(&mut self, slot: usize, failpoint: Option<Failpoint>) -> Result<()> {
        self.starts += 1;
        self.slots[slot] = Slot::Up(self.setup.start(self.starts, slot, failpoint)?);
        Ok(())
    }

    fn at(&mut self, after: Duration, action: Action) {
        self.due.push((self.begun.elapsed() + after, action));
    }

    /// Whether anything is still to go wrong, or to be put right by itself.
    pub fn faults_are_left(&self) -> bool {
        !self.due.is_empty()
    }

    /// Whether anybody still writes.
    ///
    /// # Errors
    /// The system's.
    pub fn writers_are_left(&mut self) -> Result<bool> {
        for writer in &mut self.writers {
            if writer.try_wait().context("look after a writer")?.is_none() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Does what is due, and sees who died and which leases changed hands.
    ///
    /// # Errors
    /// The machine's.
    pub fn tick(&mut self) -> Result<()> {
        self.note_takeovers()?;
        self.endings.iter().for_each(Ending::look);
        let now = self.begun.elapsed();
        while let Some(at) = self.due.iter().position(|(at, _)| *at <= now) {
            let (_, action) = self.due.remove(at);
            self.act(action)?;
        }
        for slot in 0..self.slots.len() {
            self.look_after(slot)?;
        }
        Ok(())
    }

    fn note_takeovers(&mut self) -> Result<()> {
        // A database that can't be read for a moment is looked at again at the next tick.
        let Ok(numbers) = self.world.takeover_numbers() else { return Ok(()) };
        self.mark(&numbers)
    }

    /// Marks what is not marked yet with this moment. While a sink can't tell it nothing arrives
    /// there, so a later one is as good.
    fn mark(&mut self, takeovers: &[i64]) -> Result<()> {
        if takeovers.iter().any(|number| !self.marks.contains_key(number))
            && let Some(now) = self.now()?
        {
            for number in takeovers {
                self.marks.entry(*number).or_insert_with(|| now.clone());
            }
        }
        Ok(())
    }

    fn look_after(&mut self, slot: usize) -> Result<()> {
        let (Slot::Up(relay) | Slot::Leaving(relay)) = &mut self.slots[slot] else { return Ok(()) };
        let Some(status) = relay.ended()? else { return Ok(()) };
        let (number, relay_armed) = (relay.number, relay.is_armed());
        let leaving = matches!(self.slots[slot], Slot::Leaving(_));
        let killed = status.signal() == Some(Signal::KILL.as_raw());
        let expected = killed && relay_armed || leaving && status.success();
        if !expected && status.code() != Some(NOT_READY) {
            self.findings.push(format!("relay {number} ended with {status}"));
        }
        self.slots[slot] = Slot::Down;
        let after = if leaving { Duration::ZERO } else { RESTART_AFTER };
        self.at(after, Action::Start { slot, failpoint: None });
        Ok(())
    }

    fn act(&mut self, action: Action) -> Result<()> {
        match action {
            Action::Begin(fault) => {
                self.faults += 1;
                self.begin(fault)
            }
            Action::Start { slot, failpoint } => match self.slots[slot] {
                Slot::Down => self.start(slot, failpoint),
                Slot::Up(_) | Slot::Stopped(_) | Slot::Leaving(_) => Ok(()),
            },
            Action::Resume { slot } => self.resume(slot),
            Action::FreeDisk => self.world.free_disk(),
            Action::Restore { whose, how } => {
                self.world.postgres()?.cluster().restore(whose, how);
                Ok(())
            }
            Action::AwaitCopy { lag } => self.await_copy(lag),
            Action::Replace => self.replace(),
            Action::EndOutage => self.endings.iter().try_for_each(|ending| ending.set_outage(None)),
        }
    }

    fn begin(&mut self, fault: Fault) -> Result<()> {
        match fault {
            Fault::Kill { slot, down } => self.kill(slot, down, None),
            Fault::Failpoint { slot, name, count } => {
                self.kill(slot, Duration::ZERO, Some(Failpoint { name, count }))
            }
            Fault::Pause { slot, length } => self.stop(slot, length),
            Fault::HandOver { slot } => self.hand_over(slot),
            Fault::KillWriter { writer } => {
                self.writers[writer].kill().context("kill a writer")?;
                self.writers[writer].wait().context("wait for a killed writer").map(drop)
            }
            Fault::Lock { length } => self.hold_lock(length),
            Fault::FillDisk { length } => {
                self.world.fill_disk()?;
                self.at(length, Action::FreeDisk);
                Ok(())
            }
            Fault::MoveClock { by_seconds } => {
                self.clock_seconds += by_seconds;
                let clock = self.setup.clock.as_ref().context("the clock can be moved")?;
                clock.move_by(self.clock_seconds)
            }
            Fault::Requeue => {
                // Locked or full: whoever asked would ask again, and the healing does.
                let _ = self.world.requeue_all();
                Ok(())
            }
            Fault::TearLine => self.endings.iter().try_for_each(|ending| match ending {
                Ending::Jsonl(folder) => lines::tear(folder),
                Ending::Webhook(_) | Ending::Servicebus(_) | Ending::Broker(_) => Ok(()),
            }),
            Fault::Outage { kind, length } => {
                self.endings.iter().try_for_each(|ending| ending.set_outage(Some(kind)))?;
                self.at(length, Action::EndOutage);
                Ok(())
            }
            of_a_server => self.disturb_server(of_a_server),
        }
    }

    fn kill(&mut self, slot: usize, down: Duration, failpoint: Option<Failpoint>) -> Result<()> {
        match &mut self.slots[slot] {
            Slot::Up(relay) | Slot::Stopped(relay) | Slot::Leaving(relay) => relay.kill()?,
            Slot::Down => {}
        }
        self.slots[slot] = Slot::Down;
        self.at(down, Action::Start { slot, failpoint });
        Ok(())
    }

    fn stop(&mut self, slot: usize, length: Duration) -> Result<()> {
        let Slot::Up(relay) = &self.slots[slot] else { return Ok(()) };
        if relay.signal(Signal::STOP).is_err() {
            // It died a moment ago: the next tick finds it.
            return Ok(());
        }
        let (number, process_id) = (relay.number, relay.process_id());
        // While the database can't say, anything may be in flight.
        let newest = self.world.newest_place().unwrap_or(Place::MAX);
        self.pauses.push(Pause { relay: number, process_id, newest });
        if let Slot::Up(relay) = std::mem::replace(&mut self.slots[slot], Slot::Down) {
            self.slots[slot] = Slot::Stopped(relay);
        }
        self.at(length, Action::Resume { slot });
        Ok(())
    }

    fn resume(&mut self, slot: usize) -> Result<()> {
        match std::mem::replace(&mut self.slots[slot], Slot::Down) {
            Slot::Stopped(relay) => {
                relay.signal(Signal::CONT)?;
                self.slots[slot] = Slot::Up(relay);
            }
            other => self.slots[slot] = other,
        }
        Ok(())
    }

    fn hand_over(&mut self, slot: usize) -> Result<()> {
        let Slot::Up(relay) = &self.slots[slot] else { return Ok(()) };
        if !relay.listens()? {
            self.at(RESTART_AFTER, Action::Begin(Fault::HandOver { slot }));
            self.faults -= 1;
            return Ok(());
        }
        if relay.signal(Signal::TERM).is_err() {
            return Ok(());
        }
        if let Slot::Up(relay) = std::mem::replace(&mut self.slots[slot], Slot::Down) {
            self.slots[slot] = Slot::Leaving(relay);
        }
        Ok(())
    }

    fn hold_lock(&mut self, length: Duration) -> Result<()> {
        let own = std::env::current_exe().context("find the own binary")?;
        let mut command = bound_to_us(&own);
        command.arg("hold-lock").arg(self.world.database()?);
        command.arg("--length-ms").arg(length.as_millis().to_string());
        self.holders.push(command.spawn().context("start the lock's holder")?);
        Ok(())
    }

    /// Puts everything right.
    ///
    /// # Errors
    /// The machine's.
    pub fn heal(&mut self) -> Result<()> {
        self.endings.iter().try_for_each(Ending::heal)?;
        // It dates the tokens, and for as long as it is days behind the service refuses them.
        let by_tokens = self.endings.iter().any(|ending| matches!(ending, Ending::Servicebus(_)));
        if let Some(clock) = self.setup.clock.as_ref().filter(|_| by_tokens) {
            self.clock_seconds = 0;
            clock.move_by(0)?;
        }
        if self.schedule.postgres.is_some() {
            self.world.postgres()?.cluster().heal()?;
        }
        for mut holder in std::mem::take(&mut self.holders) {
            // A transaction that was ended with its session is an ordinary end.
            while holder.try_wait().context("wait for a lock's holder")?.is_none() {
                self.end_orphans()?;
                std::thread::sleep(RESTART_AFTER);
            }
        }
        Ok(())
    }

    /// Ends what was prepared and nobody ends any more, as an operator would.
    ///
    /// # Errors
    /// The database's.
    pub fn end_orphans(&self) -> Result<()> {
        match self.schedule.postgres.is_some() {
            true => self.world.postgres()?.roll_back_orphans(),
            false => Ok(()),
        }
    }

    /// Stops every relay in order.
    ///
    /// # Errors
    /// When one does not end, or not with success.
    pub fn close(&mut self, within: Duration) -> Result<()> {
        for slot in std::mem::take(&mut self.slots) {
            // A second signal would end it at once, in the middle of its drain.
            let (mut relay, told) = match slot {
                Slot::Up(relay) | Slot::Stopped(relay) => (relay, false),
                Slot::Leaving(relay) => (relay, true),
                Slot::Down => continue,
            };
            let until = Instant::now() + within;
            while relay.ended()?.is_none() && !relay.listens()? && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(5));
            }
            if told {
                relay.finish(within)?;
            } else if relay.ended()?.is_none() {
                relay.signal(Signal::TERM)?;
                relay.finish(within)?;
            }
        }
        self.note_takeovers()
    }

    /// What was found on the way.
    pub fn findings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.findings)
    }

    /// What happened to leases, as it was for the sink with this number.
    ///
    /// # Errors
    /// The database's.
    pub fn incidents(&mut self, sink: usize) -> Result<Incidents> {
        self.note_takeovers()?;
        let mut takeovers = self.world.takeovers(self.world.consumers()[sink])?;
        if let Some(replaced) = &self.replaced {
            takeovers.retain(|takeover| takeover.number > replaced.past.shared_takeover);
        }
        let now = self.now()?.context("every sink tells how far it is")?;
        let marked = takeovers.into_iter().map(|takeover| {
            let mark = self.marks.get(&takeover.number).unwrap_or(&now)[sink].clone();
            (takeover, mark)
        });
        Ok(Incidents {
            takeovers: marked.collect(),
            pauses: self.pauses.clone(),
            replaced: self.replaced.take(),
        })
    }
}

impl Drop for Stage<'_> {
    fn drop(&mut self) {
        for child in self.writers.iter_mut().chain(&mut self.holders) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
