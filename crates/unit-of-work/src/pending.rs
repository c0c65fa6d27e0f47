//! Pending events: what an entity raised and nobody saved yet.
//!
//! What lives here: the list, and the rules for a new entity and for repeated actions. What does
//! not: the payload's JSON (`envelope.rs`) and saving (`unit_of_work.rs`).
//! Invariant: an id is made when an event is raised and names that one event for ever; only saving
//! or removing takes an event off the list.

use std::fmt;
use std::sync::Arc;

use postrider_core::{EventId, Timestamp};
use uuid::Uuid;

use crate::domain_event::AnyEvent;
use crate::{DomainEvent, Entity, EventOf};

type MakeCreated<T> = Arc<dyn Fn(&T) -> Arc<dyn AnyEvent> + Send + Sync>;

/// The events that an entity raised since it was last saved, in the order in which they happened.
///
/// A new entity ([`PendingEvents::created`]) has one event, whose payload is the entity's state at
/// commit; what its methods raise before that commit is part of that state and adds nothing.
pub struct PendingEvents<T> {
    created: Option<Created<T>>,
    raised: Vec<Raised>,
    is_new: bool,
}

struct Created<T> {
    tag: Tag,
    event_type: &'static str,
    make: MakeCreated<T>,
}

/// What is known of an event beside its content.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tag {
    pub(crate) id: EventId,
    /// Set by the first commit that tries to save the event, and kept by all later ones.
    pub(crate) at: Option<Timestamp>,
}

impl Tag {
    pub(crate) fn fresh() -> Self {
        Self { id: EventId::from_uuid(Uuid::now_v7()), at: None }
    }
}

/// An event with its id.
#[derive(Clone)]
pub(crate) struct Raised {
    pub(crate) tag: Tag,
    pub(crate) event: Arc<dyn AnyEvent>,
}

/// One entry of the list, as it can be looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PendingEvent {
    /// The id under which it will be delivered.
    pub id: EventId,
    /// What happened.
    pub event_type: &'static str,
}

impl<T> PendingEvents<T> {
    /// The list of an entity that was read: empty. Also what `Default` gives.
    pub const fn new() -> Self {
        Self { created: None, raised: Vec::new(), is_new: false }
    }

    /// The list of a new entity: one event, which `make` builds from the state at commit.
    pub fn created<E: EventOf<T>>(make: impl Fn(&T) -> E + Send + Sync + 'static) -> Self {
        let make: MakeCreated<T> = Arc::new(move |entity| Arc::new(make(entity)));
        let created = Created { tag: Tag::fresh(), event_type: E::TYPE, make };
        Self { created: Some(created), raised: Vec::new(), is_new: true }
    }

    /// Takes an event off the list, if it is there.
    pub fn remove<E: EventOf<T>>(&mut self) {
        self.created.take_if(|created| created.event_type == E::TYPE);
        self.raised.retain(|raised| raised.event.event_type() != E::TYPE);
    }

    /// Takes every event off the list, a new entity's own included.
    pub fn clear(&mut self) {
        self.created = None;
        self.raised.clear();
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        usize::from(self.created.is_some()) + self.raised.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = PendingEvent> {
        let created = self.created.iter().map(|c| (c.tag.id, c.event_type));
        let raised = self.raised.iter().map(|r| (r.tag.id, r.event.event_type()));
        created.chain(raised).map(|(id, event_type)| PendingEvent { id, event_type })
    }

    /// The events with their content; a new entity's own is built from `entity`.
    pub(crate) fn collect(&self, entity: &T) -> Vec<Raised> {
        let created = self.created.iter().map(|c| Raised { tag: c.tag, event: (c.make)(entity) });
        created.chain(self.raised.iter().cloned()).collect()
    }

    /// Gives a time to every event that has none.
    pub(crate) fn stamp(&mut self, now: Timestamp) {
        let created = self.created.iter_mut().map(|c| &mut c.tag);
        for tag in created.chain(self.raised.iter_mut().map(|r| &mut r.tag)) {
            tag.at.get_or_insert(now);
        }
    }

    /// The entity is saved: nothing is pending, and it is new no more.
    pub(crate) fn saved(&mut self) {
        *self = Self::new();
    }
}

impl<T: Entity> PendingEvents<T> {
    /// Adds an event under a fresh id (UUIDv7).
    ///
    /// On a new entity: nothing, see above. With `#[entity(coalesce)]` an event of the same type
    /// that is still pending is replaced in its place, with the last value, under the new id: an
    /// id names one payload, and the replaced one may have been saved by a commit whose answer
    /// was lost.
    pub fn raise<E: EventOf<T>>(&mut self, event: E) {
        if self.is_new {
            return;
        }
        let raised = Raised { tag: Tag::fresh(), event: Arc::new(event) };
        let same = self.raised.iter_mut().find(|have| have.event.event_type() == E::TYPE);
        match same {
            Some(slot) if T::COALESCE => *slot = raised,
            Some(_) | None => self.raised.push(raised),
        }
    }
}

impl Raised {
    pub(crate) fn new<E: DomainEvent + Send + Sync + 'static>(event: E) -> Self {
        Self { tag: Tag::fresh(), event: Arc::new(event) }
    }
}

impl<T> Default for PendingEvents<T> {
    fn default() -> Self {
        Self::new()
    }
}

/// The clone holds the same events under the same ids; a store refuses to save an id twice.
impl<T> Clone for PendingEvents<T> {
    fn clone(&self) -> Self {
        let created = self.created.as_ref().map(|c| Created {
            tag: c.tag,
            event_type: c.event_type,
            make: Arc::clone(&c.make),
        });
        Self { created, raised: self.raised.clone(), is_new: self.is_new }
    }
}

/// Types and ids only: payloads never reach a log.
impl<T> fmt::Debug for PendingEvents<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}
