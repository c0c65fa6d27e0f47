//! An account, a store on it, and a contact.
//!
//! What lives here: set-up, and what the store sees in the end. What does not: the clients.
//! Invariant: each test has an account of its own.

use postrider_core::{
    BatchLimit, ConsumerName, ContentType, Document, DocumentBatch, DocumentOperation,
    DocumentStore, ETag, Entry, Event, EventType, Feed, Key, NewEvent, Position, Timestamp, Topic,
};
use postrider_servers::cosmos::Cosmos;
use postrider_store_cosmos::{CosmosConfig, CosmosStore, azure_data_cosmos};
use serde_json::Value;

/// More than any test writes.
const WHOLE: BatchLimit = BatchLimit { records: 1_000, bytes: 16 * 1024 * 1024 };
const ID: &str = "c1";

pub(crate) struct World {
    pub(crate) account: Cosmos,
    pub(crate) store: CosmosStore,
}

impl World {
    pub(crate) async fn new() -> Self {
        let account = Cosmos::start().expect("the emulator starts");
        for container in ["contacts", "leases"] {
            account.create_container("shop", container, 4).expect("it is new");
        }
        let config = CosmosConfig::new(account.connection_string(), "shop", "contacts");
        let store = CosmosStore::open(&config).await.expect("the store opens");
        Self { account, store }
    }

    /// Saves the contact `c1` and an event of it.
    pub(crate) async fn create_contact(&self, action: &str) {
        let document = Document {
            id: ID.to_owned(),
            partition_key: ID.to_owned(),
            document_type: "contact".to_owned(),
            data: "{\"name\":\"John\"}".into(),
            ttl_seconds: -1,
            deleted: false,
            etag: ETag::new(""),
            written_at: Timestamp::default(),
        };
        let valid = "a valid name";
        let event = NewEvent::builder(
            Key::new(ID).expect(valid),
            Topic::new("events").expect(valid),
            EventType::new(action).expect(valid),
        );
        let payload = format!("{{\"action\":\"{action}\"}}");
        let event = event.payload(ContentType::new("application/json").expect(valid), payload);
        let batch = DocumentBatch {
            partition_key: ID.to_owned(),
            operations: vec![DocumentOperation::Create(document)],
            events: vec![event.build().expect("within the limits")],
        };
        self.store.commit(batch).await.expect("saved");
    }

    /// The contact's document, as it stands in the container.
    pub(crate) async fn contact(&self) -> Value {
        let read = self.store.container().read_item(ID, ID, None).await.expect("it is there");
        let _: &azure_data_cosmos::models::ItemResponse = &read;
        read.into_model().expect("JSON")
    }

    /// The number of the contact's last event.
    pub(crate) async fn last_number(&self) -> u64 {
        self.contact().await["lastSeq"].as_u64().expect("a number")
    }

    /// Every event, as the store's feed has them.
    pub(crate) async fn events(&self) -> Vec<Event> {
        let consumer = ConsumerName::new("test").expect("a valid name");
        let mut waiting: Vec<_> = self
            .store
            .partitions(&consumer)
            .await
            .expect("the partitions")
            .into_iter()
            .map(|partition| (partition, Position::START))
            .collect();
        let mut events = Vec::new();
        while let Some((partition, mut after)) = waiting.pop() {
            loop {
                let page = Feed::read(&self.store, &partition, &after, WHOLE).await;
                let page = page.expect("readable");
                if let Some(successors) = page.ended {
                    waiting.extend(successors.into_iter().map(|one| (one.partition, one.from)));
                    break;
                }
                if page.entries.is_empty() {
                    break;
                }
                for entry in page.entries {
                    match entry {
                        Entry::Record(record) => events.push(record.event),
                        Entry::Malformed(malformed) => panic!("{}", malformed.reason),
                    }
                }
                after = page.position;
            }
        }
        events
    }
}
