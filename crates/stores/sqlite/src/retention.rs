//! Retention: forgetting events that every consumer has passed, and documents past their time.
//!
//! What lives here: one batch of pruning. What does not: when to prune.
//! Invariant: the slowest consumer's checkpoint bounds everything; one that has none in a
//! partition yet pins all of it; the newest event stays, because its `seq` and time seed the next.

use async_trait::async_trait;
use postrider_core::{HeldLease, Pruned, Result, Retention, RetentionPolicy};
use rusqlite::{Connection, Transaction};

use crate::SqliteStore;
use crate::clock::to_ms;
use crate::documents;
use crate::error::failed;
use crate::leases::{copy, fence};
use crate::partitions::{self, Partition};
use crate::positions::{self, Place};

/// Each known consumer's standing in one partition; without a row in it, it has not begun there.
const STANDINGS: &str = "SELECT n.consumer, c.position, ifnull(c.ended, 0)
    FROM (SELECT DISTINCT consumer FROM postrider_checkpoint) n
    LEFT JOIN postrider_checkpoint c ON c.consumer = n.consumer AND c.partition = ?1";

/// The `seq` that every consumer has passed in a partition; nothing without any consumer.
fn slowest(tx: &Connection, partition: &Partition) -> Result<Option<i64>> {
    let place = "find the slowest consumer";
    let mut statement = tx.prepare_cached(STANDINGS).map_err(failed(place))?;
    let rows = statement
        .query_map([partition.id().as_str()], |row| {
            Ok((row.get::<_, Option<Vec<u8>>>(1)?, row.get::<_, bool>(2)?))
        })
        .map_err(failed(place))?;
    let mut slowest: Option<i64> = None;
    for row in rows {
        let passed = match row.map_err(failed(place))? {
            (_, true) => i64::MAX,
            (Some(position), false) => positions::stored_seq(tx, &position)?,
            (None, false) => 0,
        };
        slowest = Some(slowest.map_or(passed, |least| least.min(passed)));
    }
    Ok(slowest)
}

/// The oldest events of a partition up to `to`: how many of at most `most`, and the last of them.
fn oldest(tx: &Connection, partition: &Partition, to: i64, most: i64) -> Result<(i64, Place)> {
    tx.prepare_cached(
        "SELECT count(*), ifnull(max(at_ms), 0), ifnull(max(seq), 0) FROM (
             SELECT at_ms, seq FROM postrider_outbox
             WHERE partition = ?1 AND seq <= ?2 ORDER BY seq LIMIT ?3)",
    )
    .and_then(|mut statement| {
        statement.query_row((partition.number, to, most), |row| {
            Ok((row.get(0)?, Place { at_ms: row.get(1)?, seq: row.get(2)? }))
        })
    })
    .map_err(failed("find events to prune"))
}

/// The deletion is bounded by a `seq` that was found under the same write lock.
fn forget(tx: &Transaction<'_>, partition: &Partition, last: Place) -> Result<()> {
    let place = "prune the outbox";
    tx.prepare_cached("DELETE FROM postrider_outbox WHERE partition = ?1 AND seq <= ?2")
        .and_then(|mut statement| statement.execute((partition.number, last.seq)))
        .map_err(failed(place))?;
    tx.prepare_cached(
        "UPDATE postrider_partition SET horizon_ms = ?2, horizon_seq = ?3 WHERE number = ?1",
    )
    .and_then(|mut statement| statement.execute((partition.number, last.at_ms, last.seq)))
    .map_err(failed(place))?;
    Ok(())
}

fn prune(tx: &Transaction<'_>, policy: &RetentionPolicy, now_ms: i64) -> Result<Pruned> {
    let mut pruned = Pruned::default();
    let newest = positions::head(tx)?.unwrap_or_default();
    // Older than `keep`, and never the newest.
    let old = positions::last_before(tx, now_ms.saturating_sub(to_ms(policy.keep)) + 1)?;
    let old = old.min(newest.seq - 1);
    let mut left = i64::from(policy.batch.max(1));
    for partition in partitions::all(tx)? {
        let Some(passed) = slowest(tx, &partition)? else { break };
        let (found, last) = oldest(tx, &partition, old.min(passed), left + 1)?;
        let (some, last) = match found > left {
            true => {
                pruned.more = true;
                oldest(tx, &partition, old.min(passed), left)?
            }
            false => (found, last),
        };
        if some > 0 && !policy.dry_run {
            forget(tx, &partition, last)?;
        }
        left -= some;
        pruned.events += some.unsigned_abs();
    }
    let horizons = partitions::all(tx)?.into_iter().map(|partition| partition.horizon);
    let lowest = horizons.filter(|horizon| *horizon != Place::default()).min();
    pruned.horizon = lowest.map(Place::position);
    Ok(pruned)
}

#[async_trait]
impl Retention for SqliteStore {
    async fn prune(&self, lease: Option<&HeldLease>, policy: &RetentionPolicy) -> Result<Pruned> {
        let (lease, policy, now_ms) = (lease.map(copy), *policy, self.inner.clock.wall_ms());
        self.write_tx(move |tx| {
            if let Some(lease) = &lease {
                fence(tx, lease)?;
            }
            if !policy.dry_run {
                documents::remove_expired(tx, policy.batch, now_ms)?;
            }
            prune(tx, &policy, now_ms)
        })
        .await
    }
}
