//! Checkpoints and the totals that prove that nothing was lost.
//!
//! What lives here: the seam over `[checkpoint]`. What does not: dead letters, whose number is
//! counted where they stand.
//! Invariant: a checkpoint never moves back; it moves in the transaction whose fence holds the
//! lease's row; published + parked + dropped + pending = appended.

use async_trait::async_trait;
use postrider_core::{
    Checkpoint, Checkpoints, ConsumerName, ConsumerProgress, Error, HeldLease, PartitionId,
    Position, Result, Successor, Tally,
};
use serde::Serialize;
use tiberius::Row;

use crate::SqlServerStore;
use crate::connections::Param;
use crate::leases::{Fence, short_answer};
use crate::names::exact;
use crate::row::{maybe_number, maybe_text, number, position, text, timestamp, whole};
use crate::sql;

/// A successor as `checkpoint_finish.sql` reads it.
#[derive(Serialize)]
struct Next<'a> {
    n: usize,
    p: &'a str,
    i: u32,
    c: u32,
}

fn progress(row: &Row) -> Result<ConsumerProgress> {
    let count =
        |at, what| -> Result<u64> { Ok(maybe_number(row, at, what)?.unwrap_or(0).unsigned_abs()) };
    Ok(ConsumerProgress {
        consumer: ConsumerName::new(text(row, 0, "consumer")?)?,
        partition: PartitionId::new(text(row, 1, "partition")?)?,
        checkpoint: Checkpoint {
            position: position(row, 2, "position")?,
            published: count(3, "published")?,
            updated_at: timestamp(number(row, 6, "updated_ms")?),
        },
        dropped: count(4, "dropped")?,
        ended: number(row, 5, "ended")? != 0,
        parked: count(7, "parked")?,
        pending: count(8, "pending")?,
        oldest_pending_at: maybe_number(row, 9, "oldest_ms")?.map(timestamp),
    })
}

#[async_trait]
impl Checkpoints for SqlServerStore {
    async fn checkpoint(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
    ) -> Result<Option<Checkpoint>> {
        exact("consumer", consumer.as_str())?;
        let params: [Param<'_>; 2] = [&consumer.as_str(), &partition.as_str()];
        let sets = self.run("read the checkpoint", sql::CHECKPOINT_READ, &params).await?;
        let Some(row) = sets.first().and_then(|set| set.first()) else { return Ok(None) };
        Ok(Some(Checkpoint {
            position: position(row, 0, "position")?,
            published: number(row, 1, "published")?.unsigned_abs(),
            updated_at: timestamp(number(row, 2, "updated_ms")?),
        }))
    }

    async fn advance(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        to: &Position,
        tally: Tally,
    ) -> Result<()> {
        to.to_ulid()?;
        exact("consumer", consumer.as_str())?;
        let place = "move the checkpoint";
        let Fence { group, partition, holder, epoch } = Fence::of(lease);
        let published = whole(tally.published);
        let params: [Param<'_>; 7] =
            [&group, &partition, &holder, &epoch, &consumer.as_str(), &to.as_bytes(), &published];
        let sets = self.run(place, sql::CHECKPOINT_ADVANCE, &params).await?;
        let row = sets.last().and_then(|set| set.first()).ok_or_else(|| short_answer(place))?;
        if number(row, 0, "moved")? == 0 {
            return Err(Error::permanent(format!(
                "checkpoint of {consumer} in partition {partition} would move back to {to}"
            )));
        }
        Ok(())
    }

    async fn finish(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        successors: &[Successor],
    ) -> Result<()> {
        exact("consumer", consumer.as_str())?;
        let mut positions = Vec::with_capacity(16 * successors.len());
        let mut next = Vec::with_capacity(successors.len());
        for (n, successor) in successors.iter().enumerate() {
            positions.extend(successor.from.to_ulid()?.to_bytes());
            let numbers = successor.partition.to_numbers();
            let (i, c) = numbers.ok_or_else(|| crate::feed::unknown(&successor.partition))?;
            next.push(Next { n, p: successor.partition.as_str(), i, c });
        }
        let next = serde_json::to_string(&next).expect("texts always serialise");
        let Fence { group, partition, holder, epoch } = Fence::of(lease);
        let params: [Param<'_>; 7] =
            [&group, &partition, &holder, &epoch, &consumer.as_str(), &next, &positions];
        self.run("finish the partition", sql::CHECKPOINT_FINISH, &params).await.map(drop)
    }

    async fn progress(&self) -> Result<Vec<ConsumerProgress>> {
        let place = "read the consumers' progress";
        let sets = self.run(place, sql::CHECKPOINT_PROGRESS, &[]).await?;
        sets.first().map_or(&[][..], Vec::as_slice).iter().map(progress).collect()
    }

    async fn remove_consumer(&self, consumer: &ConsumerName) -> Result<bool> {
        let place = "remove the consumer";
        let params: [Param<'_>; 1] = [&consumer.as_str()];
        let sets = self.run(place, sql::CHECKPOINT_REMOVE, &params).await?;
        let row = sets.last().and_then(|set| set.first()).ok_or_else(|| short_answer(place))?;
        if let Some(partition) = maybe_text(row, 0, "busy")? {
            return Err(Error::transient(format!(
                "consumer {consumer} is at work in partition {partition}; stop its relays"
            )));
        }
        Ok(number(row, 1, "gone")? > 0)
    }
}
