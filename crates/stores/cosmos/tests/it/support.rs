//! An account of the emulator with a store in it, and events as other writers write them.
//!
//! What lives here: what several tests share. What does not: any test.
//! Invariant: each world has an account of its own, which ends with it.

use std::collections::HashMap;
use std::sync::Mutex;

use azure_data_cosmos::TransactionalBatch;
use postrider_core::{
    BatchLimit, Entry, Event, EventId, Feed, NewEvent, PartitionId, Position, Record, Successor,
};
use postrider_servers::cosmos::Cosmos;
use postrider_store_cosmos::{CosmosConfig, CosmosStore, azure_data_cosmos};
use serde_json::{Value, json};
use uuid::Uuid;

pub(crate) const DATABASE: &str = "shop";
pub(crate) const CONTAINER: &str = "orders";
pub(crate) const LEASES: &str = "leases";

/// A page larger than any test fills.
pub(crate) const WHOLE: BatchLimit = BatchLimit { records: 10_000, bytes: 256 * 1024 * 1024 };

/// An account with one store.
pub(crate) struct World {
    pub(crate) account: Cosmos,
    pub(crate) store: CosmosStore,
    /// The last number of each key.
    numbers: Mutex<HashMap<String, u64>>,
}

/// The settings of the account's one store.
pub(crate) fn config(account: &Cosmos) -> CosmosConfig {
    let mut config = CosmosConfig::new(account.connection_string(), DATABASE, CONTAINER);
    config.lease_container = LEASES.to_owned();
    config
}

impl World {
    pub(crate) async fn new(ranges: u32) -> Self {
        Self::with(ranges, |_| {}).await
    }

    pub(crate) async fn with(ranges: u32, set: impl FnOnce(&mut CosmosConfig)) -> Self {
        let account = Cosmos::start().expect("the emulator starts");
        account.create_container(DATABASE, CONTAINER, ranges).expect("a container");
        account.create_container(DATABASE, LEASES, 1).expect("a container");
        let mut config = config(&account);
        set(&mut config);
        let store = CosmosStore::open(&config).await.expect("the store opens");
        Self { account, store, numbers: Mutex::default() }
    }

    /// Another store on the same account, as another process has it.
    pub(crate) async fn another(&self) -> CosmosStore {
        CosmosStore::open(&config(&self.account)).await.expect("the store opens")
    }

    /// Writes documents of one key in one batch.
    pub(crate) async fn write(&self, key: &str, documents: &[Value]) {
        let mut batch = TransactionalBatch::new(key.to_owned());
        for document in documents {
            batch = batch.create_item(document).expect("it is JSON");
        }
        let container = self.store.container();
        let answer = container.execute_transactional_batch(batch, None).await.expect("an answer");
        let answer = answer.into_model().expect("an answer");
        let statuses = answer.results().iter().map(|result| result.status_code());
        assert!(statuses.clone().all(|status| status == 201), "{:?}", statuses.collect::<Vec<_>>());
    }

    /// The same, over what is there.
    pub(crate) async fn upsert(&self, key: &str, documents: &[Value]) {
        let mut batch = TransactionalBatch::new(key.to_owned());
        for document in documents {
            batch = batch.upsert_item(document, None).expect("it is JSON");
        }
        let container = self.store.container();
        let answer = container.execute_transactional_batch(batch, None).await.expect("an answer");
        let answer = answer.into_model().expect("an answer");
        assert!(answer.results().iter().all(|result| result.is_success()));
    }

    /// Appends events of any keys: those of one key that follow each other in one batch.
    pub(crate) async fn append(&self, events: &[NewEvent]) -> Vec<EventId> {
        let fresh = || EventId::from_uuid(Uuid::new_v4());
        let events: Vec<Event> =
            events.iter().map(|event| event.clone().identified(fresh)).collect();
        for together in events.chunk_by(|a, b| a.key() == b.key()) {
            let key = together[0].key().as_str();
            let documents: Vec<Value> = {
                let mut numbers = self.numbers.lock().expect("no test panics within");
                let last = numbers.entry(key.to_owned()).or_default();
                together
                    .iter()
                    .map(|event| {
                        *last += 1;
                        document(event, *last)
                    })
                    .collect()
            };
            self.write(key, &documents).await;
        }
        events.iter().map(Event::id).collect()
    }
}

/// An event as another writer would write it: all but the payload in the open.
pub(crate) fn document(event: &Event, seq: u64) -> Value {
    let headers: Vec<Value> =
        event.headers().iter().map(|(name, value)| json!([name, value])).collect();
    let mut document = json!({
        "id": event.id().to_string(),
        "partitionKey": event.key().as_str(),
        "type": "domainEvent",
        "eventType": event.event_type().as_str(),
        "contentType": event.content_type().as_str(),
        "topic": event.topic().as_str(),
        "headers": headers,
        "data": null,
        "ttl": 864_000,
        "seq": seq,
    });
    match std::str::from_utf8(event.payload()) {
        Ok(text) => document["dataText"] = json!(text),
        Err(_) => {
            use base64::Engine;
            let text = base64::engine::general_purpose::STANDARD.encode(event.payload());
            document["dataBase64"] = json!(text);
        }
    }
    document
}

/// Everything after a position, up to the head or the partition's end; who takes over.
pub(crate) async fn read_from(
    store: &CosmosStore,
    partition: &PartitionId,
    after: &Position,
    limit: BatchLimit,
) -> (Vec<Record>, Position, Option<Vec<Successor>>) {
    let mut records = Vec::new();
    let mut after = after.clone();
    loop {
        let page = Feed::read(store, partition, &after, limit).await.expect("the page is readable");
        if page.ended.is_some() || (page.entries.is_empty() && page.position == after) {
            return (records, page.position, page.ended);
        }
        for entry in page.entries {
            match entry {
                Entry::Record(record) => records.push(record),
                Entry::Malformed(malformed) => panic!("unreadable: {}", malformed.reason),
            }
        }
        after = page.position;
    }
}
