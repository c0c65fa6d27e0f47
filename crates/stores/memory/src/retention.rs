//! Retention: forgetting rows that every consumer has passed.
//!
//! What lives here: one batch of pruning. What does not: when to prune.
//! Invariant: the slowest consumer's checkpoint bounds everything, and a consumer that has none in
//! a partition yet pins all of it.

use async_trait::async_trait;
use postrider_core::ulid::Ulid;
use postrider_core::{HeldLease, Pruned, Result, Retention, RetentionPolicy, Timestamp};

use crate::MemoryStore;
use crate::outbox::{Outbox, Partition, Row};

/// A deque this much larger than its content gives memory back.
const SPARE_FACTOR: usize = 4;
/// Smaller deques are not worth shrinking.
const KEEP_CAPACITY_ROWS: usize = 1_024;

#[async_trait]
impl Retention for MemoryStore {
    async fn prune(&self, lease: Option<&HeldLease>, policy: &RetentionPolicy) -> Result<Pruned> {
        let now = self.inner.clock.now();
        let mut documents = self.inner.documents();
        let ledger = self.inner.ledger();
        if let Some(lease) = lease {
            ledger.fence(lease)?;
        }
        if !policy.dry_run {
            documents.remove_expired(now);
        }
        drop(documents);
        let mut outbox = self.inner.outbox_mut();
        let mut pruned = Pruned::default();
        let mut left = policy.batch as usize;
        // Freed after the lock: payloads are given back without a reader or writer waiting.
        let mut forgotten = Vec::new();
        for index in 0..outbox.partitions.len() {
            let partition = &outbox.partitions[index];
            let Some(passed) = ledger.slowest(&partition.id) else { break };
            let all = prunable(partition, passed, now, policy);
            let some = all.min(left);
            left -= some;
            pruned.events += some as u64;
            pruned.more |= some < all;
            if !policy.dry_run {
                forget(&mut outbox, index, some, &mut forgotten);
            }
        }
        pruned.horizon = outbox
            .partitions
            .iter()
            .filter_map(|partition| partition.horizon)
            .min()
            .map(Into::into);
        drop(outbox);
        drop(ledger);
        drop(forgotten);
        Ok(pruned)
    }
}

/// How many rows at the front are both old enough and passed by every consumer.
fn prunable(
    partition: &Partition,
    passed: Ulid,
    now: Timestamp,
    policy: &RetentionPolicy,
) -> usize {
    partition
        .rows
        .partition_point(|row| row.ulid <= passed && now.since(row.ulid.time()) >= policy.keep)
}

fn forget(outbox: &mut Outbox, index: usize, rows: usize, forgotten: &mut Vec<Row>) {
    for _ in 0..rows {
        let partition = &mut outbox.partitions[index];
        let row = partition.rows.pop_front().expect("only counted rows are forgotten");
        partition.horizon = Some(row.ulid);
        outbox.ids.remove(&row.event_id());
        forgotten.push(row);
    }
    let rows = &mut outbox.partitions[index].rows;
    if rows.capacity() > KEEP_CAPACITY_ROWS.max(rows.len() * SPARE_FACTOR) {
        rows.shrink_to(KEEP_CAPACITY_ROWS.max(rows.len() * 2));
    }
}
