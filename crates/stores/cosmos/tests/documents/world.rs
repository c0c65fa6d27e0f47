//! An account, a container and short words for what tests do with them.
//!
//! What lives here: set-up, sample documents and events, and looking at the container as any client
//! sees it. What does not: judging.
//! Invariant: what a test looks at comes from the service and not from the store under test.

use azure_data_cosmos::Query;
use azure_data_cosmos::feed::FeedScope;
use futures_util::TryStreamExt;
use postrider_core::{
    ContentType, Document, DocumentBatch, DocumentError, DocumentOperation, DocumentRead,
    DocumentStore, ETag, EventId, EventType, Key, NewEvent, SavedDocument, Timestamp, Topic,
};
use postrider_servers::cosmos::Cosmos;
use postrider_store_cosmos::{CosmosConfig, CosmosStore, azure_data_cosmos};
use serde_json::Value;
use uuid::Uuid;

pub(crate) const DATABASE: &str = "shop";
pub(crate) const CONTAINER: &str = "contacts";

pub(crate) struct World {
    pub(crate) account: Cosmos,
    pub(crate) store: CosmosStore,
}

/// Settings for an account.
pub(crate) fn config(account: &Cosmos) -> CosmosConfig {
    let mut config = CosmosConfig::new(account.connection_string(), DATABASE, CONTAINER);
    config.topic = "contacts".to_owned();
    config
}

impl World {
    pub(crate) async fn new() -> Self {
        let account = Cosmos::start().expect("the emulator starts");
        for container in [CONTAINER, "leases"] {
            account.create_container(DATABASE, container, 4).expect("it is new");
        }
        let store = CosmosStore::open(&config(&account)).await.expect("the store opens");
        Self { account, store }
    }

    /// Another process's view: a store that has seen nothing.
    pub(crate) async fn another_store(&self) -> CosmosStore {
        CosmosStore::open(&config(&self.account)).await.expect("the store opens")
    }

    /// Saves in the logical partition `c1`.
    pub(crate) async fn commit(
        &self,
        operations: Vec<DocumentOperation>,
        events: Vec<NewEvent>,
    ) -> Result<Vec<SavedDocument>, DocumentError> {
        let batch = DocumentBatch { partition_key: "c1".to_owned(), operations, events };
        self.store.commit(batch).await
    }

    /// Saves what can't fail, and returns the first document's version.
    pub(crate) async fn save(&self, operation: DocumentOperation, events: Vec<NewEvent>) -> ETag {
        let saved = self.commit(vec![operation], events).await.expect("saved");
        saved.into_iter().next().expect("one answer").etag
    }

    pub(crate) async fn read(&self, id: &str) -> Option<Document> {
        match self.store.read("c1", id, None).await.expect("readable") {
            DocumentRead::Found(document) => Some(document),
            DocumentRead::NotFound => None,
            DocumentRead::NotModified => panic!("nobody asked whether it was modified"),
        }
    }

    /// Every document of the logical partition `c1`, as any client sees it, but for the members
    /// that the service adds; by `seq` and then by id.
    pub(crate) async fn documents(&self) -> Vec<Value> {
        let query = Query::from("SELECT * FROM c");
        let scope = FeedScope::partition("c1");
        let found = self.store.container().query_items::<Value>(query, scope, None).await;
        let mut found: Vec<Value> =
            found.expect("the query").try_collect().await.expect("the documents");
        for document in &mut found {
            document.as_object_mut().expect("an object").retain(|name, _| !name.starts_with('_'));
        }
        found.sort_by_key(|d| (d["seq"].as_i64(), d["id"].as_str().map(str::to_owned)));
        found
    }

    /// The numbers of the events in `c1`, in order.
    pub(crate) async fn numbers(&self) -> Vec<i64> {
        let documents = self.documents().await;
        documents.iter().filter_map(|document| document["seq"].as_i64()).collect()
    }

    /// The number that the entity `c1` says its last event has.
    pub(crate) async fn last_number(&self) -> Option<u64> {
        let documents = self.documents().await;
        documents.iter().find(|document| document["id"] == "c1")?["lastSeq"].as_u64()
    }
}

pub(crate) fn contact(id: &str, data: &str) -> Document {
    Document {
        id: id.to_owned(),
        partition_key: "c1".to_owned(),
        document_type: "contact".to_owned(),
        data: data.to_owned().into(),
        ttl_seconds: -1,
        deleted: false,
        etag: ETag::new(""),
        written_at: Timestamp::default(),
    }
}

pub(crate) fn create(data: &str) -> DocumentOperation {
    DocumentOperation::Create(contact("c1", data))
}

pub(crate) fn replace(data: &str, if_match: Option<&ETag>) -> DocumentOperation {
    DocumentOperation::Replace { document: contact("c1", data), if_match: if_match.cloned() }
}

pub(crate) fn delete(id: &str, if_match: Option<&ETag>) -> DocumentOperation {
    DocumentOperation::Delete { id: id.to_owned(), if_match: if_match.cloned() }
}

/// An event of `c1` with an id of its own.
pub(crate) fn event(action: &str) -> NewEvent {
    event_with(Uuid::now_v7(), "c1", &format!("{{\"action\":\"{action}\"}}"), action)
}

pub(crate) fn event_with(id: Uuid, key: &str, payload: &str, action: &str) -> NewEvent {
    let valid = "a valid name";
    NewEvent::builder(
        Key::new(key).expect(valid),
        Topic::new("contacts").expect(valid),
        EventType::new(action).expect(valid),
    )
    .id(EventId::from_uuid(id))
    .payload(ContentType::new("application/json").expect(valid), payload.to_owned())
    .build()
    .expect("within the limits")
}
