//! The feed: the outbox's read side.
//!
//! What lives here: `Feed` for the store, and how large a page is. What does not: giving events
//! their places (`migrations/0001_changefeed.sql`), waiting beyond this process's own appends.
//! Invariant: what an empty page says is told by what was read before it (`sql/feed_read.sql`), so
//! that neither an end nor a quiet partition's position ever passes an event by.

use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use postrider_core::ulid::Ulid;
use postrider_core::{
    BatchLimit, ConsumerName, Entry, Error, Feed, FeedPage, PartitionId, Position, Result,
    Successor, Timestamp,
};
use tiberius::Row;
use tokio::sync::Notify;

use crate::SqlServerStore;
use crate::connections::Param;
use crate::leases::short_answer;
use crate::names::exact;
use crate::row::{Decoder, maybe_number, ms, number, position, timestamp};
use crate::sql;

/// Most events in one page: the server writes a page down before it sends any of it.
const MOST_RECORDS: usize = 1_000;
/// Least events in one page that is cut by its bytes.
const LEAST_RECORDS: usize = 8;
/// A quiet partition's time is moved on when it is this old, in milliseconds: readers hand a quiet
/// position out about as often.
const QUIET_MS: i64 = 1_000;
/// The last millisecond of `datetime2`.
const LAST_MS: i64 = 253_402_300_799_999;

/// How many events the next page asks for: fewer while payloads are large.
#[derive(Debug)]
pub(crate) struct PageSize(AtomicUsize);

impl PageSize {
    pub(crate) fn new() -> Self {
        Self(AtomicUsize::new(MOST_RECORDS))
    }

    fn ask(&self, limit: BatchLimit) -> i32 {
        let most = limit.records.clamp(1, self.0.load(Ordering::Relaxed));
        i32::try_from(most).unwrap_or(1)
    }

    /// `found` were written down, of which `sent` came.
    fn learn(&self, found: usize, sent: usize) {
        let now = self.0.load(Ordering::Relaxed);
        let next = match found > sent.saturating_mul(2) {
            true => now / 2,
            false if found == sent => now.saturating_mul(2),
            false => now,
        };
        self.0.store(next.clamp(LEAST_RECORDS, MOST_RECORDS), Ordering::Relaxed);
    }
}

/// Wakes this process's own readers.
#[derive(Debug, Default)]
pub(crate) struct Bell(Notify);

impl Bell {
    pub(crate) fn ring(&self) {
        self.0.notify_waiters();
    }
}

pub(crate) fn unknown(id: &PartitionId) -> Error {
    Error::permanent(format!(
        "partition {id} does not exist here; it belongs to another source or another number of \
         partitions"
    ))
}

/// Index and count, as SQL compares them.
fn numbers(id: &PartitionId) -> Result<(i32, i32)> {
    let numbers = id.to_numbers().ok_or_else(|| unknown(id))?;
    let whole = |number| i32::try_from(number).map_err(|_| unknown(id));
    Ok((whole(numbers.0)?, whole(numbers.1)?))
}

fn partition(row: &Row) -> Result<PartitionId> {
    let part = |at, what| -> Result<u32> {
        u32::try_from(number(row, at, what)?).map_err(|_| short_answer("read a partition"))
    };
    let (index, count) = (part(0, "index_no")?, part(1, "count_no")?);
    match index < count {
        true => Ok(PartitionId::numbered(index, count)),
        false => Err(Error::corrupt(format!("there is a partition {index} of {count}"))),
    }
}

/// What a page's first result set says of its partition.
struct Standing {
    generation: i64,
    ended: bool,
    state_ms: Option<i64>,
    now_ms: i64,
}

impl Standing {
    /// Nothing where there is no such partition.
    fn read(row: &Row) -> Result<Option<Self>> {
        if maybe_number(row, 0, "number")?.is_none() {
            return Ok(None);
        }
        Ok(Some(Self {
            generation: number(row, 1, "generation")?,
            ended: number(row, 2, "ended")? != 0,
            state_ms: maybe_number(row, 3, "state_ms")?,
            now_ms: number(row, 4, "now_ms")?,
        }))
    }
}

/// The later of a position and a plain time.
fn later(after: &Position, time_ms: Option<i64>) -> Result<Position> {
    let quiet = time_ms.map_or(Ulid::from_bytes([0; 16]), |ms| Ulid::from_time(timestamp(ms)));
    Ok(if quiet > after.to_ulid()? { quiet.into() } else { after.clone() })
}

/// The entries of a page up to its limit, and how many rows the server had found.
fn entries(rows: &[Row], limit: BatchLimit) -> Result<(Vec<Entry>, usize)> {
    let mut decoder = Decoder::default();
    let mut page: Vec<Entry> = Vec::with_capacity(rows.len());
    let (mut bytes, mut found) = (0usize, 0);
    for row in rows {
        found = usize::try_from(number(row, 9, "found")?).unwrap_or(usize::MAX);
        let at = position(row, 0, "ulid")?;
        let appended_at = timestamp(number(row, 1, "appended_ms")?);
        let entry = decoder.entry(row, 2, at, appended_at)?;
        bytes = bytes.saturating_add(entry.cost_bytes());
        if !page.is_empty() && bytes > limit.bytes {
            break;
        }
        page.push(entry);
    }
    Ok((page, found))
}

impl SqlServerStore {
    async fn successors(&self, id: &PartitionId, generation: i64) -> Result<Vec<Successor>> {
        let (index, count) = numbers(id)?;
        let params: [Param<'_>; 3] = [&index, &count, &generation];
        let place = "find the successors";
        let sets = self.run(place, sql::PARTITION_SUCCESSORS, &params).await?;
        let rows = sets.first().map_or(&[][..], Vec::as_slice);
        // Each partition has positions of its own, and a new one begins at its beginning.
        let successor = |row| Ok(Successor { partition: partition(row)?, from: Position::START });
        rows.iter().map(successor).collect()
    }

    /// Where a reader stands that found nothing after `after`.
    async fn quiet(
        &self,
        id: &PartitionId,
        after: &Position,
        standing: &Standing,
    ) -> Result<Position> {
        let known = standing.state_ms.filter(|ms| standing.now_ms - ms < QUIET_MS);
        if known.is_some() {
            return later(after, known);
        }
        let (index, count) = numbers(id)?;
        let params: [Param<'_>; 3] = [&index, &count, &after.as_bytes()];
        let place = "move a quiet partition on";
        let sets = self.run(place, sql::FEED_QUIET, &params).await?;
        let row = sets.last().and_then(|set| set.first()).ok_or_else(|| short_answer(place))?;
        later(after, maybe_number(row, 0, "state_ms")?)
    }

    async fn find_position(&self, id: &PartitionId, time_ms: Option<i64>) -> Result<Position> {
        let (index, count) = numbers(id)?;
        let place = "find a position";
        let params: [Param<'_>; 3] = [&index, &count, &time_ms];
        let sets = self.run(place, sql::FEED_POSITION, &params).await?;
        let row = sets.last().and_then(|set| set.first()).ok_or_else(|| short_answer(place))?;
        maybe_number(row, 0, "number")?.ok_or_else(|| unknown(id))?;
        position(row, 1, "position")
    }

    /// Raises the number of partitions to a multiple of the present one. Events appended from now
    /// on go to the new ones, which consumers read after they have finished the old.
    ///
    /// # Errors
    /// `Permanent` for a number that is no such multiple or too large.
    pub async fn raise_partitions(&self, count: u32) -> Result<()> {
        let count = i32::try_from(count).unwrap_or(i32::MAX);
        let params: [Param<'_>; 1] = [&count];
        self.run("raise the partitions", sql::PARTITION_RAISE, &params).await.map(drop)
    }
}

#[async_trait]
impl Feed for SqlServerStore {
    fn identity(&self) -> String {
        self.inner.identity.clone()
    }

    async fn partitions(&self, consumer: &ConsumerName) -> Result<Vec<PartitionId>> {
        exact("consumer", consumer.as_str())?;
        let params: [Param<'_>; 1] = [&consumer.as_str()];
        let place = "list the partitions";
        let sets = self.run(place, sql::PARTITIONS_OF_CONSUMER, &params).await?;
        sets.first().map_or(&[][..], Vec::as_slice).iter().map(partition).collect()
    }

    async fn read(
        &self,
        partition: &PartitionId,
        after: &Position,
        limit: BatchLimit,
    ) -> Result<FeedPage> {
        after.to_ulid()?;
        let (index, count) = numbers(partition)?;
        let records = self.inner.page_size.ask(limit);
        let bytes = i64::try_from(limit.bytes).unwrap_or(i64::MAX);
        let place = "read the feed";
        let params: [Param<'_>; 5] = [&index, &count, &after.as_bytes(), &records, &bytes];
        let sets = self.run(place, sql::FEED_READ, &params).await?;
        let [standing, rows] = &sets[..] else { return Err(short_answer(place)) };
        let standing = standing.first().ok_or_else(|| short_answer(place))?;
        let standing = Standing::read(standing)?.ok_or_else(|| unknown(partition))?;
        let (entries, found) = entries(rows, limit)?;
        if let Some(last) = entries.last() {
            self.inner.page_size.learn(found, entries.len());
            let position = last.position().clone();
            return Ok(FeedPage { entries, position, ended: None });
        }
        if standing.ended {
            let ended = Some(self.successors(partition, standing.generation).await?);
            return Ok(FeedPage { entries, position: after.clone(), ended });
        }
        let position = self.quiet(partition, after, &standing).await?;
        Ok(FeedPage { entries, position, ended: None })
    }

    async fn head(&self, partition: &PartitionId) -> Result<Position> {
        self.find_position(partition, None).await
    }

    async fn position_at(&self, partition: &PartitionId, time: Timestamp) -> Result<Position> {
        if time == Timestamp::default() {
            numbers(partition)?;
            return Ok(Position::START);
        }
        self.find_position(partition, Some(ms(time).min(LAST_MS))).await
    }

    async fn changed(&self) {
        self.inner.bell.0.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_asks_for_fewer_events_while_they_are_large() {
        let size = PageSize::new();
        let limit = BatchLimit { records: 5_000, bytes: 1 << 20 };
        assert_eq!(size.ask(limit), 1_000);
        (0..20).for_each(|_| size.learn(100, 1));
        assert_eq!(size.ask(limit), 8);
        assert_eq!(size.ask(BatchLimit { records: 3, ..limit }), 3);
        assert_eq!(size.ask(BatchLimit { records: 0, ..limit }), 1);
        (0..20).for_each(|_| size.learn(10, 10));
        assert_eq!(size.ask(limit), 1_000);
    }

    #[test]
    fn a_quiet_position_never_moves_back() {
        let after: Position = Ulid::from_parts(timestamp(5), 1, 1).into();
        assert_eq!(later(&after, None).expect("a ULID"), after);
        assert_eq!(later(&after, Some(5)).expect("a ULID"), after);
        let moved = later(&after, Some(6)).expect("a ULID");
        assert_eq!(moved, Ulid::from_time(timestamp(6)).into());
    }
}
