//! The read seam: what a relay reads from.
//!
//! What lives here: `Source` and `Reader`, behind which stands a store's feed, a write-ahead log or
//! a change feed. What does not: polling a feed (`feed_source.rs`).
//! Invariant: what a reader handed out, a later reader opened at the same place hands out again, in
//! the same order.

use async_trait::async_trait;

use crate::{Batch, BatchLimit, ConsumerName, PartitionId, Position, Result, Timestamp};

/// Where a reader begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StartFrom {
    /// The oldest record that is kept.
    Oldest,
    /// The head: only what is committed from now on.
    Now,
    /// The first record appended at or after a time.
    Time(Timestamp),
    /// After a position: where a checkpoint stands.
    After(Position),
}

/// A partition that takes over from one that ended, and where its readers begin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Successor {
    /// The new partition.
    pub partition: PartitionId,
    /// A consumer that finished the old partition begins here.
    pub from: Position,
}

/// What a reader hands out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadOutcome {
    /// Entries in feed order, or a position that moved without any.
    Batch(Batch),
    /// The partition was split or replaced; nothing follows here. A consumer writes the
    /// successors' checkpoints once all before is confirmed.
    Ended(Vec<Successor>),
}

/// What a relay reads: a store's feed, a write-ahead log or a change feed.
#[async_trait]
pub trait Source: Send + Sync {
    /// Names the data: two databases, or one before and after a re-creation, differ. Restoring a
    /// backup keeps it. For logs, checkpoints and reports; at most 255 bytes.
    fn identity(&self) -> String;

    /// The partitions that `consumer` has to read now, in a stable order. A successor is listed
    /// once the consumer's checkpoint for it exists (its predecessor was finished), and a
    /// finished predecessor is no longer listed.
    async fn partitions(&self, consumer: &ConsumerName) -> Result<Vec<PartitionId>>;

    /// Opens a reader. Any number may be open, on any partition.
    ///
    /// One that is not opened after a position hands out the place where it begins before any
    /// entry: a consumer makes it its checkpoint, so that "now" stays the same moment over a
    /// restart and retention waits for the consumer from the beginning.
    ///
    /// # Errors
    /// `Permanent` for a position that is refused: beyond the head, of another source, or below
    /// the retention horizon (the text names the horizon).
    async fn open(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        from: StartFrom,
    ) -> Result<Box<dyn Reader>>;
}

/// One reader of one partition, in feed order.
#[async_trait]
pub trait Reader: Send {
    /// Waits for records and returns a batch, in feed order, that is never empty unless only the
    /// position moved, or is told for the first time.
    ///
    /// # Errors
    /// `Transient` may be called again: the reader goes on where it was.
    ///
    /// # Cancellation
    /// Cancel-safe: a dropped call loses nothing.
    async fn next(&mut self, limit: BatchLimit) -> Result<ReadOutcome>;

    /// Hears that everything up to `position` is durable at the sink and checkpointed. Returns at
    /// once: a log's reader hands it to the task that reports to the server.
    fn confirmed(&mut self, position: &Position);
}
