//! Events in a batch of the caller's own, and the inbox.
//!
//! What lives here: writers that build the SDK's batch themselves. What does not: the document
//! seam (`saving.rs`).
//! Invariant: an event is saved if and only if the caller's own change is.

use azure_data_cosmos::TransactionalBatch;
use azure_data_cosmos::models::TransactionalBatchResponse;
use postrider_core::{ConsumerName, EventId};
use postrider_store_cosmos::{CosmosInbox, InboxOptions, Numbering, azure_data_cosmos};
use serde_json::json;
use uuid::Uuid;

use super::world::{World, event, event_with};

async fn statuses(world: &World, batch: TransactionalBatch) -> Vec<u16> {
    let sent = world.store.container().execute_transactional_batch(batch, None).await;
    let answer: TransactionalBatchResponse =
        sent.expect("an answer").into_model().expect("results");
    answer.results().iter().map(|result| result.status_code()).collect()
}

#[tokio::test]
async fn events_share_the_fate_of_the_callers_own_change() {
    let world = World::new().await;
    let own = json!({ "id": "c1", "partitionKey": "c1", "type": "order", "lastSeq": 2 });
    let batch = TransactionalBatch::new("c1").create_item(&own).expect("valid");
    let events = [event("Placed"), event("Paid")];
    let appended = world.store.append(batch, "c1", &events, Numbering::After(0));
    let (batch, ids) = appended.expect("within the limits");
    assert_eq!(statuses(&world, batch.clone()).await, [201, 201, 201]);
    assert_eq!(world.numbers().await, [1, 2]);
    let documents = world.documents().await;
    assert_eq!(documents[1]["id"], ids[0].to_string());
    assert_eq!(documents[1]["ttl"], 864_000);
    // Sent again: refused whole, and nothing twice.
    assert_eq!(statuses(&world, batch).await, [409, 424, 424]);
    let events = [event("Cancelled")];
    let batch = TransactionalBatch::new("c1").create_item(&own).expect("valid");
    let appended = world.store.append(batch, "c1", &events, Numbering::WithoutEntity);
    assert_eq!(statuses(&world, appended.expect("valid").0).await, [409, 424]);
    assert_eq!(world.numbers().await, [1, 2]);
}

#[tokio::test]
async fn what_can_not_be_appended_is_refused() {
    let world = World::new().await;
    let foreign = [event_with(Uuid::now_v7(), "c2", "{}", "A")];
    let refused =
        world.store.append(TransactionalBatch::new("c1"), "c1", &foreign, Numbering::After(0));
    assert!(refused.is_err());
    let many: Vec<_> = (0..101).map(|_| event("A")).collect();
    let refused =
        world.store.append(TransactionalBatch::new("c1"), "c1", &many, Numbering::WithoutEntity);
    assert!(refused.is_err());
}

#[tokio::test]
async fn a_message_that_is_delivered_twice_has_one_effect() {
    let world = World::new().await;
    let inbox = CosmosInbox::new(world.store.clone(), InboxOptions::default()).expect("valid");
    let consumer = ConsumerName::new("mailer/a").expect("a name");
    let id = EventId::from_uuid(Uuid::now_v7());
    let handle = |effect: &str| {
        let effect = json!({ "id": effect, "partitionKey": "c1", "type": "mail" });
        let batch = TransactionalBatch::new("c1").create_item(effect).expect("valid");
        inbox.note(batch, "c1", &consumer, id).expect("valid")
    };
    assert!(!inbox.handled("c1", &consumer, id).await.expect("readable"));
    assert_eq!(statuses(&world, handle("one")).await, [201, 201]);
    assert!(inbox.handled("c1", &consumer, id).await.expect("readable"));
    assert_eq!(statuses(&world, handle("two")).await, [424, 409]);
    assert_eq!(world.documents().await.len(), 2);
    let note = world.documents().await.into_iter().find(|d| d["type"] == "inboxNote");
    assert_eq!(note.expect("the note")["ttl"], 14 * 86_400);
    let other = ConsumerName::new("other").expect("a name");
    assert!(!inbox.handled("c1", &other, id).await.expect("readable"));
}
