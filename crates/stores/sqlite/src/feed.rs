//! The feed: the outbox's read side.
//!
//! What lives here: `Feed` for the store. What does not: the check of positions
//! (`positions.rs`) and waiting (`wakeup.rs`).
//! Invariant: a page is read from one snapshot, together with the head and the horizon that judge
//! it, and rows are written in `seq` order only, so nothing can appear behind the reader.

use async_trait::async_trait;
use postrider_core::{
    BatchLimit, ConsumerName, Entry, Feed, FeedPage, PartitionId, Position, Result, Timestamp,
};
use rusqlite::Connection;

use crate::SqliteStore;
use crate::error::failed;
use crate::partitions::{self, Partition};
use crate::positions::{self, Place};
use crate::row::Decoder;

/// Takes no lock that a writer would meet: a snapshot of the write-ahead log.
const READ: &str = "SELECT at_ms, seq, id, key, topic, type, content_type, headers, payload
    FROM postrider_outbox WHERE partition = ?1 AND seq > ?2 ORDER BY seq LIMIT ?3";

/// Where a quiet partition's reader stands: the end of an ended one, else the outbox's head.
fn quiet_place(tx: &Connection, partition: &Partition) -> Result<Place> {
    let place = match partition.ended {
        Some(end) => end,
        None => positions::head(tx)?.unwrap_or_default(),
    };
    Ok(place.max(partition.horizon))
}

fn read_page(
    tx: &Connection,
    id: &PartitionId,
    after: &Position,
    limit: BatchLimit,
    now_ms: i64,
) -> Result<FeedPage> {
    let partition = partitions::find(tx, id)?;
    let after_seq = positions::resolve(tx, &partition, after, now_ms)?;
    let place = "read the feed";
    let most = limit.records.max(1);
    let mut entries: Vec<Entry> = Vec::with_capacity(most.min(4_096));
    let mut last = None;
    let mut bytes = 0usize;
    let mut reached_end = true;
    let mut decoder = Decoder::default();
    let mut statement = tx.prepare_cached(READ).map_err(failed(place))?;
    let sql_limit = i64::try_from(most).unwrap_or(i64::MAX);
    let mut rows =
        statement.query((partition.number, after_seq, sql_limit)).map_err(failed(place))?;
    while let Some(row) = rows.next().map_err(failed(place))? {
        let found = Place {
            at_ms: row.get(0).map_err(failed(place))?,
            seq: row.get(1).map_err(failed(place))?,
        };
        let at = positions::timestamp(found.at_ms);
        let entry = decoder.entry(row, 2, found.position(), at).map_err(failed(place))?;
        let cost = entry.cost_bytes();
        if !entries.is_empty() && bytes.saturating_add(cost) > limit.bytes {
            reached_end = false;
            break;
        }
        bytes = bytes.saturating_add(cost);
        entries.push(entry);
        last = Some(found);
    }
    reached_end &= entries.len() < most;
    let position = match last {
        Some(found) => found.position(),
        None => later(after, quiet_place(tx, &partition)?)?,
    };
    let ended = match partition.ended {
        Some(_) if reached_end => Some(partitions::successors(tx, &partition)?),
        Some(_) | None => None,
    };
    Ok(FeedPage { entries, position, ended })
}

/// A position never moves back, not even from a plain time that lies after the head.
fn later(after: &Position, quiet: Place) -> Result<Position> {
    let quiet = quiet.position();
    Ok(if quiet.to_ulid()? > after.to_ulid()? { quiet } else { after.clone() })
}

#[async_trait]
impl Feed for SqliteStore {
    fn identity(&self) -> String {
        self.inner.identity.clone()
    }

    async fn partitions(&self, consumer: &ConsumerName) -> Result<Vec<PartitionId>> {
        let consumer = consumer.clone();
        let found = self.read_tx(move |tx| partitions::of_consumer(tx, &consumer)).await?;
        Ok(found.iter().map(Partition::id).collect())
    }

    async fn read(
        &self,
        partition: &PartitionId,
        after: &Position,
        limit: BatchLimit,
    ) -> Result<FeedPage> {
        let (partition, after) = (partition.clone(), after.clone());
        let now_ms = self.inner.clock.wall_ms();
        self.read_tx(move |tx| read_page(tx, &partition, &after, limit, now_ms)).await
    }

    async fn head(&self, partition: &PartitionId) -> Result<Position> {
        let id = partition.clone();
        self.read_tx(move |tx| Ok(quiet_place(tx, &partitions::find(tx, &id)?)?.position())).await
    }

    async fn position_at(&self, partition: &PartitionId, time: Timestamp) -> Result<Position> {
        let id = partition.clone();
        self.read_tx(move |tx| {
            let horizon = partitions::find(tx, &id)?.horizon;
            let plain = Place { at_ms: positions::ms(time), seq: 0 };
            if time == Timestamp::default() {
                return Ok(Position::START);
            }
            if plain < horizon {
                let what = format!("time {} ms", plain.at_ms);
                return Err(positions::below_horizon(&what, horizon));
            }
            let head = positions::head(tx)?.unwrap_or_default();
            // Later than the head is the head: a clock set back could still fill that time.
            Ok(if plain > head { head.position() } else { plain.position() })
        })
        .await
    }

    async fn changed(&self) {
        self.inner.wakeup.changed().await;
    }
}
