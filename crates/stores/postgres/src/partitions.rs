//! Partitions and their generations.
//!
//! What lives here: which partitions exist, which a consumer has to read, where a generation ends,
//! and raising their number. What does not: the choice of a record's partition (`feed.rs`).
//! Invariant: every tick belongs to one generation, in order, so that a key's records are read
//! under one number of partitions up to a tick, and under the next one from there on.

use std::sync::{PoisonError, RwLock};

use postrider_core::limits::MAX_PARTITIONS;
use postrider_core::{ConsumerName, Error, PartitionId, Result, Successor};
use tokio_postgres::types::Type;

use crate::connections::Connections;
use crate::names::Names;
use crate::positions::Place;

/// A number of partitions that was in force for a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Generation {
    pub(crate) number: i32,
    pub(crate) count: u32,
    /// The last place of the generation before, or the oldest kept one if that was pruned.
    pub(crate) after: Place,
}

/// A partition of one generation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Partition {
    pub(crate) index: u32,
    pub(crate) generation: Generation,
    /// Present once the partitions were raised.
    pub(crate) next: Option<Generation>,
}

impl Partition {
    pub(crate) fn has(&self, hash: u32) -> bool {
        hash % self.generation.count == self.index
    }

    /// Where it has ended, if it has.
    pub(crate) fn ended(&self) -> Option<Place> {
        self.next.map(|next| next.after)
    }

    /// The partitions that its keys are in now, after it has ended.
    pub(crate) fn successors(&self) -> Option<Vec<Successor>> {
        let next = self.next?;
        let indexes = (self.index..next.count).step_by(self.generation.count as usize);
        Some(
            indexes
                .map(|index| Successor {
                    partition: PartitionId::numbered(index, next.count),
                    from: next.after.position(),
                })
                .collect(),
        )
    }
}

/// Each generation with the end of the one before; the oldest tick stands in for a pruned one.
const GENERATIONS: &str = "SELECT g.number, g.partitions, t.stamp, t.seq_hi
    FROM {schema}.generation AS g
    LEFT JOIN LATERAL (SELECT t.stamp, t.seq_hi FROM {schema}.{outbox_tick} AS t
        WHERE t.stamp >= g.after_stamp ORDER BY t.stamp LIMIT 1) AS t ON g.number > 0
    WHERE g.outbox = $1 ORDER BY g.number";

/// What a consumer has to read: the first generation, and every successor that it has begun,
/// without those it has finished.
const OF_CONSUMER: &str = "SELECT i, g.partitions FROM {schema}.generation AS g
    CROSS JOIN LATERAL generate_series(0, g.partitions - 1) AS i
    LEFT JOIN {schema}.checkpoint AS c ON c.outbox = g.outbox AND c.consumer = $2
        AND c.partition = i || '/' || g.partitions
    WHERE g.outbox = $1 AND NOT coalesce(c.ended, false)
        AND (g.number = 0 OR c.position IS NOT NULL)
    ORDER BY g.number, i";

/// The generations as last seen; they only ever grow in number.
pub(crate) struct Partitions {
    known: RwLock<Vec<Generation>>,
}

impl Partitions {
    pub(crate) fn new() -> Self {
        Self { known: RwLock::default() }
    }

    fn find_known(&self, index: u32, count: u32) -> Option<Partition> {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        let at = known.iter().position(|generation| generation.count == count)?;
        Some(Partition { index, generation: known[at], next: known.get(at + 1).copied() })
    }

    /// Reads the generations anew: after a raise by another process.
    pub(crate) async fn refresh(&self, connections: &Connections, names: &Names) -> Result<()> {
        let sql = names.fill(GENERATIONS);
        let rows = connections
            .query("list the partitions", &sql, &[(&names.outbox(), Type::TEXT)])
            .await?;
        let found = rows.iter().map(|row| Generation {
            number: row.get(0),
            count: row.get::<_, i32>(1).unsigned_abs(),
            after: Place {
                stamp: row.get::<_, Option<i64>>(2).unwrap_or_default(),
                seq: row.get::<_, Option<i64>>(3).unwrap_or_default(),
            },
        });
        *self.known.write().unwrap_or_else(PoisonError::into_inner) = found.collect();
        Ok(())
    }

    /// The partition of that name.
    pub(crate) async fn find(
        &self,
        connections: &Connections,
        names: &Names,
        id: &PartitionId,
    ) -> Result<Partition> {
        let unknown = || {
            Error::permanent(format!(
                "partition {id} does not exist here; it belongs to another source or another \
                 number of partitions"
            ))
        };
        let (index, count) = id.to_numbers().ok_or_else(unknown)?;
        if let Some(partition) = self.find_known(index, count) {
            return Ok(partition);
        }
        self.refresh(connections, names).await?;
        self.find_known(index, count).ok_or_else(unknown)
    }
}

/// The partitions that `consumer` has to read.
pub(crate) async fn of_consumer(
    connections: &Connections,
    names: &Names,
    consumer: &ConsumerName,
) -> Result<Vec<PartitionId>> {
    let sql = names.fill(OF_CONSUMER);
    let params: [crate::connections::Param<'_>; 2] =
        [(&names.outbox(), Type::TEXT), (&consumer.as_str(), Type::TEXT)];
    let rows = connections.query("list the partitions", &sql, &params).await?;
    let id = |row: &tokio_postgres::Row| {
        let (index, count): (i32, i32) = (row.get(0), row.get(1));
        PartitionId::numbered(index.unsigned_abs(), count.unsigned_abs())
    };
    Ok(rows.iter().map(id).collect())
}

/// Raises the number of partitions. The rule stands in the database's own function; the check here
/// spares the driver's text.
pub(crate) async fn raise(connections: &Connections, names: &Names, count: u32) -> Result<()> {
    let too_many =
        || Error::permanent(format!("{count} partitions; {MAX_PARTITIONS} are the most allowed"));
    if count > MAX_PARTITIONS {
        return Err(too_many());
    }
    let count = i32::try_from(count).map_err(|_| too_many())?;
    let sql = names.fill("SELECT {schema}.{outbox_raise}($1)");
    connections.query("raise the partitions", &sql, &[(&count, Type::INT4)]).await.map(drop)
}
