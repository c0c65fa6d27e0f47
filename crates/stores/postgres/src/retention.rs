//! Retention: forgetting whole segments of events that every consumer has passed.
//!
//! What lives here: the seam, as a few calls of the database's own functions, each in a transaction
//! of its own. What does not: the rules, which are SQL (`migrations/0003_retention.sql`), and when
//! to prune. Invariant: nothing is decided here; a call that is cut short has done a smaller step.

use std::time::Duration;

use async_trait::async_trait;
use postrider_core::{HeldLease, Position, Pruned, Result, Retention, RetentionPolicy};
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use crate::PostgresStore;
use crate::connections::Param;
use crate::documents;
use crate::leases::{LeaseKey, fence, fenced};
use crate::positions::Place;

/// Held against take-overs, as any write under a lease.
const FENCE: &str = concat!("WITH ", fence!());
const NO_FENCE: &str = "WITH fence AS MATERIALIZED (SELECT 1 AS held)";

/// Takes no lock that a writer or a reader would meet.
const PRUNE: &str = "outbox_prune";

/// ACCESS EXCLUSIVE on one segment that writers do not choose any more, waited for 25 ms at most.
const EMPTY: &str = "outbox_empty";

/// Takes no lock.
const PRUNABLE: &str = "outbox_prunable";

/// So often is a segment tried that somebody is reading: a page takes a few milliseconds, and one
/// that is read for longer is tried again when pruning is due next.
const ATTEMPTS: u32 = 3;
const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(50);

/// Everything up to a tick is forgotten; nothing yet, before the first that ends anywhere.
fn horizon(stamp: i64, seq: i64) -> Option<Position> {
    (seq > 0).then(|| Place { stamp, seq }.position())
}

impl PostgresStore {
    /// Calls one of the outbox's functions in a transaction of its own; `Fenced` when the lease is
    /// not the newest. The number 1 that each argument is multiplied by comes from the fence: no
    /// plan can make the call before it, or without it.
    async fn call(
        &self,
        place: &'static str,
        lease: Option<&HeldLease>,
        function: &str,
        arguments: &[Param<'_>],
    ) -> Result<Option<Row>> {
        let key = lease.map(LeaseKey::of);
        let params = key.as_ref().map_or_else(|| arguments.to_vec(), |key| key.params(arguments));
        let before = params.len() - arguments.len();
        let list: Vec<String> =
            (1..=arguments.len()).map(|i| format!("${} * fence.held", before + i)).collect();
        let sql = format!(
            "{} SELECT f.* FROM fence CROSS JOIN LATERAL {{schema}}.{{{function}}}({}) AS f",
            lease.map_or(NO_FENCE, |_| FENCE),
            list.join(", ")
        );
        let inner = &*self.inner;
        let rows = inner.connections.query(place, &inner.names.fill(&sql), &params).await?;
        match (rows.into_iter().next(), lease) {
            (None, Some(lease)) => Err(fenced(lease)),
            (row, _) => Ok(row),
        }
    }

    /// Empties one segment, unless somebody stays at work in it.
    async fn empty(&self, lease: Option<&HeldLease>, segment: i32) -> Result<u64> {
        for attempt in 0..ATTEMPTS {
            if attempt > 0 {
                tokio::time::sleep(BETWEEN_ATTEMPTS).await;
            }
            let params: [Param<'_>; 1] = [(&segment, Type::INT4)];
            let row = self.call("empty a segment", lease, EMPTY, &params).await?;
            if let Some(events) = row.and_then(|row| row.get::<_, Option<i64>>(0)) {
                return Ok(events.unsigned_abs());
            }
        }
        Ok(0)
    }
}

/// Pruning here means: the horizon moves to the newest tick that every consumer has passed and that
/// is older than `keep`, and whole segments below it are emptied. A segment is closed once its
/// oldest event has an eighth of `keep`, so events lie in the table for up to that much longer than
/// they can be read.
///
/// `batch` bounds what is deleted row by row in one transaction (ticks, ids that callers gave,
/// documents); a segment is emptied as a whole, one a call: its files are freed when that commits,
/// at up to 0.3 s of a processor for each gigabyte, and the caller can pause in between.
/// `Pruned::events` is exact for a segment of up to 100,000 events and an estimate from the
/// planner's statistics above. `more` does not speak of a segment that somebody is reading, or that
/// a writer has open: it is tried again when pruning is due next, and never waited for.
#[async_trait]
impl Retention for PostgresStore {
    async fn prune(&self, lease: Option<&HeldLease>, policy: &RetentionPolicy) -> Result<Pruned> {
        let keep_ms = i64::try_from(policy.keep.as_millis()).unwrap_or(i64::MAX);
        let mut pruned = Pruned::default();
        if policy.dry_run {
            let params: [Param<'_>; 1] = [(&keep_ms, Type::INT8)];
            let row = self.call("count what to prune", lease, PRUNABLE, &params).await?;
            if let Some(row) = row {
                pruned.events = row.get::<_, i64>(0).unsigned_abs();
                pruned.horizon = horizon(row.get(1), row.get(2));
            }
            return Ok(pruned);
        }
        let most = i32::try_from(policy.batch.max(1)).unwrap_or(i32::MAX);
        let params: [Param<'_>; 2] = [(&keep_ms, Type::INT8), (&most, Type::INT4)];
        let row = self.call("move the horizon", lease, PRUNE, &params).await?;
        // What was read below the horizon must not be handed out any more.
        self.inner.chunks.clear();
        let Some(row) = row else { return Ok(pruned) };
        pruned.horizon = horizon(row.get(0), row.get(1));
        pruned.more = row.get(2);
        let segments: Vec<i32> = row.get(3);
        for (number, segment) in (1..).zip(&segments) {
            pruned.events = self.empty(lease, *segment).await?;
            if pruned.events > 0 {
                pruned.more |= number < segments.len();
                break;
            }
        }
        if !pruned.more {
            // Last, so that a failure keeps no segment full; after the calls that check the lease.
            let (connections, batch) = (&self.inner.connections, policy.batch.max(1));
            let removed = documents::remove_expired(connections, &self.inner.names, batch).await?;
            pruned.more = removed >= u64::from(batch);
        }
        Ok(pruned)
    }
}
