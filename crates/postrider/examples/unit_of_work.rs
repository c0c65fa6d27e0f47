//! A unit of work: entities raise events, one commit saves both, a stale version is refused.
//!
//! What lives here: the write side over documents. What does not: delivery.
//! Invariant: an entity's fields are private; only its methods change them and raise events.

use std::sync::Arc;

use postrider::sqlite::{SqliteOptions, SqliteStore};
use postrider::{
    CommitError, DomainEvent, Entity, EntityRead, PendingEvents, Repository, SystemClock,
    UnitOfWork,
};
use serde::{Deserialize, Serialize};

type AnyError = Box<dyn std::error::Error + Send + Sync>;

#[derive(Serialize, Deserialize, Entity)]
#[entity(type = "contact", coalesce)]
struct Contact {
    name: String,
    #[entity(id)]
    id: String,
    #[serde(skip)]
    #[entity(pending)]
    events: PendingEvents<Contact>,
}

impl Contact {
    fn new(id: &str, name: &str) -> Self {
        let created = |contact: &Contact| ContactCreated {
            name: contact.name.clone(),
            contact: contact.id.clone(),
        };
        Self { name: name.into(), id: id.into(), events: PendingEvents::created(created) }
    }

    fn rename(&mut self, name: &str) {
        self.name = name.into();
        self.events.raise(ContactRenamed { name: name.into(), contact: self.id.clone() });
    }
}

#[derive(Serialize, DomainEvent)]
#[event(topic = "contacts", name = "ContactCreated", version = 1, entity = Contact)]
struct ContactCreated {
    name: String,
    #[event(key)]
    contact: String,
}

#[derive(Serialize, DomainEvent)]
#[event(topic = "contacts", name = "ContactRenamed", version = 1, entity = Contact)]
struct ContactRenamed {
    name: String,
    #[event(key)]
    contact: String,
}

#[tokio::main]
async fn main() -> Result<(), AnyError> {
    let store = Arc::new(SqliteStore::open(SqliteOptions::new("contacts.db")).await?);
    let mut work = UnitOfWork::new(Arc::clone(&store), Arc::new(SystemClock));
    work.on::<ContactRenamed>(|event, _| {
        Box::pin(async move {
            println!("about to save the name {}", event.name);
            Ok(())
        })
    });

    work.create(Contact::new("c1", "John"));
    let created = work.commit().await?;
    println!("created with {} event", created.events().len());
    let first_version = created.etag("c1").cloned();

    let contacts: Repository<Contact, _> = Repository::new(Arc::clone(&store));
    let EntityRead::Found(mut contact, etag) = contacts.read("c1", None).await? else {
        return Err("contact c1 is gone".into());
    };
    contact.rename("Jane");
    contact.rename("Janet"); // `coalesce`: one event, with the last value
    work.update(contact, etag);
    println!("renamed with {} event", work.commit().await?.events().len());

    let EntityRead::Found(mut contact, _) = contacts.read("c1", None).await? else {
        return Err("contact c1 is gone".into());
    };
    contact.rename("Joan");
    work.update(contact, first_version);
    match work.commit().await {
        Err(error @ CommitError::PreconditionFailed { .. }) => println!("refused: {error}"),
        other => return Err(format!("a stale version was not refused: {other:?}").into()),
    }
    Ok(())
}
