//! One sink's work in one partition: the loop from reading to checkpoint.
//!
//! What lives here: the state, the loop and its timers. What does not: what a batch (`enqueue.rs`),
//! a call (`dispatch.rs`), an outcome (`settle.rs`) or a stop (`drain.rs`) changes.
//! Invariant: nothing is sent after the trust window; one task owns all state, so that every
//! decision sees all that was decided before.

mod dispatch;
mod drain;
mod enqueue;
mod settle;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use postrider_core::limits::WINDOW_RECORDS;
use postrider_core::{
    Batch, BatchLimit, Capabilities, Checkpoint, ConsumerName, DeadLetter, Error, ErrorKind,
    Jitter, Key, Outcome, PartitionId, ReadOutcome, Result, Sink, Source, StartFrom, Successor,
};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::health::Health;
use crate::keeper::LatestNews;
use crate::lanes::{Chains, LaneId, Lanes, Turn};
use crate::options::SinkOptions;
use crate::reading::{self, ReadFrom, Reading};
use crate::status::{PipelineStatus, SinkState};
use crate::store_ops::{Desk, Patience, StoreOp, StoreOps};
use crate::told::{Rarely, Told};
use crate::trust::Trust;
use crate::window::{Seq, Window};

use dispatch::Calls;

/// How often released dead letters are looked for.
const RELEASE_EVERY: Duration = Duration::from_secs(1);
/// Looking for them takes at most about this part of the time.
const LOOK_AT_MOST_ONE_IN: u32 = 10;
/// Released letters in memory at most.
const RELEASE_PAGE: BatchLimit = BatchLimit { records: 256, bytes: 1024 * 1024 };
/// Letters are released only up to the checkpoint. A key between attempts that keeps it back for
/// longer than this goes to the letters itself.
const HOLD_BACK_AT_MOST: Duration = Duration::from_secs(5);
/// Longest the loop sleeps when nothing is due.
const IDLE_WAIT: Duration = Duration::from_secs(60);

/// What one pipeline works with.
pub(crate) struct Setting {
    pub(crate) source: Arc<dyn Source>,
    pub(crate) sink: Arc<dyn Sink>,
    pub(crate) desk: Desk,
    pub(crate) trust: Arc<Trust>,
    pub(crate) news: Arc<LatestNews>,
    pub(crate) options: SinkOptions,
    /// This partition's share of the sink's budget.
    pub(crate) budget_bytes: usize,
    pub(crate) drain_timeout: Duration,
    pub(crate) checkpoint_every: Duration,
    pub(crate) status: Arc<PipelineStatus>,
    pub(crate) seed: u64,
}

/// Why a pipeline ended.
#[derive(Debug)]
pub(crate) enum Exit {
    /// Asked to stop; what was under way is confirmed and checkpointed.
    Drained,
    /// Another relay may have the partition by now; nothing more was written.
    LeaseLost,
    /// The partition ended and its successors' checkpoints are written.
    Finished,
    /// Needs a person.
    Halted(Error),
}

enum Phase {
    Running,
    /// No more reading; only what is under way, and the gaps before it.
    Draining {
        until: Duration,
        halted: Option<Error>,
    },
}

struct Published {
    turn: Turn,
    chains: Chains,
    outcomes: Vec<Outcome>,
}

type Lookup = Pin<Box<dyn Future<Output = Result<HashSet<Key>>> + Send>>;
type Release = Pin<Box<dyn Future<Output = Result<(Vec<DeadLetter>, u64)>> + Send>>;

enum Signal {
    Stop,
    Written(StoreOp, Result<()>),
    Published(Published),
    SinkPanicked,
    LookedUp(Result<HashSet<Key>>),
    Released(Result<(Vec<DeadLetter>, u64)>),
    Read(Option<Result<ReadOutcome>>),
    Timer,
}

pub(crate) struct Pipeline {
    set: Setting,
    limits: Capabilities,
    lanes: Lanes,
    window: Window,
    health: Health,
    ops: StoreOps,
    reading: Option<Reading>,
    reader: JoinSet<()>,
    publishes: JoinSet<Published>,
    calls: Calls,
    retries: BinaryHeap<Reverse<(Duration, LaneId)>>,
    /// A batch whose keys are being looked up among the dead letters.
    lookup: Option<(Batch, Lookup)>,
    release: Option<Release>,
    /// Keys whose letters are being written.
    parking: HashMap<Key, u32>,
    /// Keys whose letters were written while a look-up was under way that may have missed them.
    parked_meanwhile: HashSet<Key>,
    /// Letters that hold keys back; never below the truth that this pipeline made.
    blocking: u64,
    /// Grows with each parking, so that a count read before it is not believed.
    parkings: u64,
    parkings_at_release: u64,
    /// That the letters can't be read.
    told: Told,
    /// When an event that goes on failing is told of again.
    failures: Rarely,
    /// When lanes that fail on are looked for next, if there is little room.
    room_at: Duration,
    /// The last look found nothing that holds a key back, and nothing was parked since: until a
    /// person requeues a letter there is nothing to look for.
    at_rest: bool,
    /// Grows as letters leave memory, so that a page read before it is not believed.
    letters_ended: u64,
    ended_at_release: u64,
    release_at: Duration,
    /// The same while letters are in memory.
    look_again_at: Duration,
    looked_at: Duration,
    /// The oldest open record, and since when it is that.
    oldest: (Seq, Duration),
    checkpoint_at: Duration,
    ended: Option<Vec<Successor>>,
    finishing: bool,
    phase: Phase,
    exit: Option<Exit>,
    rng: StdRng,
}

/// Runs one sink in one partition until `stop`, the end of the lease or of the partition.
pub(crate) async fn run(set: Setting, stop: CancellationToken) -> Exit {
    let status = Arc::clone(&set.status);
    let consumer = set.desk.consumer.clone();
    let partition = set.desk.lease.partition().clone();
    status.set_running(true);
    status.set_state(SinkState::Flowing);
    let started = tokio::select! {
       biased;
        () = stop.cancelled() => None,
        started = Pipeline::start(set) => Some(started),
    };
    let exit = match started {
        None => Exit::Drained,
        Some(Ok(mut pipeline)) => pipeline.run(&stop).await,
        Some(Err(error)) if error.kind() == ErrorKind::Fenced => Exit::LeaseLost,
        Some(Err(error)) => Exit::Halted(error),
    };
    if let Exit::Halted(error) = &exit {
        tracing::error!(
            %partition, sink = %consumer, error = %error.chain(),
            "the sink is halted in this partition until the relay is restarted"
        );
        status.set_state(SinkState::Halted { reason: error.chain() });
    }
    status.set_running(false);
    exit
}

impl Pipeline {
    async fn start(set: Setting) -> Result<Self> {
        let consumer = set.desk.consumer.clone();
        let partition = set.desk.lease.partition().clone();
        let (from, blocking) = load_for_long(&set).await?;
        let (reading, task) = reading::start(ReadFrom {
            source: Arc::clone(&set.source),
            clock: Arc::clone(&set.desk.clock),
            consumer,
            partition,
            from,
        });
        let mut reader = JoinSet::new();
        reader.spawn(task);
        let now = set.desk.clock.elapsed();
        Ok(Self {
            limits: set.sink.capabilities(),
            lanes: Lanes::default(),
            window: Window::default(),
            health: Health::default(),
            ops: StoreOps::new(set.desk.clone()),
            reading: Some(reading),
            reader,
            publishes: JoinSet::new(),
            calls: Calls::default(),
            retries: BinaryHeap::new(),
            lookup: None,
            release: None,
            parking: HashMap::new(),
            parked_meanwhile: HashSet::new(),
            blocking,
            parkings: 0,
            parkings_at_release: 0,
            told: Told::default(),
            failures: Rarely::default(),
            room_at: Duration::ZERO,
            at_rest: false,
            letters_ended: 0,
            ended_at_release: 0,
            release_at: now,
            look_again_at: now,
            looked_at: now,
            oldest: (0, now),
            checkpoint_at: now + set.checkpoint_every,
            ended: None,
            finishing: false,
            phase: Phase::Running,
            exit: None,
            rng: StdRng::seed_from_u64(set.seed),
            set,
        })
    }

    async fn run(&mut self, stop: &CancellationToken) -> Exit {
        loop {
            let now = self.set.desk.clock.elapsed();
            if self.set.trust.remaining(now).is_none() {
                tracing::warn!(
                    partition = %self.partition(), sink = %self.set.desk.consumer,
                    epoch = self.set.desk.lease.epoch().get(),
                    "the lease was not renewed in time; this worker stops"
                );
                return Exit::LeaseLost;
            }
            self.tick(now);
            if let Some(exit) = self.exit.take() {
                return exit;
            }
            self.dispatch(now);
            self.report();
            let wait = self.next_deadline(now).saturating_sub(now);
            let signal = self.signal(stop, wait).await;
            self.handle(signal);
        }
    }

    /// Waits for whatever comes first. Cancel-safe in each branch.
    async fn signal(&mut self, stop: &CancellationToken, wait: Duration) -> Signal {
        let running = matches!(self.phase, Phase::Running);
        let may_read = running && self.may_read();
        let (clock, trust) = (Arc::clone(&self.set.desk.clock), Arc::clone(&self.set.trust));
        let (lookup, release) = (&mut self.lookup, &mut self.release);
        tokio::select! {
           biased;
            () = stop.cancelled(), if running => Signal::Stop,
            // The head of the loop sees that no trust is left.
            () = trust.lost() => Signal::Timer,
            (op, result) = self.ops.done() => Signal::Written(op, result),
            Some(done) = self.publishes.join_next(), if !self.publishes.is_empty() => {
                done.map_or(Signal::SinkPanicked, Signal::Published)
            }
            blocked = async { lookup.as_mut().expect("guarded").1.as_mut().await },
                if lookup.is_some() => Signal::LookedUp(blocked),
            letters = async { release.as_mut().expect("guarded").as_mut().await },
                if release.is_some() => Signal::Released(letters),
            read = async { self.reading.as_mut().expect("guarded").batches.recv().await },
                if may_read => Signal::Read(read),
            () = clock.sleep(wait) => Signal::Timer,
        }
    }

    fn handle(&mut self, signal: Signal) {
        match signal {
            Signal::Stop => self.begin_drain(None),
            Signal::Written(op, result) => self.written(op, result),
            Signal::Published(published) => self.settle(published),
            Signal::SinkPanicked => {
                self.exit = Some(Exit::Halted(Error::corrupt("the sink panicked; see its log")));
            }
            Signal::LookedUp(blocked) => self.looked_up(blocked),
            Signal::Released(letters) => self.released(letters),
            Signal::Read(Some(Ok(ReadOutcome::Batch(batch)))) => self.receive(batch),
            Signal::Read(Some(Ok(ReadOutcome::Ended(successors)))) => {
                self.reading = None;
                self.ended = Some(successors);
            }
            // What was read before may not be what the source holds now, nor may the checkpoint.
            Signal::Read(Some(Err(error))) if error.kind() == ErrorKind::Fenced => self.step_down(
                &error,
                "the source is another one than before; this worker begins again",
            ),
            Signal::Read(Some(Err(error))) => self.begin_drain(Some(error)),
            Signal::Read(None) => {
                let error = Error::corrupt("the source's reader ended without a word");
                self.begin_drain(Some(error));
            }
            Signal::Timer => {}
        }
    }

    /// What is due by time alone.
    fn tick(&mut self, now: Duration) {
        while let Some(Reverse((at, lane))) = self.retries.peek().copied() {
            if at > now {
                break;
            }
            self.retries.pop();
            if self.lanes.is_waiting(lane) {
                self.lanes.make_ready(lane);
            }
        }
        if self.window.len() >= WINDOW_RECORDS / 4 * 3 || self.holds_letters_back(now) {
            self.set_aside_the_oldest();
        }
        if self.lacks_room(now) {
            self.set_aside_who_fails_on();
        }
        self.drain_tick(now);
        self.finish_tick();
        let last_call = matches!(self.phase, Phase::Draining { .. }) || self.ended.is_some();
        // Reading waits for it once there are too many.
        let many = self.window.finished() >= WINDOW_RECORDS / 4;
        if self.window.has_prefix() && (now >= self.checkpoint_at || last_call || many) {
            let (to, tally) = self.window.take_prefix().expect("just asked");
            self.ops.push(StoreOp::Advance { to, tally });
            self.checkpoint_at = now + self.set.checkpoint_every;
        }
        self.look_for_released(now);
    }

    fn next_deadline(&self, now: Duration) -> Duration {
        let mut next = now + self.set.trust.remaining(now).unwrap_or_default().min(IDLE_WAIT);
        if let Some(Reverse((at, _))) = self.retries.peek() {
            next = next.min(*at);
        }
        if self.window.has_prefix() {
            next = next.min(self.checkpoint_at);
        }
        match self.phase {
            // While writes are under way their end wakes the loop.
            Phase::Running => next = self.release_due_at().map_or(next, |at| next.min(at)),
            Phase::Draining { until, .. } => next = next.min(until),
        }
        self.next_call_at(now).map_or(next, |at| next.min(at))
    }

    fn may_read(&self) -> bool {
        self.reading.is_some()
            && self.lookup.is_none()
            && self.uncovered() < WINDOW_RECORDS
            && self.lanes.bytes() + self.ops.bytes() < self.set.budget_bytes
    }

    /// Records that no durable checkpoint covers: what may come again after a crash.
    fn uncovered(&self) -> usize {
        self.window.len() + self.window.finished() + self.ops.records()
    }

    fn report(&self) {
        let status = &self.set.status;
        status.outstanding.store(self.lanes.len() as u64, Ordering::Relaxed);
        let bytes = self.lanes.bytes() + self.ops.bytes();
        status.in_flight_bytes.store(bytes as u64, Ordering::Relaxed);
        if self.lanes.len() == 0 {
            status.moved(self.set.desk.clock.elapsed());
        }
    }

    fn partition(&self) -> &PartitionId {
        self.set.desk.lease.partition()
    }

    fn jitter(&mut self) -> Jitter {
        Jitter::new(self.rng.random::<f64>())
    }
}

/// Where to begin, and how many letters hold keys back; waits for a database that is away.
async fn load_for_long(set: &Setting) -> Result<(StartFrom, u64)> {
    let (consumer, partition) = (&set.desk.consumer, set.desk.lease.partition());
    let (mut patience, mut told) = (Patience::new(), Told::default());
    loop {
        match load(set, consumer, partition).await {
            Ok((checkpoint, blocking)) => {
                let resume = checkpoint.map(|found| StartFrom::After(found.position));
                return Ok((resume.unwrap_or_else(|| set.options.from.clone()), blocking));
            }
            Err(error) => {
                let Some(wait) = patience.after(&error) else { return Err(error) };
                let text = error.chain();
                if told.is_news(&text, set.desk.clock.elapsed()) {
                    tracing::warn!(%partition, sink = %consumer, error = text,
                        "the checkpoint can't be read for now; trying again");
                }
                if set.trust.remaining(set.desk.clock.elapsed()).is_none() {
                    return Err(Error::fenced("the lease ran out before the checkpoint was read"));
                }
                set.desk.clock.sleep(wait).await;
            }
        }
    }
}

async fn load(
    set: &Setting,
    consumer: &ConsumerName,
    partition: &PartitionId,
) -> Result<(Option<Checkpoint>, u64)> {
    let checkpoint = set.desk.store.checkpoint(consumer, partition).await?;
    Ok((checkpoint, set.desk.store.blocking(consumer, partition).await?))
}
