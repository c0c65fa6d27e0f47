//! Makes a `Source` of a `Feed`: reads pages and polls at the head.
//!
//! What lives here: the adaptive poll. What does not: any store.
//! Invariant: `next` keeps no state across its waits but the position: dropping it loses nothing.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::{
    Batch, BatchLimit, Clock, ConsumerName, ErrorKind, Feed, PartitionId, Position, ReadOutcome,
    Reader, Result, Source, StartFrom, Successor, Timestamp,
};

/// How long a reader at the head waits before it looks again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PollInterval {
    /// First wait after records were seen.
    pub busy: Duration,
    /// Longest wait; each empty look doubles the wait up to it.
    pub idle: Duration,
}

impl Default for PollInterval {
    /// 5 ms while busy, 1 s when idle.
    fn default() -> Self {
        Self { busy: Duration::from_millis(5), idle: Duration::from_secs(1) }
    }
}

/// A feed as a relay reads it.
pub struct FeedSource<F: ?Sized> {
    feed: Arc<F>,
    clock: Arc<dyn Clock>,
    poll: PollInterval,
}

impl<F: Feed + ?Sized + 'static> FeedSource<F> {
    /// Reads `feed`, waiting by `clock`.
    pub fn new(feed: Arc<F>, clock: Arc<dyn Clock>, poll: PollInterval) -> Self {
        Self { feed, clock, poll }
    }
}

#[async_trait]
impl<F: Feed + ?Sized + 'static> Source for FeedSource<F> {
    fn identity(&self) -> String {
        self.feed.identity()
    }

    async fn partitions(&self, consumer: &ConsumerName) -> Result<Vec<PartitionId>> {
        self.feed.partitions(consumer).await
    }

    async fn open(
        &self,
        _consumer: &ConsumerName,
        partition: &PartitionId,
        from: StartFrom,
    ) -> Result<Box<dyn Reader>> {
        let after = begin(&*self.feed, partition, &from).await?;
        let passed = match from {
            StartFrom::Now | StartFrom::Time(_) => {
                passed(&*self.feed, partition, &after, &from).await?
            }
            StartFrom::Oldest | StartFrom::After(_) => Vec::new(),
        };
        // One that begins after the end hands out the end alone: a checkpoint written in between
        // would forget where it begins in the successors.
        let begins = passed.is_empty() && !matches!(from, StartFrom::After(_));
        Ok(Box::new(FeedReader {
            feed: Arc::clone(&self.feed),
            clock: Arc::clone(&self.clock),
            poll: self.poll,
            partition: partition.clone(),
            after,
            begins,
            passed,
            wait: self.poll.busy,
            last_moved: Timestamp::default(),
        }))
    }
}

async fn begin<F: Feed + ?Sized>(
    feed: &F,
    partition: &PartitionId,
    from: &StartFrom,
) -> Result<Position> {
    match from {
        StartFrom::Oldest => Ok(Position::START),
        StartFrom::Now => feed.head(partition).await,
        StartFrom::Time(time) => feed.position_at(partition, *time).await,
        StartFrom::After(position) => Ok(position.clone()),
    }
}

/// Where a reader that begins `from` goes on when `partition` had ended before that: its
/// successors, and theirs where one of them had ended before it as well. Without this they would
/// be read from their beginnings, which lie before the start.
async fn passed<F: Feed + ?Sized>(
    feed: &F,
    partition: &PartitionId,
    after: &Position,
    from: &StartFrom,
) -> Result<Vec<Successor>> {
    let one = BatchLimit { records: 1, bytes: 1 };
    let mut found: Vec<Successor> = Vec::new();
    let mut unseen = VecDeque::from([(partition.clone(), after.clone())]);
    while let Some((partition, after)) = unseen.pop_front() {
        let page = feed.read(&partition, &after, one).await?;
        let ended = page.ended.filter(|_| page.entries.is_empty());
        for successor in ended.unwrap_or_default() {
            let start = match begin(feed, &successor.partition, from).await {
                Ok(start) if is_later(&start, &successor.from) => start,
                Ok(_) => successor.from,
                // Below the horizon of the successor, which its own beginning respects.
                Err(error) if error.kind() == ErrorKind::Permanent => successor.from,
                Err(error) => return Err(error),
            };
            unseen.push_back((successor.partition.clone(), start.clone()));
            found.push(Successor { from: start, ..successor });
        }
    }
    Ok(found)
}

/// Whether a successor's own start lies behind the end of its predecessor. Where positions are no
/// ULIDs, the end is a place in the successor, too, and the start can't lie behind it.
fn is_later(start: &Position, end: &Position) -> bool {
    matches!((start.to_ulid(), end.to_ulid()), (Ok(start), Ok(end)) if start > end)
}

/// A quiet partition's position is handed out at most this often, so that it pins no retention.
const QUIET_POSITION_EVERY: Duration = Duration::from_secs(1);

/// A reader of a feed that watches for itself looks this seldom: a lost watch must not last.
const UNWATCHED_AT_MOST: Duration = Duration::from_secs(120);

struct FeedReader<F: ?Sized> {
    feed: Arc<F>,
    clock: Arc<dyn Clock>,
    poll: PollInterval,
    partition: PartitionId,
    after: Position,
    /// Where it begins is not handed out yet.
    begins: bool,
    /// Where to go on instead, when the partition had ended before the start.
    passed: Vec<Successor>,
    wait: Duration,
    /// When the position last moved without records.
    last_moved: Timestamp,
}

impl<F: Feed + ?Sized> FeedReader<F> {
    /// Moves to the page's end and says whether there is anything to hand out.
    fn take(&mut self, entries: usize, position: &Position) -> bool {
        let now = Timestamp::from_millis(
            u64::try_from(self.clock.elapsed().as_millis()).unwrap_or(u64::MAX),
        );
        let moved = *position != self.after;
        let due = self.last_moved == Timestamp::default()
            || now.since(self.last_moved) >= QUIET_POSITION_EVERY;
        if entries == 0 && !(moved && due) {
            return false;
        }
        if entries == 0 {
            self.last_moved = now;
        }
        self.after = position.clone();
        true
    }
}

#[async_trait]
impl<F: Feed + ?Sized + 'static> Reader for FeedReader<F> {
    async fn next(&mut self, limit: BatchLimit) -> Result<ReadOutcome> {
        if !self.passed.is_empty() {
            return Ok(ReadOutcome::Ended(std::mem::take(&mut self.passed)));
        }
        if std::mem::take(&mut self.begins) {
            let position = self.after.clone();
            return Ok(ReadOutcome::Batch(Batch { entries: Vec::new(), position }));
        }
        loop {
            let page = self.feed.read(&self.partition, &self.after, limit).await?;
            if !page.entries.is_empty() {
                self.wait = self.poll.busy;
            } else if let Some(successors) = page.ended {
                return Ok(ReadOutcome::Ended(successors));
            }
            if self.take(page.entries.len(), &page.position) {
                return Ok(ReadOutcome::Batch(Batch {
                    entries: page.entries,
                    position: page.position,
                }));
            }
            let wait = if self.feed.watches() { UNWATCHED_AT_MOST } else { self.wait };
            wait_for_news(&*self.feed, &self.after, &*self.clock, wait).await;
            self.wait = (self.wait * 2).min(self.poll.idle);
        }
    }

    fn confirmed(&mut self, _position: &Position) {}
}

/// Ends at the feed's own signal or after `wait`, whichever comes first.
async fn wait_for_news<F: Feed + ?Sized>(
    feed: &F,
    after: &Position,
    clock: &dyn Clock,
    wait: Duration,
) {
    let mut changed = std::pin::pin!(feed.changed_after(after));
    let mut sleep = std::pin::pin!(clock.sleep(wait));
    std::future::poll_fn(|cx| {
        if changed.as_mut().poll(cx).is_ready() || sleep.as_mut().poll(cx).is_ready() {
            return std::task::Poll::Ready(());
        }
        std::task::Poll::Pending
    })
    .await;
}
