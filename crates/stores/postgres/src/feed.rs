//! The feed: the outbox's read side, a chain of ticks over snapshots.
//!
//! What lives here: `Feed` for the store, a partition's own view of the chunks. What does not:
//! reading chunks (`chunks.rs`), making ticks (`head.rs`), and the cut itself, which is SQL
//! (`migrations/0001_outbox.sql`; why it is right: docs/design/postgres-feed.md).
//! Invariant: a page ends at a place up to which every record of the partition was handed out.

use async_trait::async_trait;
use postrider_core::{
    BatchLimit, ConsumerName, Entry, Error, Feed, FeedPage, PartitionId, Position, Result,
    Timestamp,
};
use tokio_postgres::types::Type;

use crate::PostgresStore;
use crate::chunks::Chunk;
use crate::partitions::{self, Partition};
use crate::positions::Place;

/// The oldest and the newest tick.
const ENDS: &str = "SELECT (SELECT stamp FROM {schema}.{outbox_tick} ORDER BY stamp LIMIT 1),
        (SELECT seq_hi FROM {schema}.{outbox_tick} ORDER BY stamp LIMIT 1), t.stamp, t.seq_hi
    FROM {schema}.{outbox_tick} AS t ORDER BY t.stamp DESC LIMIT 1";

/// A page in the making.
struct Page {
    entries: Vec<Entry>,
    bytes: usize,
    limit: BatchLimit,
    /// Up to where the partition's records are in it, or were passed over.
    at: Place,
}

/// Why a chunk adds no more to a page.
enum Scan {
    /// It has no more.
    Exhausted,
    /// The page is full.
    Full,
    /// The partition's generation ends before the chunk does.
    Ended,
}

impl Page {
    /// Takes the partition's records from a chunk.
    fn scan(&mut self, chunk: &Chunk, partition: &Partition) -> Scan {
        let own = partition.generation.number;
        for found in chunk.records_after(self.at) {
            if found.generation > own {
                return Scan::Ended;
            }
            if found.generation < own || !partition.has(found.hash) {
                continue;
            }
            let cost = found.entry.cost_bytes();
            let full = self.entries.len() >= self.limit.records.max(1)
                || self.bytes.saturating_add(cost) > self.limit.bytes;
            if full && !self.entries.is_empty() {
                return Scan::Full;
            }
            self.bytes = self.bytes.saturating_add(cost);
            self.entries.push(found.entry.clone());
            self.at = found.place;
        }
        let later = chunk.ticks.iter().any(|(_, generation)| *generation > own);
        if later {
            return Scan::Ended;
        }
        Scan::Exhausted
    }
}

impl PostgresStore {
    async fn partition(&self, id: &PartitionId) -> Result<Partition> {
        self.inner.partitions.find(&self.inner.connections, &self.inner.names, id).await
    }

    /// The partition, which is known to have ended.
    async fn ended(&self, id: &PartitionId) -> Result<(Partition, Place)> {
        let mut partition = self.partition(id).await?;
        if partition.ended().is_none() {
            self.inner.partitions.refresh(&self.inner.connections, &self.inner.names).await?;
            partition = self.partition(id).await?;
        }
        let Some(end) = partition.ended() else {
            return Err(Error::corrupt(format!(
                "a tick belongs to a generation of partitions that is not listed, after {id}"
            )));
        };
        Ok((partition, end))
    }

    /// The places of the oldest and the newest tick.
    async fn ends(&self) -> Result<(Place, Place)> {
        let sql = self.inner.names.fill(ENDS);
        let rows = self.inner.connections.query("read the feed's ends", &sql, &[]).await?;
        let Some(row) = rows.first() else {
            return Err(Error::corrupt("the outbox has no tick; its tables were changed by hand"));
        };
        Ok((
            Place { stamp: row.get(0), seq: row.get(1) },
            Place { stamp: row.get(2), seq: row.get(3) },
        ))
    }

    pub(crate) async fn look(&self) -> Result<i64> {
        self.inner.head.look(&self.inner.connections, &self.inner.names).await
    }

    /// Whether there is a tick after `stamp`.
    async fn is_more_after(&self, stamp: i64) -> Result<bool> {
        let inner = &*self.inner;
        Ok(inner.head.look_beyond(stamp, &inner.connections, &inner.names).await? > stamp)
    }

    /// Raises the number of partitions to a multiple of the present one, from the next tick on.
    /// Consumers read the new ones after they have finished the old. Waits for no writer.
    ///
    /// # Errors
    /// `Permanent` for a number that is no such multiple or too large.
    pub async fn raise_partitions(&self, count: u32) -> Result<()> {
        // What is committed by now is the old partitions'.
        self.look().await?;
        partitions::raise(&self.inner.connections, &self.inner.names, count).await?;
        self.inner.partitions.refresh(&self.inner.connections, &self.inner.names).await?;
        // The tick that tells readers.
        self.look().await.map(drop)
    }
}

#[async_trait]
impl Feed for PostgresStore {
    fn identity(&self) -> String {
        self.inner.identity.clone()
    }

    async fn partitions(&self, consumer: &ConsumerName) -> Result<Vec<PartitionId>> {
        partitions::of_consumer(&self.inner.connections, &self.inner.names, consumer).await
    }

    async fn read(
        &self,
        id: &PartitionId,
        after: &Position,
        limit: BatchLimit,
    ) -> Result<FeedPage> {
        let inner = &*self.inner;
        let partition = self.partition(id).await?;
        let start = Place::of(after)?;
        let mut page = Page { entries: Vec::new(), bytes: 0, limit, at: start };
        loop {
            // Where a tick ends and no later one was known, looking comes first: it costs no more
            // than to read in vain, and one look serves all readers.
            if inner.chunks.end_at(&inner.connections, page.at)
                && !self.is_more_after(page.at.stamp).await?
            {
                break;
            }
            let chunk = inner.chunks.after(&self.inner, page.at).await?;
            match page.scan(&chunk, &partition) {
                Scan::Full => break,
                Scan::Ended => {
                    let (partition, end) = self.ended(id).await?;
                    let at = if page.entries.is_empty() { end.max(start) } else { page.at };
                    let (entries, ended) = (page.entries, partition.successors());
                    return Ok(FeedPage { entries, position: at.position(), ended });
                }
                Scan::Exhausted if !page.entries.is_empty() => break,
                Scan::Exhausted if chunk.end > page.at => page.at = chunk.end,
                // At the head, as far as is committed; is there more to come?
                Scan::Exhausted
                    if self.is_more_after(page.at.stamp.max(chunk.end.stamp)).await? => {}
                Scan::Exhausted => break,
            }
        }
        Ok(FeedPage { entries: page.entries, position: page.at.position(), ended: None })
    }

    async fn head(&self, id: &PartitionId) -> Result<Position> {
        let partition = self.partition(id).await?;
        self.look().await?;
        let (oldest, newest) = self.ends().await?;
        Ok(partition.ended().map_or(newest, |end| end.max(oldest)).position())
    }

    async fn position_at(&self, id: &PartitionId, time: Timestamp) -> Result<Position> {
        self.partition(id).await?;
        if time == Timestamp::default() {
            return Ok(Position::START);
        }
        self.look().await?;
        let (oldest, newest) = self.ends().await?;
        let plain = Place::of_time(time);
        if plain < oldest && oldest.seq > 0 {
            return Err(Error::permanent(format!(
                "time {} ms lies below the retention horizon {}: events there were deleted; start \
                 at the oldest instead",
                time.as_millis(),
                oldest.position()
            )));
        }
        Ok(if plain > newest { newest } else { plain }.position())
    }

    async fn changed_after(&self, after: &Position) {
        let stamp = Place::of(after).map_or(i64::MAX, |place| place.stamp);
        let inner = &*self.inner;
        inner.head.wait_beyond(stamp, &inner.connections, &inner.names).await;
    }

    fn watches(&self) -> bool {
        true
    }
}

/// The outbox's own identity, which a dump or a copy keeps.
pub(crate) async fn identity(
    connections: &crate::connections::Connections,
    names: &crate::names::Names,
) -> Result<String> {
    let sql = names.fill("SELECT identity::text FROM {schema}.feed WHERE outbox = $1");
    let place = "read the outbox's identity";
    let rows = connections.query(place, &sql, &[(&names.outbox(), Type::TEXT)]).await?;
    let Some(row) = rows.first() else {
        return Err(Error::permanent("the outbox is not registered; run `postrider init`"));
    };
    Ok(format!("postgres-{}", row.get::<_, &str>(0)))
}
