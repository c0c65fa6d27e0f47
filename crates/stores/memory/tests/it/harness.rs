//! The memory store's harness.
//!
//! What lives here: how the suites set up and write to a memory store. What does not: tests.
//! Invariant: the application's row is a document of the same transaction.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postrider_conformance::clock::ManualClock;
use postrider_conformance::store::{Prunes, StoreFeatures, StoreHarness, Supports, Times, Writers};
use postrider_core::{
    Document, DocumentOperation, DocumentRead, DocumentStore, ETag, EventId, NewEvent, Result,
    Timestamp,
};
use postrider_store_memory::{MemoryStore, MemoryTransaction, OnDuplicate};

pub(crate) struct MemoryHarness {
    pub(crate) store: Arc<MemoryStore>,
    pub(crate) clock: Arc<ManualClock>,
}

#[async_trait]
impl StoreHarness for MemoryHarness {
    type Store = MemoryStore;
    type Transaction = MemoryTransaction;

    async fn fresh(partitions: u32) -> Self {
        let clock = Arc::new(ManualClock::default());
        Self { store: Arc::new(MemoryStore::new(partitions, clock.clone())), clock }
    }

    fn store(&self) -> Arc<MemoryStore> {
        Arc::clone(&self.store)
    }

    fn features(&self) -> StoreFeatures {
        StoreFeatures {
            writers: Writers::Concurrent,
            documents: Supports::Yes,
            raising: Supports::Yes,
            pruning: Prunes::Events,
            times: Times::OfTheAppend,
        }
    }

    async fn begin(&self) -> MemoryTransaction {
        self.store.begin()
    }

    async fn append(
        &self,
        transaction: &mut MemoryTransaction,
        events: &[NewEvent],
    ) -> Result<Vec<EventId>> {
        transaction.append(events)
    }

    async fn append_ignoring_repeats(
        &self,
        transaction: &mut MemoryTransaction,
        events: &[NewEvent],
    ) -> Result<Vec<EventId>> {
        transaction.append_with(events, OnDuplicate::Ignore)
    }

    async fn write_row(&self, transaction: &mut MemoryTransaction, id: &str, value: &str) {
        let row = Document {
            id: id.to_owned(),
            partition_key: "rows".to_owned(),
            document_type: "row".to_owned(),
            data: value.to_owned().into(),
            ttl_seconds: -1,
            deleted: false,
            etag: ETag::new(""),
            written_at: Timestamp::default(),
        };
        transaction.write_document("rows", DocumentOperation::Create(row));
    }

    async fn read_row(&self, id: &str) -> Option<String> {
        match self.store.read("rows", id, None).await {
            Ok(DocumentRead::Found(row)) => String::from_utf8(row.data.to_vec()).ok(),
            Ok(DocumentRead::NotFound | DocumentRead::NotModified) | Err(_) => None,
        }
    }

    async fn commit(&self, transaction: MemoryTransaction) -> Result<()> {
        transaction.commit()
    }

    async fn rollback(&self, transaction: MemoryTransaction) {
        transaction.rollback();
    }

    async fn pass_time(&self, duration: Duration) {
        self.clock.advance(duration);
    }

    async fn raise_partitions(&self, count: u32) -> Result<()> {
        self.store.raise_partitions(count)
    }
}
