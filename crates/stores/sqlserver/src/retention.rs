//! Retention: forgetting events that every consumer has passed, and documents past their time.
//!
//! What lives here: one batch of pruning. What does not: when to prune; the statements, which say
//! what pins what (`sql/retention_prune.sql`).
//! Invariant: the slowest consumer's checkpoint bounds everything, judged in the transaction that
//! deletes; one that has none in a partition yet pins all of it.

use async_trait::async_trait;
use postrider_core::{HeldLease, Pruned, Result, Retention, RetentionPolicy};

use crate::SqlServerStore;
use crate::connections::Param;
use crate::leases::{Fence, short_answer};
use crate::row::{maybe_bytes, number, position};
use crate::sql;

#[async_trait]
impl Retention for SqlServerStore {
    async fn prune(&self, lease: Option<&HeldLease>, policy: &RetentionPolicy) -> Result<Pruned> {
        let batch = i32::try_from(policy.batch.max(1)).unwrap_or(i32::MAX);
        if !policy.dry_run {
            let most = i64::from(batch);
            let params: [Param<'_>; 1] = [&most];
            self.run("remove expired documents", sql::DOCUMENT_EXPIRE, &params).await?;
        }
        let place = "prune the outbox";
        let fence = lease.map(Fence::of);
        // The driver sends a null text as one of no type, which not every engine takes.
        let group = fence.as_ref().map_or("", |fence| fence.group);
        let partition = fence.as_ref().map_or("", |fence| fence.partition);
        let holder = fence.as_ref().map_or("", |fence| fence.holder);
        let epoch = fence.as_ref().map(|fence| fence.epoch);
        let keep = i64::try_from(policy.keep.as_millis()).unwrap_or(i64::MAX).min(KEEP_MS);
        let dry_run = i32::from(policy.dry_run);
        let params: [Param<'_>; 7] = [&group, &partition, &holder, &epoch, &keep, &batch, &dry_run];
        let sets = self.run(place, sql::RETENTION_PRUNE, &params).await?;
        let row = sets.last().and_then(|set| set.first()).ok_or_else(|| short_answer(place))?;
        let horizon = match maybe_bytes(row, 2, "horizon")? {
            Some(_) => Some(position(row, 2, "horizon")?),
            None => None,
        };
        Ok(Pruned {
            events: number(row, 0, "events")?.unsigned_abs(),
            horizon,
            more: number(row, 1, "more")? != 0,
        })
    }
}

/// Fifty years: what is kept longer is kept for ever, and SQL Server's times have a first one.
const KEEP_MS: i64 = 50 * 366 * 86_400_000;
