//! What a relay is doing, for `/readyz`, `/metrics` and people.
//!
//! What lives here: counters that pipelines write and anyone reads. What does not: exporting them.
//! Invariant: ready means that events can flow: nothing is outstanding without progress for 30 s.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use postrider_core::{Clock, ConsumerName, PartitionId};

/// Outstanding work without any progress for this long is a stall.
pub(crate) const STALL_AFTER: Duration = Duration::from_secs(30);

/// What one sink is doing in one partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SinkState {
    /// Events flow, or there are none.
    Flowing,
    /// The sink as a whole fails; one call at a time tries whether it is back.
    Outage {
        /// The last error.
        reason: String,
    },
    /// Stopped until a restart, because the policy or damaged data asks for a person.
    Halted {
        /// Why.
        reason: String,
    },
}

/// Counters of one sink in one partition.
#[derive(Debug)]
pub(crate) struct PipelineStatus {
    pub(crate) published: AtomicU64,
    pub(crate) duplicates: AtomicU64,
    pub(crate) parked: AtomicU64,
    pub(crate) failures: AtomicU64,
    pub(crate) calls: AtomicU64,
    pub(crate) outstanding: AtomicU64,
    pub(crate) in_flight_bytes: AtomicU64,
    /// `elapsed` of the clock, in milliseconds, when something last moved.
    pub(crate) progress_ms: AtomicU64,
    /// Append time of the last record read.
    pub(crate) read_up_to_ms: AtomicU64,
    running: AtomicBool,
    state: Mutex<SinkState>,
    /// The last failure's reason, and when it was, as `progress_ms`.
    failure: Mutex<Option<(u64, String)>>,
    /// Since when a checkpoint or a letter can't be written to the source's database, as
    /// `progress_ms`, and why.
    unwritten: Mutex<Option<(u64, String)>>,
}

impl PipelineStatus {
    fn new() -> Self {
        Self {
            published: AtomicU64::new(0),
            duplicates: AtomicU64::new(0),
            parked: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            calls: AtomicU64::new(0),
            outstanding: AtomicU64::new(0),
            in_flight_bytes: AtomicU64::new(0),
            progress_ms: AtomicU64::new(0),
            read_up_to_ms: AtomicU64::new(0),
            running: AtomicBool::new(false),
            state: Mutex::new(SinkState::Flowing),
            failure: Mutex::new(None),
            unwritten: Mutex::new(None),
        }
    }

    /// Remembers why something was not taken, for whoever asks why nothing moves.
    pub(crate) fn failed(&self, now: Duration, reason: String) {
        let now = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some((now, reason));
    }

    /// The last failure's reason, if nothing moved after it.
    fn failure_since(&self, moved_ms: u64) -> Option<String> {
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.as_ref().filter(|(at, _)| *at >= moved_ms).map(|(_, reason)| reason.clone())
    }

    /// Says that a write to the source's database has failed and is tried again.
    pub(crate) fn unwritten(&self, now: Duration, reason: &str) {
        let now = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        let mut unwritten = self.unwritten.lock().unwrap_or_else(PoisonError::into_inner);
        let since = unwritten.as_ref().map_or(now, |(since, _)| *since);
        *unwritten = Some((since, reason.to_owned()));
    }

    /// Says that the last write is done, or is tried no more.
    pub(crate) fn written(&self) {
        *self.unwritten.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// For how long no write to the source's database was done, and why.
    fn unwritten_for(&self, now: Duration) -> Option<(Duration, String)> {
        let unwritten = self.unwritten.lock().unwrap_or_else(PoisonError::into_inner);
        let (since, reason) = unwritten.as_ref()?;
        Some((now.saturating_sub(Duration::from_millis(*since)), reason.clone()))
    }

    pub(crate) fn set_state(&self, state: SinkState) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = state;
    }

    fn state(&self) -> SinkState {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set_running(&self, running: bool) {
        self.running.store(running, Ordering::Relaxed);
        if !running {
            self.written();
            self.outstanding.store(0, Ordering::Relaxed);
            self.in_flight_bytes.store(0, Ordering::Relaxed);
        }
    }

    pub(crate) fn moved(&self, now: Duration) {
        let now = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        self.progress_ms.store(now, Ordering::Relaxed);
    }
}

type Pipelines = BTreeMap<(ConsumerName, PartitionId), Arc<PipelineStatus>>;

/// A view of a relay that can be cloned and read at any time, also while it runs.
#[derive(Clone)]
pub struct RelayStatus {
    inner: Arc<Inner>,
}

struct Inner {
    clock: Arc<dyn Clock>,
    pipelines: Mutex<Pipelines>,
    sinks: Vec<ConsumerName>,
    /// Why the relay can't talk to its database, while it can't.
    store_trouble: Mutex<Option<String>>,
    started: AtomicBool,
}

/// One moment of a relay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// Partitions that this relay works on.
    pub partitions: Vec<PartitionId>,
    /// Each sink, its partitions taken together.
    pub sinks: Vec<SinkSnapshot>,
    /// Whether events can flow.
    pub ready: bool,
    /// Why not, one sentence for each reason.
    pub reasons: Vec<String>,
}

/// One moment of one sink, since the relay started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SinkSnapshot {
    /// The sink.
    pub name: ConsumerName,
    /// Events confirmed.
    pub published: u64,
    /// Confirmed events that the broker already had.
    pub duplicates: u64,
    /// Events written to the dead letters.
    pub parked: u64,
    /// Failed attempts.
    pub failures: u64,
    /// Calls made.
    pub calls: u64,
    /// Events read and not yet finished.
    pub outstanding: u64,
    /// Bytes read and not yet finished.
    pub in_flight_bytes: u64,
    /// For how long checkpoints and dead letters can't be written to the source's database, in
    /// the partition where that has lasted longest; zero while they can. Meanwhile what is
    /// confirmed and unwritten is bounded, and comes again after a crash.
    pub unwritten: Duration,
    /// The worst state over its partitions.
    pub state: SinkState,
}

impl RelayStatus {
    pub(crate) fn new(clock: Arc<dyn Clock>, sinks: Vec<ConsumerName>) -> Self {
        Self {
            inner: Arc::new(Inner {
                clock,
                pipelines: Mutex::new(Pipelines::new()),
                sinks,
                store_trouble: Mutex::new(None),
                started: AtomicBool::new(false),
            }),
        }
    }

    pub(crate) fn pipeline(
        &self,
        sink: &ConsumerName,
        partition: &PartitionId,
    ) -> Arc<PipelineStatus> {
        let mut pipelines = self.inner.pipelines.lock().unwrap_or_else(PoisonError::into_inner);
        let place = pipelines.entry((sink.clone(), partition.clone()));
        let status = Arc::clone(place.or_insert_with(|| Arc::new(PipelineStatus::new())));
        status.moved(self.inner.clock.elapsed());
        status
    }

    pub(crate) fn store_answered(&self, trouble: Option<String>) {
        if trouble.is_none() {
            self.inner.started.store(true, Ordering::Relaxed);
        }
        *self.inner.store_trouble.lock().unwrap_or_else(PoisonError::into_inner) = trouble;
    }

    /// What the relay is doing now. Cheap.
    pub fn snapshot(&self) -> Snapshot {
        let now = self.inner.clock.elapsed();
        let pipelines = self.inner.pipelines.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let trouble =
            self.inner.store_trouble.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut reasons: Vec<String> = trouble
            .map(|text| format!("the database does not answer: {text}"))
            .into_iter()
            .collect();
        if !self.inner.started.load(Ordering::Relaxed) && reasons.is_empty() {
            reasons.push("the relay has not joined its group yet".into());
        }
        let mut partitions: Vec<PartitionId> = Vec::new();
        for ((sink, partition), status) in &pipelines {
            if status.running.load(Ordering::Relaxed) && !partitions.contains(partition) {
                partitions.push(partition.clone());
            }
            reasons.extend(trouble_of(sink, partition, status, now));
            let unwritten = status.unwritten_for(now);
            reasons
                .extend(unwritten.filter(|(time, _)| *time >= STALL_AFTER).map(|(time, why)| {
                format!(
                    "the checkpoint of sink {sink} in partition {partition} can't be written for \
                     {} s: {why}",
                    time.as_secs()
                )
            }));
        }
        let sinks = self.inner.sinks.iter().map(|name| sum(name, &pipelines, now)).collect();
        Snapshot { partitions, sinks, ready: reasons.is_empty(), reasons }
    }
}

fn trouble_of(
    sink: &ConsumerName,
    partition: &PartitionId,
    status: &PipelineStatus,
    now: Duration,
) -> Option<String> {
    match status.state() {
        SinkState::Halted { reason } => {
            return Some(format!("sink {sink} is halted in partition {partition}: {reason}"));
        }
        SinkState::Flowing | SinkState::Outage { .. } => {}
    }
    let moved_ms = status.progress_ms.load(Ordering::Relaxed);
    let since = Duration::from_millis(moved_ms);
    let stalled =
        status.outstanding.load(Ordering::Relaxed) > 0 && now.saturating_sub(since) >= STALL_AFTER;
    stalled.then(|| {
        let reason = match status.state() {
            SinkState::Outage { reason } => format!(": {reason}"),
            SinkState::Flowing | SinkState::Halted { .. } => {
                status.failure_since(moved_ms).map(|text| format!(": {text}")).unwrap_or_default()
            }
        };
        format!(
            "sink {sink} made no progress in partition {partition} for {} s{reason}",
            now.saturating_sub(since).as_secs()
        )
    })
}

fn sum(name: &ConsumerName, pipelines: &Pipelines, now: Duration) -> SinkSnapshot {
    let mut total = SinkSnapshot {
        name: name.clone(),
        published: 0,
        duplicates: 0,
        parked: 0,
        failures: 0,
        calls: 0,
        outstanding: 0,
        in_flight_bytes: 0,
        unwritten: Duration::ZERO,
        state: SinkState::Flowing,
    };
    for (_, status) in pipelines.iter().filter(|((sink, _), _)| sink == name) {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        total.published += read(&status.published);
        total.duplicates += read(&status.duplicates);
        total.parked += read(&status.parked);
        total.failures += read(&status.failures);
        total.calls += read(&status.calls);
        total.outstanding += read(&status.outstanding);
        total.in_flight_bytes += read(&status.in_flight_bytes);
        let unwritten = status.unwritten_for(now).unwrap_or_default().0;
        total.unwritten = total.unwritten.max(unwritten);
        let worse = match (&total.state, status.state()) {
            (_, halted @ SinkState::Halted { .. }) => Some(halted),
            (SinkState::Flowing, outage @ SinkState::Outage { .. }) => Some(outage),
            (_, SinkState::Flowing | SinkState::Outage { .. }) => None,
        };
        total.state = worse.unwrap_or(total.state);
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_that_fails_counts_from_its_first_failure_until_it_is_done() {
        let at = Duration::from_secs;
        let status = PipelineStatus::new();
        assert_eq!(status.unwritten_for(at(9)), None);
        status.unwritten(at(1), "locked");
        status.unwritten(at(5), "gone");
        assert_eq!(status.unwritten_for(at(31)), Some((at(30), "gone".to_owned())));
        status.written();
        assert_eq!(status.unwritten_for(at(32)), None);
    }
}
