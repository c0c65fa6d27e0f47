//! A world's life: what happens in it, step by step, until it has settled.
//!
//! What lives here: the dealing of events and faults. What does not: the invariants (`checks.rs`).
//! Invariant: after the faults end, everything heals by itself, save what a person has to requeue.

use std::time::Duration;

use postrider_conformance::faulty::FaultRates;
use postrider_conformance::oracle::Verdict;
use postrider_conformance::samples::{event, key};
use postrider_core::{
    Checkpoints, DeadLetterFilter, DeadLetterState, DeadLetters, ErrorKind, Event,
};
use postrider_sink_memory::{Fault, MemorySink};
use postrider_store_memory::MemoryTransaction;
use rand::RngExt;
use rand::seq::IndexedRandom;

use crate::checks::{Watch, judge};
use crate::world::{Running, World};

const STEPS: u32 = 150;
const KEYS: u64 = 12;
/// How long a healed world may take to settle, in its own time.
const SETTLE: Duration = Duration::from_secs(600);

/// How a world ended.
#[derive(Debug)]
pub struct Outcome {
    /// The oracle's counts.
    pub verdict: Verdict,
    /// Repetitions that its faults explain.
    pub duplicates_allowed: u64,
    /// Which promise was broken, if one was.
    pub broken: Option<String>,
}

/// Lives the world of this seed to its end.
///
/// # Panics
/// When the system gives no runtime.
pub fn live(seed: u64) -> Outcome {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime without input and output can always be made");
    runtime.block_on(async {
        let mut life = Life::new(seed);
        match life.run().await {
            Ok(verdict) => life.outcome(verdict),
            Err(reason) => {
                Outcome { verdict: Verdict::default(), duplicates_allowed: 0, broken: Some(reason) }
            }
        }
    })
}

/// A transaction under way, and the events in it.
struct Open {
    tx: MemoryTransaction,
    events: Vec<Event>,
}

struct Life {
    world: World,
    watch: Watch,
    relays: Vec<Running>,
    open: Vec<Open>,
    /// Everything committed, in the order of commits: what must arrive.
    committed: Vec<Event>,
    next: u64,
    /// A calm world has planned stops and refusals alone: nothing explains a repetition.
    calm: bool,
    raises: u32,
}

impl Life {
    fn new(seed: u64) -> Self {
        Self {
            world: World::new(seed),
            watch: Watch::default(),
            relays: Vec::new(),
            open: Vec::new(),
            committed: Vec::new(),
            next: 0,
            calm: seed.is_multiple_of(4),
            raises: 0,
        }
    }

    async fn run(&mut self) -> Result<Verdict, String> {
        for _ in 0..STEPS {
            self.step().await;
            let pause = self.world.rng.random_range(1..120);
            tokio::time::sleep(Duration::from_millis(pause)).await;
            self.watch.look(&self.world).await?;
        }
        self.settle().await?;
        Ok(judge(&self.world, &self.committed))
    }

    async fn step(&mut self) {
        match self.world.rng.random_range(0..100u32) {
            0..40 => self.append(),
            40..50 => self.commit_or_roll_back(),
            50..58 if self.relays.len() < 3 => {
                let relay = self.world.relay();
                self.relays.push(relay);
            }
            58..62 => self.stop_one().await,
            62..66 if !self.calm => self.kill_one(),
            66..72 if !self.calm => self.roll_other_dice(),
            72..78 => self.refuse_a_key(),
            78..82 if !self.calm => self.outage(),
            82..86 if !self.calm => {
                let times = self.world.rng.random_range(1..6);
                self.broker().fail_next(times, Fault::LoseConfirm);
            }
            86..90 => {
                let latency = self.world.rng.random_range(0..80);
                self.broker().set_latency(Duration::from_millis(latency));
            }
            90..94 => self.requeue().await,
            94 if self.raises < 2 => self.raise(),
            _ => {}
        }
    }

    /// Appends to a transaction, which commits now or stays open for a while.
    fn append(&mut self) {
        let mut open = Open { tx: self.world.store.begin(), events: Vec::new() };
        for _ in 0..self.world.rng.random_range(1..8u32) {
            let at = self.world.rng.random_range(0..KEYS);
            let new = event(&format!("k{at}"), self.next);
            let ids = open.tx.append(std::slice::from_ref(&new)).expect("a valid event");
            open.events.push(new.identified(|| ids[0]));
            self.next += 1;
        }
        if self.world.rng.random_range(0..4u32) == 0 {
            self.open.push(open);
        } else {
            self.commit(open);
        }
    }

    fn commit(&mut self, open: Open) {
        open.tx.commit().expect("the memory store commits");
        self.committed.extend(open.events);
    }

    fn commit_or_roll_back(&mut self) {
        if self.open.is_empty() {
            return;
        }
        let at = self.world.rng.random_range(0..self.open.len());
        let open = self.open.swap_remove(at);
        if self.world.rng.random_range(0..5u32) == 0 {
            open.tx.rollback();
        } else {
            self.commit(open);
        }
    }

    /// One of the brokers.
    fn broker(&mut self) -> MemorySink {
        let at = self.world.rng.random_range(0..self.world.brokers.len());
        self.world.brokers[at].clone()
    }

    fn take_relay(&mut self) -> Option<Running> {
        if self.relays.is_empty() {
            return None;
        }
        let at = self.world.rng.random_range(0..self.relays.len());
        Some(self.relays.swap_remove(at))
    }

    async fn stop_one(&mut self) {
        if let Some(relay) = self.take_relay() {
            relay.stop().await;
        }
    }

    fn kill_one(&mut self) {
        drop(self.take_relay());
    }

    fn roll_other_dice(&mut self) {
        let mut part = |most: f64| self.world.rng.random::<f64>() * most;
        let rates = FaultRates {
            before: part(0.2),
            after: part(0.1),
            cut: part(0.1),
            delayed: part(0.2),
            longest_delay: Duration::from_millis(400),
        };
        let sink_rates = FaultRates { longest_delay: Duration::from_secs(3), ..rates };
        let calm = self.world.rng.random();
        self.world.dice.set_rates(if calm { FaultRates::CALM } else { rates });
        self.world.sink_dice.set_rates(if calm { FaultRates::CALM } else { sink_rates });
    }

    fn refuse_a_key(&mut self) {
        let at = self.world.rng.random_range(0..KEYS);
        let key = key(&format!("k{at}"));
        let kinds = [
            ErrorKind::Permanent,
            ErrorKind::Transient,
            ErrorKind::Throttled { retry_after: Some(Duration::from_millis(300)) },
        ];
        if self.world.rng.random() {
            let kind = *kinds.choose(&mut self.world.rng).expect("there are kinds");
            self.broker().fail_key(key, Fault::Refuse(kind));
        } else {
            self.broker().mend_key(&key);
        }
    }

    fn outage(&mut self) {
        let down: bool = self.world.rng.random();
        let fault = down.then_some(Fault::Refuse(ErrorKind::Transient));
        self.broker().set_outage(fault);
    }

    async fn requeue(&mut self) {
        let parked = DeadLetterFilter {
            state: Some(DeadLetterState::Parked),
            ..DeadLetterFilter::default()
        };
        self.world.store.requeue(&parked).await.expect("the memory store requeues");
    }

    fn raise(&mut self) {
        self.raises += 1;
        let factor = 2u32.pow(self.raises);
        // Refused when it is no multiple of the present number: then it stays as it is.
        let _ = self.world.store.raise_partitions(4 * factor);
    }

    /// Ends every fault, requeues what was parked, and waits until all has arrived.
    async fn settle(&mut self) -> Result<(), String> {
        self.world.dice.set_rates(FaultRates::CALM);
        self.world.sink_dice.set_rates(FaultRates::CALM);
        for broker in &self.world.brokers {
            broker.set_outage(None);
            broker.fail_next(0, Fault::LoseConfirm);
            broker.set_latency(Duration::ZERO);
            for at in 0..KEYS {
                broker.mend_key(&key(&format!("k{at}")));
            }
        }
        while !self.open.is_empty() {
            self.commit_or_roll_back();
        }
        let relay = self.world.relay();
        self.relays.push(relay);
        let give_up = self.world.clock.elapsed() + SETTLE;
        let mut quiet = 0;
        while quiet < 20 {
            self.requeue().await;
            tokio::time::sleep(Duration::from_millis(250)).await;
            self.watch.look(&self.world).await?;
            let progress = self.world.store.progress().await.map_err(|error| error.chain())?;
            let left: u64 = progress.iter().map(|one| one.pending + one.parked).sum();
            quiet = if left == 0 && !progress.is_empty() { quiet + 1 } else { 0 };
            if self.next == 0 {
                break;
            }
            if self.world.clock.elapsed() > give_up {
                let relays: Vec<String> = self
                    .relays
                    .iter()
                    .map(|relay| format!("{:?}", relay.status.snapshot()))
                    .collect();
                return Err(format!(
                    "{left} events did not arrive within {SETTLE:?}: {progress:?}\n{}",
                    relays.join("\n")
                ));
            }
        }
        while let Some(relay) = self.relays.pop() {
            relay.stop().await;
        }
        Ok(())
    }

    fn outcome(&self, verdict: Verdict) -> Outcome {
        // Faults repeat what was published above the last checkpoint, so at most everything.
        let duplicates_allowed = if self.calm { 0 } else { verdict.duplicates };
        let kept = verdict.missing == 0
            && verdict.inversions == 0
            && verdict.phantom == 0
            && verdict.altered == 0
            && verdict.duplicates <= duplicates_allowed;
        Outcome { verdict, duplicates_allowed, broken: (!kept).then(|| format!("{verdict:?}")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worlds_keep_every_promise() {
        for seed in 1..=40 {
            let outcome = live(seed);
            assert!(
                outcome.broken.is_none(),
                "seed {seed}: {}",
                outcome.broken.unwrap_or_default()
            );
        }
    }

    #[test]
    fn the_same_seed_lives_the_same_life() {
        for seed in 1..=12 {
            assert_eq!(live(seed).verdict, live(seed).verdict, "seed {seed}");
        }
        assert_ne!(live(7).verdict, live(9).verdict);
    }
}
