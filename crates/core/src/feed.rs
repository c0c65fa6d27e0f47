//! The read side of a SQL store's outbox.
//!
//! What lives here: the `Feed` seam. What does not: waiting and polling (`feed_source.rs`).
//! Invariant: the contract on the trait; the store suite of `conformance` checks each clause.

use async_trait::async_trait;

use crate::{BatchLimit, ConsumerName, Entry, PartitionId, Position, Result, Successor, Timestamp};

/// One page of a feed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FeedPage {
    /// In feed order. A short page is not the end; only an empty one means "at the head now", as
    /// far as [`Feed::is_head`] says so.
    pub entries: Vec<Entry>,
    /// Where to read on: the last entry's position, or a later one that a quiet partition gives.
    pub position: Position,
    /// Set when the partition has ended and this page reaches its end.
    pub ended: Option<Vec<Successor>>,
}

/// A race-safe, ordered, partitioned view of committed events.
///
/// 1. Nothing committed is ever skipped, whatever order transactions commit in; no reader waits
///    for an open transaction or blocks a writer.
/// 2. A record's position never changes and nothing ever appears behind one that was read.
/// 3. A transaction known to be committed before another began comes first; for one key, feed
///    order is commit order.
/// 4. Positions are ULIDs, exclusive, ordered bytewise within a partition.
#[async_trait]
pub trait Feed: Send + Sync {
    /// See [`Source::identity`](crate::Source::identity).
    fn identity(&self) -> String;

    /// See [`Source::partitions`](crate::Source::partitions).
    async fn partitions(&self, consumer: &ConsumerName) -> Result<Vec<PartitionId>>;

    /// The page after `after`.
    ///
    /// # Errors
    /// `Permanent` for a position that is beyond the head, names no record and no plain time, or
    /// lies below the retention horizon (the text names the horizon; the start is never below).
    async fn read(
        &self,
        partition: &PartitionId,
        after: &Position,
        limit: BatchLimit,
    ) -> Result<FeedPage>;

    /// Whether a page that `read` gave after `after` says that nothing more follows now. A feed
    /// that reads over other things may give its place alone: more may follow it at once.
    fn is_head(&self, page: &FeedPage, after: &Position) -> bool {
        let _ = after;
        page.entries.is_empty()
    }

    /// The newest position that `read` would accept now.
    async fn head(&self, partition: &PartitionId) -> Result<Position>;

    /// The position from which all records appended at or after `time` follow.
    ///
    /// # Errors
    /// `Permanent` for a time below the retention horizon. A time after the head is the head.
    async fn position_at(&self, partition: &PartitionId, time: Timestamp) -> Result<Position>;

    /// A position as people read it; nothing reads it back. Short, without line breaks.
    fn describe(&self, position: &Position) -> String {
        position.to_string()
    }

    /// Waits until there may be something new, as far as this process can tell; for ever where it
    /// can't. A hint only: readers poll as well. Cancel-safe.
    async fn changed(&self) {
        std::future::pending().await
    }

    /// [`changed`](Self::changed) for a reader that stands at `after`: returns at once when this
    /// process knows of something beyond it. Cancel-safe.
    async fn changed_after(&self, after: &Position) {
        let _ = after;
        self.changed().await;
    }

    /// Whether [`changed_after`](Self::changed_after) polls by itself, once for all readers of this
    /// process, so that a reader need not.
    fn watches(&self) -> bool {
        false
    }
}
