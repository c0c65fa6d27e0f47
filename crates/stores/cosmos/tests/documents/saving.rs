//! What is saved, under which versions, and what the documents look like.
//!
//! What lives here: a commit that meets no fault. What does not: faults (`failures.rs`).
//! Invariant: all of a batch is there, or nothing of it.

use postrider_core::{
    Document, DocumentBatch, DocumentError, DocumentOperation, DocumentRead, DocumentStore, ETag,
    ErrorKind, PageRequest,
};
use serde_json::json;
use uuid::Uuid;

use super::world::{World, contact, create, delete, event, event_with, replace};

fn kind(error: &DocumentError) -> Option<ErrorKind> {
    match error {
        DocumentError::Store(error) => Some(error.kind()),
        DocumentError::NotFound { .. }
        | DocumentError::Conflict { .. }
        | DocumentError::PreconditionFailed { .. }
        | DocumentError::TooLarge(_) => None,
    }
}

#[tokio::test]
async fn a_document_is_read_with_its_version_and_spared_who_has_it() {
    let world = World::new().await;
    let etag = world.save(create("{\"name\":\"Zoë\",\"n\":1.5}"), vec![]).await;
    let read = world.read("c1").await.expect("it is there");
    assert_eq!(read.etag, etag);
    assert!(read.written_at.as_millis() > 0);
    let (written_at, n) = (read.written_at, serde_json::from_slice(&read.data).ok());
    assert_eq!(n, Some(json!({ "name": "Zoë", "n": 1.5 })));
    let expected = contact("c1", std::str::from_utf8(&read.data).expect("text"));
    assert_eq!(read, Document { etag: etag.clone(), written_at, ..expected });
    let same = world.store.read("c1", "c1", Some(&etag)).await.expect("readable");
    assert_eq!(same, DocumentRead::NotModified);
    let other = world.store.read("c1", "c1", Some(&ETag::new("\"x\""))).await.expect("readable");
    assert!(matches!(other, DocumentRead::Found(_)));
    for (key, id) in [("c1", "c2"), ("c2", "c1")] {
        let none = world.store.read(key, id, None).await.expect("readable");
        assert_eq!(none, DocumentRead::NotFound);
    }
}

#[tokio::test]
async fn a_change_and_its_events_are_the_articles_documents_in_one_logical_partition() {
    let world = World::new().await;
    world.save(create("{\"name\":\"John\"}"), vec![event("ContactCreatedEvent")]).await;
    let renamed = Uuid::now_v7();
    let payload = "{\"name\":\"Jane\",\"action\":\"ContactNameUpdatedEvent\"}";
    let events = vec![
        event_with(renamed, "c1", payload, "ContactNameUpdatedEvent"),
        event("ContactEmailUpdatedEvent"),
    ];
    world.save(replace("{\"name\":\"Jane\"}", None), events).await;
    let documents = world.documents().await;
    assert_eq!(documents.len(), 4);
    let entity = json!({
        "id": "c1", "partitionKey": "c1", "type": "contact", "data": { "name": "Jane" },
        "ttl": -1, "lastSeq": 3,
    });
    assert_eq!(documents[0], entity);
    let event = json!({
        "id": renamed.to_string(), "partitionKey": "c1", "type": "domainEvent",
        "data": { "name": "Jane", "action": "ContactNameUpdatedEvent" },
        "ttl": 864_000, "seq": 2,
    });
    assert_eq!(documents[2], event);
    assert_eq!(world.numbers().await, [1, 2, 3]);
}

#[tokio::test]
async fn a_write_needs_the_current_version() {
    let world = World::new().await;
    let first = world.save(create("1"), vec![]).await;
    let second = world.save(replace("2", Some(&first)), vec![event("A")]).await;
    assert_ne!(first, second);
    let other = world.another_store().await;
    for stale in [replace("3", Some(&first)), delete("c1", Some(&first))] {
        for store in [&world.store, &other] {
            let operations = vec![stale.clone()];
            let events = vec![event("B")];
            let batch = DocumentBatch { partition_key: "c1".to_owned(), operations, events };
            let refused = store.commit(batch).await;
            let Err(DocumentError::PreconditionFailed { id, current_etag }) = refused else {
                panic!("a stale version is refused, not {refused:?}");
            };
            assert_eq!((id.as_str(), current_etag), ("c1", Some(second.clone())));
        }
    }
    assert_eq!(world.read("c1").await.expect("there").data, "2");
    assert_eq!(world.numbers().await, [1]);
    let third = world.save(replace("2", None), vec![]).await;
    assert_ne!(second, third, "every write changes the version");
    assert_eq!(world.last_number().await, Some(1), "a write without events keeps the number");
    world.save(delete("c1", Some(&third)), vec![event("C")]).await;
    assert_eq!(world.read("c1").await, None);
    assert_eq!(world.numbers().await, [1, 2], "the last event goes on counting");
    let recreated = world.save(create("1"), vec![]).await;
    assert!(recreated != first && recreated != second, "a version never comes back");
}

#[tokio::test]
async fn what_is_there_is_not_created_and_what_is_not_there_is_not_changed() {
    let world = World::new().await;
    let etag = Some(ETag::new("\"x\""));
    for operation in [
        replace("1", None),
        replace("1", etag.as_ref()),
        delete("c1", None),
        delete("c1", etag.as_ref()),
        DocumentOperation::Replace { document: contact("c2", "1"), if_match: None },
        delete("c2", etag.as_ref()),
    ] {
        let refused = world.commit(vec![operation], vec![event("A")]).await;
        assert!(matches!(&refused, Err(DocumentError::NotFound { .. })), "{refused:?}");
    }
    world.save(create("1"), vec![]).await;
    let again = world.commit(vec![create("2")], vec![event("A")]).await;
    assert!(matches!(&again, Err(DocumentError::Conflict { id }) if id == "c1"), "{again:?}");
    assert_eq!(world.read("c1").await.expect("there").data, "1");
    assert!(world.numbers().await.is_empty());
}

#[tokio::test]
async fn a_batch_is_saved_whole_or_not_at_all() {
    let world = World::new().await;
    let taken = || contact("taken", "1");
    world.save(DocumentOperation::Create(taken()), vec![]).await;
    let operations = vec![create("1"), DocumentOperation::Create(taken())];
    let refused = world.commit(operations, vec![event("A"), event("B")]).await;
    assert!(
        matches!(&refused, Err(DocumentError::Conflict { id }) if id == "taken"),
        "{refused:?}"
    );
    assert_eq!(world.documents().await.len(), 1);
    let operations = vec![create("1"), replace("2", None), delete("taken", None)];
    let saved = world.commit(operations, vec![event("A")]).await.expect("saved");
    let ids: Vec<&str> = saved.iter().map(|one| one.id.as_str()).collect();
    assert_eq!(ids, ["c1", "c1", "taken"]);
    let read = world.read("c1").await.expect("there");
    assert_eq!((&read.etag, &read.data[..]), (&saved[1].etag, &b"2"[..]));
    assert_eq!((world.last_number().await, world.numbers().await), (Some(1), vec![1]));
    assert_eq!(world.read("taken").await, None);
}

#[tokio::test]
async fn an_event_id_is_saved_once_and_the_same_batch_again_changes_nothing() {
    let world = World::new().await;
    let id = Uuid::now_v7();
    let events = || vec![event_with(id, "c1", "{\"action\":\"A\"}", "A")];
    let first = world.save(create("1"), events()).await;
    // The same as before, as after a lost answer: it was saved, and says so.
    assert_eq!(world.save(create("1"), events()).await, first);
    // The same event beside something else is none of ours.
    let other = vec![event_with(id, "c1", "{\"action\":\"B\"}", "B")];
    let refused = world.commit(vec![replace("2", None)], other).await;
    assert!(matches!(&refused, Err(DocumentError::Conflict { .. })), "{refused:?}");
    // Changed since: the version that was saved then is no current one.
    let second = world.save(replace("3", Some(&first)), vec![]).await;
    let late = world.save(create("1"), events()).await;
    assert!(late != first && late != second);
    let refused = world.commit(vec![replace("4", Some(&late))], vec![]).await;
    assert!(matches!(refused, Err(DocumentError::PreconditionFailed { .. })), "{refused:?}");
    assert_eq!(world.numbers().await, [1]);
}

#[tokio::test]
async fn two_writers_of_one_entity_never_use_a_number_twice() {
    let world = World::new().await;
    world.save(create("0"), vec![event("A")]).await;
    let other = world.another_store().await;
    let write = |store: postrider_store_cosmos::CosmosStore| async move {
        for _ in 0..10 {
            let operations = vec![replace("1", None)];
            let events = vec![event("B"), event("C")];
            let batch = DocumentBatch { partition_key: "c1".to_owned(), operations, events };
            store.commit(batch).await.expect("saved");
        }
    };
    tokio::join!(write(world.store.clone()), write(other));
    assert_eq!(world.numbers().await, (1..=41).collect::<Vec<_>>());
    assert_eq!(world.last_number().await, Some(41));
}

#[tokio::test]
async fn events_without_their_entity_are_in_order_and_outside_its_count() {
    let world = World::new().await;
    world.save(create("1"), vec![event("A")]).await;
    let saved = world.commit(vec![], vec![event("B"), event("C")]).await.expect("saved");
    assert!(saved.is_empty());
    assert_eq!(world.numbers().await, [-2, -1, 1]);
    assert_eq!(world.last_number().await, Some(1));
    assert!(world.commit(vec![], vec![]).await.expect("no error").is_empty());
}

#[tokio::test]
async fn what_can_not_be_one_batch_is_refused_before_anything_is_sent() {
    let world = World::new().await;
    world.account.ask("DELETE", "requests", "").expect("reset");
    let many = (0..101).map(|n| DocumentOperation::Create(contact(&format!("d{n}"), "1")));
    let refused = world.commit(many.collect(), vec![]).await;
    assert!(matches!(refused, Err(DocumentError::TooLarge(_))), "{refused:?}");
    let large = format!("\"{}\"", "x".repeat(2 * 1024 * 1024));
    let refused = world.commit(vec![create(&large)], vec![]).await;
    assert!(matches!(refused, Err(DocumentError::TooLarge(_))), "{refused:?}");
    let payload = format!("{{\"action\":\"{}\"}}", "x".repeat(1024 * 1024));
    let half = |n| event_with(Uuid::now_v7(), "c1", &payload, n);
    let refused = world.commit(vec![create("1")], vec![half("A"), half("B")]).await;
    assert!(matches!(refused, Err(DocumentError::TooLarge(_))), "{refused:?}");
    let elsewhere = Document { partition_key: "c2".to_owned(), ..contact("c1", "1") };
    let foreign = vec![DocumentOperation::Create(elsewhere)];
    let refused = world.commit(foreign, vec![]).await.expect_err("refused");
    assert_eq!(kind(&refused), Some(ErrorKind::Permanent));
    let foreign = vec![event_with(Uuid::now_v7(), "c2", "{}", "A")];
    let refused = world.commit(vec![create("1")], foreign).await.expect_err("refused");
    assert_eq!(kind(&refused), Some(ErrorKind::Permanent));
    let refused = world.commit(vec![create("no JSON")], vec![]).await.expect_err("refused");
    assert_eq!(kind(&refused), Some(ErrorKind::Permanent));
    let requests = world.account.requests().expect("counters");
    assert!(requests.contains("\"total\":0"), "{requests}");
}

/// The largest batch that is let through is one that the service takes.
#[tokio::test]
async fn the_largest_batch_is_saved() {
    let world = World::new().await;
    let payload = format!("{{\"action\":\"{}\"}}", "x".repeat(20_500));
    let events: Vec<_> = (0..99).map(|_| event_with(Uuid::now_v7(), "c1", &payload, "A")).collect();
    world.save(create("1"), events).await;
    assert_eq!(world.numbers().await.len(), 99);
}

async fn all_pages(world: &World, size: u32) -> Vec<String> {
    let mut ids = Vec::new();
    let mut continuation = None;
    loop {
        let document_type = "contact".to_owned();
        let request = PageRequest { document_type, size, continuation };
        let page = world.store.read_page(&request).await.expect("readable");
        assert!(page.documents.len() <= size as usize);
        ids.extend(page.documents.into_iter().map(|document| document.id));
        continuation = page.continuation;
        if continuation.is_none() {
            return ids;
        }
        assert!(ids.len() < 1_000, "pages end");
    }
}

#[tokio::test]
async fn pages_show_each_document_once_in_a_stable_order_over_all_ranges() {
    let world = World::new().await;
    for n in [3, 1, 4, 0, 5, 9, 2, 6, 8, 7] {
        let id = format!("c{n}");
        let document = Document { partition_key: id.clone(), ..contact(&id, "1") };
        let operations = vec![DocumentOperation::Create(document)];
        let batch = DocumentBatch { partition_key: id, operations, events: vec![] };
        world.store.commit(batch).await.expect("saved");
    }
    let order = Document { document_type: "order".to_owned(), ..contact("o1", "1") };
    world.save(DocumentOperation::Create(order), vec![event("A")]).await;
    let whole = all_pages(&world, 100).await;
    let mut sorted = whole.clone();
    sorted.sort();
    assert_eq!(sorted, (0..10).map(|n| format!("c{n}")).collect::<Vec<_>>());
    for size in [1, 2, 7] {
        assert_eq!(all_pages(&world, size).await, whole, "by pages of {size}");
    }
    world.account.split(super::world::DATABASE, super::world::CONTAINER, 1).expect("split");
    let mut after = all_pages(&world, 2).await;
    after.sort();
    assert_eq!(after, sorted, "after a split");
}

#[tokio::test]
async fn a_softly_deleted_document_is_left_out_of_pages_and_read_by_id() {
    let world = World::new().await;
    for id in ["c1", "c2", "c3"] {
        world.save(DocumentOperation::Create(contact(id, "{}")), vec![]).await;
    }
    let document = Document { deleted: true, ..contact("c1", "{\"deleted\":true}") };
    world.save(DocumentOperation::Replace { document, if_match: None }, vec![]).await;
    let document = Document { deleted: true, ..contact("c2", "{}") };
    world.save(DocumentOperation::Replace { document, if_match: None }, vec![]).await;
    assert_eq!(all_pages(&world, 1).await, ["c3"]);
    assert!(world.read("c1").await.expect("readable").deleted);
    assert!(world.read("c2").await.expect("readable").deleted);
    assert!(!world.read("c3").await.expect("readable").deleted);
}

#[tokio::test]
async fn a_foreign_continuation_is_refused() {
    let world = World::new().await;
    for id in ["c1", "c2"] {
        world.save(DocumentOperation::Create(contact(id, "1")), vec![]).await;
    }
    let ask = |document_type: &str, continuation: Option<String>| {
        let document_type = document_type.to_owned();
        let request = PageRequest { document_type, size: 1, continuation };
        let store = world.store.clone();
        async move { store.read_page(&request).await }
    };
    let own = ask("contact", None).await.expect("readable").continuation.expect("there is more");
    assert!(ask("contact", Some(own.clone())).await.is_ok());
    assert!(ask("order", Some(own.clone())).await.is_err(), "of another type");
    let bent = format!("{}A", &own[..own.len() - 1]);
    for text in ["", "x", "é", "zz00", "deadbeef", "' or 1=1 --", &bent] {
        let refused = ask("contact", Some(text.to_owned())).await.expect_err(text);
        assert_eq!(refused.kind(), ErrorKind::Permanent, "{text:?}");
    }
}

/// A number that the service would round travels to the digit.
#[tokio::test]
async fn an_event_with_a_number_beyond_floats_is_kept_to_the_digit() {
    let world = World::new().await;
    let payload = "{\"action\":\"A\",\"n\":9007199254740993}";
    world.save(create("1"), vec![event_with(Uuid::now_v7(), "c1", payload, "A")]).await;
    assert_eq!(world.documents().await[1]["dataText"], payload);
    let refused = world.commit(vec![replace("9007199254740993", None)], vec![]).await;
    assert_eq!(kind(&refused.expect_err("refused")), Some(ErrorKind::Permanent));
}
