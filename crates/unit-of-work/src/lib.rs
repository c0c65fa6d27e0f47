//! Entities that raise domain events, saved together with them in one commit.
//!
//! What lives here: domain events, entities and their pending events, the article's document
//! envelope, the unit of work and the repository. What does not: any store; they come by the
//! `DocumentStore` seam of `core`.
//! Invariant: a commit saves every document and event of a unit of work, or nothing; what was not
//! saved stays in the unit of work with the same event ids.

extern crate self as postrider_unit_of_work;

mod changes;
mod domain_event;
mod entity;
mod envelope;
mod error;
mod pending;
mod repository;
mod unit_of_work;

pub use changes::{Changes, Removal};
pub use domain_event::{DomainEvent, EVENT_VERSION, EventOf, ToJson};
pub use entity::Entity;
pub use envelope::{DOMAIN_EVENT, Envelope};
pub use error::{BoxError, CommitError};
pub use pending::{PendingEvent, PendingEvents};
pub use repository::{EntityPage, EntityRead, Repository};
pub use unit_of_work::{
    Committed, HandlerFuture, MAX_COMMIT_BYTES, MAX_COMMIT_OPERATIONS, MAX_HANDLED_EVENTS,
    UnitOfWork,
};
