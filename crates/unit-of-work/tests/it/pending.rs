//! What is pending on an entity, before anything is saved.
//!
//! What lives here: the rules of raising and coalescing. What does not: commits.
//! Invariant: these tests need no store.

use std::collections::HashSet;

use postrider_unit_of_work::{DomainEvent, Entity};

use crate::contact::{
    Account, Contact, ContactDeleted, ContactEmailUpdated, ContactNameUpdated, Name,
};

fn stored() -> Contact {
    let json = serde_json::to_string(&Contact::new("c1", Name::new("John", "Doe"))).unwrap();
    serde_json::from_str(&json).unwrap()
}

fn types<T: Entity>(entity: &T) -> Vec<&'static str> {
    entity.pending().iter().map(|event| event.event_type).collect()
}

#[test]
fn a_new_entity_has_its_created_event_and_no_other() {
    let mut contact = Contact::new("c1", Name::new("John", "Doe"));
    contact.rename(Name::new("Jane", "Doe"));
    contact.change_email("jane@contoso.com");
    contact.delete();
    assert_eq!(types(&contact), ["ContactCreatedEvent"]);
}

#[test]
fn an_entity_that_was_read_has_no_events() {
    assert!(stored().pending().is_empty());
}

#[test]
fn actions_keep_the_order_in_which_they_were_first_raised() {
    let mut contact = stored();
    contact.change_email("a@contoso.com");
    contact.rename(Name::new("Jane", "Doe"));
    assert_eq!(types(&contact), ["ContactEmailUpdatedEvent", "ContactNameUpdatedEvent"]);
}

#[test]
fn a_coalesced_action_stays_in_its_place_under_a_new_id() {
    let mut contact = stored();
    contact.change_email("a@contoso.com");
    contact.rename(Name::new("Jane", "Doe"));
    let before: Vec<_> = contact.pending().iter().collect();
    contact.change_email("b@contoso.com");
    let after: Vec<_> = contact.pending().iter().collect();
    assert_eq!(types(&contact), ["ContactEmailUpdatedEvent", "ContactNameUpdatedEvent"]);
    assert_ne!(before[0].id, after[0].id);
    assert_eq!(before[1].id, after[1].id);
}

#[test]
fn without_coalescing_a_repeated_action_is_kept_twice() {
    let mut account = Account::open(1, "c1");
    account.pay_in(5);
    account.pay_in(5);
    let ids: HashSet<_> = account.pending().iter().map(|event| event.id).collect();
    assert_eq!((types(&account).len(), ids.len()), (2, 2));
}

#[test]
fn pending_events_can_be_removed_one_or_all() {
    let mut contact = stored();
    contact.change_email("a@contoso.com");
    contact.rename(Name::new("Jane", "Doe"));
    contact.delete();
    contact.events_mut().remove::<ContactNameUpdated>();
    contact.events_mut().remove::<ContactNameUpdated>();
    assert_eq!(types(&contact), ["ContactEmailUpdatedEvent", "ContactDeletedEvent"]);
    contact.events_mut().remove::<ContactEmailUpdated>();
    contact.events_mut().remove::<ContactDeleted>();
    assert!(contact.pending().is_empty());

    let mut contact = Contact::new("c2", Name::new("John", "Doe"));
    contact.events_mut().clear();
    assert!(contact.pending().is_empty());
}

#[test]
fn ids_are_of_version_7_and_debug_shows_no_payload() {
    let mut contact = stored();
    contact.rename(Name::new("Secret", "Name"));
    let id = contact.pending().iter().next().unwrap().id;
    assert_eq!(id.as_uuid().get_version_num(), 7);
    let text = format!("{:?}", contact.pending());
    assert!(text.contains("ContactNameUpdatedEvent") && !text.contains("Secret"), "{text}");
}

/// Case O61: a message's type is what was written, so that renaming the struct changes nothing.
#[test]
fn the_derives_say_what_was_written() {
    assert_eq!(Contact::TYPE, "contact");
    const { assert!(Contact::COALESCE && !Account::COALESCE) };
    let account = Account::open(7, "c1");
    assert_eq!((account.id().as_str(), account.partition_key().as_str()), ("7", "c1"));
    let event = ContactNameUpdated { name: Name::new("J", "D"), contact_id: "c1".into() };
    assert_eq!(DomainEvent::key(&event), "c1");
    assert_eq!(ContactNameUpdated::TYPE, "ContactNameUpdatedEvent");
    assert_eq!(ContactNameUpdated::TOPIC, "contacts");
    assert_eq!(ContactNameUpdated::VERSION, 2);
}
