//! The JSON that is stored and delivered: the article's, member for member.
//!
//! What lives here: exact texts. What does not: the outcome of commits.
//! Invariant: a change of these texts is a change for every reader of the documents.

use postrider_core::{Document, DocumentRead, DocumentStore};
use postrider_core::{ErrorKind, EventId};
use postrider_macros::DomainEvent;
use postrider_unit_of_work::{CommitError, DomainEvent, EVENT_VERSION, Envelope};
use serde::Serialize;

use crate::contact::{Contact, ContactNameUpdated, Name};
use crate::world::World;

async fn renamed() -> (std::sync::Arc<World>, EventId) {
    let world = World::new();
    let mut work = world.unit_of_work();
    work.create(Contact::new("b5e2e7aa", Name::new("John", "Doe")));
    work.commit().await.unwrap();
    let (mut contact, etag) = world.read::<Contact>("b5e2e7aa").await;
    contact.rename(Name::new("Jane", "Doe"));
    let mut work = world.unit_of_work();
    work.update(contact, etag);
    let id = work.commit().await.unwrap().events()[0];
    (world, id)
}

#[tokio::test]
async fn a_document_reads_as_in_the_article() {
    let (world, _) = renamed().await;
    let read = DocumentStore::read(&*world, "b5e2e7aa", "b5e2e7aa", None).await.unwrap();
    let DocumentRead::Found(document) = read else { panic!("{read:?}") };
    let document = Document { etag: postrider_core::ETag::new("\"180014cc\""), ..document };
    assert_eq!(
        serde_json::to_string(&Envelope::of_document(&document).unwrap()).unwrap(),
        r#"{"id":"b5e2e7aa","partitionKey":"b5e2e7aa","type":"contact","data":{"#.to_owned()
            + r#""name":{"firstName":"Jane","lastName":"Doe"},"email":null,"deleted":false,"#
            + r#""id":"b5e2e7aa"},"ttl":-1,"_etag":"\"180014cc\"","_ts":1632303457}"#
    );
}

#[tokio::test]
async fn an_event_document_reads_as_in_the_article_and_its_data_is_the_payload() {
    let (world, id) = renamed().await;
    let event = &world.events().await[1];
    let data = format!(
        r#"{{"name":{{"firstName":"Jane","lastName":"Doe"}},"contactId":"b5e2e7aa",{}{id}{}"#,
        r#""action":"ContactNameUpdatedEvent","id":""#,
        r#"","createdAt":"2021-09-22T09:37:37.302Z"}"#,
    );
    assert_eq!(event.payload(), data.as_bytes());
    assert_eq!(
        serde_json::to_string(&Envelope::of_event(event, 120).unwrap()).unwrap(),
        format!(
            r#"{{"id":"{id}","partitionKey":"b5e2e7aa","type":"domainEvent",{}{data},{}"#,
            r#""data":"#, r#""ttl":120}"#,
        )
    );
}

#[tokio::test]
async fn an_event_carries_its_id_key_topic_type_and_version() {
    let (world, id) = renamed().await;
    let event = &world.events().await[1];
    assert_eq!(event.id(), id);
    assert_eq!(event.key().as_str(), "b5e2e7aa");
    assert_eq!(event.topic().as_str(), "contacts");
    assert_eq!(event.event_type().as_str(), "ContactNameUpdatedEvent");
    assert_eq!(event.content_type().as_str(), "application/json");
    assert_eq!(event.headers().get(EVENT_VERSION), Some("2"));
}

#[test]
fn an_event_can_go_to_append_without_a_unit_of_work() {
    let event = ContactNameUpdated { name: Name::new("Jane", "Doe"), contact_id: "c1".into() };
    let event = event.to_event().unwrap();
    assert_eq!(event.id(), None);
    let event = event.identified(|| EventId::from_uuid(uuid::Uuid::nil()));
    assert_eq!(
        &event.payload()[..],
        br#"{"name":{"firstName":"Jane","lastName":"Doe"},"contactId":"c1"}"#
    );
    let error = ContactNameUpdated { name: Name::new("J", "D"), contact_id: String::new() };
    assert_eq!(error.to_event().map_err(|e| e.kind()).map(drop), Err(ErrorKind::Permanent));
}

#[tokio::test]
async fn an_event_may_not_have_a_member_that_every_event_gains() {
    #[derive(Serialize, DomainEvent)]
    #[event(topic = "t", name = "Clash", version = 1)]
    struct Clash {
        #[event(key)]
        id: String,
    }
    let world = World::new();
    let mut work = world.unit_of_work();
    work.raise(Clash { id: "c1".into() });
    let Err(CommitError::Invalid(error)) = work.commit().await else { panic!("committed") };
    assert!(error.to_string().contains(r#"Clash has a field "id""#), "{error}");
    assert_eq!(world.commits(), 0);
}

#[tokio::test]
async fn an_event_without_a_json_object_is_refused() {
    #[derive(Serialize, DomainEvent)]
    #[serde(transparent)]
    #[event(topic = "t", name = "Bare", version = 1)]
    struct Bare {
        #[event(key)]
        about: String,
    }
    let world = World::new();
    let mut work = world.unit_of_work();
    work.raise(Bare { about: "c1".into() });
    let Err(CommitError::Invalid(error)) = work.commit().await else { panic!("committed") };
    assert!(error.to_string().contains("Bare is no JSON object"), "{error}");
}
