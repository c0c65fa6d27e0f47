//! The feed seam over the outbox.
//!
//! What lives here: taking the read lock for one page. What does not: rows and positions
//! (`outbox.rs`).
//! Invariant: a page is copied (its events are shared) and the lock let go before it is returned.

use async_trait::async_trait;
use postrider_core::{
    BatchLimit, ConsumerName, Feed, FeedPage, PartitionId, Position, Result, Timestamp,
};

use crate::MemoryStore;

#[async_trait]
impl Feed for MemoryStore {
    fn identity(&self) -> String {
        self.inner.identity.clone()
    }

    async fn partitions(&self, consumer: &ConsumerName) -> Result<Vec<PartitionId>> {
        Ok(self.partitions_of(consumer))
    }

    async fn read(
        &self,
        partition: &PartitionId,
        after: &Position,
        limit: BatchLimit,
    ) -> Result<FeedPage> {
        let (after, now) = (after.to_ulid()?, self.inner.clock.now());
        self.inner.outbox().partition(partition)?.read(after, now, limit)
    }

    async fn head(&self, partition: &PartitionId) -> Result<Position> {
        let now = self.inner.clock.now();
        let outbox = self.inner.outbox();
        let partition = outbox.partition(partition)?;
        let head = partition.head(now);
        partition.promise(head);
        Ok(head.into())
    }

    async fn position_at(&self, partition: &PartitionId, time: Timestamp) -> Result<Position> {
        let now = self.inner.clock.now();
        self.inner.outbox().partition(partition)?.position_at(time, now)
    }

    async fn changed(&self) {
        self.inner.news.notified().await;
    }
}
