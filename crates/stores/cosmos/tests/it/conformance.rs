//! The shared suites, on this store: what relays keep, and what of a feed holds here.
//!
//! What lives here: the harness. What does not: what this store alone promises (`feed.rs`).
//! Positions are no ULIDs here, and the same record may be met at places that are written
//! differently: behaviours that compare positions have siblings in `feed.rs`.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use azure_data_cosmos::feed::FeedScope;
use futures_util::TryStreamExt;
use postrider_conformance::clock::TokioClock;
use postrider_conformance::source::SourceHarness;
use postrider_conformance::store::{Prunes, StoreFeatures, StoreHarness, Supports, Times, Writers};
use postrider_core::{
    Acquired, BatchLimit, Checkpoint, Checkpoints, ConsumerName, ConsumerProgress, DeadLetter,
    DeadLetterFilter, DeadLetterId, DeadLetterState, DeadLetters, DocumentBatch, DocumentError,
    DocumentOperation, DocumentPage, DocumentRead, DocumentStore, ETag, Error, EventId, Feed,
    FeedPage, FeedSource, GroupName, Heartbeat, HeldLease, Key, LeaseInfo, Leases, NewDeadLetter,
    NewEvent, PageRequest, PartitionId, PollInterval, Position, Pruned, RelayId, Renewal, Result,
    Retention, RetentionPolicy, SavedDocument, Source, Successor, Tally, Timestamp,
};
use postrider_store_cosmos::{CosmosStore, azure_data_cosmos};
use serde_json::Value;
use uuid::Uuid;

use crate::support::World;

/// The store under the names that the suites have for partitions: numbers.
pub(crate) struct Numbered(CosmosStore);

/// All of a container with one range.
const WHOLE_RANGE: &str = "00-FF";

impl Numbered {
    /// The range of number 0 of 1; other names are the store's to refuse.
    fn range(partition: &PartitionId) -> PartitionId {
        match partition.to_numbers() {
            Some((0, 1)) => PartitionId::new(WHOLE_RANGE).expect("a valid name"),
            _ => partition.clone(),
        }
    }

    /// The other way.
    fn number(partition: PartitionId) -> PartitionId {
        match partition.as_str() {
            WHOLE_RANGE => PartitionId::numbered(0, 1),
            _ => partition,
        }
    }

    fn lease(lease: &HeldLease) -> HeldLease {
        let partition = Self::range(lease.partition());
        Self::granted(lease, partition)
    }

    fn granted(lease: &HeldLease, partition: PartitionId) -> HeldLease {
        let (group, holder) = (lease.group().clone(), lease.holder().clone());
        HeldLease::granted(group, partition, holder, lease.epoch())
    }

    fn letter(letter: DeadLetter) -> DeadLetter {
        DeadLetter { partition: Self::number(letter.partition), ..letter }
    }
}

#[async_trait]
impl Feed for Numbered {
    fn identity(&self) -> String {
        self.0.identity()
    }

    async fn partitions(&self, consumer: &ConsumerName) -> Result<Vec<PartitionId>> {
        let partitions = self.0.partitions(consumer).await?;
        Ok(partitions.into_iter().map(Self::number).collect())
    }

    /// Documents that are no events have pages without entries; the suites take one for the head.
    async fn read(
        &self,
        partition: &PartitionId,
        after: &Position,
        limit: BatchLimit,
    ) -> Result<FeedPage> {
        let (range, mut after) = (Self::range(partition), after.clone());
        loop {
            let page = Feed::read(&self.0, &range, &after, limit).await?;
            if !page.entries.is_empty() || page.ended.is_some() || page.position == after {
                return Ok(page);
            }
            after = page.position;
        }
    }

    async fn head(&self, partition: &PartitionId) -> Result<Position> {
        self.0.head(&Self::range(partition)).await
    }

    async fn position_at(&self, partition: &PartitionId, time: Timestamp) -> Result<Position> {
        self.0.position_at(&Self::range(partition), time).await
    }
}

#[async_trait]
impl Leases for Numbered {
    async fn join(
        &self,
        group: &GroupName,
        relay: &RelayId,
        ttl: Duration,
    ) -> Result<Vec<RelayId>> {
        self.0.join(group, relay, ttl).await
    }

    async fn leave(&self, group: &GroupName, relay: &RelayId) -> Result<()> {
        self.0.leave(group, relay).await
    }

    async fn acquire(
        &self,
        group: &GroupName,
        partition: &PartitionId,
        relay: &RelayId,
        ttl: Duration,
    ) -> Result<Acquired> {
        let answer = self.0.acquire(group, &Self::range(partition), relay, ttl).await?;
        Ok(match answer {
            Acquired::Held(lease) => Acquired::Held(Self::granted(&lease, partition.clone())),
            busy @ Acquired::Busy { .. } => busy,
        })
    }

    async fn renew(&self, leases: &[&HeldLease], ttl: Duration) -> Result<Vec<Renewal>> {
        let leases: Vec<HeldLease> = leases.iter().map(|lease| Self::lease(lease)).collect();
        self.0.renew(&leases.iter().collect::<Vec<_>>(), ttl).await
    }

    async fn heartbeat(
        &self,
        group: &GroupName,
        leases: &[&HeldLease],
        ttl: Duration,
    ) -> Result<Heartbeat> {
        let leases: Vec<HeldLease> = leases.iter().map(|lease| Self::lease(lease)).collect();
        self.0.heartbeat(group, &leases.iter().collect::<Vec<_>>(), ttl).await
    }

    async fn release(&self, lease: &HeldLease) -> Result<()> {
        self.0.release(&Self::lease(lease)).await
    }

    async fn leases(&self, group: &GroupName) -> Result<Vec<LeaseInfo>> {
        let leases = self.0.leases(group).await?.into_iter();
        let named =
            |lease: LeaseInfo| LeaseInfo { partition: Self::number(lease.partition), ..lease };
        Ok(leases.map(named).collect())
    }
}

#[async_trait]
impl Checkpoints for Numbered {
    async fn checkpoint(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
    ) -> Result<Option<Checkpoint>> {
        self.0.checkpoint(consumer, &Self::range(partition)).await
    }

    async fn advance(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        to: &Position,
        tally: Tally,
    ) -> Result<()> {
        self.0.advance(&Self::lease(lease), consumer, to, tally).await
    }

    async fn finish(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        successors: &[Successor],
    ) -> Result<()> {
        self.0.finish(&Self::lease(lease), consumer, successors).await
    }

    async fn progress(&self) -> Result<Vec<ConsumerProgress>> {
        let all = self.0.progress().await?.into_iter();
        let named = |one: ConsumerProgress| ConsumerProgress {
            partition: Self::number(one.partition),
            ..one
        };
        Ok(all.map(named).collect())
    }

    async fn remove_consumer(&self, consumer: &ConsumerName) -> Result<bool> {
        self.0.remove_consumer(consumer).await
    }
}

#[async_trait]
impl DeadLetters for Numbered {
    async fn park(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        letters: &[NewDeadLetter],
    ) -> Result<u64> {
        self.0.park(&Self::lease(lease), consumer, letters).await
    }

    async fn blocked(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        keys: &[Key],
    ) -> Result<Vec<Key>> {
        self.0.blocked(consumer, &Self::range(partition), keys).await
    }

    async fn blocking(&self, consumer: &ConsumerName, partition: &PartitionId) -> Result<u64> {
        self.0.blocking(consumer, &Self::range(partition)).await
    }

    async fn released(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        limit: BatchLimit,
    ) -> Result<Vec<DeadLetter>> {
        let letters = self.0.released(consumer, &Self::range(partition), limit).await?;
        Ok(letters.into_iter().map(Self::letter).collect())
    }

    async fn resolve(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        ids: &[DeadLetterId],
    ) -> Result<()> {
        self.0.resolve(&Self::lease(lease), consumer, ids).await
    }

    async fn refuse(
        &self,
        lease: &HeldLease,
        id: DeadLetterId,
        state: DeadLetterState,
        reason: &str,
        attempts: u32,
    ) -> Result<()> {
        self.0.refuse(&Self::lease(lease), id, state, reason, attempts).await
    }

    async fn list(
        &self,
        filter: &DeadLetterFilter,
        after: Option<DeadLetterId>,
        limit: usize,
    ) -> Result<Vec<DeadLetter>> {
        let letters = self.0.list(filter, after, limit).await?;
        Ok(letters.into_iter().map(Self::letter).collect())
    }

    async fn requeue(&self, filter: &DeadLetterFilter) -> Result<u64> {
        self.0.requeue(filter).await
    }

    async fn skip(&self, filter: &DeadLetterFilter) -> Result<u64> {
        self.0.skip(filter).await
    }

    async fn discard(&self, filter: &DeadLetterFilter) -> Result<u64> {
        self.0.discard(filter).await
    }

    async fn at(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        position: &Position,
    ) -> Result<Option<DeadLetter>> {
        let letter = self.0.at(consumer, &Self::range(partition), position).await?;
        Ok(letter.map(Self::letter))
    }
}

#[async_trait]
impl Retention for Numbered {
    async fn prune(&self, lease: Option<&HeldLease>, policy: &RetentionPolicy) -> Result<Pruned> {
        self.0.prune(lease.map(Self::lease).as_ref(), policy).await
    }
}

/// A batch is of one logical partition: the suite's events, which have any key, get that one. And
/// it is JSON: what of the suite is none is a text.
#[async_trait]
impl DocumentStore for Numbered {
    async fn read(
        &self,
        partition_key: &str,
        id: &str,
        if_none_match: Option<&ETag>,
    ) -> Result<DocumentRead, Error> {
        DocumentStore::read(&self.0, partition_key, id, if_none_match).await
    }

    async fn read_page(&self, request: &PageRequest) -> Result<DocumentPage, Error> {
        self.0.read_page(request).await
    }

    async fn commit(&self, mut batch: DocumentBatch) -> Result<Vec<SavedDocument>, DocumentError> {
        for operation in &mut batch.operations {
            let document = match operation {
                DocumentOperation::Create(document) => document,
                DocumentOperation::Replace { document, .. } => document,
                DocumentOperation::Delete { .. } => continue,
            };
            if serde_json::from_slice::<Value>(&document.data).is_err() {
                let text = String::from_utf8_lossy(&document.data);
                document.data = Value::from(text).to_string().into();
            }
        }
        for event in &mut batch.events {
            *event = keyed(event, &batch.partition_key);
        }
        self.0.commit(batch).await
    }
}

/// The event under another key.
fn keyed(event: &NewEvent, key: &str) -> NewEvent {
    let id = event.id();
    let fields = event.clone().identified(|| EventId::from_uuid(Uuid::new_v4()));
    let key = Key::new(key).expect("a valid key");
    let mut keyed = NewEvent::builder(key, fields.topic().clone(), fields.event_type().clone())
        .payload(fields.content_type().clone(), fields.payload().clone())
        .headers(fields.headers().clone());
    if let Some(id) = id {
        keyed = keyed.id(id);
    }
    keyed.build().expect("it was within the limits before")
}

/// One range, events of any key in a transaction: it is as many batches as it has runs of a key.
pub(crate) struct CosmosHarness(World);

#[async_trait]
impl StoreHarness for CosmosHarness {
    type Store = Numbered;
    type Transaction = Vec<NewEvent>;

    async fn fresh(partitions: u32) -> Self {
        Self(World::new(partitions).await)
    }

    fn store(&self) -> Arc<Numbered> {
        Arc::new(Numbered(self.0.store.clone()))
    }

    fn features(&self) -> StoreFeatures {
        StoreFeatures {
            writers: Writers::Concurrent,
            documents: Supports::Yes,
            raising: Supports::No,
            pruning: Prunes::Events,
            times: Times::OfTheAppend,
        }
    }

    async fn begin(&self) -> Vec<NewEvent> {
        Vec::new()
    }

    async fn append(&self, open: &mut Vec<NewEvent>, events: &[NewEvent]) -> Result<Vec<EventId>> {
        open.extend_from_slice(events);
        Ok(Vec::new())
    }

    async fn append_ignoring_repeats(
        &self,
        open: &mut Vec<NewEvent>,
        events: &[NewEvent],
    ) -> Result<Vec<EventId>> {
        self.append(open, events).await
    }

    async fn write_row(&self, _: &mut Vec<NewEvent>, _: &str, _: &str) {
        panic!("no behaviour listed here has rows")
    }

    async fn read_row(&self, _: &str) -> Option<String> {
        panic!("no behaviour listed here has rows")
    }

    async fn commit(&self, open: Vec<NewEvent>) -> Result<()> {
        self.0.append(&open).await;
        Ok(())
    }

    async fn rollback(&self, open: Vec<NewEvent>) {
        drop(open);
    }

    /// The emulator lets nothing expire: what has is deleted, as the service would.
    async fn pass_time(&self, duration: Duration) {
        tokio::time::sleep(duration).await;
        let container = self.0.store.container();
        let mortal = "SELECT c.id, c.partitionKey FROM c WHERE c.ttl = 1";
        let found = container.query_items::<Value>(mortal, FeedScope::full_container(), None).await;
        let found: Vec<Value> = found.expect("a query").try_collect().await.expect("documents");
        for document in found {
            let text = |name: &str| document[name].as_str().expect("a text").to_owned();
            let deleted = container.delete_item(text("partitionKey"), &text("id"), None).await;
            deleted.expect("it was there");
        }
    }

    async fn raise_partitions(&self, _: u32) -> Result<()> {
        Err(Error::unsupported("the service splits ranges by itself"))
    }
}

/// The same as a source; ranges are split where partitions of others are raised.
pub(crate) struct CosmosSource(World);

#[async_trait]
impl SourceHarness for CosmosSource {
    async fn fresh(partitions: u32) -> Self {
        Self(World::new(partitions).await)
    }

    fn source(&self) -> Arc<dyn Source> {
        let poll = PollInterval { busy: Duration::from_millis(1), idle: Duration::from_millis(20) };
        let store = Arc::new(self.0.store.clone());
        Arc::new(FeedSource::new(store, Arc::new(TokioClock::default()), poll))
    }

    async fn append(&self, events: &[NewEvent]) {
        self.0.append(events).await;
    }

    async fn pass_time(&self, duration: Duration) {
        // The database tells its time in seconds.
        tokio::time::sleep(duration + Duration::from_millis(1_100)).await;
    }

    fn raising(&self) -> Supports {
        Supports::No
    }

    async fn raise_partitions(&self, _: u32) -> Result<()> {
        Err(Error::unsupported("the service splits ranges by itself"))
    }
}

postrider_conformance::source_suite!(CosmosSource);

postrider_conformance::listed_tests! { suite, store, CosmosHarness;
    feed:
        an_open_transaction_holds_no_reader_back
        an_earlier_commit_comes_first
        only_an_empty_page_means_the_head
        a_page_keeps_to_its_limits
        a_position_of_another_source_is_refused
        the_head_is_followed_by_what_is_new_only
        an_unknown_partition_is_refused
        each_store_has_its_own_identity;
    leases:
        a_lease_is_exclusive
        one_of_many_gets_the_lease
        an_expired_lease_is_taken_under_a_higher_epoch
        a_holder_that_asks_again_gets_a_higher_epoch
        a_renewed_lease_lives_on
        an_expired_lease_that_nobody_took_is_renewed
        a_renewal_answers_for_each_lease
        a_released_lease_is_free_at_once
        releasing_a_lost_lease_does_nothing
        groups_do_not_meet
        live_relays_are_listed_until_they_leave_or_expire
        every_lease_is_listed;
    fencing:
        a_stale_lease_cannot_move_a_checkpoint
        a_stale_lease_cannot_finish_a_partition
        a_stale_lease_cannot_park
        a_stale_lease_cannot_resolve_or_refuse
        an_expired_lease_that_nobody_took_still_writes;
    checkpoints:
        a_checkpoint_is_kept_with_its_tally
        a_checkpoint_never_moves_back
        progress_accounts_for_every_event
        a_removed_consumer_is_forgotten
        a_consumer_at_work_is_not_removed;
    dead_letters:
        a_letter_is_kept_whole
        parking_again_adds_nothing
        an_unreadable_entry_is_kept_and_never_released
        a_parked_key_is_blocked_and_others_are_not
        letters_behind_a_parked_one_wait
        a_requeued_letter_is_released_in_order_with_those_behind_it
        a_resolved_letter_counts_as_published
        a_letter_refused_again_is_parked_with_its_attempts
        a_letter_refused_as_skipped_holds_nothing_back
        a_skipped_letter_holds_nothing_back
        a_skipped_letter_can_be_requeued
        a_discarded_letter_counts_as_dropped
        a_letter_above_the_checkpoint_is_not_released
        a_page_of_released_letters_keeps_to_its_limits
        letters_are_listed_by_filter_and_page
        consumers_have_letters_of_their_own;
    documents:
        a_document_is_created_once
        a_write_needs_the_current_version
        a_write_needs_the_document
        a_batch_is_saved_whole_or_not_at_all
        events_of_a_batch_are_appended_in_order
        an_event_id_of_a_batch_is_saved_once
        an_empty_batch_does_nothing
        pages_show_each_document_once_in_a_stable_order
        a_soft_deleted_document_is_left_out_of_pages
        a_foreign_continuation_is_refused
        a_batch_above_the_limits_is_refused
        an_expired_document_is_gone;
}
