//! Event handlers: inside the commit, before the save.
//!
//! What lives here: when handlers run and what they may do. What does not: plain commits.
//! Invariant: what a handler adds is saved with its event, or neither is.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use postrider_core::{DocumentError, Error};
use postrider_unit_of_work::CommitError;

use crate::contact::{
    Account, Contact, ContactCreated, ContactEmailUpdated, ContactNameUpdated, Name, Noted,
};
use crate::world::{Fault, World};

fn john() -> Contact {
    Contact::new("c1", Name::new("John", "Doe"))
}

#[tokio::test]
async fn a_handler_adds_documents_and_events_to_the_same_commit() {
    let world = World::new();
    let mut work = world.unit_of_work();
    work.on::<ContactCreated>(|event, changes| {
        Box::pin(async move {
            tokio::task::yield_now().await;
            changes.create(Account::open(1, "c1"));
            let text = format!("welcome {}", event.name.first_name);
            changes.raise(Noted { text, about: "c1".into() });
            Ok(())
        })
    });
    work.create(john());
    let committed = work.commit().await.unwrap();
    assert_eq!((committed.documents().len(), committed.events().len()), (2, 2));
    assert_eq!(world.event_types().await, ["ContactCreatedEvent", "Noted"]);
}

#[tokio::test]
async fn events_that_handlers_raise_reach_their_handlers_too() {
    let world = World::new();
    let mut work = world.unit_of_work();
    work.create(john());
    work.commit().await.unwrap();
    let (mut contact, etag) = world.read::<Contact>("c1").await;
    contact.rename(Name::new("Jane", "Doe"));
    work.on::<ContactNameUpdated>(|event, changes| {
        Box::pin(async move {
            let contact = changes.entity_mut::<Contact>(&event.contact_id);
            contact.ok_or("no contact")?.change_email("jane@contoso.com");
            Ok(())
        })
    })
    .on::<ContactEmailUpdated>(|_, changes| {
        changes.raise(Noted { text: "mail".into(), about: "c1".into() });
        Box::pin(async { Ok(()) })
    });
    work.update(contact, etag);
    work.commit().await.unwrap();
    assert_eq!(
        world.event_types().await[1..],
        ["ContactNameUpdatedEvent", "ContactEmailUpdatedEvent", "Noted"]
    );
    assert_eq!(world.read::<Contact>("c1").await.0.email(), Some("jane@contoso.com"));
}

#[tokio::test]
async fn a_handlers_error_aborts_the_commit_and_takes_back_what_it_added() {
    let world = World::new();
    let calls = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&calls);
    let mut work = world.unit_of_work();
    work.on::<ContactCreated>(|_, changes| {
        changes.raise(Noted { text: "first".into(), about: "c1".into() });
        Box::pin(async { Ok(()) })
    });
    work.on::<ContactCreated>(move |_, changes| {
        changes.raise(Noted { text: "second".into(), about: "c1".into() });
        let refuse = seen.fetch_add(1, Ordering::Relaxed) == 0;
        Box::pin(async move { if refuse { Err("not today".into()) } else { Ok(()) } })
    });
    work.create(john());
    let refused = work.commit().await;
    assert!(
        matches!(&refused, Err(CommitError::Handler(e)) if e.to_string() == "not today"),
        "{refused:?}"
    );
    assert_eq!(world.commits(), 0);
    assert_eq!(work.commit().await.unwrap().events().len(), 3);
    assert_eq!(calls.load(Ordering::Relaxed), 2);
}

#[tokio::test]
async fn handlers_do_not_run_again_when_the_store_failed() {
    let world = World::new();
    let mut work = world.unit_of_work();
    work.on::<ContactCreated>(|_, changes| {
        changes.raise(Noted { text: String::new(), about: "c1".into() });
        Box::pin(async { Ok(()) })
    });
    work.create(john());
    world.fail_next_commit(Fault::Refuse(DocumentError::Store(Error::transient("down"))));
    assert!(work.commit().await.is_err());
    assert_eq!(work.commit().await.unwrap().events().len(), 2);
}

#[tokio::test]
async fn a_commit_dropped_inside_a_handler_can_be_repeated() {
    let world = World::new();
    let calls = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&calls);
    let mut work = world.unit_of_work();
    work.on::<ContactCreated>(move |_, changes| {
        changes.raise(Noted { text: String::new(), about: "c1".into() });
        let hang = seen.fetch_add(1, Ordering::Relaxed) == 0;
        Box::pin(async move {
            if hang {
                std::future::pending::<()>().await;
            }
            Ok(())
        })
    });
    work.create(john());
    {
        let mut first = std::pin::pin!(work.commit());
        let polled = std::future::poll_fn(|cx| std::task::Poll::Ready(first.as_mut().poll(cx)));
        assert!(polled.await.is_pending());
    }
    assert_eq!(work.commit().await.unwrap().events().len(), 2);
}

#[tokio::test]
async fn handlers_that_raise_each_others_events_for_ever_are_stopped() {
    let world = World::new();
    let mut work = world.unit_of_work();
    work.create(john());
    work.commit().await.unwrap();
    let (mut contact, etag) = world.read::<Contact>("c1").await;
    contact.change_email("a@contoso.com");
    work.on::<ContactEmailUpdated>(|_, changes| {
        if let Some(contact) = changes.entity_mut::<Contact>("c1") {
            contact.change_email("again@contoso.com");
        }
        Box::pin(async { Ok(()) })
    });
    work.update(contact, etag);
    let Err(CommitError::Invalid(error)) = work.commit().await else { panic!("committed") };
    assert!(error.to_string().contains("raise each other's"), "{error}");
}

#[test]
fn a_unit_of_work_and_its_commit_can_move_between_threads() {
    fn is_send<T: Send>(_: &T) {}
    let world = World::new();
    let mut work = world.unit_of_work();
    is_send(&work);
    is_send(&work.commit());
}
