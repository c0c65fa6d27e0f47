//! Transactions: events and documents that become visible together.
//!
//! What lives here: staging and commit. What does not: partitions and rows (`outbox.rs`).
//! Invariant: positions are given at commit, under the outbox lock, so that a transaction that
//! stays open for long never commits behind a reader.

use std::collections::HashSet;

use ahash::AHashSet;
use postrider_core::limits::MAX_APPEND_EVENTS;
use postrider_core::{
    DocumentError, DocumentOperation, Error, Event, EventId, NewEvent, Result, SavedDocument,
    key_hash,
};

use crate::{Inner, MemoryStore};

/// What an append does with an id that was appended before and is still kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnDuplicate {
    /// The append fails with `Permanent`, and so does the commit of a transaction that lost the
    /// race for an id.
    #[default]
    Fail,
    /// The event is left out: the first one stands.
    Ignore,
}

struct StagedEvent {
    event: Event,
    key_hash: u32,
    on_duplicate: OnDuplicate,
}

/// An open transaction. Dropping it rolls it back.
#[must_use = "a transaction that is not committed is rolled back"]
pub struct MemoryTransaction {
    store: MemoryStore,
    events: Vec<StagedEvent>,
    /// Ids that the caller gave; the store's own can't repeat.
    given: HashSet<EventId>,
    operations: Vec<(String, DocumentOperation)>,
}

impl MemoryStore {
    /// Opens a transaction. Any number may be open; none waits for another.
    pub fn begin(&self) -> MemoryTransaction {
        MemoryTransaction {
            store: self.clone(),
            events: Vec::new(),
            given: HashSet::new(),
            operations: Vec::new(),
        }
    }

    /// Appends events in a transaction of their own.
    ///
    /// # Errors
    /// As [`MemoryTransaction::append`].
    pub fn append(&self, events: &[NewEvent]) -> Result<Vec<EventId>> {
        let mut transaction = self.begin();
        let ids = transaction.append(events)?;
        transaction.commit()?;
        Ok(ids)
    }
}

impl MemoryTransaction {
    /// Stages events, in order; an id that is already there is an error. Returns their ids.
    ///
    /// # Errors
    /// `Permanent` for an id that was appended before or too many events; nothing was staged.
    pub fn append(&mut self, events: &[NewEvent]) -> Result<Vec<EventId>> {
        self.append_with(events, OnDuplicate::Fail)
    }

    /// Stages events, in order, with a choice for repeated ids. Returns their ids.
    ///
    /// # Errors
    /// As [`append`](Self::append); with [`OnDuplicate::Ignore`] a repeated id is none.
    pub fn append_with(
        &mut self,
        events: &[NewEvent],
        on_duplicate: OnDuplicate,
    ) -> Result<Vec<EventId>> {
        if self.events.len() + events.len() > MAX_APPEND_EVENTS {
            return Err(Error::permanent(format!(
                "a transaction takes at most {MAX_APPEND_EVENTS} events; split it"
            )));
        }
        let inner = &self.store.inner;
        let given = || events.iter().filter_map(NewEvent::id);
        if on_duplicate == OnDuplicate::Fail {
            let mut fresh = HashSet::new();
            let outbox = inner.outbox();
            let mut taken = |id: &EventId| {
                self.given.contains(id) || outbox.ids.contains(id) || !fresh.insert(*id)
            };
            if let Some(id) = given().find(|id| taken(id)) {
                return Err(duplicate(id));
            }
        }
        let mut ids = Vec::with_capacity(events.len());
        for new in events {
            let staged = new.id().is_none_or(|id| self.given.insert(id));
            let event = new.clone().identified(|| inner.fresh_id());
            ids.push(event.id());
            if staged {
                let key_hash = key_hash(event.key());
                self.events.push(StagedEvent { event, key_hash, on_duplicate });
            }
        }
        Ok(ids)
    }

    /// Stages a write to a document; it is checked at commit.
    pub fn write_document(
        &mut self,
        partition_key: impl Into<String>,
        operation: DocumentOperation,
    ) {
        self.operations.push((partition_key.into(), operation));
    }

    /// Makes everything visible at once.
    ///
    /// # Errors
    /// `Permanent` when another transaction committed one of the ids meanwhile, or a document
    /// was not as expected; then nothing was saved.
    pub fn commit(self) -> Result<()> {
        match self.save() {
            Ok(_) => Ok(()),
            Err(DocumentError::Store(error)) => Err(error),
            Err(other) => Err(Error::permanent("commit a transaction").with_source(other)),
        }
    }

    /// Forgets everything that was staged; the same as dropping it.
    pub fn rollback(self) {}

    /// The payload bytes of all staged events.
    pub(crate) fn payload_bytes(&self) -> usize {
        self.events.iter().map(|staged| staged.event.payload().len()).sum()
    }

    /// Applies documents and events under their locks, or nothing.
    pub(crate) fn save(self) -> Result<Vec<SavedDocument>, DocumentError> {
        let inner = &self.store.inner;
        let now = inner.clock.now();
        let random = inner.ten_random_bytes();
        let mut documents = (!self.operations.is_empty()).then(|| inner.documents());
        let plan = match &documents {
            Some(documents) => documents.plan(&self.operations, now)?,
            None => Default::default(),
        };
        let mut outbox = inner.outbox_mut();
        let events = unrepeated(self.events, &outbox.ids)?;
        let news = !events.is_empty();
        for staged in events {
            outbox.push(staged.event, staged.key_hash, now, random);
        }
        drop(outbox);
        let saved = match &mut documents {
            Some(documents) => documents.apply(plan),
            None => Vec::new(),
        };
        drop(documents);
        if news {
            inner.news.notify_waiters();
        }
        Ok(saved)
    }
}

/// The staged events whose ids are new; an id that must be and is not fails them all.
fn unrepeated(
    events: Vec<StagedEvent>,
    kept: &AHashSet<EventId>,
) -> Result<Vec<StagedEvent>, DocumentError> {
    let repeated = |staged: &StagedEvent| kept.contains(&staged.event.id());
    let failing =
        |staged: &&StagedEvent| staged.on_duplicate == OnDuplicate::Fail && repeated(staged);
    if let Some(staged) = events.iter().find(failing) {
        return Err(DocumentError::Conflict { id: staged.event.id().to_string() });
    }
    Ok(events.into_iter().filter(|staged| !repeated(staged)).collect())
}

fn duplicate(id: EventId) -> Error {
    Error::permanent(format!("event {id} was appended before; ignore repetitions or drop the id"))
}

impl Inner {
    /// Whether an event with this id is kept.
    pub(crate) fn has_event(&self, id: EventId) -> bool {
        self.outbox().ids.contains(&id)
    }
}
