//! What the tests share: a store in a temporary folder and short ways to make its values.

use std::path::PathBuf;
use std::time::Duration;

use postrider_core::*;
use postrider_store_sqlite::{ClockOffset, SqliteOptions, SqliteStore, append};
use tempfile::TempDir;

pub(crate) struct World {
    pub(crate) folder: TempDir,
    pub(crate) store: SqliteStore,
    pub(crate) clock: ClockOffset,
}

pub(crate) const LIMIT: BatchLimit = BatchLimit { records: 1_000, bytes: 64 << 20 };
pub(crate) const TTL: Duration = Duration::from_secs(5);

impl World {
    pub(crate) async fn new(partitions: u32) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let clock = ClockOffset::default();
        let options = SqliteOptions::new(folder.path().join("data.db"))
            .partitions(partitions)
            .clock_offset(clock.clone());
        let store = SqliteStore::open(options).await.expect("open");
        Self { folder, store, clock }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.folder.path().join("data.db")
    }

    /// A connection of the application's own.
    pub(crate) fn connection(&self) -> rusqlite::Connection {
        let connection = rusqlite::Connection::open(self.path()).expect("open");
        connection.busy_timeout(Duration::from_secs(10)).expect("busy_timeout");
        connection
    }

    pub(crate) async fn append(&self, events: Vec<NewEvent>) -> Vec<EventId> {
        self.store.transaction(move |tx| append(tx, &events)).await.expect("append")
    }

    pub(crate) async fn held(&self, partition: &PartitionId, relay: &str) -> HeldLease {
        match self.store.acquire(&group(), partition, &relay_id(relay), TTL).await {
            Ok(Acquired::Held(lease)) => lease,
            other => panic!("not granted: {other:?}"),
        }
    }

    pub(crate) async fn page(&self, partition: &PartitionId, after: &Position) -> FeedPage {
        Feed::read(&self.store, partition, after, LIMIT).await.expect("read")
    }

    /// All records of all of a consumer's partitions, each partition in feed order.
    pub(crate) async fn drain(&self) -> Vec<Record> {
        let mut found = Vec::new();
        for partition in self.store.partitions(&consumer("drain")).await.expect("partitions") {
            let mut after = Position::START;
            loop {
                let page = self.page(&partition, &after).await;
                if page.entries.is_empty() {
                    break;
                }
                after = page.position.clone();
                found.extend(page.entries.iter().map(|entry| record(entry).clone()));
            }
        }
        found
    }
}

pub(crate) fn record(entry: &Entry) -> &Record {
    match entry {
        Entry::Record(record) => record,
        Entry::Malformed(malformed) => panic!("unreadable: {malformed:?}"),
    }
}

pub(crate) fn key(text: &str) -> Key {
    Key::new(text).expect("a valid key")
}

pub(crate) fn builder(key_text: &str) -> NewEventBuilder {
    let topic = Topic::new("orders").expect("valid");
    let event_type = EventType::new("OrderPlaced").expect("valid");
    NewEvent::builder(key(key_text), topic, event_type)
}

pub(crate) fn event(key_text: &str, payload: &str) -> NewEvent {
    let json = ContentType::new("application/json").expect("valid");
    builder(key_text).payload(json, payload.to_owned()).build().expect("within the limits")
}

pub(crate) fn p(index: u32, count: u32) -> PartitionId {
    PartitionId::numbered(index, count)
}

pub(crate) fn consumer(name: &str) -> ConsumerName {
    ConsumerName::new(name).expect("valid")
}

pub(crate) fn group() -> GroupName {
    GroupName::new("group").expect("valid")
}

pub(crate) fn relay_id(name: &str) -> RelayId {
    RelayId::new(name).expect("valid")
}

pub(crate) fn payload(entry: &Entry) -> String {
    String::from_utf8(record(entry).event.payload().to_vec()).expect("text")
}

pub(crate) fn payloads(page: &FeedPage) -> Vec<String> {
    page.entries.iter().map(payload).collect()
}
