//! The relay: a source, its store, and sinks.
//!
//! What lives here: the builder, `run`, and one worker per partition with a pipeline for each sink.
//! What does not: how a pipeline works.
//! Invariant: sinks of one relay share leases and nothing else; one that fails holds up no other.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use postrider_core::{Clock, Error, PartitionId, RelayStore, Result, Sink, Source};
use rand::TryRng;
use rand::rngs::SysRng;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::clock::SystemClock;
use crate::coordinator::{Coordinator, Work, WorkExit};
use crate::keeper::{self, Held};
use crate::options::{RelayOptions, SinkOptions};
use crate::pipeline::{self, Exit, Setting};
use crate::retaining;
use crate::status::RelayStatus;
use crate::store_ops::Desk;

/// A partition's share of a sink's budget is never below this.
const MIN_SHARE_BYTES: usize = 1024 * 1024;
/// How often a worker looks whether a sink that lagged behind has reached its partition: soon
/// beside the time it was behind, and each look is one small query.
const LOOK_FOR_ABSENT_EVERY: Duration = Duration::from_secs(1);

/// Collects a relay's sinks.
#[must_use]
pub struct RelayBuilder {
    source: Arc<dyn Source>,
    store: Arc<dyn RelayStore>,
    options: RelayOptions,
    clock: Arc<dyn Clock>,
    sinks: Vec<(SinkOptions, Arc<dyn Sink>)>,
}

impl RelayBuilder {
    /// Another clock: a simulation's.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Adds a sink. Each has checkpoints of its own, under its name.
    pub fn sink(mut self, options: SinkOptions, sink: Arc<dyn Sink>) -> Self {
        self.sinks.push((options, sink));
        self
    }

    /// The relay, if its options can be run.
    ///
    /// # Errors
    /// `Permanent`, naming the option: no sink, two of one name, a limit or a time of zero.
    pub fn build(self) -> Result<Relay> {
        self.options.check()?;
        if self.sinks.is_empty() {
            return Err(Error::permanent("the relay has no sink; give it at least one"));
        }
        for (at, (options, _)) in self.sinks.iter().enumerate() {
            options.check()?;
            let name = &options.name;
            if self.sinks[..at].iter().any(|(other, _)| other.name == *name) {
                return Err(Error::permanent(format!("two sinks are named {name}; rename one")));
            }
        }
        let names = self.sinks.iter().map(|(options, _)| options.name.clone()).collect();
        let status = RelayStatus::new(Arc::clone(&self.clock), names);
        Ok(Relay {
            source: self.source,
            store: self.store,
            options: self.options,
            clock: self.clock,
            sinks: self.sinks,
            status,
        })
    }
}

/// Moves every event of a source to each of its sinks.
pub struct Relay {
    source: Arc<dyn Source>,
    store: Arc<dyn RelayStore>,
    options: RelayOptions,
    clock: Arc<dyn Clock>,
    sinks: Vec<(SinkOptions, Arc<dyn Sink>)>,
    status: RelayStatus,
}

impl Relay {
    /// Starts a relay from `source` that keeps its state in `store`, the source's own database.
    pub fn builder(
        source: Arc<dyn Source>,
        store: Arc<dyn RelayStore>,
        options: RelayOptions,
    ) -> RelayBuilder {
        RelayBuilder { source, store, options, clock: Arc::new(SystemClock), sinks: Vec::new() }
    }

    /// What the relay is doing; can be cloned and read while it runs.
    pub fn status(&self) -> RelayStatus {
        self.status.clone()
    }

    /// Runs until `stop` is cancelled, then drains: confirmations under way are waited for (up to
    /// `drain_timeout`), checkpoints written, leases released, sinks closed.
    ///
    /// # Errors
    /// When the database can't be used at all at the start (newer schema, missing tables).
    ///
    /// # Cancellation
    /// Dropping the future instead of cancelling `stop` is like a crash: nothing is lost, and what
    /// was published after the last checkpoint is published again by the next relay.
    pub async fn run(self, stop: CancellationToken) -> Result<()> {
        let seed = self.options.seed.unwrap_or_else(|| {
            // Only jitter hangs on it: a fixed seed is as good when the system has none to give.
            SysRng.try_next_u64().unwrap_or(1)
        });
        let work = RelayWork {
            source: Arc::clone(&self.source),
            store: Arc::clone(&self.store),
            clock: Arc::clone(&self.clock),
            options: self.options.clone(),
            sinks: self.sinks.clone(),
            status: self.status.clone(),
            seeds: AtomicU64::new(seed),
        };
        let result = run_group(
            Arc::clone(&self.store),
            Arc::clone(&self.clock),
            self.options.clone(),
            Arc::new(work),
            self.status.clone(),
            stop,
        )
        .await;
        for (options, sink) in &self.sinks {
            if let Err(error) = sink.close().await {
                tracing::warn!(sink = %options.name, error = %error.chain(), "closing failed");
            }
        }
        result
    }
}

/// Coordinates `work` with the group's other relays, with the lease keeper and retention beside it.
pub(crate) async fn run_group(
    store: Arc<dyn RelayStore>,
    clock: Arc<dyn Clock>,
    options: RelayOptions,
    work: Arc<dyn Work>,
    status: RelayStatus,
    stop: CancellationToken,
) -> Result<()> {
    let coordinator = Coordinator::new(
        Arc::clone(&store),
        Arc::clone(&clock),
        options.clone(),
        Arc::clone(&work),
        status,
    );
    let keeping = coordinator.keeping();
    let stop_keeper = CancellationToken::new();
    // The keeper outlives the drain, and ends also when this future is dropped.
    let stop_with_us = stop_keeper.clone().drop_guard();
    let keeper = keeper::start(keeping.clone(), &options, stop_keeper)?;
    let mut beside = JoinSet::new();
    if let Some(retain) = options.retention {
        beside.spawn(retaining::run(keeping, options, retain, work, stop.clone()));
    }
    let result = coordinator.run(stop.clone()).await;
    stop.cancel();
    while beside.join_next().await.is_some() {}
    drop(stop_with_us);
    keeper.await;
    result
}

struct RelayWork {
    source: Arc<dyn Source>,
    store: Arc<dyn RelayStore>,
    clock: Arc<dyn Clock>,
    options: RelayOptions,
    sinks: Vec<(SinkOptions, Arc<dyn Sink>)>,
    status: RelayStatus,
    seeds: AtomicU64,
}

impl RelayWork {
    fn setting(
        &self,
        held: &Held,
        partitions: usize,
        options: &SinkOptions,
        sink: &Arc<dyn Sink>,
    ) -> Setting {
        let share = options.budget_bytes / partitions.max(1);
        let status = self.status.pipeline(&options.name, held.lease.partition());
        Setting {
            source: Arc::clone(&self.source),
            sink: Arc::clone(sink),
            desk: Desk {
                store: Arc::clone(&self.store),
                clock: Arc::clone(&self.clock),
                lease: Arc::clone(&held.lease),
                consumer: options.name.clone(),
                status: Arc::clone(&status),
            },
            trust: Arc::clone(&held.trust),
            news: Arc::clone(&held.news),
            options: options.clone(),
            budget_bytes: share.max(MIN_SHARE_BYTES.min(options.budget_bytes)),
            drain_timeout: self.options.drain_timeout,
            checkpoint_every: self.options.checkpoint_every,
            status,
            seed: self.seeds.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// Starts those of `absent` whose sinks have to read this partition by now. A sink that is
    /// still at work on the predecessor begins later: earlier, it would overtake itself.
    async fn start_wanted(
        &self,
        worker: &Worker<'_>,
        absent: &mut Vec<usize>,
        running: &mut Running,
    ) {
        let partition = worker.held.lease.partition();
        for at in std::mem::take(absent) {
            let (options, sink) = &self.sinks[at];
            match self.source.partitions(&options.name).await {
                Ok(partitions) if partitions.contains(partition) => {
                    let setting = self.setting(worker.held, worker.partitions, options, sink);
                    running.spawn(pipeline::run(setting, worker.stop.clone()));
                }
                Ok(_) => absent.push(at),
                Err(error) => {
                    tracing::warn!(%partition, sink = %options.name, error = %error.chain(),
                        "the source's partitions can't be read; asking again");
                    absent.push(at);
                }
            }
        }
    }
}

/// What a worker of one partition was started with.
struct Worker<'a> {
    held: &'a Held,
    partitions: usize,
    stop: &'a CancellationToken,
}

type Running = JoinSet<Exit>;

#[async_trait]
impl Work for RelayWork {
    async fn partitions(&self) -> Result<Vec<PartitionId>> {
        let mut all = Vec::new();
        for (options, _) in &self.sinks {
            for partition in self.source.partitions(&options.name).await? {
                if !all.contains(&partition) {
                    all.push(partition);
                }
            }
        }
        Ok(all)
    }

    async fn has_begun(&self) -> Result<bool> {
        for (options, _) in &self.sinks {
            for partition in self.source.partitions(&options.name).await? {
                if self.store.checkpoint(&options.name, &partition).await?.is_none() {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    async fn run(&self, held: Held, partitions: usize, stop: CancellationToken) -> WorkExit {
        let worker = Worker { held: &held, partitions, stop: &stop };
        let mut running = Running::new();
        let mut absent: Vec<usize> = (0..self.sinks.len()).collect();
        let mut exit = WorkExit::Done;
        let mut halted = false;
        loop {
            let left = held.trust.remaining(self.clock.elapsed());
            let goes_on = exit == WorkExit::Done && left.is_some() && !stop.is_cancelled();
            if goes_on && !absent.is_empty() {
                tokio::select! {
                    biased;
                    () = stop.cancelled() => continue,
                    () = self.start_wanted(&worker, &mut absent, &mut running) => {}
                }
            }
            // After a halt it is kept until told to stop: another relay would only halt in turn.
            if running.is_empty() && !(halted && goes_on) {
                return if left.is_none() && halted { WorkExit::LeaseLost } else { exit };
            }
            let wait = left.unwrap_or(LOOK_FOR_ABSENT_EVERY);
            let wait = if absent.is_empty() { wait } else { wait.min(LOOK_FOR_ABSENT_EVERY) };
            tokio::select! {
                biased;
                Some(ended) = running.join_next(), if !running.is_empty() => match ended {
                    Ok(Exit::Drained | Exit::Finished) => {}
                    Ok(Exit::LeaseLost) => exit = WorkExit::LeaseLost,
                    Ok(Exit::Halted(_)) => halted = true,
                    Err(error) if error.is_panic() => {
                        std::panic::resume_unwind(error.into_panic());
                    }
                    Err(_) => exit = WorkExit::LeaseLost,
                },
                () = stop.cancelled(), if !stop.is_cancelled() => {}
                () = self.clock.sleep(wait) => {}
            }
        }
    }
}
