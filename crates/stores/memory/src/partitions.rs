//! Generations of partitions: raising their number without reordering a key.
//!
//! What lives here: raising, and which partitions a consumer has to read. What does not: rows.
//! Invariant: partition p of n is followed by p, p+n, p+2n, … of the new count, so that each new
//! partition has exactly one parent, and a consumer reads it only after the parent's end.

use postrider_core::limits::MAX_PARTITIONS;
use postrider_core::{ConsumerName, Error, PartitionId, Result};

use crate::MemoryStore;

impl MemoryStore {
    /// Raises the number of partitions. Events committed from now on go to the new generation;
    /// consumers finish the old one first.
    ///
    /// # Errors
    /// `Permanent` unless `count` is a multiple of the present number, above it, and at most
    /// [`MAX_PARTITIONS`].
    pub fn raise_partitions(&self, count: u32) -> Result<()> {
        let now = self.inner.clock.now();
        let mut outbox = self.inner.outbox_mut();
        let old = outbox.count();
        if count <= old || !count.is_multiple_of(old) || count > MAX_PARTITIONS {
            return Err(Error::permanent(format!(
                "{old} partitions cannot become {count}; give a multiple of {old} up to \
                 {MAX_PARTITIONS}"
            )));
        }
        outbox.raise(count, now);
        drop(outbox);
        self.inner.news.notify_waiters();
        Ok(())
    }

    pub(crate) fn partitions_of(&self, consumer: &ConsumerName) -> Vec<PartitionId> {
        let ledger = self.inner.ledger();
        let outbox = self.inner.outbox();
        let standing = |id: &PartitionId| ledger.standing(consumer, id);
        let listed = outbox.partitions.iter().filter(|partition| match standing(&partition.id) {
            Some(standing) if standing.ended => false,
            Some(standing) if standing.position.is_some() => true,
            Some(_) | None => partition.parent.is_none(),
        });
        listed.map(|partition| partition.id.clone()).collect()
    }
}
