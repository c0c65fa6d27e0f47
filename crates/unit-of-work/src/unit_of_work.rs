//! The unit of work: one commit saves entities and their events together.
//!
//! What lives here: the commit with its handlers, and its answer. What does not: what a batch looks
//! like (`changes.rs`) and how a store saves it.
//! Invariant: every rule that needs no store is checked before the store is called.

use std::any::TypeId;
use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use postrider_core::{Clock, DocumentStore, ETag, Error, EventId, SavedDocument, TraceContext};

use crate::changes::{Tracked, take_entity};
use crate::domain_event::AnyEvent;
use crate::{BoxError, Changes, CommitError, DomainEvent, Entity, Removal};

/// Most documents and events in one commit: what a transactional batch of Azure Cosmos DB takes,
/// on every store, so that an application can move between them.
pub const MAX_COMMIT_OPERATIONS: usize = 100;
/// Most bytes of JSON in one commit, for the same reason.
pub const MAX_COMMIT_BYTES: usize = 2 * 1024 * 1024;
/// Most events whose handlers run in one commit. Coalesced events replace each other, so that the
/// limit on operations alone would not end handlers that raise each other's events.
pub const MAX_HANDLED_EVENTS: usize = 1_000;

/// What an event handler returns: `Box::pin(async move { … })`.
pub type HandlerFuture<'a> = Pin<Box<dyn Future<Output = Result<(), BoxError>> + Send + 'a>>;

type Handler =
    Box<dyn for<'a> Fn(&'a dyn AnyEvent, &'a mut Changes) -> HandlerFuture<'a> + Send + Sync>;

/// Collects entities and events, and saves all of them in one transaction, or none.
///
/// It is owned and used through `&mut self`, so that two tasks cannot share one by accident. All
/// of one commit shares one partition key. A failed commit leaves everything in place, under the
/// same event ids, to be committed again or [taken](UnitOfWork::take) back.
pub struct UnitOfWork<S: DocumentStore + ?Sized> {
    store: Arc<S>,
    clock: Arc<dyn Clock>,
    handlers: HashMap<TypeId, Vec<Handler>>,
    trace: Option<TraceContext>,
    changes: Changes,
}

impl<S: DocumentStore + ?Sized> UnitOfWork<S> {
    /// An empty one over `store`; `clock` gives events their `createdAt`.
    pub fn new(store: Arc<S>, clock: Arc<dyn Clock>) -> Self {
        Self { store, clock, handlers: HashMap::new(), trace: None, changes: Changes::default() }
    }

    /// Runs `handler` for each event of type `E`, inside the commit and before anything is saved.
    /// Its error aborts the commit. It may add documents and events, whose handlers run as well.
    ///
    /// A handler runs once for an event: not again when the commit that it was part of failed
    /// later and is repeated. What a failing handler added is taken back and it runs again; what
    /// it did to an entity by `entity_mut` is not undone.
    pub fn on<E: DomainEvent + Send + Sync + 'static>(
        &mut self,
        run: impl for<'a> Fn(&'a E, &'a mut Changes) -> HandlerFuture<'a> + Send + Sync + 'static,
    ) -> &mut Self {
        let handler: Handler = Box::new(move |event, changes| {
            let event = event.as_any().downcast_ref::<E>();
            run(event.expect("handlers are kept by the type of their event"), changes)
        });
        self.handlers.entry(TypeId::of::<E>()).or_default().push(handler);
        self
    }

    /// Every event saved from now on carries the caller's span.
    pub fn trace(&mut self, trace: TraceContext) -> &mut Self {
        self.trace = Some(trace);
        self
    }

    /// See [`Changes::create`].
    pub fn create<T: Entity>(&mut self, entity: T) {
        self.changes.create(entity);
    }

    /// See [`Changes::update`].
    pub fn update<T: Entity>(&mut self, entity: T, if_match: impl Into<Option<ETag>>) {
        self.changes.update(entity, if_match);
    }

    /// See [`Changes::delete`].
    pub fn delete<T: Entity>(
        &mut self,
        entity: T,
        if_match: impl Into<Option<ETag>>,
        removal: Removal,
    ) {
        self.changes.delete(entity, if_match, removal);
    }

    /// See [`Changes::attach`].
    pub fn attach<T: Entity>(&mut self, entity: T, etag: impl Into<Option<ETag>>) {
        self.changes.attach(entity, etag);
    }

    /// See [`Changes::raise`].
    pub fn raise<E: DomainEvent + Send + Sync + 'static>(&mut self, event: E) {
        self.changes.raise(event);
    }

    /// See [`Changes::entity`].
    pub fn entity<T: Entity>(&self, id: &str) -> Option<&T> {
        self.changes.entity(id)
    }

    /// See [`Changes::entity_mut`].
    pub fn entity_mut<T: Entity>(&mut self, id: &str) -> Option<&mut T> {
        self.changes.entity_mut(id)
    }

    /// Takes an entity back, with its pending events; it will not be saved.
    pub fn take<T: Entity>(&mut self, id: &str) -> Option<T> {
        self.changes.take(id)
    }

    /// Saves everything in one transaction and empties the unit of work. Nothing to save: nothing
    /// is done.
    ///
    /// # Errors
    /// [`CommitError`] says why nothing was saved.
    ///
    /// # Cancellation
    /// After a dropped call the outcome is unknown. The unit of work still holds everything;
    /// committing it again repeats the same ids, so that the store refuses what it has saved.
    pub async fn commit(&mut self) -> Result<Committed, CommitError> {
        self.run_handlers().await?;
        let now = self.clock.now();
        self.changes.stamp(now);
        let plan = self.changes.plan(now, self.trace.as_ref())?;
        let (documents, events) = match plan {
            None => (Vec::new(), Vec::new()),
            Some(plan) => (self.store.commit(plan.batch).await?, plan.events),
        };
        let mut entities = std::mem::take(&mut self.changes).into_tracked();
        for tracked in &mut entities {
            tracked.entity.saved();
        }
        Ok(Committed { documents, events, entities })
    }

    async fn run_handlers(&mut self) -> Result<(), CommitError> {
        self.changes.forget_unfinished();
        if self.handlers.is_empty() {
            return Ok(());
        }
        for _ in 0..MAX_HANDLED_EVENTS {
            let Some(raised) = self.changes.next_unhandled() else { return Ok(()) };
            self.changes.begin_handlers();
            let of_its_type = raised.event.as_any().type_id();
            for handler in self.handlers.get(&of_its_type).into_iter().flatten() {
                if let Err(error) = handler(&*raised.event, &mut self.changes).await {
                    self.changes.forget_unfinished();
                    return Err(CommitError::Handler(error));
                }
            }
            self.changes.end_handlers(raised.tag.id);
        }
        Err(CommitError::Invalid(Error::permanent(format!(
            "handlers ran for {MAX_HANDLED_EVENTS} events and more are raised; do they raise each \
             other's?"
        ))))
    }
}

/// What a commit saved.
#[derive(Default)]
pub struct Committed {
    documents: Vec<SavedDocument>,
    events: Vec<EventId>,
    entities: Vec<Tracked>,
}

impl Committed {
    /// The documents that were written, with their new versions.
    pub fn documents(&self) -> &[SavedDocument] {
        &self.documents
    }

    /// The events that were appended, in order.
    pub fn events(&self) -> &[EventId] {
        &self.events
    }

    /// The new version of a document; nothing if it was not written.
    pub fn etag(&self, id: &str) -> Option<&ETag> {
        self.documents.iter().find(|saved| saved.id == id).map(|saved| &saved.etag)
    }

    /// Takes a saved entity out, without pending events, to go on with it.
    pub fn take<T: Entity>(&mut self, id: &str) -> Option<T> {
        let at = self.entities.iter().position(|tracked| tracked.is::<T>(id))?;
        take_entity(self.entities.remove(at))
    }
}

impl std::fmt::Debug for Committed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Committed")
            .field("documents", &self.documents)
            .field("events", &self.events)
            .finish_non_exhaustive()
    }
}
