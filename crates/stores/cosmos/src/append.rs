//! Events into a batch of the caller's own.
//!
//! What lives here: `append` for writers that build the SDK's batch themselves, and the numbers
//! that events get. What does not: what a document of an event looks like (`event_document.rs`).
//! Invariant: an event has its id before it is in a batch, so that a batch that is sent again can't
//! save it twice.

use azure_data_cosmos::TransactionalBatch;
use postrider_core::{Error, Event, EventId, NewEvent, Result};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::batch::MAX_OPERATIONS;
use crate::error::failed;
use crate::event_document::document;
use crate::{CosmosStore, Inner};

/// From where the numbers of a batch's events go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Numbering {
    /// After the number that the entity's document has as `lastSeq`; 0 for a new entity. The batch
    /// has to write the entity, in the version in which that number was read, with the last
    /// event's number as its `lastSeq`.
    After(u64),
    /// The batch writes no entity. The numbers are below zero and order the events of this batch
    /// alone; one that is deleted unsent leaves no gap that could be seen.
    WithoutEntity,
}

/// The events under their ids; each that has none gets one.
pub(crate) fn identified(events: &[NewEvent]) -> Vec<Event> {
    let fresh = || EventId::from_uuid(Uuid::now_v7());
    events.iter().map(|event| event.clone().identified(fresh)).collect()
}

/// The documents of events, in order.
pub(crate) fn event_documents<'a>(
    inner: &'a Inner,
    events: &'a [Event],
    numbering: Numbering,
) -> impl Iterator<Item = Value> + 'a {
    let count = i64::try_from(events.len()).unwrap_or(i64::MAX);
    events.iter().zip(0i64..).map(move |(event, at)| {
        let mut json = document(event, inner.event_ttl_seconds, 0, inner.default_topic.as_str());
        json["seq"] = match numbering {
            Numbering::After(last) => json!(last + 1 + at.unsigned_abs()),
            Numbering::WithoutEntity => json!(at - count),
        };
        json
    })
}

impl CosmosStore {
    /// Adds events to a batch of the SDK's, each as a document. They are saved if and only if the
    /// batch is. Returns their ids; send the same ids again when a batch's outcome is unknown, and
    /// a second save answers 409.
    ///
    /// A [`DocumentStore`](postrider_core::DocumentStore)'s `commit` does all of this and the rest.
    ///
    /// # Errors
    /// `Permanent` for an event whose key is not the batch's partition key, and for more events
    /// than a batch may have; the batch is given up then.
    pub fn append(
        &self,
        batch: TransactionalBatch,
        partition_key: &str,
        events: &[NewEvent],
        numbering: Numbering,
    ) -> Result<(TransactionalBatch, Vec<EventId>)> {
        if events.len() > MAX_OPERATIONS {
            return Err(Error::permanent(format!(
                "{} events in one batch; {MAX_OPERATIONS} operations are allowed: split it",
                events.len()
            )));
        }
        let events = identified(events);
        if let Some(other) = events.iter().find(|event| event.key().as_str() != partition_key) {
            return Err(Error::permanent(format!(
                "an event has the key {:?} and its batch the partition key {partition_key:?}; send \
                 them apart",
                other.key().as_str()
            )));
        }
        let mut batch = batch;
        for document in event_documents(&self.inner, &events, numbering) {
            batch = batch.create_item(document).map_err(failed("append events"))?;
        }
        Ok((batch, events.iter().map(Event::id).collect()))
    }
}
