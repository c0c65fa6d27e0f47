//! Checkpoints, and the ledger that holds everything a relay keeps beside the events.
//!
//! What lives here: consumers' standings. What does not: leases and letters, which have files of
//! their own over the same ledger.
//! Invariant: a checkpoint never moves back and is only written under the newest epoch.

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use postrider_core::ulid::Ulid;
use postrider_core::{
    Checkpoint, Checkpoints, ConsumerName, ConsumerProgress, Epoch, Error, GroupName, HeldLease,
    PartitionId, Position, RelayId, Result, Successor, Tally, Timestamp,
};

use crate::MemoryStore;
use crate::dead_letters::Letters;
use crate::leases::LeaseRow;
use crate::outbox::START;

/// A consumer in one partition.
#[derive(Default)]
pub(crate) struct Standing {
    pub(crate) position: Option<Ulid>,
    pub(crate) published: u64,
    pub(crate) dropped: u64,
    updated_at: Timestamp,
    pub(crate) ended: bool,
    /// The lease under which it last advanced.
    advanced_under: Option<(GroupName, Epoch)>,
}

/// Leases, live relays, checkpoints and dead letters.
#[derive(Default)]
pub(crate) struct Ledger {
    pub(crate) leases: BTreeMap<GroupName, BTreeMap<PartitionId, LeaseRow>>,
    pub(crate) members: BTreeMap<GroupName, BTreeMap<RelayId, Duration>>,
    pub(crate) standings: BTreeMap<ConsumerName, BTreeMap<PartitionId, Standing>>,
    pub(crate) letters: Letters,
}

impl Ledger {
    pub(crate) fn standing(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
    ) -> Option<&Standing> {
        self.standings.get(consumer)?.get(partition)
    }

    pub(crate) fn standing_mut(
        &mut self,
        consumer: &ConsumerName,
        partition: &PartitionId,
    ) -> &mut Standing {
        let standings = self.standings.entry(consumer.clone()).or_default();
        standings.entry(partition.clone()).or_default()
    }

    /// What every known consumer has passed in a partition; none without any consumer.
    pub(crate) fn slowest(&self, partition: &PartitionId) -> Option<Ulid> {
        let passed = |standings: &BTreeMap<PartitionId, Standing>| match standings.get(partition) {
            Some(standing) if standing.ended => Ulid::from_bytes([0xff; 16]),
            Some(standing) => standing.position.unwrap_or(START),
            None => START,
        };
        self.standings.values().map(passed).min()
    }
}

#[async_trait]
impl Checkpoints for MemoryStore {
    async fn checkpoint(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
    ) -> Result<Option<Checkpoint>> {
        let ledger = self.inner.ledger();
        Ok(ledger.standing(consumer, partition).and_then(Standing::checkpoint))
    }

    async fn advance(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        to: &Position,
        tally: Tally,
    ) -> Result<()> {
        let (to, now) = (to.to_ulid()?, self.inner.clock.now());
        let mut ledger = self.inner.ledger();
        ledger.fence(lease)?;
        if let Some(standing) = ledger.standing(consumer, lease.partition())
            && standing.position.is_some_and(|from| to < from)
        {
            return Err(Error::permanent(format!(
                "checkpoint of {consumer} in partition {} would move back to {to}",
                lease.partition()
            )));
        }
        let standing = ledger.standing_mut(consumer, lease.partition());
        if standing.position != Some(to) {
            standing.published += tally.published;
        }
        standing.position = Some(to);
        standing.updated_at = now;
        standing.advanced_under = Some((lease.group().clone(), lease.epoch()));
        Ok(())
    }

    async fn finish(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        successors: &[Successor],
    ) -> Result<()> {
        let now = self.inner.clock.now();
        let starts = successors.iter().map(|successor| successor.from.to_ulid());
        let starts: Vec<Ulid> = starts.collect::<Result<_>>()?;
        let mut ledger = self.inner.ledger();
        ledger.fence(lease)?;
        for (successor, from) in successors.iter().zip(starts) {
            let standing = ledger.standing_mut(consumer, &successor.partition);
            if standing.position.is_none() {
                standing.position = Some(from);
                standing.updated_at = now;
            }
        }
        let standing = ledger.standing_mut(consumer, lease.partition());
        if !standing.ended {
            standing.ended = true;
            standing.updated_at = now;
        }
        ledger.letters.follow(consumer, lease.partition(), successors);
        Ok(())
    }

    async fn progress(&self) -> Result<Vec<ConsumerProgress>> {
        let ledger = self.inner.ledger();
        let outbox = self.inner.outbox();
        let mut progress = Vec::new();
        for (consumer, standings) in &ledger.standings {
            for (partition, standing) in standings {
                let Some(checkpoint) = standing.checkpoint() else { continue };
                let (pending, oldest_pending_at) = match (standing.ended, standing.position) {
                    (false, Some(after)) => outbox.partition(partition)?.pending(after),
                    (true, _) | (false, None) => (0, None),
                };
                progress.push(ConsumerProgress {
                    consumer: consumer.clone(),
                    partition: partition.clone(),
                    checkpoint,
                    pending,
                    oldest_pending_at,
                    parked: ledger.letters.kept(consumer, partition),
                    dropped: standing.dropped,
                    ended: standing.ended,
                });
            }
        }
        Ok(progress)
    }

    async fn remove_consumer(&self, consumer: &ConsumerName) -> Result<bool> {
        let now = self.inner.clock.elapsed();
        let mut ledger = self.inner.ledger();
        for (partition, standing) in ledger.standings.get(consumer).into_iter().flatten() {
            if let Some((group, epoch)) = &standing.advanced_under
                && ledger.runs(group, partition, *epoch, now)
            {
                return Err(Error::transient(format!(
                    "consumer {consumer} is at work in partition {partition}; stop its relays"
                )));
            }
        }
        let known = ledger.standings.remove(consumer).is_some();
        Ok(ledger.letters.remove(consumer) || known)
    }
}

impl Standing {
    pub(crate) fn checkpoint(&self) -> Option<Checkpoint> {
        self.position.map(|position| Checkpoint {
            position: position.into(),
            published: self.published,
            updated_at: self.updated_at,
        })
    }
}
