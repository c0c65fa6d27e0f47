//! Partitions and their generations.
//!
//! What lives here: the first partitions, raising their number, and what each consumer has to
//! read. What does not: reading records.
//! Invariant: a key's records lie in one partition of each generation, and those of a generation
//! all come before those of the next.

use postrider_core::limits::MAX_PARTITIONS;
use postrider_core::{ConsumerName, Error, PartitionId, Result, Successor};
use rusqlite::{Connection, OptionalExtension, Transaction};

use crate::error::failed;
use crate::positions::{self, Place};

/// One partition as it is kept.
#[derive(Debug, Clone)]
pub(crate) struct Partition {
    pub(crate) number: i64,
    pub(crate) index: u32,
    pub(crate) count: u32,
    pub(crate) generation: i64,
    /// The head when it ended; nothing while it takes events.
    pub(crate) ended: Option<Place>,
    /// The newest of its events that retention has deleted; the start if there is none.
    pub(crate) horizon: Place,
}

impl Partition {
    pub(crate) fn id(&self) -> PartitionId {
        PartitionId::numbered(self.index, self.count)
    }
}

/// Called under the write lock of the migration that makes the tables.
pub(crate) fn create_first(tx: &Transaction<'_>, count: u32) -> Result<()> {
    tx.execute(
        "INSERT INTO postrider_state
             (only_row, identity, generation, first_partition, partition_count)
         VALUES (1, 'sqlite:' || lower(hex(randomblob(16))), 0, 0, ?1)",
        [count],
    )
    .map_err(failed("create the partitions"))?;
    insert(tx, 0, 0, count)
}

fn insert(tx: &Transaction<'_>, generation: i64, first: i64, count: u32) -> Result<()> {
    for index in 0..count {
        tx.execute(
            "INSERT INTO postrider_partition (number, index_no, count_no, generation)
             VALUES (?1, ?2, ?3, ?4)",
            (first + i64::from(index), index, count, generation),
        )
        .map_err(failed("create the partitions"))?;
    }
    Ok(())
}

/// Ends the current generation at the head and opens one of `count` partitions. Runs under the
/// write lock, which every append takes too, so that no event lands in the ended generation.
pub(crate) fn raise(tx: &Transaction<'_>, count: u32) -> Result<()> {
    let place = "raise the partitions";
    let (generation, first, old): (i64, i64, u32) = tx
        .query_row(
            "SELECT generation, first_partition, partition_count FROM postrider_state",
            [],
            |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)),
        )
        .map_err(failed(place))?;
    if count <= old || !count.is_multiple_of(old) || count > MAX_PARTITIONS {
        return Err(Error::permanent(format!(
            "{old} partitions cannot become {count}; give a larger multiple of {old} up to \
             {MAX_PARTITIONS}, so that every key moves as a whole"
        )));
    }
    let end = positions::head(tx)?.unwrap_or_default();
    tx.execute(
        "UPDATE postrider_partition SET ended_ms = ?1, ended_seq = ?2 WHERE generation = ?3",
        (end.at_ms, end.seq, generation),
    )
    .map_err(failed(place))?;
    let first = first + i64::from(old);
    insert(tx, generation + 1, first, count)?;
    tx.execute(
        "UPDATE postrider_state
         SET generation = ?1, first_partition = ?2, partition_count = ?3",
        (generation + 1, first, count),
    )
    .map_err(failed(place))?;
    Ok(())
}

const COLUMNS: &str = "number, index_no, count_no, generation, ended_ms, ended_seq, \
     ifnull(horizon_ms, 0), ifnull(horizon_seq, 0)";

fn from_row(row: &rusqlite::Row<'_>) -> rusqlite::Result<Partition> {
    let ended_ms: Option<i64> = row.get(4)?;
    let ended_seq: Option<i64> = row.get(5)?;
    Ok(Partition {
        number: row.get(0)?,
        index: row.get(1)?,
        count: row.get(2)?,
        generation: row.get(3)?,
        ended: ended_ms.zip(ended_seq).map(|(at_ms, seq)| Place { at_ms, seq }),
        horizon: Place { at_ms: row.get(6)?, seq: row.get(7)? },
    })
}

/// The partition of that name.
pub(crate) fn find(tx: &Connection, id: &PartitionId) -> Result<Partition> {
    let place = "find the partition";
    let unknown = || {
        Error::permanent(format!(
            "partition {id} does not exist here; it belongs to another source or another number \
             of partitions"
        ))
    };
    let (index, count) = id.to_numbers().ok_or_else(unknown)?;
    tx.prepare_cached(&format!(
        "SELECT {COLUMNS} FROM postrider_partition WHERE index_no = ?1 AND count_no = ?2"
    ))
    .map_err(failed(place))?
    .query_row((index, count), from_row)
    .optional()
    .map_err(failed(place))?
    .ok_or_else(unknown)
}

/// Those that take over from `partition`, and where a consumer begins in them: at its end, or at
/// the horizon if retention has passed that.
pub(crate) fn successors(tx: &Connection, partition: &Partition) -> Result<Vec<Successor>> {
    let Some(end) = partition.ended else { return Ok(Vec::new()) };
    let place = "find the successors";
    let mut statement = tx
        .prepare_cached(&format!(
            "SELECT {COLUMNS} FROM postrider_partition
             WHERE generation = ?1 AND index_no % ?2 = ?3 ORDER BY number"
        ))
        .map_err(failed(place))?;
    let rows = statement
        .query_map((partition.generation + 1, partition.count, partition.index), from_row)
        .map_err(failed(place))?;
    let successor = |next: Partition| Successor {
        partition: next.id(),
        from: end.max(next.horizon).position(),
    };
    rows.map(|row| row.map(successor)).collect::<rusqlite::Result<_>>().map_err(failed(place))
}

/// What a consumer has to read: the first generation, and every successor that it has begun,
/// without those it has finished.
const OF_CONSUMER: &str = "SELECT p.number, p.index_no, p.count_no, p.generation, p.ended_ms,
        p.ended_seq, ifnull(p.horizon_ms, 0), ifnull(p.horizon_seq, 0)
    FROM postrider_partition p
    LEFT JOIN postrider_checkpoint c
        ON c.consumer = ?1 AND c.partition = p.index_no || '/' || p.count_no
    WHERE ifnull(c.ended, 0) = 0 AND (p.generation = 0 OR c.position IS NOT NULL)
    ORDER BY p.number";

/// The partitions that `consumer` has to read.
pub(crate) fn of_consumer(tx: &Connection, consumer: &ConsumerName) -> Result<Vec<Partition>> {
    let place = "list the partitions";
    let mut statement = tx.prepare_cached(OF_CONSUMER).map_err(failed(place))?;
    let rows = statement.query_map([consumer.as_str()], from_row).map_err(failed(place))?;
    rows.collect::<rusqlite::Result<_>>().map_err(failed(place))
}

/// All partitions of all generations.
pub(crate) fn all(tx: &Connection) -> Result<Vec<Partition>> {
    let place = "list the partitions";
    let mut statement = tx
        .prepare_cached(&format!("SELECT {COLUMNS} FROM postrider_partition ORDER BY number"))
        .map_err(failed(place))?;
    let rows = statement.query_map([], from_row).map_err(failed(place))?;
    rows.collect::<rusqlite::Result<_>>().map_err(failed(place))
}
