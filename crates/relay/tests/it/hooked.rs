//! A store whose calls a test can watch, delay or fail.
//!
//! What lives here: the wrapper. What does not: which call meets what, which each test says.
//! Invariant: a call that meets nothing is the inner store's own.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postrider_core::{
    Acquired, BatchLimit, Checkpoint, Checkpoints, ConsumerName, ConsumerProgress, DeadLetter,
    DeadLetterFilter, DeadLetterId, DeadLetterState, DeadLetters, Error, GroupName, Heartbeat,
    HeldLease, Key, LeaseInfo, Leases, NewDeadLetter, News, PartitionId, Position, Pruned, RelayId,
    Renewal, Result, Retention, RetentionPolicy, Successor, Tally,
};
use postrider_store_memory::MemoryStore;

/// A call that a test can meet; `Released` after its answer was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call {
    Checkpoint,
    Blocked,
    Park,
    Released,
    /// Listing the leases, which the coordinator does again and again.
    Leases,
    Heartbeat,
    Other(&'static str),
}

/// What a call meets before its answer goes out: how long it waits, and whether it fails.
pub(crate) type Hook = dyn Fn(Call) -> (Duration, Option<Error>) + Send + Sync;

pub(crate) struct Hooked {
    pub(crate) inner: MemoryStore,
    pub(crate) hook: Arc<Hook>,
    pub(crate) heartbeats: Heartbeats,
}

/// What a heartbeat brings along.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Heartbeats {
    Bare,
    WithNews,
}

impl Hooked {
    async fn meet(&self, call: Call) -> Result<()> {
        let (wait, error) = (self.hook)(call);
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
        error.map_or(Ok(()), Err)
    }
}

#[async_trait]
impl Leases for Hooked {
    async fn join(
        &self,
        group: &GroupName,
        relay: &RelayId,
        ttl: Duration,
    ) -> Result<Vec<RelayId>> {
        self.meet(Call::Other("join")).await?;
        self.inner.join(group, relay, ttl).await
    }

    async fn leave(&self, group: &GroupName, relay: &RelayId) -> Result<()> {
        self.meet(Call::Other("leave")).await?;
        self.inner.leave(group, relay).await
    }

    async fn acquire(
        &self,
        group: &GroupName,
        partition: &PartitionId,
        relay: &RelayId,
        ttl: Duration,
    ) -> Result<Acquired> {
        self.meet(Call::Other("acquire")).await?;
        self.inner.acquire(group, partition, relay, ttl).await
    }

    async fn renew(&self, leases: &[&HeldLease], ttl: Duration) -> Result<Vec<Renewal>> {
        self.inner.renew(leases, ttl).await
    }

    /// As a store that keeps the holders alive by it.
    async fn heartbeat(
        &self,
        group: &GroupName,
        leases: &[&HeldLease],
        ttl: Duration,
    ) -> Result<Heartbeat> {
        self.meet(Call::Heartbeat).await?;
        let renewals = self.inner.renew(leases, ttl).await?;
        if self.heartbeats == Heartbeats::Bare {
            return Ok(Heartbeat { renewals, news: None });
        }
        let relays = self.inner.join(group, leases[0].holder(), ttl).await?;
        let requeued =
            DeadLetterFilter { state: Some(DeadLetterState::Requeued), ..Default::default() };
        let requeued = !self.inner.list(&requeued, None, 1).await?.is_empty();
        Ok(Heartbeat { renewals, news: Some(News { relays, requeued }) })
    }

    async fn release(&self, lease: &HeldLease) -> Result<()> {
        self.meet(Call::Other("release")).await?;
        self.inner.release(lease).await
    }

    async fn leases(&self, group: &GroupName) -> Result<Vec<LeaseInfo>> {
        self.meet(Call::Leases).await?;
        self.inner.leases(group).await
    }
}

#[async_trait]
impl Checkpoints for Hooked {
    async fn checkpoint(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
    ) -> Result<Option<Checkpoint>> {
        self.meet(Call::Checkpoint).await?;
        self.inner.checkpoint(consumer, partition).await
    }

    async fn advance(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        to: &Position,
        tally: Tally,
    ) -> Result<()> {
        self.meet(Call::Other("advance")).await?;
        self.inner.advance(lease, consumer, to, tally).await
    }

    async fn finish(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        successors: &[Successor],
    ) -> Result<()> {
        self.meet(Call::Other("finish")).await?;
        self.inner.finish(lease, consumer, successors).await
    }

    async fn progress(&self) -> Result<Vec<ConsumerProgress>> {
        self.meet(Call::Other("progress")).await?;
        self.inner.progress().await
    }

    async fn remove_consumer(&self, consumer: &ConsumerName) -> Result<bool> {
        self.meet(Call::Other("remove_consumer")).await?;
        self.inner.remove_consumer(consumer).await
    }
}

#[async_trait]
impl DeadLetters for Hooked {
    async fn park(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        letters: &[NewDeadLetter],
    ) -> Result<u64> {
        self.meet(Call::Park).await?;
        self.inner.park(lease, consumer, letters).await
    }

    async fn blocked(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        keys: &[Key],
    ) -> Result<Vec<Key>> {
        self.meet(Call::Blocked).await?;
        self.inner.blocked(consumer, partition, keys).await
    }

    async fn blocking(&self, consumer: &ConsumerName, partition: &PartitionId) -> Result<u64> {
        self.meet(Call::Other("blocking")).await?;
        self.inner.blocking(consumer, partition).await
    }

    async fn released(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        limit: BatchLimit,
    ) -> Result<Vec<DeadLetter>> {
        let letters = self.inner.released(consumer, partition, limit).await?;
        self.meet(Call::Released).await?;
        Ok(letters)
    }

    async fn resolve(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        ids: &[DeadLetterId],
    ) -> Result<()> {
        self.meet(Call::Other("resolve")).await?;
        self.inner.resolve(lease, consumer, ids).await
    }

    async fn refuse(
        &self,
        lease: &HeldLease,
        id: DeadLetterId,
        state: DeadLetterState,
        reason: &str,
        attempts: u32,
    ) -> Result<()> {
        self.meet(Call::Other("refuse")).await?;
        self.inner.refuse(lease, id, state, reason, attempts).await
    }

    async fn list(
        &self,
        filter: &DeadLetterFilter,
        after: Option<DeadLetterId>,
        limit: usize,
    ) -> Result<Vec<DeadLetter>> {
        self.meet(Call::Other("list")).await?;
        self.inner.list(filter, after, limit).await
    }

    async fn requeue(&self, filter: &DeadLetterFilter) -> Result<u64> {
        self.meet(Call::Other("requeue")).await?;
        self.inner.requeue(filter).await
    }

    async fn skip(&self, filter: &DeadLetterFilter) -> Result<u64> {
        self.meet(Call::Other("skip")).await?;
        self.inner.skip(filter).await
    }

    async fn discard(&self, filter: &DeadLetterFilter) -> Result<u64> {
        self.meet(Call::Other("discard")).await?;
        self.inner.discard(filter).await
    }

    async fn at(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        position: &Position,
    ) -> Result<Option<DeadLetter>> {
        self.meet(Call::Other("at")).await?;
        self.inner.at(consumer, partition, position).await
    }
}

#[async_trait]
impl Retention for Hooked {
    async fn prune(&self, lease: Option<&HeldLease>, policy: &RetentionPolicy) -> Result<Pruned> {
        self.meet(Call::Other("prune")).await?;
        self.inner.prune(lease, policy).await
    }
}
