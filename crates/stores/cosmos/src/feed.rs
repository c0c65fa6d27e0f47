//! The change feed as a feed: pages of events in the order in which they changed.
//!
//! What lives here: reading a page, where a page begins and ends, the head, a time. What does not:
//! what an event's document says (`event_document.rs`), ranges and their successors (`ranges.rs`).
//! Invariant: a position is a token of the library and the events after it that were handed out;
//! reading on from it gives every event that was not, whatever the size of pages and whether the
//! range was split since. Events of one key that one page has come in the order of their numbers.

use std::collections::{BTreeSet, HashMap};
use std::num::NonZeroU32;
use std::time::Duration;

use async_trait::async_trait;
use azure_data_cosmos::feed::{ChangeFeedPageIterator, ContinuationToken, FeedRange, FeedScope};
use azure_data_cosmos::models::ChangeFeedItem;
use azure_data_cosmos::options::{ChangeFeedOptions, ChangeFeedStartFrom, MaxItemCountHint};
use futures_util::StreamExt;
use postrider_core::{
    BatchLimit, ConsumerName, Entry, Error, Feed, FeedPage, PartitionId, Position, Result,
    Timestamp,
};
use serde_json::Value;

use crate::CosmosStore;
use crate::error::failed;
use crate::event_document::{entry, is_event, seq, text, written_seconds};
use crate::position::{At, Passed, Place};
use crate::ranges;

const READ: &str = "read the change feed";

type Pages = ChangeFeedPageIterator<ChangeFeedItem<Value>>;

/// One page as the library gave it.
struct Page {
    /// Events of one key in the order of their numbers.
    documents: Vec<Value>,
    /// From where it can be read again.
    before: String,
    /// From where the next one follows.
    after: String,
    /// Whether nothing of the range follows it for now.
    last: bool,
}

/// Marks that are carried on at most: documents that changed or were deleted since are never met.
const MAX_CARRIED: usize = 100;

impl CosmosStore {
    /// Begins to read a range at a place.
    async fn pages(&self, range: &FeedRange, from: &Place, most: NonZeroU32) -> Result<Pages> {
        let mut options =
            ChangeFeedOptions::default().with_max_item_count(MaxItemCountHint::Limit(most));
        if let Place::At(at) = from {
            let token = ContinuationToken::from_string(at.token.clone());
            options = options.with_continuation_token(token);
        }
        self.begin(range, ChangeFeedStartFrom::Beginning, options).await
    }

    async fn begin(
        &self,
        range: &FeedRange,
        start: ChangeFeedStartFrom,
        options: ChangeFeedOptions,
    ) -> Result<Pages> {
        let scope = FeedScope::range(range.clone());
        let pages = self.inner.container.query_change_feed(scope, start, Some(options)).await;
        pages.map_err(failed(READ))
    }

    /// A range of this container, and a place of it.
    fn range_and_place(
        &self,
        partition: &PartitionId,
        after: &Position,
    ) -> Result<(FeedRange, Place)> {
        let range = ranges::parse(partition)?;
        let place = Place::read(after)?;
        if let Place::At(at) = &place
            && at.container != self.inner.container_rid
        {
            return Err(Error::permanent(format!(
                "the position is of another container {:?}, which was deleted and made anew since; \
                 what it held and was not delivered is gone: remove the consumer to begin with the \
                 new one",
                self.inner.container_name
            )));
        }
        Ok((range, place))
    }

    /// How many parts of a range are polled in turn: one, but for the moment in which the service
    /// has split it.
    async fn parts(&self, range: &FeedRange) -> Result<usize> {
        let ranges = self.ranges(false).await?;
        Ok(ranges.iter().filter(|other| other.overlaps(range)).count().max(1))
    }

    /// The next page that has any documents; none when no part of the range has.
    async fn next_page(
        &self,
        range: &FeedRange,
        pages: &mut Pages,
        most: NonZeroU32,
    ) -> Result<Option<Page>> {
        let parts = self.parts(range).await?;
        for _ in 0..parts {
            let before = token(pages)?;
            let Some(page) = pages.next().await else { break };
            let page = page.map_err(failed(READ))?;
            let mut documents: Vec<Value> =
                page.into_items().into_iter().filter_map(|item| item.current().cloned()).collect();
            in_order(&mut documents);
            if !documents.is_empty() {
                // The library hears of a split by asking, and then gives one part's page alone.
                let whole = self.parts(range).await? == 1;
                let last = whole && documents.len() < most.get() as usize;
                return Ok(Some(Page { documents, before, after: token(pages)?, last }));
            }
        }
        Ok(None)
    }

    /// Tells of events that were deleted before anybody read them here.
    async fn look_for_expired(&self, partition: &PartitionId, page: &Page) -> Result<()> {
        let ttl = Duration::from_secs(self.inner.event_ttl_seconds.unsigned_abs());
        let ago = self.now().await?.as_millis() / 1_000;
        let before = ago.saturating_sub(ttl.as_secs());
        let gaps = self.inner.expired.look(&page.documents, before);
        if !gaps.is_empty() {
            let events: u64 = gaps.iter().map(|gap| gap.count).sum();
            metrics::counter!("postrider_cosmos_events_expired_total").increment(events);
            tracing::warn!(
                %partition, keys = gaps.len(), events,
                "events were deleted, most likely by their time to live, before they were read here"
            );
        }
        Ok(())
    }

    /// A token of "now" that stays where it is: every part of the range is asked once, since only
    /// the service's answer pins the moment.
    async fn pinned(&self, range: &FeedRange) -> Result<String> {
        let options = ChangeFeedOptions::default();
        let mut pages = self.begin(range, ChangeFeedStartFrom::Now, options).await?;
        for _ in 0..self.parts(range).await? {
            let page = pages.next().await;
            page.transpose().map_err(failed(READ))?;
        }
        token(&pages)
    }
}

fn token(pages: &Pages) -> Result<String> {
    let token =
        pages.to_continuation_token().map_err(failed("note the place in the change feed"))?;
    Ok(token.as_str().to_owned())
}

/// Events of one key in the order of their numbers, where they have some; the places that they
/// take stay those of the page. One batch's events have one time, and no order of their own.
fn in_order(documents: &mut [Value]) {
    let mut places: HashMap<String, Vec<usize>> = HashMap::new();
    for (at, document) in documents.iter().enumerate() {
        if let (Some(key), Some(_)) = (text(document, "partitionKey"), seq(document)) {
            places.entry(key.to_owned()).or_default().push(at);
        }
    }
    for places in places.into_values().filter(|places| places.len() > 1) {
        let mut sorted: Vec<Value> =
            places.iter().map(|at| std::mem::take(&mut documents[*at])).collect();
        sorted.sort_by_key(seq);
        for (at, document) in places.into_iter().zip(sorted) {
            documents[at] = document;
        }
    }
}

/// Hands out what of a page was not, as far as the limits allow.
struct Handing<'a> {
    store: &'a CosmosStore,
    limit: BatchLimit,
    entries: Vec<Entry>,
    bytes: usize,
}

impl Handing<'_> {
    /// Takes a page's events; where to go on, and whether the limits were met before its end.
    fn take(&mut self, page: Page, from: &Place) -> Result<(At, bool)> {
        let inner = &self.store.inner;
        let mut at = At::token(&inner.container_rid, page.before);
        (at.ordinal, at.seconds) = (from.ordinal(), from.seconds());
        let passed = from.passed();
        let mut met = BTreeSet::new();
        at.passed = passed.clone();
        for document in page.documents.into_iter().filter(is_event) {
            let mark = Passed::mark(&document);
            met.insert(mark);
            if passed.has(mark) {
                continue;
            }
            let mut after = at.clone();
            after.ordinal += 1;
            after.seconds = after.seconds.max(written_seconds(&document));
            after.passed.insert(mark);
            let entry = entry(&document, after.write()?, &inner.default_topic);
            let cost = entry.cost_bytes();
            let full = self.entries.len() >= self.limit.records
                || (!self.entries.is_empty() && self.bytes + cost > self.limit.bytes);
            if full {
                return Ok((at, true));
            }
            self.bytes += cost;
            self.entries.push(entry);
            at = after;
        }
        at.token = page.after;
        // What this page did not have is met by a later one: pages may be smaller than they were.
        at.passed = passed.without(&met);
        if page.last || at.passed.len() > MAX_CARRIED {
            at.passed = Passed::default();
        }
        Ok((at, false))
    }
}

#[async_trait]
impl Feed for CosmosStore {
    fn identity(&self) -> String {
        let inner = &self.inner;
        let names =
            format!("cosmos {} {}/{}", inner.account, inner.database_name, inner.container_name);
        let rid = format!(" {}", inner.container_rid);
        let most = postrider_core::limits::MAX_NAME_BYTES.saturating_sub(rid.len());
        let cut = names.floor_char_boundary(most);
        format!("{}{rid}", &names[..cut])
    }

    async fn partitions(&self, consumer: &ConsumerName) -> Result<Vec<PartitionId>> {
        self.partitions_of(consumer).await
    }

    async fn read(
        &self,
        partition: &PartitionId,
        after: &Position,
        limit: BatchLimit,
    ) -> Result<FeedPage> {
        let (range, from) = self.range_and_place(partition, after)?;
        // One that was split is read no further: its successors begin where it stands.
        if let Some(ended) = self.successors(&range, after).await? {
            let position = after.clone();
            return Ok(FeedPage { entries: Vec::new(), position, ended: Some(ended) });
        }
        let most = u32::try_from(limit.records).unwrap_or(u32::MAX).min(self.inner.max_items);
        let most = NonZeroU32::new(most).unwrap_or(NonZeroU32::MIN);
        let mut pages = self.pages(&range, &from, most).await?;
        let mut handing = Handing { store: self, limit, entries: Vec::new(), bytes: 0 };
        let Some(page) = self.next_page(&range, &mut pages, most).await? else {
            let position = after.clone();
            return Ok(FeedPage { entries: Vec::new(), position, ended: None });
        };
        self.look_for_expired(partition, &page).await?;
        let (at, _) = handing.take(page, &from)?;
        Ok(FeedPage { entries: handing.entries, position: at.write()?, ended: None })
    }

    async fn head(&self, partition: &PartitionId) -> Result<Position> {
        let range = ranges::parse(partition)?;
        At::token(&self.inner.container_rid, self.pinned(&range).await?).write()
    }

    async fn position_at(&self, partition: &PartitionId, time: Timestamp) -> Result<Position> {
        let range = ranges::parse(partition)?;
        let seconds = i64::try_from(time.as_millis() / 1_000).unwrap_or(i64::MAX);
        let start = time::OffsetDateTime::from_unix_timestamp(seconds).map_err(|error| {
            Error::permanent(format!("the change feed can't be read from second {seconds}"))
                .with_source(error)
        })?;
        let start = ChangeFeedStartFrom::PointInTime(start);
        let pages = self.begin(&range, start, ChangeFeedOptions::default()).await?;
        At::token(&self.inner.container_rid, token(&pages)?).write()
    }
}
