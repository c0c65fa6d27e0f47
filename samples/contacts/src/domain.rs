//! The contact and the events that its changes raise.
//!
//! What lives here: the entity, whose methods are the only way to change it. What does not: the
//! values' rules (`values.rs`), storing (`service.rs`), HTTP.
//! Invariant: no change without its event, no event without its change. The JSON of contact and
//! events is that of the article on the outbox with Azure Cosmos DB.

use postrider::{DomainEvent, Entity, PendingEvents, Timestamp};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::values::{Company, Description, Email, Name};

/// What a new contact is made of.
#[derive(Debug, Clone)]
pub(crate) struct NewContact {
    /// Its name.
    pub(crate) name: Name,
    /// Its email address, if it has one.
    pub(crate) email: Option<Email>,
    /// Free text.
    pub(crate) description: Option<Description>,
    /// Where it works.
    pub(crate) company: Company,
}

/// A person one knows. Deleting keeps the document, marked.
#[derive(Debug, Clone, Serialize, Deserialize, Entity)]
#[entity(type = "contact", coalesce)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Contact {
    name: Name,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    description: Option<Description>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    email: Option<Email>,
    company: Company,
    created_at: jiff::Timestamp,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    modified_at: Option<jiff::Timestamp>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    deleted_at: Option<jiff::Timestamp>,
    deleted: bool,
    #[entity(id)]
    id: Uuid,
    #[serde(skip)]
    #[entity(pending)]
    events: PendingEvents<Self>,
}

impl Contact {
    /// A contact that nobody saved yet. Its only event tells its state when it is saved.
    pub(crate) fn new(id: Uuid, new: NewContact, now: Timestamp) -> Self {
        let NewContact { name, email, description, company } = new;
        Self {
            name,
            description,
            email,
            company,
            created_at: calendar(now),
            modified_at: None,
            deleted_at: None,
            deleted: false,
            id,
            events: PendingEvents::created(|contact: &Self| ContactCreatedEvent {
                contact: contact.clone(),
                contact_id: contact.id,
            }),
        }
    }

    /// Gives it another name.
    pub(crate) fn set_name(&mut self, name: Name, now: Timestamp) {
        self.name = name.clone();
        self.modified_at = Some(calendar(now));
        self.events.raise(ContactNameUpdatedEvent { name, contact_id: self.id });
    }

    /// Gives it another description, or none.
    pub(crate) fn set_description(&mut self, description: Option<Description>, now: Timestamp) {
        self.description.clone_from(&description);
        self.modified_at = Some(calendar(now));
        self.events.raise(ContactDescriptionUpdatedEvent { description, contact_id: self.id });
    }

    /// Gives it another email address, or none.
    pub(crate) fn set_email(&mut self, email: Option<Email>, now: Timestamp) {
        self.email.clone_from(&email);
        self.modified_at = Some(calendar(now));
        self.events.raise(ContactEmailUpdatedEvent { email, contact_id: self.id });
    }

    /// Gives it another company.
    pub(crate) fn set_company(&mut self, company: Company, now: Timestamp) {
        self.company = company.clone();
        self.modified_at = Some(calendar(now));
        self.events.raise(ContactCompanyUpdatedEvent { company, contact_id: self.id });
    }

    /// Marks it as deleted.
    pub(crate) fn delete(&mut self, now: Timestamp) {
        self.deleted = true;
        self.deleted_at = Some(calendar(now));
        self.events.raise(ContactDeletedEvent { contact_id: self.id });
    }

    /// Whether it was deleted.
    pub(crate) fn is_deleted(&self) -> bool {
        self.deleted
    }

    /// Its id; also the key of its events.
    pub(crate) fn contact_id(&self) -> Uuid {
        self.id
    }

    /// Its name.
    pub(crate) fn name(&self) -> &Name {
        &self.name
    }

    /// Its description, if it has one.
    pub(crate) fn description(&self) -> Option<&Description> {
        self.description.as_ref()
    }

    /// Its email address, if it has one.
    pub(crate) fn email(&self) -> Option<&Email> {
        self.email.as_ref()
    }

    /// Where it works.
    pub(crate) fn company(&self) -> &Company {
        &self.company
    }
}

/// The store's time as a date that JSON shows; the calendar ends with the year 9999.
fn calendar(time: Timestamp) -> jiff::Timestamp {
    let ms = i64::try_from(time.as_millis()).unwrap_or(i64::MAX);
    jiff::Timestamp::from_millisecond(ms).unwrap_or(jiff::Timestamp::MAX)
}

/// A contact was created.
#[derive(Debug, Serialize, DomainEvent)]
#[event(topic = "contacts", name = "ContactCreatedEvent", version = 1, entity = Contact)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ContactCreatedEvent {
    contact: Contact,
    #[event(key)]
    contact_id: Uuid,
}

/// A contact got another name.
#[derive(Debug, Serialize, DomainEvent)]
#[event(topic = "contacts", name = "ContactNameUpdatedEvent", version = 1, entity = Contact)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ContactNameUpdatedEvent {
    name: Name,
    #[event(key)]
    contact_id: Uuid,
}

/// A contact got another description, or none: then the field is left out.
#[derive(Debug, Serialize, DomainEvent)]
#[event(topic = "contacts", name = "ContactDescriptionUpdatedEvent", version = 1, entity = Contact)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ContactDescriptionUpdatedEvent {
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<Description>,
    #[event(key)]
    contact_id: Uuid,
}

/// A contact got another email address, or none: then the field is left out.
#[derive(Debug, Serialize, DomainEvent)]
#[event(topic = "contacts", name = "ContactEmailUpdatedEvent", version = 1, entity = Contact)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ContactEmailUpdatedEvent {
    #[serde(skip_serializing_if = "Option::is_none")]
    email: Option<Email>,
    #[event(key)]
    contact_id: Uuid,
}

/// A contact got another company.
#[derive(Debug, Serialize, DomainEvent)]
#[event(topic = "contacts", name = "ContactCompanyUpdatedEvent", version = 1, entity = Contact)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ContactCompanyUpdatedEvent {
    company: Company,
    #[event(key)]
    contact_id: Uuid,
}

/// A contact was deleted.
#[derive(Debug, Serialize, DomainEvent)]
#[event(topic = "contacts", name = "ContactDeletedEvent", version = 1, entity = Contact)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ContactDeletedEvent {
    #[event(key)]
    contact_id: Uuid,
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp::from_millis(1_632_301_657_302);

    fn name(first: &str) -> Name {
        Name::new(first.into(), "Doe".into()).expect("a valid name")
    }

    fn contact() -> Contact {
        let company = Company::new("Contoso".into(), Default::default()).expect("valid");
        let new = NewContact { name: name("John"), email: None, description: None, company };
        Contact::new(Uuid::from_u128(7), new, NOW)
    }

    fn read_back(contact: &Contact) -> Contact {
        let json = serde_json::to_vec(contact).expect("serialises");
        serde_json::from_slice(&json).expect("reads back")
    }

    fn pending(contact: &Contact) -> Vec<&'static str> {
        contact.events.iter().map(|event| event.event_type).collect()
    }

    #[test]
    fn a_new_contact_raises_only_its_created_event_and_one_read_back_none() {
        let mut contact = contact();
        contact.set_name(name("Jane"), NOW);
        assert_eq!(pending(&contact), ["ContactCreatedEvent"]);
        assert_eq!(pending(&read_back(&contact)), [""; 0]);
    }

    #[test]
    fn a_repeated_action_keeps_its_place_with_the_last_value() {
        let mut contact = read_back(&contact());
        contact.set_name(name("Jane"), NOW);
        contact.set_email(None, NOW);
        contact.set_name(name("Jill"), NOW);
        assert_eq!(pending(&contact), ["ContactNameUpdatedEvent", "ContactEmailUpdatedEvent"]);
    }

    #[test]
    fn stored_json_is_the_articles() {
        let json = serde_json::to_value(contact()).expect("serialises");
        let expected = serde_json::json!({
            "name": { "firstName": "John", "lastName": "Doe" },
            "company": { "companyName": "Contoso", "street": "", "houseNumber": "",
                "postalCode": "", "city": "", "country": "" },
            "createdAt": "2021-09-22T09:07:37.302Z",
            "deleted": false,
            "id": "00000000-0000-0000-0000-000000000007",
        });
        assert_eq!(json, expected);
    }
}
