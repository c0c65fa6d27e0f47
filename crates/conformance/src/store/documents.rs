//! What every document store promises: versions, whole batches, pages.
//!
//! What lives here: documents, and the events saved with them. What does not: entities.
//! Invariant: a write that was not made against the current version changes nothing.

use std::time::Duration;

use postrider_core::{
    Document, DocumentBatch, DocumentError, DocumentOperation, DocumentRead, DocumentStore, ETag,
    ErrorKind, NewEvent, PageRequest, SavedDocument, Timestamp,
};

use super::{StoreHarness, Supports, partition, read_all};
use crate::samples::{event, event_with_id, fresh_id, number, sized_event};
use DocumentOperation::{Create, Delete, Replace};

/// Whether the store keeps documents; if it does not, it must say so.
async fn keeps_documents<H: StoreHarness>(harness: &H) -> bool {
    if harness.features().documents == Supports::Yes {
        return true;
    }
    let answer = commit(harness, vec![Create(contact("c1", "{}"))], vec![]).await;
    let Err(DocumentError::Store(error)) = answer else { panic!("unsupported, not {answer:?}") };
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let read = harness.store().read("p", "c1", None).await.map_err(|error| error.kind());
    assert_eq!(read, Err(ErrorKind::Unsupported));
    false
}

fn contact(id: &str, data: &str) -> Document {
    Document {
        id: id.to_owned(),
        partition_key: "p".to_owned(),
        document_type: "contact".to_owned(),
        data: data.to_owned().into(),
        ttl_seconds: -1,
        deleted: false,
        etag: ETag::new(""),
        written_at: Timestamp::default(),
    }
}

async fn commit<H: StoreHarness>(
    harness: &H,
    operations: Vec<DocumentOperation>,
    events: Vec<NewEvent>,
) -> Result<Vec<SavedDocument>, DocumentError> {
    let batch = DocumentBatch { partition_key: "p".to_owned(), operations, events };
    harness.store().commit(batch).await
}

async fn save<H: StoreHarness>(harness: &H, operation: DocumentOperation) -> ETag {
    let mut saved = commit(harness, vec![operation], vec![]).await.expect("saved");
    assert_eq!(saved.len(), 1, "one answer for one operation");
    saved.remove(0).etag
}

async fn found<H: StoreHarness>(harness: &H, id: &str) -> Option<Document> {
    match harness.store().read("p", id, None).await.expect("readable") {
        DocumentRead::Found(document) => Some(document),
        DocumentRead::NotFound => None,
        DocumentRead::NotModified => panic!("nobody asked whether it was modified"),
    }
}

async fn event_numbers<H: StoreHarness>(harness: &H) -> Vec<u64> {
    let records = read_all(&*harness.store(), &partition(0, 1)).await;
    records.iter().map(|record| number(&record.event)).collect()
}

/// A document is read as it was written, with its version; who has that version is spared it.
pub async fn a_document_is_read_with_its_version<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    if !keeps_documents(&harness).await {
        return;
    }
    let written = contact("c1", "{ \"name\" : \"Zo\\u00eb\" , \"n\":1.0}");
    let etag = save(&harness, Create(written.clone())).await;
    let read = found(&harness, "c1").await.expect("it is there");
    assert_eq!(read.etag, etag);
    let (written_at, etag) = (read.written_at, read.etag.clone());
    assert_eq!(read, Document { etag: etag.clone(), written_at, ..written });
    let store = harness.store();
    let same = store.read("p", "c1", Some(&etag)).await.expect("readable");
    assert_eq!(same, DocumentRead::NotModified);
    let other = store.read("p", "c1", Some(&ETag::new("\"other\""))).await.expect("readable");
    assert!(matches!(other, DocumentRead::Found(_)));
    for (partition_key, id) in [("p", "c2"), ("q", "c1")] {
        let none = store.read(partition_key, id, None).await.expect("readable");
        assert_eq!(none, DocumentRead::NotFound);
    }
}

/// Creating what exists is a conflict and leaves it as it is.
pub async fn a_document_is_created_once<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    if !keeps_documents(&harness).await {
        return;
    }
    save(&harness, Create(contact("c1", "1"))).await;
    let again = commit(&harness, vec![Create(contact("c1", "2"))], vec![event("c1", 1)]).await;
    assert!(matches!(&again, Err(DocumentError::Conflict { id }) if id == "c1"), "{again:?}");
    assert_eq!(found(&harness, "c1").await.expect("there").data, "1");
    assert!(event_numbers(&harness).await.is_empty());
}

/// A replace or delete under an old version is refused and told the current one; under the current
/// one, or under none, it succeeds and changes the version.
pub async fn a_write_needs_the_current_version<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    if !keeps_documents(&harness).await {
        return;
    }
    let first = save(&harness, Create(contact("c1", "1"))).await;
    let replace = |data: &str, if_match: Option<&ETag>| Replace {
        document: contact("c1", data),
        if_match: if_match.cloned(),
    };
    let second = save(&harness, replace("2", Some(&first))).await;
    assert_ne!(first, second);
    let delete = Delete { id: "c1".to_owned(), if_match: Some(first.clone()) };
    for stale in [replace("3", Some(&first)), delete] {
        let refused = commit(&harness, vec![stale], vec![event("c1", 1)]).await;
        let Err(DocumentError::PreconditionFailed { id, current_etag }) = refused else {
            panic!("a stale version is refused, not {refused:?}");
        };
        assert_eq!((id.as_str(), current_etag), ("c1", Some(second.clone())));
    }
    assert_eq!(found(&harness, "c1").await.expect("there").data, "2");
    assert!(event_numbers(&harness).await.is_empty());
    let third = save(&harness, replace("2", None)).await;
    assert_ne!(second, third, "every write changes the version");
    save(&harness, Delete { id: "c1".to_owned(), if_match: Some(third) }).await;
    assert_eq!(found(&harness, "c1").await, None);
    let recreated = save(&harness, Create(contact("c1", "1"))).await;
    assert!(recreated != first && recreated != second, "a version never comes back");
}

/// Replacing or deleting what is not there is told apart from a stale version.
pub async fn a_write_needs_the_document<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    if !keeps_documents(&harness).await {
        return;
    }
    let etag = Some(ETag::new("\"x\""));
    for operation in [
        Replace { document: contact("c1", "1"), if_match: None },
        Replace { document: contact("c1", "1"), if_match: etag.clone() },
        Delete { id: "c1".to_owned(), if_match: None },
        Delete { id: "c1".to_owned(), if_match: etag },
    ] {
        let refused = commit(&harness, vec![operation], vec![]).await;
        let named = matches!(&refused, Err(DocumentError::NotFound { id }) if id == "c1");
        assert!(named, "{refused:?}");
    }
}

/// When one operation fails, no document changes and no event is appended; else all do, and later
/// operations see the earlier ones.
pub async fn a_batch_is_saved_whole_or_not_at_all<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    if !keeps_documents(&harness).await {
        return;
    }
    save(&harness, Create(contact("taken", "1"))).await;
    let refused = commit(
        &harness,
        vec![
            Create(contact("c1", "1")),
            Replace { document: contact("taken", "2"), if_match: None },
            Create(contact("taken", "3")),
        ],
        vec![event("c1", 1)],
    )
    .await;
    assert!(matches!(&refused, Err(DocumentError::Conflict { id }) if id == "taken"));
    assert_eq!(found(&harness, "c1").await, None);
    assert_eq!(found(&harness, "taken").await.expect("there").data, "1");
    assert!(event_numbers(&harness).await.is_empty());
    let saved = commit(
        &harness,
        vec![
            Create(contact("c1", "1")),
            Replace { document: contact("c1", "2"), if_match: None },
            Delete { id: "taken".to_owned(), if_match: None },
        ],
        vec![event("c1", 2)],
    )
    .await
    .expect("saved");
    let ids: Vec<&str> = saved.iter().map(|one| one.id.as_str()).collect();
    assert_eq!(ids, ["c1", "c1", "taken"]);
    let read = found(&harness, "c1").await.expect("there");
    assert_eq!((&read.etag, &read.data[..]), (&saved[1].etag, &b"2"[..]));
    assert_eq!(found(&harness, "taken").await, None);
    assert_eq!(event_numbers(&harness).await, [2]);
}

/// Events of a batch are appended in order, also without any document.
pub async fn events_of_a_batch_are_appended_in_order<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    if !keeps_documents(&harness).await {
        return;
    }
    let events = (1..=5).map(|n| event(&format!("k{}", n % 2), n)).collect();
    commit(&harness, vec![Create(contact("c1", "1"))], events).await.expect("saved");
    let saved = commit(&harness, vec![], vec![event("k0", 6)]).await.expect("saved");
    assert!(saved.is_empty());
    assert_eq!(event_numbers(&harness).await, [1, 2, 3, 4, 5, 6]);
}

/// A commit that repeats an event's id, as a blind retry does, is a conflict that saves nothing.
pub async fn an_event_id_of_a_batch_is_saved_once<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    if !keeps_documents(&harness).await {
        return;
    }
    let id = fresh_id();
    let first = commit(&harness, vec![], vec![event_with_id(id, "a", 1)]).await;
    first.expect("saved");
    let events = vec![event_with_id(id, "a", 2)];
    let again = commit(&harness, vec![Create(contact("c1", "1"))], events).await;
    assert!(matches!(again, Err(DocumentError::Conflict { .. })), "{again:?}");
    assert_eq!(found(&harness, "c1").await, None);
    assert_eq!(event_numbers(&harness).await, [1]);
}

/// A batch without operations and events does nothing and is no error.
pub async fn an_empty_batch_does_nothing<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    if !keeps_documents(&harness).await {
        return;
    }
    assert!(commit(&harness, vec![], vec![]).await.expect("no error").is_empty());
}

/// Pages of any size show each document of the type once, and the same again the second time.
pub async fn pages_show_each_document_once_in_a_stable_order<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    if !keeps_documents(&harness).await {
        return;
    }
    for n in [3, 1, 4, 0, 5, 9, 2] {
        save(&harness, Create(contact(&format!("c{n}"), &n.to_string()))).await;
    }
    let order = Document { document_type: "order".to_owned(), ..contact("o1", "1") };
    save(&harness, Create(order)).await;
    let whole = all_pages(&harness, 100).await;
    assert_eq!(whole.len(), 7);
    let mut sorted = whole.clone();
    sorted.sort();
    assert_eq!(sorted, ["c0", "c1", "c2", "c3", "c4", "c5", "c9"]);
    for size in [1, 2, 7] {
        assert_eq!(all_pages(&harness, size).await, whole, "by pages of {size}");
    }
}

/// A softly deleted document is left out of pages and can still be read by id.
pub async fn a_soft_deleted_document_is_left_out_of_pages<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    if !keeps_documents(&harness).await {
        return;
    }
    for id in ["c1", "c2", "c3"] {
        save(&harness, Create(contact(id, "1"))).await;
    }
    let deleted = Document { deleted: true, ..contact("c2", "1") };
    save(&harness, Replace { document: deleted, if_match: None }).await;
    let mut left = all_pages(&harness, 1).await;
    left.sort();
    assert_eq!(left, ["c1", "c3"]);
    assert!(found(&harness, "c2").await.expect("still readable").deleted);
}

/// A continuation that the store did not make for this request is refused.
pub async fn a_foreign_continuation_is_refused<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    if !keeps_documents(&harness).await {
        return;
    }
    save(&harness, Create(contact("c1", "1"))).await;
    for text in ["", "x", "é", "zz00", "deadbeef", "' or 1=1 --"] {
        let request = page_request(10, Some(text.to_owned()));
        let answer = harness.store().read_page(&request).await.map_err(|error| error.kind());
        assert_eq!(answer, Err(ErrorKind::Permanent), "{text:?}");
    }
}

/// More than the limits allow is refused as too large, before anything is saved: the limits of the
/// strictest store hold on all.
pub async fn a_batch_above_the_limits_is_refused<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    if !keeps_documents(&harness).await {
        return;
    }
    let many = (0..101).map(|n| Create(contact(&format!("c{n}"), "1"))).collect();
    let refused = commit(&harness, many, vec![]).await;
    assert!(matches!(refused, Err(DocumentError::TooLarge(_))), "{refused:?}");
    let large = "x".repeat(2 * 1024 * 1024 + 1);
    let refused = commit(&harness, vec![Create(contact("c1", &large))], vec![]).await;
    assert!(matches!(refused, Err(DocumentError::TooLarge(_))), "{refused:?}");
    let events = vec![sized_event("a", 1, 2 * 1024 * 1024 + 1)];
    let refused = commit(&harness, vec![Create(contact("c1", "1"))], events).await;
    assert!(matches!(refused, Err(DocumentError::TooLarge(_))), "{refused:?}");
    assert!(all_pages(&harness, 10).await.is_empty());
    assert!(event_numbers(&harness).await.is_empty());
}

/// A document whose time to live has passed is not there any more; -1 lives for ever.
pub async fn an_expired_document_is_gone<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    if !keeps_documents(&harness).await {
        return;
    }
    let mortal = Document { ttl_seconds: 1, ..contact("mortal", "1") };
    save(&harness, Create(mortal)).await;
    save(&harness, Create(contact("immortal", "1"))).await;
    assert!(found(&harness, "mortal").await.is_some());
    harness.pass_time(Duration::from_millis(1_100)).await;
    assert_eq!(found(&harness, "mortal").await, None);
    assert_eq!(all_pages(&harness, 10).await, ["immortal"]);
    save(&harness, Create(contact("mortal", "2"))).await;
}

fn page_request(size: u32, continuation: Option<String>) -> PageRequest {
    PageRequest { document_type: "contact".to_owned(), size, continuation }
}

/// The ids of all contacts, by pages of `size`.
async fn all_pages<H: StoreHarness>(harness: &H, size: u32) -> Vec<String> {
    let mut ids = Vec::new();
    let mut continuation = None;
    loop {
        let request = page_request(size, continuation);
        let page = harness.store().read_page(&request).await.expect("readable");
        assert!(page.documents.len() <= size as usize);
        ids.extend(page.documents.into_iter().map(|document| document.id));
        continuation = page.continuation;
        if continuation.is_none() {
            return ids;
        }
        assert!(ids.len() < 1_000, "pages end");
    }
}
