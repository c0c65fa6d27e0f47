//! Makes a `Source` of a `Feed`: reads pages and polls at the head.
//!
//! What lives here: the adaptive poll. What does not: any store.
//! Invariant: `next` keeps no state across its waits but the position and the page that is on its
//! way: dropping it loses nothing, and has nothing read twice.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::{
    Batch, BatchLimit, Clock, ConsumerName, ErrorKind, Feed, FeedPage, PartitionId, Position,
    ReadOutcome, Reader, Result, Source, StartFrom, Successor, Timestamp,
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
            reading: None,
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
    /// The page that is being read, of which a caller that was called away must lose nothing: what
    /// was asked for is paid for.
    reading: Option<(BatchLimit, ReadingPage)>,
}

/// A page on its way.
type ReadingPage = Pin<Box<dyn Future<Output = Result<FeedPage>> + Send>>;

impl<F: Feed + ?Sized + 'static> FeedReader<F> {
    /// The page after this place; one that is on its way already is waited for.
    async fn page(&mut self, limit: BatchLimit) -> Result<FeedPage> {
        let (feed, partition) = (Arc::clone(&self.feed), self.partition.clone());
        let after = self.after.clone();
        let (_, reading) = match &mut self.reading {
            Some(reading) if reading.0 == limit => reading,
            other => other.insert((
                limit,
                Box::pin(async move { feed.read(&partition, &after, limit).await }),
            )),
        };
        let page = reading.await;
        self.reading = None;
        page
    }

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
            let page = self.page(limit).await?;
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// A feed whose pages take a while.
    struct Slow(AtomicUsize);

    #[async_trait]
    impl Feed for Slow {
        fn identity(&self) -> String {
            "slow".to_owned()
        }

        async fn partitions(&self, _consumer: &ConsumerName) -> Result<Vec<PartitionId>> {
            Ok(vec![PartitionId::numbered(0, 1)])
        }

        async fn read(
            &self,
            _partition: &PartitionId,
            _after: &Position,
            limit: BatchLimit,
        ) -> Result<FeedPage> {
            self.0.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(Duration::from_secs(1)).await;
            let position = Position::from_bytes(&limit.records.to_be_bytes())?;
            Ok(FeedPage { entries: Vec::new(), position, ended: None })
        }

        async fn head(&self, _partition: &PartitionId) -> Result<Position> {
            Ok(Position::START)
        }

        async fn position_at(&self, _: &PartitionId, _: Timestamp) -> Result<Position> {
            Ok(Position::START)
        }
    }

    struct Tokio(tokio::time::Instant);

    #[async_trait]
    impl Clock for Tokio {
        fn now(&self) -> Timestamp {
            Timestamp::from_millis(0)
        }

        fn elapsed(&self) -> Duration {
            self.0.elapsed()
        }

        async fn sleep(&self, duration: Duration) {
            tokio::time::sleep(duration).await;
        }
    }

    /// A relay that notes a checkpoint leaves `next` and comes back.
    #[tokio::test(start_paused = true)]
    async fn a_page_on_its_way_is_not_asked_for_again() {
        let feed = Arc::new(Slow(AtomicUsize::new(0)));
        let clock = Arc::new(Tokio(tokio::time::Instant::now()));
        let source = FeedSource::new(Arc::clone(&feed), clock, PollInterval::default());
        let consumer = ConsumerName::new("c").expect("a valid name");
        let partition = PartitionId::numbered(0, 1);
        let from = StartFrom::After(Position::START);
        let mut reader = source.open(&consumer, &partition, from).await.expect("opened");
        let few = BatchLimit { records: 7, bytes: 7 };
        for _ in 0..3 {
            let left = tokio::time::timeout(Duration::from_millis(300), reader.next(few)).await;
            assert!(left.is_err(), "it takes a second");
        }
        reader.confirmed(&Position::START);
        let outcome = reader.next(few).await.expect("a page");
        assert_eq!(feed.0.load(Ordering::Relaxed), 1);
        let ReadOutcome::Batch(batch) = outcome else { panic!("a batch") };
        assert_eq!(batch.position.as_bytes(), 7usize.to_be_bytes());
        // Another limit is another page.
        let left = tokio::time::timeout(Duration::from_millis(300), reader.next(few)).await;
        assert!(left.is_err(), "it takes a second");
        let more = BatchLimit { records: 8, bytes: 8 };
        let ReadOutcome::Batch(batch) = reader.next(more).await.expect("a page") else {
            panic!("a batch")
        };
        assert_eq!(batch.position.as_bytes(), 8usize.to_be_bytes());
    }
}
