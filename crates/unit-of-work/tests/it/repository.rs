//! Reading entities back.
//!
//! What lives here: point reads and pages. What does not: writing.
//! Invariant: softly deleted entities stay unseen.

use postrider_core::{DocumentBatch, DocumentOperation, DocumentStore, ETag, ErrorKind, Timestamp};
use postrider_unit_of_work::{Entity, EntityRead, Removal};

use crate::contact::{Account, Contact, Name};
use crate::world::World;

#[tokio::test]
async fn a_read_finds_spares_or_misses() {
    let world = World::new();
    let contacts = world.repository::<Contact>();
    assert!(matches!(contacts.read("c1", None).await.unwrap(), EntityRead::NotFound));
    let mut work = world.unit_of_work();
    work.create(Contact::new("c1", Name::new("John", "Doe")));
    let committed = work.commit().await.unwrap();
    let etag = committed.etag("c1").unwrap();

    let EntityRead::Found(contact, found) = contacts.read("c1", None).await.unwrap() else {
        panic!("not found")
    };
    assert_eq!((contact.name(), &found), (&Name::new("John", "Doe"), etag));
    assert!(contact.pending().is_empty());
    assert!(matches!(contacts.read("c1", Some(etag)).await.unwrap(), EntityRead::NotModified));
    let other = ETag::new("\"other\"");
    assert!(matches!(contacts.read("c1", Some(&other)).await.unwrap(), EntityRead::Found(..)));
    let accounts = world.repository::<Account>();
    assert!(matches!(accounts.read("c1", None).await.unwrap(), EntityRead::NotFound));
}

#[tokio::test]
async fn a_softly_deleted_entity_is_not_found_by_its_own_version_either() {
    let world = World::new();
    let mut work = world.unit_of_work();
    work.create(Contact::new("c1", Name::new("John", "Doe")));
    work.commit().await.unwrap();
    let (mut contact, etag) = world.read::<Contact>("c1").await;
    contact.delete();
    work.delete(contact, etag, Removal::Soft);
    let committed = work.commit().await.unwrap();
    let contacts = world.repository::<Contact>();
    for version in [None, committed.etag("c1")] {
        assert!(matches!(contacts.read("c1", version).await.unwrap(), EntityRead::NotFound));
    }
    assert!(contacts.read_page(10, None).await.unwrap().entities.is_empty());
}

#[tokio::test]
async fn pages_show_every_entity_of_the_type_once() {
    let world = World::new();
    for i in 0..7 {
        let mut work = world.unit_of_work();
        work.create(Contact::new(&format!("c{i}"), Name::new("John", "Doe")));
        work.create(Account::open(i, &format!("c{i}")));
        work.commit().await.unwrap();
    }
    let contacts = world.repository::<Contact>();
    let (mut seen, mut next) = (Vec::new(), None);
    loop {
        let page = contacts.read_page(3, next).await.unwrap();
        assert!(page.entities.len() <= 3);
        seen.extend(page.entities.iter().map(|(contact, _)| contact.id()));
        next = page.continuation;
        if next.is_none() {
            break;
        }
    }
    seen.sort();
    assert_eq!(seen, (0..7).map(|i| format!("c{i}")).collect::<Vec<_>>());
    let refused = contacts.read_page(3, Some("no token".into())).await;
    assert_eq!(refused.map(drop).map_err(|e| e.kind()), Err(ErrorKind::Permanent));
}

#[tokio::test]
async fn an_entity_in_anothers_partition_is_read_by_both_keys() {
    let world = World::new();
    let mut work = world.unit_of_work();
    work.create(Account::open(1, "c1"));
    work.commit().await.unwrap();
    let accounts = world.repository::<Account>();
    assert!(matches!(accounts.read_in("c1", "1", None).await.unwrap(), EntityRead::Found(..)));
    assert!(matches!(accounts.read("1", None).await.unwrap(), EntityRead::NotFound));
}

#[tokio::test]
async fn a_document_that_is_no_such_entity_is_an_error_that_names_it() {
    let world = World::new();
    let document = postrider_core::Document {
        id: "c1".into(),
        partition_key: "c1".into(),
        document_type: "contact".into(),
        data: "{}".into(),
        ttl_seconds: -1,
        deleted: false,
        etag: ETag::new(""),
        written_at: Timestamp::default(),
    };
    let batch = DocumentBatch {
        partition_key: "c1".into(),
        operations: vec![DocumentOperation::Create(document)],
        events: Vec::new(),
    };
    world.commit(batch).await.unwrap();
    let error = world.repository::<Contact>().read("c1", None).await.map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.to_string().contains("document c1"), "{error}");
}
