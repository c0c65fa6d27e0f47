//! A small application: a contact that coalesces its events, and an account that does not.
//!
//! What lives here: entities and events. What does not: tests.
//! Invariant: the contact's JSON is that of the article.

use postrider_macros::{DomainEvent, Entity};
use postrider_unit_of_work::PendingEvents;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Name {
    pub(crate) first_name: String,
    pub(crate) last_name: String,
}

impl Name {
    pub(crate) fn new(first_name: &str, last_name: &str) -> Self {
        Self { first_name: first_name.into(), last_name: last_name.into() }
    }
}

#[derive(Debug, Clone, Serialize, Deserialize, Entity)]
#[serde(rename_all = "camelCase")]
#[entity(type = "contact", coalesce)]
pub(crate) struct Contact {
    name: Name,
    email: Option<String>,
    deleted: bool,
    #[entity(id)]
    id: String,
    #[serde(skip)]
    #[entity(pending)]
    events: PendingEvents<Contact>,
}

impl Contact {
    pub(crate) fn new(id: &str, name: Name) -> Self {
        let events = PendingEvents::created(|contact: &Contact| ContactCreated {
            name: contact.name.clone(),
            email: contact.email.clone(),
            contact_id: contact.id.clone(),
        });
        Self { name, email: None, deleted: false, id: id.into(), events }
    }

    pub(crate) fn name(&self) -> &Name {
        &self.name
    }

    pub(crate) fn email(&self) -> Option<&str> {
        self.email.as_deref()
    }

    pub(crate) fn rename(&mut self, name: Name) {
        self.name = name.clone();
        self.events.raise(ContactNameUpdated { name, contact_id: self.id.clone() });
    }

    pub(crate) fn change_email(&mut self, email: &str) {
        self.email = Some(email.into());
        let email = email.into();
        self.events.raise(ContactEmailUpdated { email, contact_id: self.id.clone() });
    }

    pub(crate) fn delete(&mut self) {
        self.deleted = true;
        self.events.raise(ContactDeleted { contact_id: self.id.clone() });
    }

    pub(crate) fn events_mut(&mut self) -> &mut PendingEvents<Contact> {
        &mut self.events
    }
}

#[derive(Serialize, DomainEvent)]
#[serde(rename_all = "camelCase")]
#[event(topic = "contacts", name = "ContactCreatedEvent", version = 1, entity = Contact)]
pub(crate) struct ContactCreated {
    pub(crate) name: Name,
    email: Option<String>,
    #[event(key)]
    contact_id: String,
}

#[derive(Serialize, DomainEvent)]
#[serde(rename_all = "camelCase")]
#[event(topic = "contacts", name = "ContactNameUpdatedEvent", version = 2, entity = Contact)]
pub(crate) struct ContactNameUpdated {
    pub(crate) name: Name,
    #[event(key)]
    pub(crate) contact_id: String,
}

#[derive(Serialize, DomainEvent)]
#[serde(rename_all = "camelCase")]
#[event(topic = "contacts", name = "ContactEmailUpdatedEvent", version = 1, entity = Contact)]
pub(crate) struct ContactEmailUpdated {
    email: String,
    #[event(key)]
    contact_id: String,
}

#[derive(Serialize, DomainEvent)]
#[serde(rename_all = "camelCase")]
#[event(topic = "contacts", name = "ContactDeletedEvent", version = 1, entity = Contact)]
pub(crate) struct ContactDeleted {
    #[event(key)]
    contact_id: String,
}

/// An event of no entity.
#[derive(Serialize, DomainEvent)]
#[event(topic = "audit", name = "Noted", version = 1)]
pub(crate) struct Noted {
    pub(crate) text: String,
    #[event(key)]
    pub(crate) about: String,
}

/// An entity in another's partition, which keeps repeated actions.
#[derive(Debug, Serialize, Deserialize, Entity)]
#[entity(type = "account")]
pub(crate) struct Account {
    #[entity(id)]
    number: u64,
    #[entity(partition_key)]
    owner: String,
    balance: i64,
    #[serde(skip)]
    #[entity(pending)]
    events: PendingEvents<Account>,
}

impl Account {
    pub(crate) fn open(number: u64, owner: &str) -> Self {
        Self { number, owner: owner.into(), balance: 0, events: PendingEvents::new() }
    }

    pub(crate) fn balance(&self) -> i64 {
        self.balance
    }

    /// A change that nobody is told of.
    pub(crate) fn correct(&mut self, balance: i64) {
        self.balance = balance;
    }

    pub(crate) fn pay_in(&mut self, amount: i64) {
        self.balance += amount;
        self.events.raise(PaidIn { amount, owner: self.owner.clone() });
    }
}

#[derive(Serialize, DomainEvent)]
#[event(topic = "accounts", name = "PaidIn", version = 1, entity = Account)]
pub(crate) struct PaidIn {
    amount: i64,
    #[event(key)]
    owner: String,
}
