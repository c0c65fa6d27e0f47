//! Consuming a feed without a broker.
//!
//! What lives here: a closure over batches of a partition, with the relay's leases and checkpoints.
//! What does not: lanes and dead letters of refused events; a subscriber decides for itself.
//! Invariant: a batch is handed out again until the closure accepts it, and the next one only after
//! its position is durable.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postrider_core::{
    Attempt, Batch, Clock, ConsumerName, DeadLetterState, Entry, Error, ErrorKind, GroupName,
    HeldLease, Jitter, NewDeadLetter, PartitionId, Position, Reaction, ReadOutcome, Record,
    RelayId, RelayStore, Result, RetryPolicy, Source, StartFrom, Tally, react,
};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::clock::SystemClock;
use crate::coordinator::{Work, WorkExit};
use crate::keeper::Held;
use crate::options::{Keeper, RelayOptions};
use crate::reading::{self, ReadFrom, Reading};
use crate::relay::run_group;
use crate::status::{PipelineStatus, RelayStatus, SinkState};
use crate::store_ops::Patience;

/// Once told to stop, a call to the database is tried this often more: within five seconds.
const LAST_TRIES: u32 = 5;

/// What a subscriber is handed: records of one partition, in feed order.
#[derive(Debug, Clone)]
pub struct Delivery {
    /// The subscription's name, under which its checkpoint stands.
    pub consumer: ConsumerName,
    /// The partition.
    pub partition: PartitionId,
    /// In feed order; never empty.
    pub records: Vec<Record>,
    /// What the checkpoint becomes. A handler that writes it in its own transaction, under
    /// `lease`, gets an exactly-once effect.
    pub position: Position,
    /// The lease under which the batch was read.
    pub lease: Arc<HeldLease>,
}

/// What holds for a subscription.
#[derive(Debug, Clone)]
pub struct SubscriptionOptions {
    /// Names the subscription and its checkpoints, kept over restarts.
    pub name: ConsumerName,
    /// This process; must be unique for each start.
    pub instance: RelayId,
    /// Where it begins when it has no checkpoint yet (the oldest record).
    pub from: StartFrom,
    /// Waits between attempts of a handler that failed for now. Attempts have no end.
    pub retry: RetryPolicy,
    /// How long a lease lasts without renewal (5 s).
    pub lease_ttl: Duration,
}

impl SubscriptionOptions {
    /// All defaults.
    pub fn new(name: ConsumerName, instance: RelayId) -> Self {
        let ttl = postrider_core::limits::LEASE_TTL_MS;
        Self {
            name,
            instance,
            from: StartFrom::Oldest,
            retry: RetryPolicy::default(),
            lease_ttl: Duration::from_millis(ttl),
        }
    }
}

/// A subscriber with a pointer of its own. Several instances of one name share the partitions.
pub struct Subscription {
    source: Arc<dyn Source>,
    store: Arc<dyn RelayStore>,
    clock: Arc<dyn Clock>,
    keeper: Keeper,
    options: SubscriptionOptions,
    status: RelayStatus,
}

impl Subscription {
    /// A subscription to `source` that keeps its state in `store`, the source's own database.
    pub fn new(
        source: Arc<dyn Source>,
        store: Arc<dyn RelayStore>,
        options: SubscriptionOptions,
    ) -> Self {
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let status = RelayStatus::new(Arc::clone(&clock), vec![options.name.clone()]);
        Self { source, store, clock, keeper: Keeper::OwnThread, options, status }
    }

    /// Another clock, and where leases are renewed by it: a simulation's.
    #[must_use]
    pub fn clock(mut self, clock: Arc<dyn Clock>, keeper: Keeper) -> Self {
        self.status = RelayStatus::new(Arc::clone(&clock), vec![self.options.name.clone()]);
        self.clock = clock;
        self.keeper = keeper;
        self
    }

    /// What it is doing; can be cloned and read while it runs.
    pub fn status(&self) -> RelayStatus {
        self.status.clone()
    }

    /// Hands batches to `handler` until `stop` is cancelled; the batch under way is finished.
    ///
    /// A handler's error of kind `Transient` or `Throttled` is tried again after a wait; any other
    /// halts the partition until a restart, and `status` says so.
    ///
    /// # Errors
    /// When the database can't be used at all at the start.
    pub async fn run<H, F>(self, handler: H, stop: CancellationToken) -> Result<()>
    where
        H: Fn(Delivery) -> F + Send + Sync + 'static,
        F: Future<Output = Result<()>> + Send + 'static,
    {
        let group = GroupName::new(format!("subscription {}", self.options.name))
            .or_else(|_| GroupName::new(self.options.name.as_str()))?;
        let mut options = RelayOptions::new(group, self.options.instance.clone());
        options.lease_ttl = self.options.lease_ttl;
        options.keeper = self.keeper;
        options.check()?;
        let work = SubscriptionWork {
            source: Arc::clone(&self.source),
            store: Arc::clone(&self.store),
            clock: Arc::clone(&self.clock),
            options: self.options.clone(),
            status: self.status.clone(),
            handler,
        };
        run_group(self.store, self.clock, options, Arc::new(work), self.status, stop).await
    }
}

struct SubscriptionWork<H> {
    source: Arc<dyn Source>,
    store: Arc<dyn RelayStore>,
    clock: Arc<dyn Clock>,
    options: SubscriptionOptions,
    status: RelayStatus,
    handler: H,
}

#[async_trait]
impl<H, F> Work for SubscriptionWork<H>
where
    H: Fn(Delivery) -> F + Send + Sync + 'static,
    F: Future<Output = Result<()>> + Send + 'static,
{
    async fn partitions(&self) -> Result<Vec<PartitionId>> {
        self.source.partitions(&self.options.name).await
    }

    async fn has_begun(&self) -> Result<bool> {
        for partition in self.source.partitions(&self.options.name).await? {
            if self.store.checkpoint(&self.options.name, &partition).await?.is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    async fn run(&self, held: Held, _partitions: usize, stop: CancellationToken) -> WorkExit {
        let partition = held.lease.partition().clone();
        let status = self.status.pipeline(&self.options.name, &partition);
        status.set_running(true);
        let ended = self.follow(&held, &status, &stop).await;
        status.set_running(false);
        match ended {
            Ok(()) => WorkExit::Done,
            Err(error) if error.kind() == ErrorKind::Fenced => WorkExit::LeaseLost,
            Err(error) if stop.is_cancelled() => {
                tracing::warn!(%partition, subscription = %self.options.name,
                    error = %error.chain(), "stopped before the database could be used again");
                WorkExit::Done
            }
            Err(error) => {
                tracing::error!(%partition, subscription = %self.options.name,
                    error = %error.chain(), "the subscription is halted in this partition");
                status.set_state(SinkState::Halted { reason: error.chain() });
                stop.cancelled().await;
                WorkExit::Done
            }
        }
    }
}

impl<H, F> SubscriptionWork<H>
where
    H: Fn(Delivery) -> F + Send + Sync + 'static,
    F: Future<Output = Result<()>> + Send + 'static,
{
    async fn follow(
        &self,
        held: &Held,
        status: &PipelineStatus,
        stop: &CancellationToken,
    ) -> Result<()> {
        let (consumer, partition) = (&self.options.name, held.lease.partition());
        let checkpoint =
            self.patiently(held, stop, || self.store.checkpoint(consumer, partition)).await?;
        let resume = checkpoint.map(|found| StartFrom::After(found.position));
        let (mut reading, task) = reading::start(ReadFrom {
            source: Arc::clone(&self.source),
            clock: Arc::clone(&self.clock),
            consumer: consumer.clone(),
            partition: partition.clone(),
            from: resume.unwrap_or_else(|| self.options.from.clone()),
        });
        let mut reader = JoinSet::new();
        reader.spawn(task);
        loop {
            let Some(left) = held.trust.remaining(self.clock.elapsed()) else {
                return Err(Error::fenced("the lease was not renewed in time"));
            };
            let read = tokio::select! {
               biased;
                () = stop.cancelled() => return Ok(()),
                read = reading.batches.recv() => read,
                () = self.clock.sleep(left) => continue,
            };
            let outcome =
                read.unwrap_or_else(|| Err(Error::corrupt("the source's reader ended")))?;
            match outcome {
                ReadOutcome::Batch(batch) => {
                    self.hand_out(held, status, &reading, batch, stop).await?;
                }
                ReadOutcome::Ended(successors) => {
                    let finish = || self.store.finish(&held.lease, consumer, &successors);
                    return self.patiently(held, stop, finish).await;
                }
            }
            if stop.is_cancelled() {
                return Ok(());
            }
        }
    }

    /// Hands one batch to the handler until it is accepted, then moves the checkpoint.
    async fn hand_out(
        &self,
        held: &Held,
        status: &PipelineStatus,
        reading: &Reading,
        batch: Batch,
        stop: &CancellationToken,
    ) -> Result<()> {
        use std::sync::atomic::Ordering;
        let (records, letters) = sorted(batch.entries);
        let (published, parked) = (records.len() as u64, letters.len() as u64);
        status.outstanding.store(published, Ordering::Relaxed);
        if !letters.is_empty() {
            let park = || self.store.park(&held.lease, &self.options.name, &letters);
            self.patiently(held, stop, park).await?;
        }
        let accepted = records.is_empty()
            || self.accepted(held, records, batch.position.clone(), stop).await?;
        if !accepted {
            return Ok(());
        }
        let tally = Tally { published, parked };
        let (lease, name) = (&held.lease, &self.options.name);
        self.patiently(held, stop, || self.store.advance(lease, name, &batch.position, tally))
            .await?;
        reading.confirm(batch.position);
        status.published.fetch_add(published, Ordering::Relaxed);
        status.parked.fetch_add(parked, Ordering::Relaxed);
        status.outstanding.store(0, Ordering::Relaxed);
        status.moved(self.clock.elapsed());
        Ok(())
    }

    /// Whether the handler accepted; false when told to stop between two attempts.
    async fn accepted(
        &self,
        held: &Held,
        records: Vec<Record>,
        position: Position,
        stop: &CancellationToken,
    ) -> Result<bool> {
        let delivery = Delivery {
            consumer: self.options.name.clone(),
            partition: held.lease.partition().clone(),
            records,
            position,
            lease: Arc::clone(&held.lease),
        };
        let endless = RetryPolicy { max_attempts: u32::MAX, ..self.options.retry.clone() };
        let mut attempt = 1u32;
        loop {
            if held.trust.remaining(self.clock.elapsed()).is_none() {
                return Err(Error::fenced("the lease was not renewed in time"));
            }
            let Err(error) = (self.handler)(delivery.clone()).await else { return Ok(true) };
            let wait = match react(error.kind(), Attempt(attempt), &endless, Jitter::NONE) {
                Reaction::RetryAfter(wait) => wait,
                Reaction::Park | Reaction::Skip | Reaction::Halt | Reaction::StepDown => {
                    return Err(error);
                }
            };
            tracing::warn!(
                partition = %delivery.partition, subscription = %delivery.consumer,
                position = %delivery.position, attempt, error = %error.chain(),
                "the handler failed; trying again"
            );
            attempt = attempt.saturating_add(1).min(u32::MAX - 1);
            tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(false),
                () = self.clock.sleep(wait) => {}
            }
        }
    }

    /// Repeats a call to the database while it fails for now and the lease is trusted; a few times
    /// more only once it is told to stop.
    async fn patiently<T, C, R>(&self, held: &Held, stop: &CancellationToken, call: C) -> Result<T>
    where
        C: Fn() -> R,
        R: Future<Output = Result<T>>,
    {
        let (mut patience, mut last_tries) = (Patience::new(), LAST_TRIES);
        loop {
            let error = match call().await {
                Ok(done) => return Ok(done),
                Err(error) => error,
            };
            let Some(wait) = patience.after(&error) else { return Err(error) };
            if held.trust.remaining(self.clock.elapsed()).is_none() {
                return Err(Error::fenced("the lease was not renewed in time").with_source(error));
            }
            if stop.is_cancelled() {
                let Some(left) = last_tries.checked_sub(1) else { return Err(error) };
                last_tries = left;
            }
            self.clock.sleep(wait).await;
        }
    }
}

/// Readable records, and letters for what can't be read.
fn sorted(entries: Vec<Entry>) -> (Vec<Record>, Vec<NewDeadLetter>) {
    let (mut records, mut letters) = (Vec::new(), Vec::new());
    for entry in entries {
        match entry {
            Entry::Record(record) => records.push(record),
            Entry::Malformed(malformed) => letters.push(NewDeadLetter {
                reason: malformed.reason.clone(),
                entry: Entry::Malformed(malformed),
                state: DeadLetterState::Skipped,
                attempts: 0,
            }),
        }
    }
    (records, letters)
}
