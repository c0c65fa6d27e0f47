//! A sink in memory, for tests, simulations and benchmarks.
//!
//! What lives here: the sink and its log. What does not: the scripts of failures (`script.rs`).
//! Invariant: an outcome is `Confirmed` only after the event stands in the log, and after a failure
//! no later event of its key does in the same call.

mod script;

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use postrider_core::{
    Capabilities, Chain, Clock, Error, Event, EventId, Key, Outcome, PartitionId, Position,
    Publish, Record, Result, Sink, Timestamp,
};
use tokio::sync::watch;

pub use script::Fault;
use script::Script;

/// One event that the sink stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delivery {
    /// Its place in the log, from 0.
    pub index: u64,
    /// The partition it came from.
    pub partition: PartitionId,
    /// Its position there.
    pub position: Position,
    /// The event, bytes and all.
    pub event: Event,
    /// When it was stored.
    pub at: Timestamp,
}

/// Whether the sink keeps what it gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Keep {
    Everything,
    CountOnly,
}

/// A sink whose log can be read and whose failures can be scripted. Clones share one log.
#[derive(Clone)]
pub struct MemorySink {
    inner: Arc<Inner>,
    capabilities: Capabilities,
    keep: Keep,
}

struct Inner {
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
    gate_open: watch::Sender<bool>,
    counted: AtomicU64,
    waiting: AtomicU64,
}

#[derive(Default)]
struct State {
    log: Vec<Delivery>,
    seen: HashSet<EventId>,
    script: Script,
    closed: bool,
}

/// What a new sink can take: everything, in calls as large as a relay likes.
const ROOMY: Capabilities = Capabilities {
    max_event_bytes: None,
    max_batch_records: 4_096,
    max_batch_bytes: 4 * 1024 * 1024,
    max_in_flight: 4,
    chain: Chain::Many,
    dedup_window: None,
};

impl MemorySink {
    /// An empty sink that keeps everything. `clock` gives times and waits out latencies.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self::with(clock, Keep::Everything)
    }

    /// A sink that confirms and counts, and keeps nothing: for benchmarks. Scripts do not apply.
    pub fn counting(clock: Arc<dyn Clock>) -> Self {
        Self::with(clock, Keep::CountOnly)
    }

    fn with(clock: Arc<dyn Clock>, keep: Keep) -> Self {
        let inner = Inner {
            clock,
            state: Mutex::default(),
            gate_open: watch::Sender::new(true),
            counted: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
        };
        Self { inner: Arc::new(inner), capabilities: ROOMY, keep }
    }

    /// The same log behind other capabilities. With a `dedup_window` it answers `Duplicate` to an
    /// id that it has, and stores it once.
    #[must_use]
    pub fn with_capabilities(mut self, capabilities: Capabilities) -> Self {
        self.capabilities = capabilities;
        self
    }

    /// Everything that was stored, in order.
    pub fn deliveries(&self) -> Vec<Delivery> {
        self.inner.state().log.clone()
    }

    /// How many events were stored, repetitions included.
    pub fn delivered(&self) -> u64 {
        self.inner.counted.load(Ordering::Acquire)
    }

    /// How many calls stand at the closed gate.
    pub fn waiting_calls(&self) -> u64 {
        self.inner.waiting.load(Ordering::Acquire)
    }

    /// Forgets the log, not the scripts.
    pub fn clear(&self) {
        let mut state = self.inner.state();
        state.log.clear();
        state.seen.clear();
        self.inner.counted.store(0, Ordering::Release);
    }

    /// The next `times` events meet this fault, whatever their key.
    pub fn fail_next(&self, times: u32, fault: Fault) {
        self.inner.state().script.fail_next(times, fault);
    }

    /// Every event of `key` meets this fault until [`mend_key`](Self::mend_key).
    pub fn fail_key(&self, key: Key, fault: Fault) {
        self.inner.state().script.fail_key(key, fault);
    }

    /// Ends [`fail_key`](Self::fail_key).
    pub fn mend_key(&self, key: &Key) {
        self.inner.state().script.mend_key(key);
    }

    /// The event meets this fault for its next `times` attempts.
    pub fn fail_event(&self, id: EventId, times: u32, fault: Fault) {
        self.inner.state().script.fail_event(id, times, fault);
    }

    /// With a fault, everything meets it and `check` fails: an outage. With none, it is over.
    pub fn set_outage(&self, fault: Option<Fault>) {
        self.inner.state().script.set_outage(fault);
    }

    /// Every call waits this long before it is looked at.
    pub fn set_latency(&self, latency: Duration) {
        self.inner.state().script.latency = latency;
    }

    /// Closes the gate: calls wait in front of it, with nothing stored yet.
    pub fn hold(&self) {
        self.inner.gate_open.send_replace(false);
    }

    /// Opens the gate.
    pub fn release(&self) {
        self.inner.gate_open.send_replace(true);
    }

    fn store(&self, state: &mut State, partition: &PartitionId, record: &Record) -> Outcome {
        let first = state.seen.insert(record.event.id());
        if !first && self.capabilities.dedup_window.is_some() {
            return Outcome::Duplicate;
        }
        state.log.push(Delivery {
            index: state.log.len() as u64,
            partition: partition.clone(),
            position: record.position.clone(),
            event: record.event.clone(),
            at: self.inner.clock.now(),
        });
        self.inner.counted.fetch_add(1, Ordering::Release);
        Outcome::Confirmed
    }

    /// One event's fate, by script and limits.
    fn take(&self, state: &mut State, partition: &PartitionId, record: &Record) -> Outcome {
        if state.closed {
            return Outcome::Failed(Error::transient("the memory sink is closed"));
        }
        let bytes = record.event.payload().len();
        if let Some(max) = self.capabilities.max_event_bytes.filter(|max| bytes > *max) {
            return Outcome::Failed(Error::permanent(format!(
                "payload has {bytes} bytes; the memory sink takes {max}"
            )));
        }
        match state.script.fault_for(record.event.id(), record.event.key()) {
            None => self.store(state, partition, record),
            Some(Fault::Refuse(kind)) => {
                Outcome::Failed(Error::new(kind, "scripted failure of the memory sink"))
            }
            Some(Fault::LoseConfirm) => {
                self.store(state, partition, record);
                Outcome::Failed(Error::transient("scripted loss of a confirmation"))
            }
        }
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of the log's lock panics")
    }

    /// Waits for the gate; a call that is dropped here has stored nothing.
    async fn pass_gate(&self) {
        if *self.gate_open.borrow() {
            return;
        }
        let _counted = Waiting::at(&self.waiting);
        let mut open = self.gate_open.subscribe();
        open.wait_for(|open| *open).await.expect("the sink owns the gate, and outlives the call");
    }
}

/// Counts a call at the gate, also when it is dropped there.
struct Waiting<'a>(&'a AtomicU64);

impl<'a> Waiting<'a> {
    fn at(count: &'a AtomicU64) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        Self(count)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

#[async_trait]
impl Sink for MemorySink {
    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    async fn publish(&self, batch: Publish<'_>) -> Vec<Outcome> {
        let records = batch.records();
        if self.keep == Keep::CountOnly {
            self.inner.counted.fetch_add(records.len() as u64, Ordering::Release);
            return records.iter().map(|_| Outcome::Confirmed).collect();
        }
        let latency = self.inner.state().script.latency;
        if !latency.is_zero() {
            self.inner.clock.sleep(latency).await;
        }
        self.inner.pass_gate().await;
        let mut state = self.inner.state();
        let mut stopped: HashSet<&Key> = HashSet::new();
        let mut outcomes = Vec::with_capacity(records.len());
        for record in records {
            if stopped.contains(record.event.key()) {
                outcomes.push(Outcome::HeldBack);
                continue;
            }
            let outcome = self.take(&mut state, batch.partition(), record);
            if matches!(outcome, Outcome::Failed(_)) {
                stopped.insert(record.event.key());
            }
            outcomes.push(outcome);
        }
        outcomes
    }

    async fn check(&self) -> Result<()> {
        match self.inner.state().script.outage() {
            Some(_) => Err(Error::transient("the memory sink is scripted to be down")),
            None => Ok(()),
        }
    }

    async fn close(&self) -> Result<()> {
        self.inner.state().closed = true;
        Ok(())
    }
}
