//! The store and the clock of the tests.
//!
//! What lives here: the model store behind a door that can fail a commit, or save it and lose the
//! answer, and that counts its calls. What does not: any rule of the unit of work.
//! Invariant: a fault is used up by one commit.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use postrider_core::{
    BatchLimit, Clock, DocumentBatch, DocumentError, DocumentPage, DocumentRead, DocumentStore,
    ETag, Error, Event, Feed, PageRequest, PartitionId, Position, Result, SavedDocument, Timestamp,
};
use postrider_store_memory::MemoryStore;
use postrider_unit_of_work::{Entity, EntityRead, Repository, UnitOfWork};

/// 2021-09-22T09:37:37.302Z, the moment in the article.
pub(crate) const NOW_MS: u64 = 1_632_303_457_302;

/// Stands still until a test moves it.
pub(crate) struct SetClock(AtomicU64);

#[async_trait]
impl Clock for SetClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_millis(self.0.load(Ordering::Relaxed))
    }

    fn elapsed(&self) -> Duration {
        Duration::ZERO
    }

    async fn sleep(&self, _duration: Duration) {
        std::future::pending().await
    }
}

pub(crate) enum Fault {
    /// The store refuses with this.
    Refuse(DocumentError),
    /// The store saves and its answer is lost.
    LoseAnswer,
}

pub(crate) struct World {
    model: MemoryStore,
    clock: Arc<SetClock>,
    commits: AtomicUsize,
    fault: Mutex<Option<Fault>>,
}

impl World {
    pub(crate) fn new() -> Arc<Self> {
        let clock = Arc::new(SetClock(AtomicU64::new(NOW_MS)));
        let model = MemoryStore::new(1, clock.clone());
        Arc::new(Self { model, clock, commits: AtomicUsize::new(0), fault: Mutex::default() })
    }

    pub(crate) fn unit_of_work(self: &Arc<Self>) -> UnitOfWork<Self> {
        UnitOfWork::new(Arc::clone(self), self.clock.clone())
    }

    /// Lets an hour go by.
    pub(crate) fn pass_an_hour(&self) {
        self.clock.0.fetch_add(60 * 60 * 1_000, Ordering::Relaxed);
    }

    pub(crate) fn repository<T: Entity>(self: &Arc<Self>) -> Repository<T, Self> {
        Repository::new(Arc::clone(self))
    }

    /// Reads an entity that must be there.
    pub(crate) async fn read<T: Entity>(self: &Arc<Self>, id: &str) -> (T, ETag) {
        match self.repository().read(id, None).await.unwrap() {
            EntityRead::Found(entity, etag) => (entity, etag),
            EntityRead::NotModified | EntityRead::NotFound => panic!("{id} is not there"),
        }
    }

    pub(crate) fn fail_next_commit(&self, fault: Fault) {
        *self.fault.lock().unwrap() = Some(fault);
    }

    /// How often the store's `commit` was called.
    pub(crate) fn commits(&self) -> usize {
        self.commits.load(Ordering::Relaxed)
    }

    /// Every event in the outbox, in order.
    pub(crate) async fn events(&self) -> Vec<Event> {
        let limit = BatchLimit { records: 1_000, bytes: usize::MAX };
        let partition = PartitionId::numbered(0, 1);
        let page = Feed::read(&self.model, &partition, &Position::START, limit);
        let entries = page.await.unwrap().entries;
        let records = entries.into_iter().map(|entry| match entry {
            postrider_core::Entry::Record(record) => record.event,
            postrider_core::Entry::Malformed(malformed) => panic!("{malformed:?}"),
        });
        records.collect()
    }

    pub(crate) async fn event_types(&self) -> Vec<String> {
        let events = self.events().await;
        events.iter().map(|event| event.event_type().as_str().to_owned()).collect()
    }
}

/// An event's payload as JSON.
pub(crate) fn json(event: &Event) -> serde_json::Value {
    serde_json::from_slice(event.payload()).unwrap()
}

#[async_trait]
impl DocumentStore for World {
    async fn read(
        &self,
        partition_key: &str,
        id: &str,
        if_none_match: Option<&ETag>,
    ) -> Result<DocumentRead> {
        DocumentStore::read(&self.model, partition_key, id, if_none_match).await
    }

    async fn read_page(&self, request: &PageRequest) -> Result<DocumentPage> {
        self.model.read_page(request).await
    }

    async fn commit(&self, batch: DocumentBatch) -> Result<Vec<SavedDocument>, DocumentError> {
        self.commits.fetch_add(1, Ordering::Relaxed);
        let fault = self.fault.lock().unwrap().take();
        match fault {
            None => self.model.commit(batch).await,
            Some(Fault::Refuse(error)) => Err(error),
            Some(Fault::LoseAnswer) => {
                self.model.commit(batch).await?;
                Err(Error::transient("connection lost").into())
            }
        }
    }
}
