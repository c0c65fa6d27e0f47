//! Documents with ETags, saved together with their events.

use std::time::Duration;

use postrider_core::*;

use crate::support::*;

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

async fn found(world: &World, id: &str) -> Option<Document> {
    match DocumentStore::read(&world.store, "pk", id, None).await.expect("read") {
        DocumentRead::Found(document) => Some(document),
        DocumentRead::NotFound => None,
        DocumentRead::NotModified => panic!("no version was given"),
    }
}

/// Case O19: two requests change one document from the same version; one wins, the other learns
/// the current version, and the loser's event does not exist.
#[tokio::test]
async fn o19_of_two_concurrent_changes_one_wins_with_its_event() {
    let world = World::new(1).await;
    let saved = world.store.commit(batch(vec![create("1", "{}")], vec![])).await.expect("commit");
    assert_eq!(saved[0].etag.as_str(), "\"0000000000000001\"");
    let change = |data: &'static str| {
        let operation = DocumentOperation::Replace {
            document: document("1", data),
            if_match: Some(saved[0].etag.clone()),
        };
        world.store.commit(batch(vec![operation], vec![event("1", data)]))
    };
    let (one, two) = tokio::join!(change("one"), change("two"));
    let (won, lost, data) = match (one, two) {
        (Ok(won), Err(lost)) => (won, lost, "one"),
        (Err(lost), Ok(won)) => (won, lost, "two"),
        both => panic!("exactly one must win: {both:?}"),
    };
    match lost {
        DocumentError::PreconditionFailed { id, current_etag } => {
            assert_eq!((id.as_str(), current_etag.as_ref()), ("1", Some(&won[0].etag)));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(found(&world, "1").await.expect("there").data, data);
    let page = world.page(&p(0, 1), &Position::START).await;
    assert_eq!(payloads(&page), [data]);
}

#[tokio::test]
async fn a_batch_is_saved_whole_or_not_at_all() {
    let world = World::new(1).await;
    world.store.commit(batch(vec![create("1", "{}")], vec![])).await.expect("commit");
    let failing: Vec<(DocumentOperation, &str)> = vec![
        (create("1", "again"), "Conflict"),
        (DocumentOperation::Replace { document: document("9", ""), if_match: None }, "NotFound"),
        (DocumentOperation::Delete { id: "9".into(), if_match: None }, "NotFound"),
        (
            DocumentOperation::Delete { id: "1".into(), if_match: Some(ETag::new("\"x\"")) },
            "PreconditionFailed",
        ),
    ];
    for (operation, expected) in failing {
        let both = batch(vec![create("2", "{}"), operation], vec![event("2", "lost")]);
        let error = world.store.commit(both).await.expect_err("refused");
        assert!(format!("{error:?}").starts_with(expected), "{error:?}");
    }
    let id = EventId::from_uuid(uuid::Uuid::from_u128(5));
    let known = builder("k").id(id).build().expect("valid");
    world.append(vec![known.clone()]).await;
    let error = world.store.commit(batch(vec![create("2", "{}")], vec![known])).await;
    match error.expect_err("the event exists") {
        DocumentError::Conflict { id: named } => assert_eq!(named, id.to_string()),
        other => panic!("{other:?}"),
    }
    assert_eq!(found(&world, "2").await, None);
    assert_eq!(world.drain().await.len(), 1);
}

/// No version returns, not even after a document was deleted and created anew.
#[tokio::test]
async fn an_etag_never_returns() {
    let world = World::new(1).await;
    let mut seen = std::collections::HashSet::new();
    for _ in 0..3 {
        let saved = world.store.commit(batch(vec![create("1", "{}")], vec![])).await;
        let etag = saved.expect("create")[0].etag.clone();
        assert!(seen.insert(etag.clone()), "{etag}");
        let delete = DocumentOperation::Delete { id: "1".into(), if_match: Some(etag) };
        world.store.commit(batch(vec![delete], vec![])).await.expect("delete");
    }
}

#[tokio::test]
async fn an_unchanged_document_is_spared() {
    let world = World::new(1).await;
    let saved = world.store.commit(batch(vec![create("1", "{}")], vec![])).await.expect("commit");
    let known = Some(&saved[0].etag);
    let read = DocumentStore::read(&world.store, "pk", "1", known).await.expect("read");
    assert_eq!(read, DocumentRead::NotModified);
    let other = ETag::new("\"0000000000000009\"");
    let read = DocumentStore::read(&world.store, "pk", "1", Some(&other)).await.expect("read");
    assert!(matches!(read, DocumentRead::Found(_)));
}

#[tokio::test]
async fn limits_are_those_of_a_cosmos_batch() {
    let world = World::new(1).await;
    let many = |operations: usize, events: usize| {
        batch(
            (0..operations).map(|i| create(&i.to_string(), "{}")).collect(),
            (0..events).map(|_| event("k", "x")).collect(),
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
    let error = world.store.commit(batch(vec![DocumentOperation::Create(foreign)], vec![])).await;
    assert!(matches!(error, Err(DocumentError::Store(e)) if e.kind() == ErrorKind::Permanent));
    assert!(world.store.commit(batch(vec![], vec![])).await.expect("nothing").is_empty());
}

#[tokio::test]
async fn pages_hold_each_live_document_once_and_check_their_continuation() {
    let world = World::new(1).await;
    for id in 0..7 {
        let mut new = document(&id.to_string(), "{}");
        new.deleted = id == 3;
        if id == 5 {
            new.document_type = "other".into();
        }
        let operations = vec![DocumentOperation::Create(new)];
        world.store.commit(batch(operations, vec![])).await.expect("commit");
    }
    let mut request = PageRequest { document_type: "contact".into(), size: 2, continuation: None };
    let mut ids = Vec::new();
    loop {
        let page = world.store.read_page(&request).await.expect("page");
        assert!(page.documents.len() <= 2);
        ids.extend(page.documents.into_iter().map(|document| document.id));
        match page.continuation {
            Some(next) => request.continuation = Some(next),
            None => break,
        }
    }
    assert_eq!(ids, ["0", "1", "2", "4", "6"]);
    let good = request.continuation.clone().expect("several pages");
    let other = World::new(1).await;
    let wrong_type =
        PageRequest { document_type: "other".into(), size: 2, continuation: Some(good.clone()) };
    for (store, request) in [
        (&world.store, wrong_type),
        (&other.store, PageRequest { continuation: Some(good.clone()), ..request.clone() }),
        (&world.store, PageRequest { continuation: Some("é".repeat(16)), ..request.clone() }),
        (&world.store, PageRequest { continuation: Some(format!("f{}", &good[1..])), ..request }),
    ] {
        let error = store.read_page(&request).await.expect_err("not its own");
        assert_eq!(error.kind(), ErrorKind::Permanent);
    }
}

#[tokio::test]
async fn a_document_past_its_time_is_gone_for_readers_at_once() {
    let world = World::new(1).await;
    let mut short = document("1", "{}");
    short.ttl_seconds = 10;
    let new = || batch(vec![DocumentOperation::Create(short.clone())], vec![]);
    let first = world.store.commit(new()).await.expect("create")[0].etag.clone();
    assert!(found(&world, "1").await.is_some());
    world.clock.advance(Duration::from_secs(10));
    assert_eq!(found(&world, "1").await, None);
    let request = PageRequest { document_type: "contact".into(), size: 9, continuation: None };
    assert!(world.store.read_page(&request).await.expect("page").documents.is_empty());
    let replace = DocumentOperation::Replace { document: short.clone(), if_match: Some(first) };
    let error = world.store.commit(batch(vec![replace], vec![])).await;
    assert!(matches!(error, Err(DocumentError::NotFound { .. })));
    world.store.commit(new()).await.expect("its place is free");
    world.clock.advance(Duration::from_secs(11));
    let policy = RetentionPolicy { keep: Duration::ZERO, batch: 10, dry_run: false };
    world.store.prune(None, &policy).await.expect("prune");
    let left: i64 = world
        .connection()
        .query_row("SELECT count(*) FROM postrider_document", [], |row| row.get(0))
        .expect("count");
    assert_eq!(left, 0);
    short.ttl_seconds = 0;
    let error = world.store.commit(batch(vec![DocumentOperation::Create(short)], vec![])).await;
    assert!(matches!(error, Err(DocumentError::Store(e)) if e.to_string().contains("-1")));
}

/// A dropped call that has begun is committed or rolled back, and the store works on.
#[tokio::test]
async fn a_cancelled_write_leaves_no_transaction_open() {
    let world = World::new(1).await;
    let store = world.store.clone();
    let (begun, wait) = tokio::sync::oneshot::channel();
    let (go, held) = std::sync::mpsc::channel::<()>();
    let write = store.transaction(move |tx| {
        begun.send(()).expect("the test waits");
        held.recv().expect("the test lets go");
        postrider_store_sqlite::append(tx, &[event("k", "1")])
    });
    tokio::select! {
        biased;
        _ = write => panic!("it is held"),
        done = wait => done.expect("it has begun"),
    }
    go.send(()).expect("it is held");
    world.append(vec![event("k", "2")]).await;
    let page = world.page(&p(0, 1), &Position::START).await;
    assert_eq!(payloads(&page), ["1", "2"]);
}
