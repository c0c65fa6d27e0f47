//! A relay's store under the dice: leases, checkpoints, dead letters, retention.
//!
//! What lives here: the four seams, call by call. What does not: the dice.
//! Invariant: a write whose answer is lost was made; the relay has to live with not knowing.

use std::time::Duration;

use async_trait::async_trait;
use postrider_core::{
    Acquired, BatchLimit, Checkpoint, Checkpoints, ConsumerName, ConsumerProgress, DeadLetter,
    DeadLetterFilter, DeadLetterId, DeadLetterState, DeadLetters, GroupName, HeldLease, Key,
    LeaseInfo, Leases, NewDeadLetter, PartitionId, Position, Pruned, RelayId, Renewal, Result,
    Retention, RetentionPolicy, Successor, Tally,
};

use super::Faulty;

#[async_trait]
impl<S: Leases + ?Sized> Leases for Faulty<S> {
    async fn join(
        &self,
        group: &GroupName,
        relay: &RelayId,
        ttl: Duration,
    ) -> Result<Vec<RelayId>> {
        self.struck("joining", self.inner.join(group, relay, ttl)).await
    }

    async fn leave(&self, group: &GroupName, relay: &RelayId) -> Result<()> {
        self.struck("leaving", self.inner.leave(group, relay)).await
    }

    async fn acquire(
        &self,
        group: &GroupName,
        partition: &PartitionId,
        relay: &RelayId,
        ttl: Duration,
    ) -> Result<Acquired> {
        self.struck("acquiring a lease", self.inner.acquire(group, partition, relay, ttl)).await
    }

    async fn renew(&self, leases: &[&HeldLease], ttl: Duration) -> Result<Vec<Renewal>> {
        self.struck("renewing leases", self.inner.renew(leases, ttl)).await
    }

    async fn release(&self, lease: &HeldLease) -> Result<()> {
        self.struck("releasing a lease", self.inner.release(lease)).await
    }

    async fn leases(&self, group: &GroupName) -> Result<Vec<LeaseInfo>> {
        self.struck("listing leases", self.inner.leases(group)).await
    }
}

#[async_trait]
impl<S: Checkpoints + ?Sized> Checkpoints for Faulty<S> {
    async fn checkpoint(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
    ) -> Result<Option<Checkpoint>> {
        self.struck("reading a checkpoint", self.inner.checkpoint(consumer, partition)).await
    }

    async fn advance(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        to: &Position,
        tally: Tally,
    ) -> Result<()> {
        self.struck("moving a checkpoint", self.inner.advance(lease, consumer, to, tally)).await
    }

    async fn finish(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        successors: &[Successor],
    ) -> Result<()> {
        self.struck("finishing", self.inner.finish(lease, consumer, successors)).await
    }

    async fn progress(&self) -> Result<Vec<ConsumerProgress>> {
        self.struck("reading progress", self.inner.progress()).await
    }

    async fn remove_consumer(&self, consumer: &ConsumerName) -> Result<bool> {
        self.struck("removing a consumer", self.inner.remove_consumer(consumer)).await
    }
}

#[async_trait]
impl<S: DeadLetters + ?Sized> DeadLetters for Faulty<S> {
    async fn park(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        letters: &[NewDeadLetter],
    ) -> Result<u64> {
        self.struck("parking", self.inner.park(lease, consumer, letters)).await
    }

    async fn blocked(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        keys: &[Key],
    ) -> Result<Vec<Key>> {
        self.struck("looking up keys", self.inner.blocked(consumer, partition, keys)).await
    }

    async fn blocking(&self, consumer: &ConsumerName, partition: &PartitionId) -> Result<u64> {
        self.struck("counting letters", self.inner.blocking(consumer, partition)).await
    }

    async fn released(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        limit: BatchLimit,
    ) -> Result<Vec<DeadLetter>> {
        let released = self.inner.released(consumer, partition, limit);
        self.struck("reading released letters", released).await
    }

    async fn resolve(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        ids: &[DeadLetterId],
    ) -> Result<()> {
        self.struck("resolving", self.inner.resolve(lease, consumer, ids)).await
    }

    async fn refuse(
        &self,
        lease: &HeldLease,
        id: DeadLetterId,
        state: DeadLetterState,
        reason: &str,
        attempts: u32,
    ) -> Result<()> {
        let refused = self.inner.refuse(lease, id, state, reason, attempts);
        self.struck("refusing a letter", refused).await
    }

    async fn list(
        &self,
        filter: &DeadLetterFilter,
        after: Option<DeadLetterId>,
        limit: usize,
    ) -> Result<Vec<DeadLetter>> {
        self.struck("listing letters", self.inner.list(filter, after, limit)).await
    }

    async fn requeue(&self, filter: &DeadLetterFilter) -> Result<u64> {
        self.struck("requeueing", self.inner.requeue(filter)).await
    }

    async fn skip(&self, filter: &DeadLetterFilter) -> Result<u64> {
        self.struck("skipping", self.inner.skip(filter)).await
    }

    async fn discard(&self, filter: &DeadLetterFilter) -> Result<u64> {
        self.struck("discarding", self.inner.discard(filter)).await
    }

    async fn at(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        position: &Position,
    ) -> Result<Option<DeadLetter>> {
        self.struck("reading a letter", self.inner.at(consumer, partition, position)).await
    }
}

#[async_trait]
impl<S: Retention + ?Sized> Retention for Faulty<S> {
    async fn prune(&self, lease: Option<&HeldLease>, policy: &RetentionPolicy) -> Result<Pruned> {
        self.struck("pruning", self.inner.prune(lease, policy)).await
    }
}
