//! Commits: what is saved, what is refused, and what stays for the next try.
//!
//! What lives here: outcomes of `commit`. What does not: handlers and exact JSON.
//! Invariant: after every refusal the store holds what it held before.

use std::sync::Arc;
use std::time::Duration;

use postrider_core::{DocumentError, ETag, Error, ErrorKind, TraceContext};
use postrider_unit_of_work::{CommitError, Committed, Removal};

use crate::contact::{Account, Contact, Name, Noted};
use crate::world::{Fault, World, json};

fn john() -> Contact {
    Contact::new("c1", Name::new("John", "Doe"))
}

async fn with_john() -> Arc<World> {
    let world = World::new();
    let mut work = world.unit_of_work();
    work.create(john());
    work.commit().await.unwrap();
    world
}

fn counts(committed: &Committed) -> (usize, usize) {
    (committed.documents().len(), committed.events().len())
}

#[tokio::test]
async fn every_change_saves_one_document_and_one_event() {
    let world = World::new();
    let mut work = world.unit_of_work();
    work.create(john());
    assert_eq!(counts(&work.commit().await.unwrap()), (1, 1));
    let changes: [fn(&mut Contact); 2] =
        [|c| c.rename(Name::new("Jane", "Doe")), |c| c.change_email("jane@contoso.com")];
    for change in changes {
        let (mut contact, etag) = world.read::<Contact>("c1").await;
        change(&mut contact);
        let mut work = world.unit_of_work();
        work.update(contact, etag.clone());
        let committed = work.commit().await.unwrap();
        assert_eq!(counts(&committed), (1, 1));
        assert_ne!(committed.etag("c1"), Some(&etag));
    }
    let (mut contact, etag) = world.read::<Contact>("c1").await;
    contact.delete();
    let mut work = world.unit_of_work();
    work.delete(contact, etag, Removal::Soft);
    assert_eq!(counts(&work.commit().await.unwrap()), (1, 1));
    assert_eq!(
        world.event_types().await,
        [
            "ContactCreatedEvent",
            "ContactNameUpdatedEvent",
            "ContactEmailUpdatedEvent",
            "ContactDeletedEvent"
        ]
    );
}

#[tokio::test]
async fn the_created_event_shows_the_state_at_commit() {
    let world = World::new();
    let mut work = world.unit_of_work();
    work.create(john());
    work.entity_mut::<Contact>("c1").unwrap().change_email("late@contoso.com");
    work.commit().await.unwrap();
    let events = world.events().await;
    assert_eq!(events.len(), 1);
    assert_eq!(json(&events[0])["email"], "late@contoso.com");
}

#[tokio::test]
async fn coalesced_actions_send_the_last_value_once() {
    let world = with_john().await;
    let (mut contact, etag) = world.read::<Contact>("c1").await;
    contact.rename(Name::new("A", "Doe"));
    contact.rename(Name::new("B", "Doe"));
    let mut work = world.unit_of_work();
    work.update(contact, etag);
    assert_eq!(counts(&work.commit().await.unwrap()), (1, 1));
    assert_eq!(json(&world.events().await[1])["name"]["firstName"], "B");
}

#[tokio::test]
async fn an_empty_commit_does_not_call_the_store() {
    let world = World::new();
    let committed = world.unit_of_work().commit().await.unwrap();
    assert_eq!((counts(&committed), world.commits()), ((0, 0), 0));
}

#[tokio::test]
async fn an_unmodified_entity_is_not_saved() {
    let world = with_john().await;
    for with_etag in [true, false] {
        let (contact, etag) = world.read::<Contact>("c1").await;
        let mut work = world.unit_of_work();
        work.attach(contact, with_etag.then_some(etag));
        let mut committed = work.commit().await.unwrap();
        assert_eq!((counts(&committed), world.commits()), ((0, 0), 1));
        assert!(committed.take::<Contact>("c1").is_some());
    }
}

#[tokio::test]
async fn an_attached_entity_is_saved_in_its_version_once_it_changes() {
    let world = with_john().await;
    let (contact, etag) = world.read::<Contact>("c1").await;
    let mut work = world.unit_of_work();
    work.attach(contact, etag);
    work.entity_mut::<Contact>("c1").unwrap().change_email("a@contoso.com");
    assert_eq!(counts(&work.commit().await.unwrap()), (1, 1));

    // Changed without an event: saved all the same.
    let mut work = world.unit_of_work();
    work.create(Account::open(1, "c1"));
    let mut committed = work.commit().await.unwrap();
    let etag = committed.etag("1").cloned();
    work.attach(committed.take::<Account>("1").unwrap(), etag);
    work.entity_mut::<Account>("1").unwrap().correct(7);
    assert_eq!(counts(&work.commit().await.unwrap()), (1, 0));

    // Attached with an event already pending: the event is not lost.
    let (mut contact, _) = world.read::<Contact>("c1").await;
    contact.change_email("b@contoso.com");
    let mut work = world.unit_of_work();
    work.attach(contact, ETag::new("\"stale\""));
    let refused = work.commit().await;
    assert!(matches!(refused, Err(CommitError::PreconditionFailed { .. })), "{refused:?}");
}

#[tokio::test]
async fn a_stale_version_is_refused_with_the_current_one() {
    let world = with_john().await;
    let stale = || ETag::new("\"stale\"");
    let (_, current) = world.read::<Contact>("c1").await;
    for hard in [None, Some(Removal::Soft), Some(Removal::Hard)] {
        for with_event in [true, false] {
            let (mut contact, _) = world.read::<Contact>("c1").await;
            if with_event {
                contact.delete();
            }
            let mut work = world.unit_of_work();
            match hard {
                None => work.update(contact, stale()),
                Some(removal) => work.delete(contact, stale(), removal),
            }
            let refused = work.commit().await;
            let Err(CommitError::PreconditionFailed { id, current_etag }) = refused else {
                panic!("{refused:?}")
            };
            assert_eq!((id.as_str(), current_etag), ("c1", Some(current.clone())));
        }
    }
    assert_eq!(world.events().await.len(), 1);
}

#[tokio::test]
async fn a_missing_document_is_not_found_and_an_existing_one_conflicts() {
    let world = with_john().await;
    let missing = || {
        let mut account = Account::open(9, "c1");
        account.pay_in(1);
        account
    };
    let mut work = world.unit_of_work();
    work.update(missing(), None);
    assert!(matches!(work.commit().await, Err(CommitError::NotFound { id }) if id == "9"));
    for removal in [Removal::Soft, Removal::Hard] {
        let mut work = world.unit_of_work();
        work.delete(missing(), None, removal);
        assert!(matches!(work.commit().await, Err(CommitError::NotFound { id }) if id == "9"));
    }
    let mut work = world.unit_of_work();
    work.create(john());
    assert!(matches!(work.commit().await, Err(CommitError::Conflict { id }) if id == "c1"));
    assert_eq!(world.events().await.len(), 1);
}

#[tokio::test]
async fn a_hard_delete_removes_the_document_and_keeps_its_event() {
    let world = with_john().await;
    let (mut contact, etag) = world.read::<Contact>("c1").await;
    contact.delete();
    let mut work = world.unit_of_work();
    work.delete(contact, etag, Removal::Hard);
    assert_eq!(counts(&work.commit().await.unwrap()), (1, 1));
    let mut work = world.unit_of_work();
    work.create(john());
    work.commit().await.unwrap();
    assert_eq!(
        world.event_types().await,
        ["ContactCreatedEvent", "ContactDeletedEvent", "ContactCreatedEvent"]
    );
}

#[tokio::test]
async fn several_entities_of_one_partition_are_saved_together_or_not_at_all() {
    let world = with_john().await;
    let (mut contact, etag) = world.read::<Contact>("c1").await;
    contact.change_email("a@contoso.com");
    let mut account = Account::open(1, "c1");
    account.pay_in(5);
    account.pay_in(7);
    let mut work = world.unit_of_work();
    work.create(account);
    work.update(contact, ETag::new("\"stale\""));
    work.raise(Noted { text: "opened".into(), about: "c1".into() });
    assert!(matches!(work.commit().await, Err(CommitError::PreconditionFailed { .. })));
    assert_eq!(world.events().await.len(), 1);

    let contact: Contact = work.take("c1").unwrap();
    work.update(contact, etag);
    let mut committed = work.commit().await.unwrap();
    assert_eq!(counts(&committed), (2, 4));
    assert_eq!(committed.take::<Account>("1").unwrap().balance(), 12);
    assert_eq!(
        world.event_types().await[1..],
        ["PaidIn", "PaidIn", "ContactEmailUpdatedEvent", "Noted"]
    );
}

#[tokio::test]
async fn two_partition_keys_are_refused_before_the_store_is_called() {
    let world = World::new();
    let mut work = world.unit_of_work();
    work.create(john());
    work.create(Contact::new("c2", Name::new("Jane", "Doe")));
    let Err(CommitError::Invalid(error)) = work.commit().await else { panic!("committed") };
    let text = error.to_string();
    assert!(text.contains("contact c1") && text.contains("\"c2\""), "{text}");

    let mut work = world.unit_of_work();
    work.create(john());
    work.raise(Noted { text: String::new(), about: "c2".into() });
    assert!(matches!(work.commit().await, Err(CommitError::Invalid(_))));
    assert_eq!(world.commits(), 0);
}

#[tokio::test]
async fn the_same_document_twice_is_refused_and_not_dropped() {
    let world = World::new();
    let mut work = world.unit_of_work();
    work.create(john());
    work.create(john());
    let Err(CommitError::Invalid(error)) = work.commit().await else { panic!("committed") };
    assert!(error.to_string().contains("contact c1 is in this unit of work twice"), "{error}");
    assert_eq!(world.commits(), 0);
    let _: Contact = work.take("c1").unwrap();
    assert_eq!(counts(&work.commit().await.unwrap()), (1, 1));
}

#[tokio::test]
async fn an_empty_id_is_refused_before_the_store_is_called() {
    let world = World::new();
    let mut work = world.unit_of_work();
    work.create(Contact::new("", Name::new("John", "Doe")));
    assert!(matches!(work.commit().await, Err(CommitError::Invalid(_))));
    let mut work = world.unit_of_work();
    work.create(Account::open(1, ""));
    assert!(matches!(work.commit().await, Err(CommitError::Invalid(_))));
    assert_eq!(world.commits(), 0);
}

#[tokio::test]
async fn limits_hold_before_the_store_is_called() {
    let world = World::new();
    let mut work = world.unit_of_work();
    for _ in 0..101 {
        work.raise(Noted { text: String::new(), about: "c1".into() });
    }
    let refused = work.commit().await;
    assert!(
        matches!(&refused, Err(CommitError::TooLarge(text)) if text.starts_with("101 documents")),
        "{refused:?}"
    );
    let mut work = world.unit_of_work();
    work.raise(Noted { text: "x".repeat(2 * 1024 * 1024), about: "c1".into() });
    let refused = work.commit().await;
    assert!(
        matches!(&refused, Err(CommitError::TooLarge(text)) if text.contains("bytes of doc")),
        "{refused:?}"
    );
    assert_eq!(world.commits(), 0);

    let mut work = world.unit_of_work();
    for _ in 0..100 {
        work.raise(Noted { text: "x".repeat(20_000), about: "c1".into() });
    }
    assert_eq!(work.commit().await.unwrap().events().len(), 100);
}

#[tokio::test]
async fn a_failed_commit_is_repeated_with_the_same_ids() {
    let world = with_john().await;
    let (mut contact, etag) = world.read::<Contact>("c1").await;
    contact.rename(Name::new("Jane", "Doe"));
    let raised: Vec<_> = postrider_unit_of_work::Entity::pending(&contact).iter().collect();
    let mut work = world.unit_of_work();
    work.update(contact, etag);

    let retry_after = Some(Duration::from_millis(20));
    let busy = Error::new(ErrorKind::Throttled { retry_after }, "busy");
    world.fail_next_commit(Fault::Refuse(DocumentError::Store(busy)));
    let refused = work.commit().await;
    assert!(
        matches!(refused, Err(CommitError::Throttled { retry_after: wait }) if wait == retry_after),
        "{refused:?}"
    );
    let down = Error::transient("down");
    world.fail_next_commit(Fault::Refuse(DocumentError::Store(down)));
    let Err(CommitError::Store(error)) = work.commit().await else { panic!("committed") };
    assert_eq!(error.kind(), ErrorKind::Transient);

    world.pass_an_hour();
    let committed = work.commit().await.unwrap();
    assert_eq!(committed.events(), [raised[0].id]);
    let event = &world.events().await[1];
    assert_eq!(event.id(), raised[0].id);
    assert_eq!(json(event)["createdAt"], "2021-09-22T09:37:37.302Z", "the first try's time");
}

/// Case O19: two requests change one entity from the same version; one wins, and the other, told to
/// read again, loses nothing.
#[tokio::test]
async fn of_two_changes_of_one_version_one_has_to_read_again() {
    let world = with_john().await;
    let (mut renamed, version) = world.read::<Contact>("c1").await;
    let (mut mailed, _) = world.read::<Contact>("c1").await;
    renamed.rename(Name::new("Jane", "Doe"));
    mailed.change_email("jane@contoso.com");
    let (mut first, mut second) = (world.unit_of_work(), world.unit_of_work());
    first.update(renamed, version.clone());
    second.update(mailed, version);
    let outcomes = [first.commit().await, second.commit().await];
    assert!(
        matches!(outcomes, [Ok(_), Err(CommitError::PreconditionFailed { .. })]),
        "{outcomes:?}"
    );
    let (mut mailed, version) = world.read::<Contact>("c1").await;
    mailed.change_email("jane@contoso.com");
    let mut again = world.unit_of_work();
    again.update(mailed, version);
    again.commit().await.unwrap();
    let (contact, _) = world.read::<Contact>("c1").await;
    assert_eq!(
        (contact.name(), contact.email()),
        (&Name::new("Jane", "Doe"), Some("jane@contoso.com"))
    );
    assert_eq!(world.events().await.len(), 3);
}

/// Case O61: two identical events in one commit are two events.
#[tokio::test]
async fn two_identical_events_of_one_commit_are_both_delivered() {
    let world = World::new();
    let mut account = Account::open(1, "c1");
    account.pay_in(5);
    account.pay_in(5);
    let mut work = world.unit_of_work();
    work.create(account);
    work.commit().await.unwrap();
    let events = world.events().await;
    assert_eq!(events.len(), 2);
    assert_ne!(events[0].id(), events[1].id());
}

#[tokio::test]
async fn a_commit_whose_answer_was_lost_is_never_saved_twice() {
    let world = World::new();
    let mut work = world.unit_of_work();
    work.create(john());
    world.fail_next_commit(Fault::LoseAnswer);
    assert!(matches!(work.commit().await, Err(CommitError::Store(_))));
    assert!(matches!(work.commit().await, Err(CommitError::Conflict { .. })));
    assert_eq!(world.events().await.len(), 1);
}

#[tokio::test]
async fn saving_empties_the_list_and_the_entity_is_new_no_more() {
    let world = World::new();
    let mut work = world.unit_of_work();
    work.create(john());
    let mut committed = work.commit().await.unwrap();
    let etag = committed.etag("c1").cloned();
    let mut contact: Contact = committed.take("c1").unwrap();
    assert_eq!(counts(&work.commit().await.unwrap()), (0, 0));
    contact.rename(Name::new("Jane", "Doe"));
    work.update(contact, etag);
    assert_eq!(counts(&work.commit().await.unwrap()), (1, 1));
    assert_eq!(world.event_types().await, ["ContactCreatedEvent", "ContactNameUpdatedEvent"]);
}

#[tokio::test]
async fn an_entity_that_was_taken_back_keeps_its_events() {
    let world = World::new();
    let mut work = world.unit_of_work();
    work.create(john());
    let contact: Contact = work.take("c1").unwrap();
    assert_eq!(counts(&work.commit().await.unwrap()), (0, 0));
    assert_eq!(postrider_unit_of_work::Entity::pending(&contact).len(), 1);
}

#[tokio::test]
async fn events_carry_the_callers_span() {
    let world = World::new();
    let span =
        TraceContext::new("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", None).unwrap();
    let mut work = world.unit_of_work();
    work.trace(span.clone());
    work.create(john());
    work.commit().await.unwrap();
    assert_eq!(world.events().await[0].trace(), Some(span));
}
