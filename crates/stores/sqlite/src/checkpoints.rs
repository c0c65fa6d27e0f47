//! Checkpoints and the totals that prove that nothing was lost.
//!
//! What lives here: the seam over `postrider_checkpoint`. What does not: dead letters, whose
//! number is counted where they stand.
//! Invariant: a checkpoint never moves back; it moves in the same IMMEDIATE transaction that has
//! checked its lease; published + parked + dropped + pending = appended.

use async_trait::async_trait;
use postrider_core::{
    Checkpoint, Checkpoints, ConsumerName, ConsumerProgress, Error, HeldLease, PartitionId,
    Position, Result, Successor, Tally, key_hash,
};
use rusqlite::{Connection, OptionalExtension, Transaction};

use crate::SqliteStore;
use crate::dead_letters::keys_of;
use crate::error::failed;
use crate::leases::{copy, fence, runs};
use crate::partitions;
use crate::positions::{self, timestamp};

/// Adds to a consumer's totals, whether it has a position yet or not.
pub(crate) fn count(
    tx: &Connection,
    consumer: &str,
    partition: &str,
    published: u64,
    dropped: u64,
    now_ms: i64,
) -> Result<()> {
    let whole = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
    tx.prepare_cached(
        "INSERT INTO postrider_checkpoint (consumer, partition, published, dropped, updated_ms)
         VALUES (?1, ?2, ?3, ?4, ?5)
         ON CONFLICT (consumer, partition) DO UPDATE SET
             published = published + excluded.published, dropped = dropped + excluded.dropped",
    )
    .and_then(|mut statement| {
        statement.execute((consumer, partition, whole(published), whole(dropped), now_ms))
    })
    .map(drop)
    .map_err(failed("count for the consumer"))
}

fn from_row(row: &rusqlite::Row<'_>) -> rusqlite::Result<(Option<Vec<u8>>, i64, i64)> {
    Ok((row.get(0)?, row.get(1)?, row.get(2)?))
}

fn find(tx: &Connection, consumer: &str, partition: &str) -> Result<Option<Checkpoint>> {
    let found = tx
        .prepare_cached(
            "SELECT position, published, updated_ms FROM postrider_checkpoint
             WHERE consumer = ?1 AND partition = ?2",
        )
        .and_then(|mut statement| statement.query_row((consumer, partition), from_row).optional())
        .map_err(failed("read the checkpoint"))?;
    let Some((Some(position), published, updated_ms)) = found else { return Ok(None) };
    Ok(Some(Checkpoint {
        position: Position::from_bytes(&position)?,
        published: published.unsigned_abs(),
        updated_at: timestamp(updated_ms),
    }))
}

/// The lease is checked and the checkpoint compared under the write lock, so that neither can
/// change in between.
fn advance(
    tx: &Transaction<'_>,
    lease: &HeldLease,
    consumer: &str,
    to: &Position,
    published: u64,
    now_ms: i64,
) -> Result<()> {
    fence(tx, lease)?;
    let partition = lease.partition().as_str();
    let moved = tx
        .prepare_cached(
            "INSERT INTO postrider_checkpoint
                 (consumer, partition, position, published, lease_group, updated_ms)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6)
             ON CONFLICT (consumer, partition) DO UPDATE SET position = excluded.position,
                 published = published + iif(position IS excluded.position, 0, excluded.published),
                 lease_group = excluded.lease_group, updated_ms = excluded.updated_ms
             WHERE position IS NULL OR position <= excluded.position",
        )
        .and_then(|mut statement| {
            statement.execute((
                consumer,
                partition,
                to.as_bytes(),
                i64::try_from(published).unwrap_or(i64::MAX),
                lease.group().as_str(),
                now_ms,
            ))
        })
        .map_err(failed("move the checkpoint"))?;
    if moved == 0 {
        return Err(Error::permanent(format!(
            "checkpoint of {consumer} in partition {partition} would move back to {to}"
        )));
    }
    Ok(())
}

fn finish(
    tx: &Transaction<'_>,
    lease: &HeldLease,
    consumer: &str,
    successors: &[Successor],
    now_ms: i64,
) -> Result<()> {
    let place = "finish the partition";
    fence(tx, lease)?;
    let partition = lease.partition().as_str();
    for successor in successors {
        successor.from.to_ulid()?;
        tx.execute(
            "INSERT INTO postrider_checkpoint (consumer, partition, position, updated_ms)
             VALUES (?1, ?2, ?3, ?4)
             ON CONFLICT (consumer, partition) DO UPDATE SET position = excluded.position
             WHERE position IS NULL",
            (consumer, successor.partition.as_str(), successor.from.as_bytes(), now_ms),
        )
        .map_err(failed(place))?;
    }
    tx.execute(
        "INSERT INTO postrider_checkpoint (consumer, partition, ended, updated_ms)
         VALUES (?1, ?2, 1, ?3)
         ON CONFLICT (consumer, partition) DO UPDATE SET ended = 1, updated_ms = excluded.updated_ms
         WHERE ended = 0",
        (consumer, partition, now_ms),
    )
    .map_err(failed(place))?;
    for key in keys_of(tx, consumer, partition)? {
        hand_on(tx, consumer, partition, key.as_ref(), successors)?;
    }
    Ok(())
}

/// Letters of a finished partition go to the successor that has their key now: nobody leases the
/// old partition any more, and the key's later events must find them. A letter without a readable
/// key goes to the first.
fn hand_on(
    tx: &Transaction<'_>,
    consumer: &str,
    partition: &str,
    key: Option<&postrider_core::Key>,
    successors: &[Successor],
) -> Result<()> {
    let heir = successors.iter().find(|successor| {
        successor
            .partition
            .to_numbers()
            .is_some_and(|(index, count)| key.is_none_or(|key| key_hash(key) % count == index))
    });
    let Some(heir) = heir else { return Ok(()) };
    tx.prepare_cached(
        "UPDATE postrider_dead_letter SET partition = ?4
         WHERE consumer = ?1 AND partition = ?2 AND key IS ?3",
    )
    .and_then(|mut statement| {
        let key = key.map(postrider_core::Key::as_str);
        statement.execute((consumer, partition, key, heir.partition.as_str()))
    })
    .map(drop)
    .map_err(failed("hand the dead letters on"))
}

struct Standing {
    consumer: String,
    partition: String,
    position: Vec<u8>,
    published: i64,
    dropped: i64,
    ended: bool,
    updated_ms: i64,
    parked: i64,
}

const STANDINGS: &str = "SELECT c.consumer, c.partition, c.position, c.published, c.dropped,
        c.ended, c.updated_ms,
        (SELECT count(*) FROM postrider_dead_letter d
         WHERE d.consumer = c.consumer AND d.partition = c.partition)
    FROM postrider_checkpoint c WHERE c.position IS NOT NULL ORDER BY c.consumer, c.partition";

fn standings(tx: &Connection) -> Result<Vec<Standing>> {
    let place = "read the consumers' progress";
    let mut statement = tx.prepare_cached(STANDINGS).map_err(failed(place))?;
    let rows = statement
        .query_map([], |row| {
            Ok(Standing {
                consumer: row.get(0)?,
                partition: row.get(1)?,
                position: row.get(2)?,
                published: row.get(3)?,
                dropped: row.get(4)?,
                ended: row.get(5)?,
                updated_ms: row.get(6)?,
                parked: row.get(7)?,
            })
        })
        .map_err(failed(place))?;
    rows.collect::<rusqlite::Result<_>>().map_err(failed(place))
}

fn progress(tx: &Connection, standing: Standing) -> Result<ConsumerProgress> {
    let place = "count what is pending";
    let id = PartitionId::new(standing.partition)?;
    let (mut pending, mut oldest_ms) = (0i64, None);
    if !standing.ended {
        let partition = partitions::find(tx, &id)?;
        let after = positions::stored_seq(tx, &standing.position)?;
        (pending, oldest_ms) = tx
            .prepare_cached(
                "SELECT count(*), (SELECT at_ms FROM postrider_outbox
                     WHERE partition = ?1 AND seq > ?2 ORDER BY seq LIMIT 1)
                 FROM postrider_outbox WHERE partition = ?1 AND seq > ?2",
            )
            .and_then(|mut statement| {
                statement.query_row((partition.number, after), |row| Ok((row.get(0)?, row.get(1)?)))
            })
            .map_err(failed(place))?;
    }
    Ok(ConsumerProgress {
        consumer: ConsumerName::new(standing.consumer)?,
        partition: id,
        checkpoint: Checkpoint {
            position: Position::from_bytes(&standing.position)?,
            published: standing.published.unsigned_abs(),
            updated_at: timestamp(standing.updated_ms),
        },
        pending: pending.unsigned_abs(),
        oldest_pending_at: oldest_ms.map(timestamp),
        parked: standing.parked.unsigned_abs(),
        dropped: standing.dropped.unsigned_abs(),
        ended: standing.ended,
    })
}

#[async_trait]
impl Checkpoints for SqliteStore {
    async fn checkpoint(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
    ) -> Result<Option<Checkpoint>> {
        let (consumer, partition) = (consumer.clone(), partition.clone());
        self.read_tx(move |tx| find(tx, consumer.as_str(), partition.as_str())).await
    }

    async fn advance(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        to: &Position,
        tally: Tally,
    ) -> Result<()> {
        to.to_ulid()?;
        let (lease, consumer, to) = (copy(lease), consumer.clone(), to.clone());
        let now_ms = self.inner.clock.wall_ms();
        self.write_tx(move |tx| {
            advance(tx, &lease, consumer.as_str(), &to, tally.published, now_ms)
        })
        .await
    }

    async fn finish(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        successors: &[Successor],
    ) -> Result<()> {
        let (lease, consumer) = (copy(lease), consumer.clone());
        let (successors, now_ms) = (successors.to_vec(), self.inner.clock.wall_ms());
        self.write_tx(move |tx| finish(tx, &lease, consumer.as_str(), &successors, now_ms)).await
    }

    async fn progress(&self) -> Result<Vec<ConsumerProgress>> {
        self.read_tx(|tx| standings(tx)?.into_iter().map(|row| progress(tx, row)).collect()).await
    }

    async fn remove_consumer(&self, consumer: &ConsumerName) -> Result<bool> {
        let (consumer, clock) = (consumer.clone(), self.inner.clock.clone());
        self.write_tx(move |tx| remove(tx, consumer.as_str(), &clock.lease_time())).await
    }
}

fn remove(tx: &Transaction<'_>, consumer: &str, time: &crate::clock::LeaseTime) -> Result<bool> {
    let place = "remove the consumer";
    let advanced: Vec<(String, String)> = tx
        .prepare_cached(
            "SELECT lease_group, partition FROM postrider_checkpoint
             WHERE consumer = ?1 AND lease_group IS NOT NULL",
        )
        .and_then(|mut statement| {
            statement.query_map([consumer], |row| Ok((row.get(0)?, row.get(1)?)))?.collect()
        })
        .map_err(failed(place))?;
    for (group, partition) in advanced {
        if runs(tx, &group, &partition, time)? {
            return Err(Error::transient(format!(
                "consumer {consumer} is at work in partition {partition}; stop its relays"
            )));
        }
    }
    let mut forgotten = 0;
    for sql in [
        "DELETE FROM postrider_checkpoint WHERE consumer = ?1",
        "DELETE FROM postrider_dead_letter WHERE consumer = ?1",
    ] {
        forgotten += tx.execute(sql, [consumer]).map_err(failed(place))?;
    }
    Ok(forgotten > 0)
}
