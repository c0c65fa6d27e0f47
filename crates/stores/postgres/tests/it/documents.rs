//! Documents with ETags, saved together with their events.

use std::collections::HashSet;
use std::time::Duration;

use postrider_core::*;
use postrider_servers::postgres::Version;
use uuid::Uuid;

use crate::support::*;

on_both_versions! {
    o19_of_two_concurrent_changes_one_wins_with_its_event
    of_two_that_create_one_document_one_wins
    a_batch_is_saved_whole_or_not_at_all
    one_batch_may_do_several_things_to_one_document
    an_etag_never_returns
    limits_are_those_of_a_cosmos_batch
    a_continuation_of_another_type_or_store_is_refused
    a_document_past_its_time_is_gone_for_readers_at_once
    documents_that_cannot_be_removed_keep_no_segment_full
    a_dropped_commit_leaves_no_transaction_open
}

fn document(id: &str, data: &str) -> Document {
    Document {
        id: id.into(),
        partition_key: "pk".into(),
        document_type: "contact".into(),
        data: data.to_owned().into(),
        ttl_seconds: -1,
        deleted: false,
        etag: ETag::new(""),
        written_at: Timestamp::default(),
    }
}

fn batch(operations: Vec<DocumentOperation>, events: Vec<NewEvent>) -> DocumentBatch {
    DocumentBatch { partition_key: "pk".into(), operations, events }
}

fn create(id: &str, data: &str) -> DocumentOperation {
    DocumentOperation::Create(document(id, data))
}

fn replace(id: &str, data: &str, if_match: Option<&ETag>) -> DocumentOperation {
    DocumentOperation::Replace { document: document(id, data), if_match: if_match.cloned() }
}

fn delete(id: &str, if_match: Option<&ETag>) -> DocumentOperation {
    DocumentOperation::Delete { id: id.into(), if_match: if_match.cloned() }
}

async fn found(world: &World, id: &str) -> Option<Document> {
    match DocumentStore::read(&world.store, "pk", id, None).await.expect("read") {
        DocumentRead::Found(document) => Some(document),
        DocumentRead::NotFound => None,
        DocumentRead::NotModified => panic!("no version was given"),
    }
}

async fn payloads_of(world: &World) -> Vec<String> {
    payloads(&world.records(&p(0, 1)).await)
}

/// Case O19: two requests change one document from the same version; one wins, the other learns
/// the current version, and the loser's event does not exist.
async fn o19_of_two_concurrent_changes_one_wins_with_its_event(version: Version) {
    let world = World::new(version, 1).await;
    let saved = world.store.commit(batch(vec![create("1", "{}")], vec![])).await.expect("commit");
    assert_eq!(saved[0].etag.as_str(), "\"0000000000000001\"");
    let mut etag = saved[0].etag.clone();
    let mut expected = Vec::new();
    for _ in 0..20 {
        let change = |data: &'static str| {
            let operation = replace("1", data, Some(&etag));
            world.store.commit(batch(vec![operation], vec![event("1", data)]))
        };
        let (one, two) = tokio::join!(change("1"), change("2"));
        let (won, lost, data) = match (one, two) {
            (Ok(won), Err(lost)) => (won, lost, "1"),
            (Err(lost), Ok(won)) => (won, lost, "2"),
            both => panic!("exactly one must win: {both:?}"),
        };
        match lost {
            DocumentError::PreconditionFailed { id, current_etag } => {
                assert_eq!((id.as_str(), current_etag.as_ref()), ("1", Some(&won[0].etag)));
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(found(&world, "1").await.expect("there").data, data);
        etag = won[0].etag.clone();
        expected.push(data);
    }
    assert_eq!(payloads_of(&world).await, expected);
}

async fn of_two_that_create_one_document_one_wins(version: Version) {
    let world = World::new(version, 1).await;
    for round in 0..10 {
        let id = round.to_string();
        let make = |data: &'static str| {
            let operations =
                vec![create(&format!("other {round} {data}"), data), create(&id, data)];
            world.store.commit(batch(operations, vec![event("1", data)]))
        };
        let (one, two) = tokio::join!(make("1"), make("2"));
        let (lost, data, not) = match (one, two) {
            (Ok(_), Err(lost)) => (lost, "1", "2"),
            (Err(lost), Ok(_)) => (lost, "2", "1"),
            both => panic!("exactly one must win: {both:?}"),
        };
        assert!(matches!(&lost, DocumentError::Conflict { id: named } if *named == id), "{lost:?}");
        assert_eq!(found(&world, &id).await.expect("there").data, data);
        assert_eq!(found(&world, &format!("other {round} {not}")).await, None);
    }
    assert_eq!(payloads_of(&world).await.len(), 10);
}

async fn a_batch_is_saved_whole_or_not_at_all(version: Version) {
    let world = World::new(version, 1).await;
    world.store.commit(batch(vec![create("1", "{}")], vec![])).await.expect("commit");
    let failing: Vec<(DocumentOperation, &str)> = vec![
        (create("1", "again"), "Conflict"),
        (replace("9", "", None), "NotFound"),
        (delete("9", None), "NotFound"),
        (delete("1", Some(&ETag::new("\"x\""))), "PreconditionFailed"),
    ];
    for (operation, expected) in failing {
        let both = batch(vec![create("2", "{}"), operation], vec![event("2", "7")]);
        let error = world.store.commit(both).await.expect_err("refused");
        assert!(format!("{error:?}").starts_with(expected), "{error:?}");
    }
    let id = EventId::from_uuid(Uuid::from_u128(5));
    let known = builder("k").id(id).build().expect("valid");
    world.append(vec![known.clone()]).await;
    let twice = builder("k").id(EventId::from_uuid(Uuid::from_u128(6))).build().expect("valid");
    for (events, named) in [
        (vec![event("k", "8"), known], id.to_string()),
        (vec![twice.clone(), twice], Uuid::from_u128(6).to_string()),
    ] {
        let error = world.store.commit(batch(vec![create("2", "{}")], events)).await;
        match error.expect_err("the event exists") {
            DocumentError::Conflict { id } => assert_eq!(id, named),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(found(&world, "2").await, None);
    assert_eq!(world.records(&p(0, 1)).await.len(), 1);
}

/// The operations see each other's effects, in their order.
async fn one_batch_may_do_several_things_to_one_document(version: Version) {
    let world = World::new(version, 1).await;
    let saved = world.store.commit(batch(vec![create("1", "a"), create("2", "b")], vec![])).await;
    let saved = saved.expect("saved");
    let again = vec![
        replace("1", "c", Some(&saved[0].etag)),
        delete("1", None),
        create("1", "d"),
        replace("1", "e", None),
        create("3", "f"),
        delete("3", None),
        delete("2", Some(&saved[1].etag)),
    ];
    let answers = world.store.commit(batch(again, vec![])).await.expect("saved");
    let ids: Vec<&str> = answers.iter().map(|one| one.id.as_str()).collect();
    assert_eq!(ids, ["1", "1", "1", "1", "3", "3", "2"]);
    assert_eq!(answers[1].etag, answers[0].etag, "a deleted one tells its last version");
    let first = found(&world, "1").await.expect("there");
    assert_eq!((first.data.as_ref(), &first.etag), (&b"e"[..], &answers[3].etag));
    assert_eq!((found(&world, "2").await, found(&world, "3").await), (None, None));
    let twice = vec![create("4", "a"), create("4", "b")];
    let error = world.store.commit(batch(twice, vec![])).await.expect_err("twice");
    assert!(matches!(error, DocumentError::Conflict { id } if id == "4"));
    let stale = vec![replace("1", "g", None), replace("1", "h", Some(&first.etag))];
    let error = world.store.commit(batch(stale, vec![])).await.expect_err("it was changed before");
    assert!(matches!(error, DocumentError::PreconditionFailed { .. }));
    assert_eq!(found(&world, "1").await.expect("there"), first);
}

/// No version returns, not even after a document was deleted and created anew.
async fn an_etag_never_returns(version: Version) {
    let world = World::new(version, 1).await;
    let mut seen = HashSet::new();
    for _ in 0..3 {
        let saved = world.store.commit(batch(vec![create("1", "{}")], vec![])).await;
        let etag = saved.expect("create")[0].etag.clone();
        assert!(seen.insert(etag.clone()), "{etag}");
        world.store.commit(batch(vec![delete("1", Some(&etag))], vec![])).await.expect("delete");
    }
}

async fn limits_are_those_of_a_cosmos_batch(version: Version) {
    let world = World::new(version, 1).await;
    let many = |operations: usize, events: usize| {
        batch(
            (0..operations).map(|i| create(&i.to_string(), "{}")).collect(),
            (0..events).map(|_| event("k", "1")).collect(),
        )
    };
    let error = world.store.commit(many(60, 41)).await.expect_err("101 parts");
    assert!(matches!(&error, DocumentError::TooLarge(what) if what.contains("100 are allowed")));
    world.store.commit(many(60, 40)).await.expect("100 parts");
    let big = "x".repeat(2 * 1024 * 1024);
    let error = world.store.commit(batch(vec![create("big", &big)], vec![])).await;
    assert!(matches!(error, Err(DocumentError::TooLarge(_))));
    let mut foreign = document("f", "{}");
    foreign.partition_key = "other".into();
    let mut brief = document("f", "{}");
    brief.ttl_seconds = 0;
    for wrong in [foreign, brief] {
        let operations = vec![DocumentOperation::Create(wrong)];
        let error = world.store.commit(batch(operations, vec![])).await;
        assert!(matches!(error, Err(DocumentError::Store(e)) if e.kind() == ErrorKind::Permanent));
    }
    assert!(world.store.commit(batch(vec![], vec![])).await.expect("nothing").is_empty());
}

async fn a_continuation_of_another_type_or_store_is_refused(version: Version) {
    let world = World::new(version, 1).await;
    let operations = (0..3).map(|id| create(&id.to_string(), "{}")).collect();
    world.store.commit(batch(operations, vec![])).await.expect("commit");
    let first = PageRequest { document_type: "contact".into(), size: 2, continuation: None };
    let page = world.store.read_page(&first).await.expect("page");
    let good = page.continuation.expect("there is more");
    let with =
        |continuation: String| PageRequest { continuation: Some(continuation), ..first.clone() };
    let last = world.store.read_page(&with(good.clone())).await.expect("page");
    assert_eq!((last.documents.len(), last.continuation), (1, None));
    let other = World::new(version, 1).await;
    let wrong_type = PageRequest { document_type: "other".into(), ..with(good.clone()) };
    for (store, request) in [
        (&world.store, wrong_type),
        (&other.store, with(good.clone())),
        (&world.store, with("é".repeat(16))),
        (&world.store, with(format!("f{}", &good[1..]))),
    ] {
        let error = store.read_page(&request).await.expect_err("not its own");
        assert_eq!(error.kind(), ErrorKind::Permanent);
    }
}

async fn a_document_past_its_time_is_gone_for_readers_at_once(version: Version) {
    let world = World::new(version, 1).await;
    let client = world.session().await;
    let age = "UPDATE postrider.document SET written_at = written_at - interval '10 seconds'";
    let mut short = document("1", "{}");
    short.ttl_seconds = 10;
    let new = || batch(vec![DocumentOperation::Create(short.clone())], vec![]);
    let first = world.store.commit(new()).await.expect("create")[0].etag.clone();
    assert!(found(&world, "1").await.is_some());
    client.batch_execute(age).await.expect("aged");
    assert_eq!(found(&world, "1").await, None);
    let request = PageRequest { document_type: "contact".into(), size: 9, continuation: None };
    assert!(world.store.read_page(&request).await.expect("page").documents.is_empty());
    let error = world.store.commit(batch(vec![replace("1", "", Some(&first))], vec![])).await;
    assert!(matches!(error, Err(DocumentError::NotFound { .. })));
    world.store.commit(new()).await.expect("its place is free");
    world.store.commit(batch(vec![create("2", "{}")], vec![])).await.expect("lives for ever");
    client.batch_execute(age).await.expect("aged");
    let policy = RetentionPolicy { keep: Duration::ZERO, batch: 10, dry_run: false };
    world.store.prune(None, &policy).await.expect("prune");
    assert_eq!(one::<i64>(&client, "SELECT count(*) FROM postrider.document").await, 1);
}

/// Removing them can run into its time-out where there are many.
async fn documents_that_cannot_be_removed_keep_no_segment_full(version: Version) {
    let world = World::new(version, 1).await;
    let client = world.session().await;
    world.append(vec![event("a", "1"), event("b", "2")]).await;
    let head = Feed::head(&world.store, &p(0, 1)).await.expect("the head");
    let lease = world.held(&p(0, 1), "one").await;
    let sink = crate::support::consumer("sink");
    world.store.advance(&lease, &sink, &head, Tally::default()).await.expect("moved");
    let away = "ALTER TABLE postrider.document RENAME TO elsewhere";
    client.batch_execute(away).await.expect("renamed");
    let policy = RetentionPolicy { keep: Duration::ZERO, batch: 10, dry_run: false };
    while let Ok(pruned) = world.store.prune(None, &policy).await {
        assert!(pruned.more, "it was told that they can't be removed");
    }
    assert_eq!(one::<i64>(&client, "SELECT count(*) FROM postrider.outbox").await, 0);
}

/// A dropped call is rolled back, and the store works on.
async fn a_dropped_commit_leaves_no_transaction_open(version: Version) {
    let world = World::new(version, 1).await;
    world.store.commit(batch(vec![create("1", "{}")], vec![])).await.expect("commit");
    let holder = world.session().await;
    holder.batch_execute("BEGIN; SELECT FROM postrider.document FOR UPDATE").await.expect("held");
    let watcher = world.session().await;
    let waiting = world.store.commit(batch(vec![delete("1", None)], vec![event("1", "1")]));
    tokio::select! {
        biased;
        _ = waiting => panic!("it is held"),
        () = until_one_waits(&watcher) => {}
    }
    holder.batch_execute("COMMIT").await.expect("let go");
    let saved =
        world.store.commit(batch(vec![replace("1", "2", None)], vec![event("1", "2")])).await;
    saved.expect("the document is there and free");
    assert_eq!(payloads_of(&world).await, ["2"]);
}
