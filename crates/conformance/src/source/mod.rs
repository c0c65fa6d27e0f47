//! The source suite: what every source promises the relay.
//!
//! What lives here: the harness, the harness of any store's feed, and the macro that lists the
//! behaviours. What does not: the behaviours (`reading.rs`).
//! Invariant: the suite treats positions as opaque; it only hands back what it was given.

pub mod reading;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postrider_core::{FeedSource, NewEvent, PollInterval, Result, Source};

use crate::clock::TokioClock;
use crate::store::{StoreHarness, Supports};

/// How the suite sets up one kind of source.
#[async_trait]
pub trait SourceHarness: Sized + Send + Sync + 'static {
    /// A new, empty source with this many partitions, or as many as it has.
    async fn fresh(partitions: u32) -> Self;

    /// The source; the same data each time.
    fn source(&self) -> Arc<dyn Source>;

    /// Appends events in one committed transaction.
    async fn append(&self, events: &[NewEvent]);

    /// Lets at least this much of the database's time pass for new events.
    async fn pass_time(&self, duration: Duration);

    /// Whether its partitions can be raised or split.
    fn raising(&self) -> Supports;

    /// Raises or splits them into this many.
    async fn raise_partitions(&self, count: u32) -> Result<()>;
}

/// The feed of a store, as a source: `source_suite!(FeedHarness<MyStoreHarness>)`.
pub struct FeedHarness<H> {
    store: H,
}

#[async_trait]
impl<H: StoreHarness> SourceHarness for FeedHarness<H> {
    async fn fresh(partitions: u32) -> Self {
        Self { store: H::fresh(partitions).await }
    }

    fn source(&self) -> Arc<dyn Source> {
        let poll = PollInterval { busy: Duration::from_millis(1), idle: Duration::from_millis(20) };
        Arc::new(FeedSource::new(self.store.store(), Arc::new(TokioClock::default()), poll))
    }

    async fn append(&self, events: &[NewEvent]) {
        crate::store::append(&self.store, events).await;
    }

    async fn pass_time(&self, duration: Duration) {
        self.store.pass_time(duration).await;
    }

    fn raising(&self) -> Supports {
        self.store.features().raising
    }

    async fn raise_partitions(&self, count: u32) -> Result<()> {
        self.store.raise_partitions(count).await
    }
}

/// Lists a test for each behaviour of the source suite.
///
/// ```text
/// postrider_conformance::source_suite!(FeedHarness<MyStoreHarness>);
/// ```
#[macro_export]
macro_rules! source_suite {
    ($harness:ty) => {
        $crate::listed_tests! { source_suite, source, $harness;
            reading:
                every_event_is_read_once_and_in_order
                reading_resumes_at_every_record
                a_reader_waits_for_what_comes
                a_dropped_call_loses_nothing
                a_batch_keeps_to_its_limits
                readers_begin_where_they_are_told
                a_reader_tells_where_it_begins
                readers_do_not_disturb_each_other
                confirming_changes_nothing_that_is_read
                a_refused_position_is_an_error
                partitions_are_listed_in_a_stable_order
                an_identity_names_the_data
                a_partition_that_ends_names_its_successors;
        }
    };
}
