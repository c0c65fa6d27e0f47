//! The store suite: what every store's feed, leases, checkpoints, letters and documents promise.
//!
//! What lives here: the harness that a store brings, the macro that lists the behaviours, and the
//! steps that several behaviours share. What does not: the behaviours (one file an area).
//! Invariant: appending differs by store and is hidden by the harness; all else goes by the seams.

pub mod append;
pub mod checkpoints;
pub mod dead_letters;
pub mod documents;
pub mod feed;
pub mod fencing;
pub mod leases;
pub mod partitions;
pub mod retention;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postrider_core::{
    Acquired, BatchLimit, Checkpoints, ConsumerName, DocumentStore, Entry, EventId, Feed,
    HeldLease, Leases, NewEvent, PartitionId, Position, Record, RelayStore, Result, Tally,
};

use crate::samples::{WHOLE, group, relay};

/// What a store can do beyond what every store must.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreFeatures {
    /// Whether two transactions may be open and append at the same time.
    pub writers: Writers,
    /// Whether it keeps documents; one that does not answers `Unsupported`.
    pub documents: Supports,
    /// Whether its partitions can be raised; one whose can't answers `Unsupported`.
    pub raising: Supports,
    /// What it deletes at a time.
    pub pruning: Prunes,
    /// Which time a record's position has.
    pub times: Times,
}

/// Which time the ULID of a position has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Times {
    /// That of the append.
    OfTheAppend,
    /// That of the first look at the feed after the commit: never before that of the append.
    OfTheLook,
}

/// How many transactions may append at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writers {
    /// Any number.
    Concurrent,
    /// One: the next begins when it has ended.
    OneAtATime,
}

/// What retention deletes at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prunes {
    /// Single events: all that every consumer has passed.
    Events,
    /// Whole stretches of the outbox, once every consumer has passed all of one. What is appended
    /// between two prunes lies in one.
    Segments,
}

/// Whether a capability is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Supports {
    /// Then it works.
    Yes,
    /// Then it answers `Unsupported`.
    No,
}

/// How the suite sets up and writes to one kind of store. Each harness has a store of its own, and
/// leaves nothing behind when it is dropped.
#[async_trait]
pub trait StoreHarness: Sized + Send + Sync + 'static {
    /// The store under test.
    type Store: Feed + RelayStore + DocumentStore + 'static;
    /// An open transaction of the application. Dropping it rolls it back.
    type Transaction: Send;

    /// A new, empty store with this many partitions.
    async fn fresh(partitions: u32) -> Self;

    /// The store.
    fn store(&self) -> Arc<Self::Store>;

    /// What it can do.
    fn features(&self) -> StoreFeatures;

    /// Opens a transaction.
    async fn begin(&self) -> Self::Transaction;

    /// Appends within a transaction; a repeated id is refused, here or at commit.
    async fn append(
        &self,
        transaction: &mut Self::Transaction,
        events: &[NewEvent],
    ) -> Result<Vec<EventId>>;

    /// Appends within a transaction; events whose ids are there already are left out.
    async fn append_ignoring_repeats(
        &self,
        transaction: &mut Self::Transaction,
        events: &[NewEvent],
    ) -> Result<Vec<EventId>>;

    /// Writes a row of the application's own table within the transaction.
    async fn write_row(&self, transaction: &mut Self::Transaction, id: &str, value: &str);

    /// The committed value of a row of that table.
    async fn read_row(&self, id: &str) -> Option<String>;

    /// Commits.
    async fn commit(&self, transaction: Self::Transaction) -> Result<()>;

    /// Rolls back.
    async fn rollback(&self, transaction: Self::Transaction);

    /// Lets at least this much of the database's time pass, for leases, ages and new events alike:
    /// by moving a fake clock, or by waiting.
    async fn pass_time(&self, duration: Duration);

    /// Raises the number of partitions.
    async fn raise_partitions(&self, count: u32) -> Result<()>;
}

/// A lease that no behaviour outlives by accident: one minute.
pub(crate) const TTL: Duration = Duration::from_secs(60);
/// A lease that is meant to run out.
pub(crate) const SHORT_TTL: Duration = Duration::from_millis(200);
/// Longer than [`SHORT_TTL`].
pub(crate) const PAST_SHORT_TTL: Duration = Duration::from_millis(250);

/// Appends in a transaction of its own.
pub(crate) async fn append<H: StoreHarness>(harness: &H, events: &[NewEvent]) -> Vec<EventId> {
    let mut transaction = harness.begin().await;
    let ids = harness.append(&mut transaction, events).await.expect("the append is accepted");
    harness.commit(transaction).await.expect("the commit succeeds");
    ids
}

/// The partition that is number `index` of `count`.
pub(crate) fn partition(index: u32, count: u32) -> PartitionId {
    PartitionId::numbered(index, count)
}

/// Everything after a position, up to the first empty page, and where that page ends.
pub(crate) async fn read_from<F: Feed + ?Sized>(
    feed: &F,
    partition: &PartitionId,
    after: &Position,
    limit: BatchLimit,
) -> (Vec<Record>, Position) {
    let mut records = Vec::new();
    let mut after = after.clone();
    loop {
        let page = feed.read(partition, &after, limit).await.expect("the page is readable");
        if page.entries.is_empty() {
            return (records, page.position);
        }
        for entry in page.entries {
            match entry {
                Entry::Record(record) => records.push(record),
                Entry::Malformed(malformed) => panic!("unreadable entry: {malformed:?}"),
            }
        }
        assert_ne!(page.position, after, "a page with entries moves the position");
        after = page.position;
    }
}

/// Everything in a partition, from the start.
pub(crate) async fn read_all<F: Feed + ?Sized>(feed: &F, partition: &PartitionId) -> Vec<Record> {
    read_from(feed, partition, &Position::START, WHOLE).await.0
}

/// A lease of the suite's group, which must be free.
pub(crate) async fn lease<H: StoreHarness>(
    harness: &H,
    partition: &PartitionId,
    holder: &str,
    ttl: Duration,
) -> HeldLease {
    let store = harness.store();
    let answer = store.acquire(&group("relays"), partition, &relay(holder), ttl).await;
    match answer.expect("the store answers") {
        Acquired::Held(lease) => lease,
        Acquired::Busy { holder, .. } => panic!("the lease is held by {holder}"),
    }
}

/// Two leases of one partition, of which the second fences the first.
pub(crate) async fn superseded_lease<H: StoreHarness>(
    harness: &H,
    partition: &PartitionId,
) -> (HeldLease, HeldLease) {
    let old = lease(harness, partition, "old", SHORT_TTL).await;
    harness.pass_time(PAST_SHORT_TTL).await;
    let new = lease(harness, partition, "new", TTL).await;
    (old, new)
}

/// Moves a consumer's checkpoint under a lease.
pub(crate) async fn advance<H: StoreHarness>(
    harness: &H,
    lease: &HeldLease,
    consumer: &ConsumerName,
    to: &Position,
    published: u64,
) {
    let tally = Tally { published, parked: 0 };
    let done = harness.store().advance(lease, consumer, to, tally).await;
    done.expect("the checkpoint moves forward");
}

/// Lists a test for each behaviour of the store suite.
///
/// ```text
/// postrider_conformance::store_suite!(MyHarness);
/// ```
#[macro_export]
macro_rules! store_suite {
    ($harness:ty) => {
        $crate::listed_tests! { store_suite, store, $harness;
            append:
                events_are_seen_after_commit_and_not_before
                a_rolled_back_append_leaves_nothing
                a_dropped_transaction_leaves_nothing
                order_within_a_transaction_is_kept
                an_event_comes_back_unchanged
                an_event_without_an_id_gets_one
                the_same_id_twice_is_refused
                the_same_id_twice_can_be_ignored
                an_event_and_the_business_row_share_one_fate
                an_oversize_payload_is_refused_before_any_io
                the_largest_payload_comes_back_whole
                too_many_events_are_refused_whole;
            feed:
                a_late_commit_is_not_skipped
                an_open_transaction_holds_no_reader_back
                concurrent_readers_agree
                a_replay_is_identical_from_every_record
                an_earlier_commit_comes_first
                only_an_empty_page_means_the_head
                a_page_keeps_to_its_limits
                positions_are_ulids_that_grow
                a_position_beyond_the_head_is_refused
                a_position_that_names_nothing_is_refused
                a_position_of_another_source_is_refused
                the_head_is_followed_by_what_is_new_only
                a_quiet_partition_gives_a_position
                a_time_finds_the_records_from_then_on
                a_key_stays_in_its_partition
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
                a_stale_lease_cannot_prune
                an_expired_lease_that_nobody_took_still_writes;
            checkpoints:
                a_checkpoint_is_kept_with_its_tally
                a_checkpoint_never_moves_back
                consumers_have_checkpoints_of_their_own
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
                consumers_have_letters_of_their_own
                a_letter_outlives_its_event;
            retention:
                nothing_is_pruned_without_a_consumer
                nothing_is_pruned_past_the_slowest_consumer
                young_events_stay
                pruning_goes_by_batches
                a_dry_run_deletes_nothing
                a_position_below_the_horizon_is_refused_by_name
                a_removed_consumer_pins_nothing;
            partitions:
                raising_keeps_a_keys_order
                a_successor_is_listed_once_its_predecessor_is_finished
                finishing_again_changes_nothing
                a_letter_follows_its_key
                partitions_are_raised_by_a_multiple_only;
            documents:
                a_document_is_read_with_its_version
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
    };
}
