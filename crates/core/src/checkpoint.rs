//! Checkpoints: durable positions. Everything up to one is confirmed or among the dead letters.
//!
//! What lives here: the seam. What does not: when to write one.
//! Invariant: a checkpoint never moves back, and is only ever written under a held lease.

use async_trait::async_trait;

use crate::{ConsumerName, HeldLease, PartitionId, Position, Result, Successor, Timestamp};

/// What happened to the records between two checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tally {
    /// Confirmed by the sink.
    pub published: u64,
    /// Written to the dead letters (parked, waiting or skipped).
    pub parked: u64,
}

/// A consumer's durable position in one partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    /// Everything up to here is confirmed or among the dead letters.
    pub position: Position,
    /// Events confirmed since the consumer began, released dead letters among them.
    pub published: u64,
    /// When it was written, in the database's time.
    pub updated_at: Timestamp,
}

/// One consumer's standing in one partition, for `status` and `consumers list`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConsumerProgress {
    /// Who.
    pub consumer: ConsumerName,
    /// Where.
    pub partition: PartitionId,
    /// Its checkpoint.
    pub checkpoint: Checkpoint,
    /// Records beyond the checkpoint. A store may count only so many and estimate the others: its
    /// docs say from how many on.
    pub pending: u64,
    /// Append time of the oldest record beyond the checkpoint.
    pub oldest_pending_at: Option<Timestamp>,
    /// Dead letters that it still has: parked, waiting, requeued and skipped.
    pub parked: u64,
    /// Dead letters that a person dropped.
    pub dropped: u64,
    /// Whether it has finished this partition, which has successors.
    pub ended: bool,
}

/// Checkpoints of every consumer, in the source's own database.
#[async_trait]
pub trait Checkpoints: Send + Sync {
    /// The checkpoint, if the consumer has one.
    async fn checkpoint(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
    ) -> Result<Option<Checkpoint>>;

    /// Moves the checkpoint to `to` and adds the tally, in one fenced write; creates it if there
    /// is none. Moving to where it stands is allowed and adds no tally, so that a write whose
    /// outcome is unknown can be repeated.
    ///
    /// # Errors
    /// `Fenced` when the lease was taken over; then nothing was written. `Permanent` when `to`
    /// lies behind the checkpoint.
    async fn advance(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        to: &Position,
        tally: Tally,
    ) -> Result<()>;

    /// Ends the consumer's work on the lease's partition: marks it finished and creates the
    /// successors' checkpoints, in one fenced write. Idempotent.
    ///
    /// # Errors
    /// `Fenced` as in [`advance`](Self::advance).
    async fn finish(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        successors: &[Successor],
    ) -> Result<()>;

    /// Every consumer's standing in every partition.
    async fn progress(&self) -> Result<Vec<ConsumerProgress>>;

    /// Forgets a consumer: its checkpoints and dead letters. Returns whether it was known.
    ///
    /// # Errors
    /// `Transient` while a relay holds a lease under which the consumer advanced lately.
    async fn remove_consumer(&self, consumer: &ConsumerName) -> Result<bool>;
}
