//! The journal: events in the order in which they arrived, each once.
//!
//! What lives here: the seam, and what it keeps. What does not: a database (`sqlite.rs`,
//! `postgres.rs`).
//! Invariant: numbers only grow, and an event that was delivered twice has one number.

use async_trait::async_trait;
use postrider::{EventId, Result};
use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;
use uuid::Uuid;

/// How many of the last events are kept for pages that are opened later.
pub(crate) const KEPT_EVENTS: i64 = 200;

/// An event as it was delivered, its signature verified.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) id: EventId,
    pub(crate) event_type: String,
    pub(crate) key: String,
    pub(crate) payload: Box<RawValue>,
}

/// An event in the journal.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ReceivedEvent {
    /// Its place in the order of arrival.
    pub number: u64,
    /// The event's id, the same on every delivery.
    pub id: Uuid,
    /// What happened; the message's subject.
    #[serde(rename = "type")]
    pub event_type: String,
    /// The key (a broker's session) within which it keeps its order: the contact's id.
    pub key: String,
    /// The payload, byte for byte.
    #[schema(value_type = Object)]
    pub payload: Box<RawValue>,
}

/// Whether an event was new.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Receipt {
    First,
    Repeated,
}

/// Where a receiver keeps what arrived.
#[async_trait]
pub(crate) trait Journal: Send + Sync {
    /// Names this journal: numbers of another one mean nothing here.
    fn identity(&self) -> Uuid;

    /// The last number when this process opened it.
    fn opened_at(&self) -> u64;

    /// Adds an event unless it is there, in one transaction with the inbox's mark.
    async fn receive(&self, arrival: Arrival) -> Result<Receipt>;

    /// The events after a number, oldest first; of a number below the oldest, those kept.
    async fn after(&self, number: u64, limit: u32) -> Result<Vec<ReceivedEvent>>;
}

/// A journal that keeps nothing, for tests of what has nothing to do with it.
#[cfg(test)]
pub(crate) struct NoJournal;

#[cfg(test)]
#[async_trait]
impl Journal for NoJournal {
    fn identity(&self) -> Uuid {
        Uuid::nil()
    }

    fn opened_at(&self) -> u64 {
        0
    }

    async fn receive(&self, _: Arrival) -> Result<Receipt> {
        Ok(Receipt::First)
    }

    async fn after(&self, _: u64, _: u32) -> Result<Vec<ReceivedEvent>> {
        Ok(Vec::new())
    }
}
