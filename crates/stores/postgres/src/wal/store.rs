//! What a relay keeps, for an outbox that is read from the log.
//!
//! What lives here: checkpoints through the consumers' ledgers; all else is the store's own. What
//! does not: their SQL (`checkpoints.rs`).
//! Invariant: a checkpoint and what it says of transactions are written in one statement.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postrider_core::{
    Acquired, BatchLimit, Checkpoint, Checkpoints, ConsumerName, ConsumerProgress, DeadLetter,
    DeadLetterFilter, DeadLetterId, DeadLetterState, DeadLetters, Error, ErrorKind, GroupName,
    Heartbeat, HeldLease, Key, LeaseInfo, Leases, NewDeadLetter, PartitionId, Position, Pruned,
    RelayId, Renewal, Result, Retention, RetentionPolicy, Successor, Tally,
};

use super::position::WalPlace;
use super::{PostgresWal, checkpoints};

#[async_trait]
impl Checkpoints for PostgresWal {
    async fn checkpoint(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
    ) -> Result<Option<Checkpoint>> {
        self.store().checkpoint(consumer, partition).await
    }

    async fn advance(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        to: &Position,
        tally: Tally,
    ) -> Result<()> {
        let to = WalPlace::of(to)?;
        let books = self.wal.books().get(consumer).map(Arc::clone).ok_or_else(|| {
            Error::permanent(format!("{consumer} has no reader here whose place could be kept"))
        })?;
        // Before the write: a copy must not show the place without knowing of the letters.
        if let Some(mirror) = self.wal.mirror.as_ref().filter(|_| tally.parked > 0) {
            mirror.passes_letters(consumer);
        }
        let adoption = books.ledger().adoption();
        for step in &adoption {
            checkpoints::advance(self.store(), lease, consumer, step, Tally::default()).await?;
        }
        if !adoption.is_empty() {
            books.ledger().adopted();
        }
        let stands = books.ledger().delivered().place;
        if adoption.is_empty() || stands.is_none_or(|stands| stands.key() != to.key()) {
            let step = books.ledger().plan(to)?;
            checkpoints::advance(self.store(), lease, consumer, &step, tally).await?;
            books.ledger().done(step);
        }
        books.written.notify_waiters();
        if let Some(mirror) = &self.wal.mirror {
            mirror.moved(consumer, &books, lease);
        }
        Ok(())
    }

    async fn finish(&self, _: &HeldLease, _: &ConsumerName, _: &[Successor]) -> Result<()> {
        Err(Error::new(ErrorKind::Unsupported, "the log is one partition, which never ends"))
    }

    async fn progress(&self) -> Result<Vec<ConsumerProgress>> {
        checkpoints::progress(self.store()).await
    }

    /// Also from the copy of the checkpoints, where it would count as known at the next start.
    async fn remove_consumer(&self, consumer: &ConsumerName) -> Result<bool> {
        let known = self.store().remove_consumer(consumer).await?;
        let Some(mirror) = &self.wal.mirror else { return Ok(known) };
        Ok(mirror.forget(&self.wal, consumer).await? || known)
    }
}

#[async_trait]
impl Retention for PostgresWal {
    /// What is deleted is told by ticks, and nobody else makes them where the log is read.
    async fn prune(&self, lease: Option<&HeldLease>, policy: &RetentionPolicy) -> Result<Pruned> {
        self.store().look().await?;
        self.store().prune(lease, policy).await
    }
}

#[async_trait]
impl Leases for PostgresWal {
    async fn join(
        &self,
        group: &GroupName,
        relay: &RelayId,
        ttl: Duration,
    ) -> Result<Vec<RelayId>> {
        self.store().join(group, relay, ttl).await
    }

    async fn leave(&self, group: &GroupName, relay: &RelayId) -> Result<()> {
        self.store().leave(group, relay).await
    }

    async fn acquire(
        &self,
        group: &GroupName,
        partition: &PartitionId,
        relay: &RelayId,
        ttl: Duration,
    ) -> Result<Acquired> {
        self.store().acquire(group, partition, relay, ttl).await
    }

    async fn renew(&self, leases: &[&HeldLease], ttl: Duration) -> Result<Vec<Renewal>> {
        self.store().renew(leases, ttl).await
    }

    async fn heartbeat(
        &self,
        group: &GroupName,
        leases: &[&HeldLease],
        ttl: Duration,
    ) -> Result<Heartbeat> {
        self.store().heartbeat(group, leases, ttl).await
    }

    async fn release(&self, lease: &HeldLease) -> Result<()> {
        if let Some(mirror) = &self.wal.mirror {
            mirror.finish(&self.wal).await;
        }
        self.store().release(lease).await
    }

    async fn leases(&self, group: &GroupName) -> Result<Vec<LeaseInfo>> {
        self.store().leases(group).await
    }
}

#[async_trait]
impl DeadLetters for PostgresWal {
    async fn park(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        letters: &[NewDeadLetter],
    ) -> Result<u64> {
        self.store().park(lease, consumer, letters).await
    }

    async fn blocked(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        keys: &[Key],
    ) -> Result<Vec<Key>> {
        self.store().blocked(consumer, partition, keys).await
    }

    async fn blocking(&self, consumer: &ConsumerName, partition: &PartitionId) -> Result<u64> {
        self.store().blocking(consumer, partition).await
    }

    async fn released(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        limit: BatchLimit,
    ) -> Result<Vec<DeadLetter>> {
        self.store().released(consumer, partition, limit).await
    }

    async fn resolve(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        ids: &[DeadLetterId],
    ) -> Result<()> {
        self.store().resolve(lease, consumer, ids).await
    }

    async fn refuse(
        &self,
        lease: &HeldLease,
        id: DeadLetterId,
        state: DeadLetterState,
        reason: &str,
        attempts: u32,
    ) -> Result<()> {
        self.store().refuse(lease, id, state, reason, attempts).await
    }

    async fn list(
        &self,
        filter: &DeadLetterFilter,
        after: Option<DeadLetterId>,
        limit: usize,
    ) -> Result<Vec<DeadLetter>> {
        self.store().list(filter, after, limit).await
    }

    async fn requeue(&self, filter: &DeadLetterFilter) -> Result<u64> {
        self.store().requeue(filter).await
    }

    async fn skip(&self, filter: &DeadLetterFilter) -> Result<u64> {
        self.store().skip(filter).await
    }

    async fn discard(&self, filter: &DeadLetterFilter) -> Result<u64> {
        self.store().discard(filter).await
    }

    async fn at(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        position: &Position,
    ) -> Result<Option<DeadLetter>> {
        self.store().at(consumer, partition, position).await
    }
}
