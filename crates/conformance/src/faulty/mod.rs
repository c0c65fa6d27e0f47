//! Wrappers that fail by the dice: errors before and after the effect, delays, cut batches.
//!
//! What lives here: the seeded dice and the one wrapper type. What does not: the seams that it
//! implements (`source.rs`, `sink.rs`, `store.rs`).
//! Invariant: a wrapper breaks no promise of the seam it stands in front of. An error after the
//! effect is what a lost answer looks like; nothing else is made up.

mod sink;
mod source;
mod store;

use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use postrider_core::{Clock, Error, Result};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// How often what happens, as fractions of all calls.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FaultRates {
    /// Calls that fail before they had any effect.
    pub before: f64,
    /// Calls that had their effect and whose answer is lost.
    pub after: f64,
    /// Publishes that are cut in the middle: a part is sent, the rest fails.
    pub cut: f64,
    /// Calls that are delayed, before and after the effect.
    pub delayed: f64,
    /// The longest delay.
    pub longest_delay: Duration,
}

impl FaultRates {
    /// Nothing fails and nothing is delayed.
    pub const CALM: Self =
        Self { before: 0.0, after: 0.0, cut: 0.0, delayed: 0.0, longest_delay: Duration::ZERO };
}

/// What a roll decided for one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Strike {
    None,
    Before,
    After,
    Cut,
}

/// Seeded chance, shared by every wrapper of one simulated world. The same seed and the same calls
/// give the same faults.
pub struct Dice {
    clock: Arc<dyn Clock>,
    state: Mutex<(StdRng, FaultRates)>,
    strikes: AtomicU64,
}

impl Dice {
    /// Dice for a seed. Delays pass by `clock`.
    pub fn new(seed: u64, rates: FaultRates, clock: Arc<dyn Clock>) -> Arc<Self> {
        let state = Mutex::new((StdRng::seed_from_u64(seed), rates));
        Arc::new(Self { clock, state, strikes: AtomicU64::new(0) })
    }

    /// Other rates from now on; [`FaultRates::CALM`] lets a world settle.
    pub fn set_rates(&self, rates: FaultRates) {
        self.state().1 = rates;
    }

    /// How many calls have failed so far.
    pub fn strikes(&self) -> u64 {
        self.strikes.load(Ordering::Relaxed)
    }

    fn state(&self) -> MutexGuard<'_, (StdRng, FaultRates)> {
        self.state.lock().expect("rolling never panics")
    }

    /// Decides one call. A cut counts as a lost answer where nothing can be cut.
    fn roll(&self) -> Strike {
        let mut state = self.state();
        let (random, rates) = &mut *state;
        let roll: f64 = random.random();
        let strike = if roll < rates.before {
            Strike::Before
        } else if roll < rates.before + rates.after {
            Strike::After
        } else if roll < rates.before + rates.after + rates.cut {
            Strike::Cut
        } else {
            return Strike::None;
        };
        self.strikes.fetch_add(1, Ordering::Relaxed);
        strike
    }

    /// A number below `bound`, which is not 0.
    fn below(&self, bound: usize) -> usize {
        self.state().0.random_range(0..bound)
    }

    /// Waits out a delay, if the dice say so.
    async fn delay(&self) {
        let wait = {
            let mut state = self.state();
            let (random, rates) = &mut *state;
            let delayed = random.random::<f64>() < rates.delayed;
            let part: f64 = random.random();
            if delayed { rates.longest_delay.mul_f64(part) } else { Duration::ZERO }
        };
        if !wait.is_zero() {
            self.clock.sleep(wait).await;
        }
    }
}

/// Stands in front of a source, a sink or a store, and fails by the dice.
pub struct Faulty<T: ?Sized> {
    inner: Arc<T>,
    dice: Arc<Dice>,
}

impl<T: ?Sized> Faulty<T> {
    /// Wraps; several wrappers may share their dice.
    pub fn new(inner: Arc<T>, dice: Arc<Dice>) -> Self {
        Self { inner, dice }
    }
}

impl<T: ?Sized + Send + Sync> Faulty<T> {
    /// One call under the dice.
    async fn struck<R: Send>(
        &self,
        what: &'static str,
        call: impl Future<Output = Result<R>> + Send,
    ) -> Result<R> {
        self.dice.delay().await;
        let strike = self.dice.roll();
        if strike == Strike::Before {
            return Err(Error::transient(format!("injected before {what}")));
        }
        let answer = call.await;
        self.dice.delay().await;
        match strike {
            Strike::None | Strike::Before => answer,
            Strike::After | Strike::Cut => {
                answer?;
                Err(Error::transient(format!("injected after {what}")))
            }
        }
    }
}
