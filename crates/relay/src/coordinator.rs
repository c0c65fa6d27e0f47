//! Shares partitions among the live relays of a group.
//!
//! What lives here: joining, acquiring, handing over, and the workers' life. What does not: what a
//! worker does with its partition.
//! Invariant: a worker runs only under a lease in the book, and a lease is released only after its
//! worker has ended.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postrider_core::{
    Acquired, Clock, Error, ErrorKind, LeaseInfo, PartitionId, RelayId, RelayStore, Result,
};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::keeper::{Book, Held, Keeping, LatestNews};
use crate::options::RelayOptions;
use crate::status::RelayStatus;
use crate::told::Told;
use crate::trust::Trust;

/// How often a relay that holds all it may looks around.
const HOLDING_POLL: Duration = Duration::from_millis(250);
/// Shortest time between two looks at the live relays.
const JOIN_AT_MOST_EVERY: Duration = Duration::from_millis(100);

/// A relay that holds every partition lists them at least this often. While none of its workers
/// ends there can be no other: a partition is taken over by others only when it has ended.
const LIST_AT_LEAST_EVERY: Duration = Duration::from_secs(60);

/// Why a worker ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WorkExit {
    /// The lease may be released.
    Done,
    /// The lease belongs to another by now.
    LeaseLost,
}

/// What is done with a partition.
#[async_trait]
pub(crate) trait Work: Send + Sync + 'static {
    /// Partitions that want a worker, in a stable order.
    async fn partitions(&self) -> Result<Vec<PartitionId>>;

    /// Whether every consumer of this work has a checkpoint wherever it has to read. Until then
    /// the database does not know of all of them, and pruning could pass one.
    async fn has_begun(&self) -> Result<bool>;

    /// Works on one partition, out of `partitions` in all, until `stop` or the end of its lease.
    async fn run(&self, held: Held, partitions: usize, stop: CancellationToken) -> WorkExit;
}

pub(crate) struct Coordinator {
    store: Arc<dyn RelayStore>,
    clock: Arc<dyn Clock>,
    options: RelayOptions,
    work: Arc<dyn Work>,
    status: RelayStatus,
    book: Arc<Book>,
    news: Arc<LatestNews>,
    workers: JoinSet<(PartitionId, WorkExit)>,
    stops: HashMap<PartitionId, CancellationToken>,
    members: Vec<RelayId>,
    partitions: Vec<PartitionId>,
    joined_at: Option<Duration>,
    listed_at: Duration,
    /// Partitions whose lease was lost just now, and when to ask for them again.
    resting: HashMap<PartitionId, Duration>,
    /// What was last said about the database's trouble.
    told: Told,
}

impl Coordinator {
    pub(crate) fn new(
        store: Arc<dyn RelayStore>,
        clock: Arc<dyn Clock>,
        options: RelayOptions,
        work: Arc<dyn Work>,
        status: RelayStatus,
    ) -> Self {
        let news = Arc::new(LatestNews::new(&options));
        Self {
            store,
            clock,
            options,
            work,
            status,
            book: Arc::default(),
            news,
            workers: JoinSet::new(),
            stops: HashMap::new(),
            members: Vec::new(),
            partitions: Vec::new(),
            joined_at: None,
            listed_at: Duration::ZERO,
            resting: HashMap::new(),
            told: Told::default(),
        }
    }

    pub(crate) fn keeping(&self) -> Keeping {
        Keeping {
            store: Arc::clone(&self.store),
            clock: Arc::clone(&self.clock),
            group: self.options.group.clone(),
            book: Arc::clone(&self.book),
            news: Arc::clone(&self.news),
            ttl: self.options.lease_ttl,
            renew_every: self.options.renew_every(),
            trust_window: self.options.trust_window(),
        }
    }

    /// Works until `stop`, then hands everything over.
    pub(crate) async fn run(mut self, stop: CancellationToken) -> Result<()> {
        let mut exported_at = Duration::ZERO;
        while !stop.is_cancelled() {
            let wait = match self.look_around(&stop).await {
                Ok(wait) => {
                    if self.told.is_over() {
                        tracing::info!("the database can be used again");
                    }
                    self.status.store_answered(None);
                    wait
                }
                Err(error) => self.trouble(error)?,
            };
            let now = self.clock.elapsed();
            if now.saturating_sub(exported_at) >= Duration::from_secs(1) {
                exported_at = now;
                crate::metrics::export(&self.status.snapshot());
            }
            tokio::select! {
                biased;
                () = stop.cancelled() => {}
                Some(ended) = self.workers.join_next(), if !self.workers.is_empty() => {
                    self.ended(ended);
                }
                () = self.clock.sleep(wait) => {}
            }
        }
        self.hand_over().await;
        crate::metrics::export(&self.status.snapshot());
        Ok(())
    }

    /// An error before the first success that no waiting can mend ends the relay.
    fn trouble(&mut self, error: Error) -> Result<Duration> {
        let lasting = match error.kind() {
            ErrorKind::Transient | ErrorKind::Throttled { .. } | ErrorKind::Fenced => false,
            ErrorKind::Permanent | ErrorKind::Unsupported | ErrorKind::Corrupt => true,
        };
        if lasting && self.joined_at.is_none() {
            return Err(error);
        }
        let (text, now) = (error.chain(), self.clock.elapsed());
        // Trying again comes every quarter of a second; a full disk needs no line for each.
        if self.told.is_news(&text, now) {
            tracing::warn!(error = text, "the database can't be used for now; trying on");
        }
        self.status.store_answered(Some(text));
        Ok(HOLDING_POLL)
    }

    fn ended(
        &mut self,
        ended: std::result::Result<(PartitionId, WorkExit), tokio::task::JoinError>,
    ) {
        match ended {
            Ok((partition, exit)) => {
                self.stops.remove(&partition);
                if exit == WorkExit::LeaseLost {
                    // A sink that is fenced again at once must not make this a busy loop.
                    let again_at = self.clock.elapsed() + HOLDING_POLL;
                    self.resting.insert(partition, again_at);
                }
                // A finished partition may have successors to work on.
                self.joined_at = None;
            }
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => {}
        }
    }

    /// Brings what this relay holds closer to its share. Returns when to look again.
    async fn look_around(&mut self, stop: &CancellationToken) -> Result<Duration> {
        let now = self.clock.elapsed();
        let due = self.joined_at.is_none_or(|at| now >= at + self.options.renew_every());
        let heard = self.heard(now);
        if let Some(members) = heard.filter(|members| due || *members != self.members) {
            self.meet(members, now).await?;
        } else if due {
            self.join(now).await?;
        }
        if self.stops.len() >= self.partitions.len() {
            return Ok(HOLDING_POLL);
        }
        let leases = self.store.leases(&self.options.group).await?;
        let mut free = self.free(&leases);
        let may_join = self.joined_at.is_none_or(|at| now >= at + JOIN_AT_MOST_EVERY);
        if !free.is_empty() && self.stops.len() >= self.share() && may_join {
            // Whoever left them free may be gone: then the share has grown.
            self.join(now).await?;
            free = self.free(&leases);
        }
        while self.stops.len() < self.share() && !stop.is_cancelled() {
            let Some(partition) = free.pop() else { break };
            self.acquire(partition, stop).await?;
        }
        self.give_back();
        // A planned hand-over takes twice this at most.
        Ok(self.store.standby())
    }

    /// The live relays as the keeper has heard, if that was lately and this one is among them.
    fn heard(&self, now: Duration) -> Option<Vec<RelayId>> {
        let relays = self.news.get(now)?.relays;
        relays.contains(&self.options.relay).then_some(relays)
    }

    async fn join(&mut self, now: Duration) -> Result<()> {
        let options = &self.options;
        let members = self.store.join(&options.group, &options.relay, options.lease_ttl).await?;
        self.meet(members, now).await
    }

    async fn meet(&mut self, members: Vec<RelayId>, now: Duration) -> Result<()> {
        self.members = members;
        let settled = self.joined_at.is_some() && self.stops.len() >= self.partitions.len();
        if !settled || now >= self.listed_at + LIST_AT_LEAST_EVERY {
            self.partitions = self.work.partitions().await?;
            self.listed_at = now;
        }
        self.joined_at = Some(now);
        self.give_back();
        Ok(())
    }

    /// Partitions that nobody holds, the first wanted one last.
    fn free(&self, leases: &[LeaseInfo]) -> Vec<PartitionId> {
        let held = |partition: &PartitionId| {
            let lease = leases.iter().find(|lease| lease.partition == *partition);
            lease.is_some_and(|lease| {
                !lease.remaining.is_zero() && lease.holder != self.options.relay
            })
        };
        let ours = |partition: &PartitionId| self.stops.contains_key(partition);
        let now = self.clock.elapsed();
        let rests =
            |partition: &PartitionId| self.resting.get(partition).is_some_and(|at| now < *at);
        let wanted = self.partitions.iter().rev();
        let free =
            |partition: &&PartitionId| !ours(partition) && !held(partition) && !rests(partition);
        wanted.filter(free).cloned().collect()
    }

    /// This relay's even share: the first relays of the list take one of what is left over.
    fn share(&self) -> usize {
        let (all, relays) = (self.partitions.len(), self.members.len().max(1));
        let place = self.members.iter().position(|member| *member == self.options.relay);
        all / relays + usize::from(place.is_some_and(|place| place < all % relays))
    }

    /// Asks workers beyond the share to hand over.
    fn give_back(&mut self) {
        let extra = self.stops.len().saturating_sub(self.share());
        let mut partitions: Vec<&PartitionId> = self.stops.keys().collect();
        partitions.sort();
        for partition in partitions.into_iter().rev().take(extra) {
            self.stops[partition].cancel();
        }
    }

    async fn acquire(&mut self, partition: PartitionId, stop: &CancellationToken) -> Result<()> {
        let options = &self.options;
        let asked_at = self.clock.elapsed();
        let answer = self
            .store
            .acquire(&options.group, &partition, &options.relay, options.lease_ttl)
            .await?;
        let lease = match answer {
            Acquired::Held(lease) => Arc::new(lease),
            Acquired::Busy { .. } => return Ok(()),
        };
        tracing::info!(%partition, epoch = lease.epoch().get(), "lease acquired");
        let trust = Arc::new(Trust::new(asked_at + options.trust_window()));
        let held = Held { lease, trust, news: Arc::clone(&self.news) };
        self.book.add(held.clone());
        // The relay's own stop reaches the worker also while the database keeps us waiting here.
        let stop = stop.child_token();
        self.stops.insert(partition.clone(), stop.clone());
        let (work, store) = (Arc::clone(&self.work), Arc::clone(&self.store));
        let (book, count) = (Arc::clone(&self.book), self.partitions.len());
        self.workers.spawn(async move {
            let exit = work.run(held.clone(), count, stop).await;
            book.remove(&partition);
            if exit == WorkExit::Done
                && let Err(error) = store.release(&held.lease).await
            {
                tracing::warn!(%partition, error = %error.chain(),
                    "the lease was not released; it runs out by itself");
            }
            tracing::info!(%partition, epoch = held.lease.epoch().get(), ?exit, "worker ended");
            (partition, exit)
        });
        Ok(())
    }

    /// A planned stop: others learn first that this relay leaves, then each partition follows as
    /// soon as it is drained.
    async fn hand_over(&mut self) {
        for stop in self.stops.values() {
            stop.cancel();
        }
        let (store, options) = (Arc::clone(&self.store), self.options.clone());
        let leave = async {
            if let Err(error) = store.leave(&options.group, &options.relay).await {
                tracing::warn!(error = %error.chain(), "leaving the group failed; it runs out");
            }
        };
        let drained = async {
            while let Some(ended) = self.workers.join_next().await {
                if let Err(error) = ended
                    && error.is_panic()
                {
                    std::panic::resume_unwind(error.into_panic());
                }
            }
        };
        tokio::join!(leave, drained);
    }
}
