//! The change feed as a feed: pages of events in the order in which they changed.
//!
//! What lives here: reading a page, where a page begins and ends, the head, a time. What does not:
//! what an event's document says (`event_document.rs`), ranges and their successors (`ranges.rs`).
//! Invariant: a position is a token of the library and the events after it that were handed out;
//! reading on from it gives every event that was not, whatever the size of pages and whether the
//! range was split since. Events of one key that one page has come in the order of their numbers.

use std::collections::{BTreeSet, VecDeque};
use std::num::NonZeroU32;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use azure_data_cosmos::feed::{ChangeFeedPageIterator, ContinuationToken, FeedRange, FeedScope};
use azure_data_cosmos::models::ChangeFeedItem;
use azure_data_cosmos::options::{ChangeFeedOptions, ChangeFeedStartFrom, MaxItemCountHint};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use futures_util::StreamExt;
use postrider_core::{
    BatchLimit, ConsumerName, Entry, Error, Feed, FeedPage, PartitionId, Position, Result,
    Successor, Timestamp,
};
use serde_json::Value;

use crate::CosmosStore;
use crate::batch_order::{LSN, in_order};
use crate::control::MAX_BATCH_OPERATIONS;
use crate::error::failed;
use crate::event_document::{entry, is_event, text, written_seconds};
use crate::position::{At, Passed, Place};
use crate::ranges;

const READ: &str = "read the change feed";

type Pages = ChangeFeedPageIterator<ChangeFeedItem<Value>>;

/// Marks that are carried on at most: documents that changed or were deleted since are never met.
const MAX_CARRIED: usize = 50;
/// How often "now" is looked for anew, when the container is split meanwhile.
const SPLITS_AT_ONCE: usize = 5;
/// So many answers without any document are asked on from at once; a place alone is given then.
const EMPTY_AT_MOST: usize = 8;
/// A reader that meets no event for so long is given its place, so that it can note it.
const QUIET_AT_MOST: Duration = Duration::from_secs(60);
/// What the emulator's etag calls the number.
const EMULATED_LSN: &str = "lsn";
/// Pages that were read ahead and are kept until their turn; the service gives 4 MB in one.
const MAX_AHEAD: usize = 16;

/// Whether a reading looks for events that were deleted before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Looks {
    /// A relay's, a replay's.
    Yes,
    /// One that counts alone: what a relay has seen is not its own.
    No,
}

/// One page as the library gave it.
#[derive(Debug, Clone)]
struct Page {
    /// Events of one key in the order of their numbers; none where the place alone has moved.
    documents: Vec<Value>,
    /// From where it can be read again.
    before: String,
    /// From where the next one follows.
    after: String,
    /// Whether it has as many documents as were asked for: more may follow.
    full: bool,
}

/// Pages that were read ahead, each with its range and its place.
#[derive(Debug, Default)]
pub(crate) struct Ahead(Mutex<VecDeque<(String, Page)>>);

impl Ahead {
    fn pages(&self) -> MutexGuard<'_, VecDeque<(String, Page)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keep(&self, place: String, page: Page) {
        let mut pages = self.pages();
        if pages.len() >= MAX_AHEAD {
            pages.pop_front();
        }
        pages.push_back((place, page));
    }

    fn take(&self, place: &str) -> Option<Page> {
        let mut pages = self.pages();
        let at = pages.iter().position(|(of, _)| of == place)?;
        pages.remove(at).map(|(_, page)| page)
    }
}

impl CosmosStore {
    async fn begin(
        &self,
        range: &FeedRange,
        start: ChangeFeedStartFrom,
        options: ChangeFeedOptions,
    ) -> Result<Pages> {
        let scope = FeedScope::range(range.clone());
        let pages = self.container().query_change_feed(scope, start, Some(options)).await;
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

    /// The page of a range that follows a token, or its first; none where nothing follows.
    async fn changes(&self, range: &FeedRange, token: Option<&str>) -> Result<Option<Page>> {
        let place = ahead(range, token);
        if let Some(page) = self.inner.ahead.take(&place) {
            return Ok(Some(page));
        }
        let most = NonZeroU32::new(self.inner.max_items).unwrap_or(NonZeroU32::MIN);
        let mut options =
            ChangeFeedOptions::default().with_max_item_count(MaxItemCountHint::Limit(most));
        if let Some(token) = token {
            let token = ContinuationToken::from_string(token.to_owned());
            options = options.with_continuation_token(token);
        }
        let mut pages = self.begin(range, ChangeFeedStartFrom::Beginning, options).await?;
        let before = token_of(&pages)?;
        let mut documents = Vec::new();
        // A token may have several parts, of which each is asked in turn.
        for _ in 0..parts_of(&before) {
            let Some(page) = pages.next().await else { return Ok(None) };
            let page = page.map_err(failed(READ))?;
            documents.extend(page.into_items().iter().filter_map(changed));
            if !documents.is_empty() {
                break;
            }
        }
        // Without documents the place may have moved all the same: the service's first answer to a
        // start by time has nothing else.
        let after = token_of(&pages)?;
        if documents.is_empty() && after == before {
            return Ok(None);
        }
        if after == before {
            // Read on from here, the same page would come for ever.
            return Err(Error::transient(format!(
                "{READ}: a page came without a place after it; it is asked for again"
            )));
        }
        in_order(&mut documents);
        let full = documents.len() >= most.get() as usize;
        Ok(Some(Page { documents, before, after, full }))
    }

    /// What follows a full page of the key that it ends with: a page may end in the middle of a
    /// batch, whose events have no order of their own. Pages that are read for it are kept.
    async fn rest(&self, range: &FeedRange, page: &Page) -> Result<Vec<Value>> {
        let mut rest: Vec<Value> = Vec::new();
        let key = page.documents.last().and_then(|last| text(last, "partitionKey"));
        let Some(key) = key.filter(|_| page.full).map(str::to_owned) else { return Ok(rest) };
        let of_key = |document: &&Value| text(document, "partitionKey") == Some(&key);
        let mut after = page.after.clone();
        while rest.len() < MAX_BATCH_OPERATIONS {
            let Some(next) = self.changes(range, Some(&after)).await? else { break };
            let some: Vec<Value> = next.documents.iter().take_while(of_key).cloned().collect();
            let whole = some.len() == next.documents.len() && next.full;
            rest.extend(some);
            let place = ahead(range, Some(&after));
            after.clone_from(&next.after);
            self.inner.ahead.keep(place, next);
            if !whole {
                break;
            }
        }
        // Each is named in a position, which has room for no more.
        rest.truncate(MAX_BATCH_OPERATIONS);
        Ok(rest)
    }

    /// One page, which may have no event.
    async fn read_one(
        &self,
        partition: &PartitionId,
        after: &Position,
        limit: BatchLimit,
        looks: Looks,
    ) -> Result<(FeedPage, bool)> {
        let (range, from) = self.range_and_place(partition, after)?;
        // One that was split is read no further: its successors begin where it stands.
        let ended = |ended: Vec<Successor>| {
            if looks == Looks::Yes {
                self.inner.expired.hand_over(partition, after, &ended);
            }
            let position = after.clone();
            (FeedPage { entries: Vec::new(), position, ended: Some(ended) }, false)
        };
        if let Some(successors) = self.successors(&range, after).await? {
            return Ok(ended(successors));
        }
        let token = match &from {
            Place::Start => None,
            Place::At(at) => Some(at.token.as_str()),
        };
        let page = self.changes(&range, token).await?;
        let rest = match &page {
            Some(page) => self.rest(&range, page).await?,
            None => Vec::new(),
        };
        // The library may have heard of a split just now, and given a part's page alone.
        if let Some(successors) = self.successors(&range, after).await? {
            return Ok(ended(successors));
        }
        let Some(page) = page else {
            let position = after.clone();
            return Ok((FeedPage { entries: Vec::new(), position, ended: None }, true));
        };
        let is_empty = page.documents.is_empty();
        let mut whole = [&page.documents[..], &rest[..]].concat();
        in_order(&mut whole);
        let now = match looks {
            Looks::Yes => Some(self.now().await?),
            Looks::No => None,
        };
        let mut handing = Handing { store: self, limit, entries: Vec::new(), bytes: 0 };
        let position = handing.take(page, rest, &from)?.write()?;
        // From here on nothing fails: what was seen is kept.
        if let Some(now) = now {
            let mut seen = self.inner.expired.at(partition, after);
            self.look_for_expired(partition, &mut seen, &whole, now);
            self.inner.expired.keep(partition, &position, seen);
        }
        Ok((FeedPage { entries: handing.entries, position, ended: None }, is_empty))
    }

    /// Reads on over pages without events, of which a container of long-lived documents has many.
    pub(crate) async fn read_on(
        &self,
        partition: &PartitionId,
        after: &Position,
        limit: BatchLimit,
        looks: Looks,
    ) -> Result<FeedPage> {
        let (begun, mut place, mut empty) = (Instant::now(), after.clone(), 0);
        loop {
            let (page, is_empty) = match self.read_one(partition, &place, limit, looks).await {
                // What was passed over until then is passed; who goes on there meets the failure.
                Err(_) if place != *after => {
                    return Ok(FeedPage { entries: Vec::new(), position: place, ended: None });
                }
                other => other?,
            };
            empty += usize::from(is_empty);
            let quiet = page.entries.is_empty() && page.ended.is_none() && page.position != place;
            if !quiet || empty >= EMPTY_AT_MOST || begun.elapsed() >= QUIET_AT_MOST {
                return Ok(page);
            }
            place = page.position;
        }
    }

    /// A token of "now" that stays where it is: every part of the range is asked once, since only
    /// the service's answer pins the moment.
    async fn pinned(&self, range: &FeedRange) -> Result<String> {
        let parts = async |refresh| {
            let ranges = self.ranges(refresh).await?;
            Ok::<_, Error>(ranges.iter().filter(|other| other.overlaps(range)).count().max(1))
        };
        let mut expected = parts(false).await?;
        for _ in 0..SPLITS_AT_ONCE {
            let options = ChangeFeedOptions::default();
            let mut pages = self.begin(range, ChangeFeedStartFrom::Now, options).await?;
            for _ in 0..expected {
                let page = pages.next().await;
                page.transpose().map_err(failed(READ))?;
            }
            // A part that was not asked has no place yet, and would begin at another "now".
            let found = parts(false).await?;
            if found == expected {
                return token_of(&pages);
            }
            expected = found;
        }
        Err(Error::transient(format!("{READ}: the container is being split; try again")))
    }
}

/// The document of a change, with the number of the change where it is told beside it.
fn changed(item: &ChangeFeedItem<Value>) -> Option<Value> {
    let mut document = item.current()?.clone();
    let told = item.metadata().and_then(|metadata| metadata.lsn());
    if let (Some(told), Some(fields)) = (told, document.as_object_mut()) {
        fields.entry(LSN).or_insert_with(|| told.value().into());
    }
    Some(document)
}

/// The parts of a token: one, unless the range was split or merged on the way. The token is the
/// library's own; where it says nothing of parts, none is found.
fn parts(token: &str) -> Vec<Value> {
    let encoded = token.split_once('.').map_or("", |(_, rest)| rest);
    let decoded = URL_SAFE_NO_PAD.decode(encoded).unwrap_or_default();
    let mut state: Value = serde_json::from_slice(&decoded).unwrap_or_default();
    match state["root"]["active_tokens"].take() {
        Value::Array(parts) => parts,
        _ => Vec::new(),
    }
}

fn parts_of(token: &str) -> usize {
    parts(token).len().max(1)
}

/// A place in words: the service's number of the last change before it, which is its etag's (the
/// emulator's has more in it), and how many events after that were handed out.
fn described(at: &At) -> String {
    let lsn = |part: &Value| {
        let etag: Value = serde_json::from_str(part["server_continuation"].as_str()?).ok()?;
        let number = etag.as_str().map(str::to_owned);
        number.or_else(|| etag.get(EMULATED_LSN).unwrap_or(&etag).as_u64().map(|n| n.to_string()))
    };
    let numbers: Option<Vec<String>> = parts(&at.token).iter().map(lsn).collect();
    let place = match numbers.filter(|numbers| !numbers.is_empty()) {
        Some(numbers) => format!("lsn {}", numbers.join("+")),
        None => "before what is read next".to_owned(),
    };
    match at.passed.len() {
        0 => place,
        more => format!("{place} and {more} more"),
    }
}

/// Names a place of a range among the pages that were read ahead.
fn ahead(range: &FeedRange, token: Option<&str>) -> String {
    format!("{range} {}", token.unwrap_or_default())
}

fn token_of(pages: &Pages) -> Result<String> {
    let token =
        pages.to_continuation_token().map_err(failed("note the place in the change feed"))?;
    Ok(token.as_str().to_owned())
}

/// Hands out what of a page was not, as far as the limits allow.
struct Handing<'a> {
    store: &'a CosmosStore,
    limit: BatchLimit,
    entries: Vec<Entry>,
    bytes: usize,
}

impl Handing<'_> {
    /// Takes a page's events, with what follows it of its last batch; where to go on.
    fn take(&mut self, page: Page, rest: Vec<Value>, from: &Place) -> Result<At> {
        let inner = &self.store.inner;
        let mut at = At::token(&inner.container_rid, page.before);
        (at.ordinal, at.seconds, at.since) = (from.ordinal(), from.seconds(), from.since());
        let passed = from.passed();
        let (mut met, mut ahead) = (BTreeSet::new(), Passed::default());
        at.passed = passed.clone();
        rest.iter().filter(|rest| is_event(rest)).for_each(|rest| {
            ahead.insert(Passed::mark(rest));
        });
        let mut documents = page.documents;
        documents.extend(rest);
        in_order(&mut documents);
        for document in documents.into_iter().filter(is_event) {
            let mark = Passed::mark(&document);
            met.insert(mark);
            if passed.has(mark) || written_seconds(&document) < at.since {
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
                return Ok(at);
            }
            self.bytes += cost;
            self.entries.push(entry);
            at = after;
        }
        at.token = page.after;
        // What this page did not have is met by a later one: pages may be smaller than they were.
        at.passed = passed.without(&met);
        if at.passed.len() > MAX_CARRIED {
            at.passed = Passed::default();
        }
        at.passed.extend(&ahead);
        Ok(at)
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
        self.read_on(partition, after, limit, Looks::Yes).await
    }

    /// A place alone was given where other documents, or none, were read over.
    fn is_head(&self, page: &FeedPage, after: &Position) -> bool {
        page.entries.is_empty() && page.position == *after
    }

    fn describe(&self, position: &Position) -> String {
        match Place::read(position) {
            Ok(Place::Start) => "start".to_owned(),
            Ok(Place::At(at)) => described(&at),
            Err(_) => position.to_string(),
        }
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
        let mut at = At::token(&self.inner.container_rid, token_of(&pages)?);
        at.since = u64::try_from(seconds).unwrap_or(0);
        at.write()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_token_tells_its_parts() {
        let token = |state: &Value| format!("c1.{}", URL_SAFE_NO_PAD.encode(state.to_string()));
        let two = json!({ "root": { "active_tokens": [{}, {}] } });
        assert_eq!(parts_of(&token(&two)), 2);
        let told = |etags: &[&str]| {
            let parts: Vec<Value> =
                etags.iter().map(|etag| json!({ "server_continuation": etag })).collect();
            described(&At::token("rid", token(&json!({ "root": { "active_tokens": parts } }))))
        };
        assert_eq!(told(&["\"57\""]), "lsn 57");
        assert_eq!(told(&["\"57\"", r#"{"lsn": 8, "range": 3}"#]), "lsn 57+8");
        assert_eq!(told(&[]), "before what is read next");
        let mut within = At::token("rid", token(&two));
        within.passed.insert(1);
        assert_eq!(described(&within), "before what is read next and 1 more");
        for other in [token(&json!({})), "c1.".to_owned(), String::new(), "x".to_owned()] {
            assert_eq!(parts_of(&other), 1, "{other}");
        }
    }
}
