//! What a unit of work will save: entities with what happens to each, and events of their own.
//!
//! What lives here: collecting changes, and the decision what batch they make. What does not: input
//! or output; handlers and the store are called in `unit_of_work.rs`.
//! Invariant: the decision changes nothing, so that it can be made again after a failure.

use std::any::Any;
use std::collections::{BTreeSet, HashSet};

use bytes::Bytes;
use postrider_core::{
    Document, DocumentBatch, DocumentOperation, ETag, Error, Event, EventId, Key, NewEvent, Result,
    Timestamp, TraceContext,
};

use crate::domain_event::builder;
use crate::envelope::{Envelope, event_data};
use crate::pending::Raised;
use crate::unit_of_work::{MAX_COMMIT_BYTES, MAX_COMMIT_OPERATIONS};
use crate::{CommitError, DomainEvent, Entity};

/// What becomes of a deleted entity's document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removal {
    /// It stays, marked as deleted: reads and pages leave it out.
    Soft,
    /// It goes.
    Hard,
}

/// The entities and events of one unit of work. Event handlers add to it.
#[derive(Default)]
pub struct Changes {
    tracked: Vec<Tracked>,
    raised: Vec<Raised>,
    handled: HashSet<EventId>,
    /// Where the lists ended when the handlers of an event began and have not ended.
    unfinished: Option<(usize, usize)>,
}

pub(crate) struct Tracked {
    pub(crate) entity: Box<dyn AnyEntity>,
    change: Change,
}

#[derive(Debug, Clone)]
enum Change {
    Nothing { etag: Option<ETag> },
    Create,
    Update { if_match: Option<ETag> },
    Delete { if_match: Option<ETag>, removal: Removal },
}

/// What a commit will save.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) batch: DocumentBatch,
    pub(crate) events: Vec<EventId>,
}

impl Changes {
    /// Saves `entity` as a document that must not exist yet.
    pub fn create<T: Entity>(&mut self, entity: T) {
        self.track(entity, Change::Create);
    }

    /// Saves `entity` over its document, which must exist, and be in the given version if one is
    /// given.
    pub fn update<T: Entity>(&mut self, entity: T, if_match: impl Into<Option<ETag>>) {
        self.track(entity, Change::Update { if_match: if_match.into() });
    }

    /// Deletes `entity`'s document, which must exist, and be in the given version if one is given.
    /// Events that the entity raised are saved either way.
    pub fn delete<T: Entity>(
        &mut self,
        entity: T,
        if_match: impl Into<Option<ETag>>,
        removal: Removal,
    ) {
        self.track(entity, Change::Delete { if_match: if_match.into(), removal });
    }

    /// Holds an entity that was read. It is saved, as an update of the version `etag`, only if it
    /// raised an event or was reached by [`Changes::entity_mut`].
    pub fn attach<T: Entity>(&mut self, entity: T, etag: impl Into<Option<ETag>>) {
        self.track(entity, Change::Nothing { etag: etag.into() });
    }

    /// Adds an event of no entity; its key must be the partition key of all the rest.
    pub fn raise<E: DomainEvent + Send + Sync + 'static>(&mut self, event: E) {
        self.raised.push(Raised::new(event));
    }

    /// An entity in this unit of work.
    pub fn entity<T: Entity>(&self, id: &str) -> Option<&T> {
        self.tracked
            .iter()
            .filter_map(|tracked| tracked.entity.as_any().downcast_ref::<T>())
            .find(|entity| entity.id() == id)
    }

    /// The same, to be changed; an attached one will be saved.
    pub fn entity_mut<T: Entity>(&mut self, id: &str) -> Option<&mut T> {
        let at = self.find::<T>(id)?;
        let tracked = &mut self.tracked[at];
        if let Change::Nothing { etag } = &mut tracked.change {
            tracked.change = Change::Update { if_match: etag.take() };
        }
        tracked.entity.as_any_mut().downcast_mut::<T>()
    }

    pub(crate) fn take<T: Entity>(&mut self, id: &str) -> Option<T> {
        let at = self.find::<T>(id)?;
        take_entity(self.tracked.remove(at))
    }

    pub(crate) fn into_tracked(self) -> Vec<Tracked> {
        self.tracked
    }

    fn find<T: Entity>(&self, id: &str) -> Option<usize> {
        self.tracked.iter().position(|tracked| tracked.is::<T>(id))
    }

    fn track<T: Entity>(&mut self, entity: T, change: Change) {
        self.tracked.push(Tracked { entity: Box::new(entity), change });
    }

    /// The first event whose handlers have not run.
    pub(crate) fn next_unhandled(&self) -> Option<Raised> {
        let mut events = self.tracked.iter().flat_map(|tracked| tracked.entity.collect());
        let of_entities = events.find(|raised| !self.handled.contains(&raised.tag.id));
        let own = || self.raised.iter().find(|raised| !self.handled.contains(&raised.tag.id));
        of_entities.or_else(|| own().cloned())
    }

    pub(crate) fn begin_handlers(&mut self) {
        self.unfinished = Some((self.tracked.len(), self.raised.len()));
    }

    pub(crate) fn end_handlers(&mut self, id: EventId) {
        self.unfinished = None;
        self.handled.insert(id);
    }

    /// Takes back what handlers added that failed or were dropped half-way: they will run again.
    pub(crate) fn forget_unfinished(&mut self) {
        if let Some((tracked, raised)) = self.unfinished.take() {
            self.tracked.truncate(tracked);
            self.raised.truncate(raised);
        }
    }

    /// Gives a time to every event that has none.
    pub(crate) fn stamp(&mut self, now: Timestamp) {
        for tracked in &mut self.tracked {
            tracked.entity.stamp(now);
        }
        for raised in &mut self.raised {
            raised.tag.at.get_or_insert(now);
        }
    }

    /// What to save, checked against every rule that needs no store; nothing if nothing changed.
    pub(crate) fn plan(
        &self,
        now: Timestamp,
        trace: Option<&TraceContext>,
    ) -> Result<Option<Plan>, CommitError> {
        let written: Vec<&Tracked> = self.tracked.iter().filter(|t| t.is_written()).collect();
        let of_entities = written.iter().flat_map(|tracked| tracked.entity.collect());
        let raised: Vec<Raised> = of_entities.chain(self.raised.iter().cloned()).collect();
        if written.is_empty() && raised.is_empty() {
            return Ok(None);
        }
        let partition_key = one_partition_key(&written, &raised).map_err(CommitError::Invalid)?;
        let operations = written.len() + raised.len();
        if operations > MAX_COMMIT_OPERATIONS {
            return Err(CommitError::TooLarge(format!(
                "{operations} documents and events in one commit; {MAX_COMMIT_OPERATIONS} are \
                 allowed: split it"
            )));
        }
        self.lay_out(partition_key, &written, &raised, now, trace).map(Some)
    }

    fn lay_out(
        &self,
        partition_key: String,
        written: &[&Tracked],
        raised: &[Raised],
        now: Timestamp,
        trace: Option<&TraceContext>,
    ) -> Result<Plan, CommitError> {
        let mut bytes = 0;
        let mut operations = Vec::with_capacity(written.len());
        for tracked in written {
            let (operation, size) = tracked.operation().map_err(CommitError::Invalid)?;
            operations.push(operation);
            bytes += size;
        }
        let mut events = Vec::with_capacity(raised.len());
        for raised in raised {
            let event = to_event(raised, now, trace).map_err(CommitError::Invalid)?;
            bytes += event_bytes(&event).map_err(CommitError::Invalid)?;
            events.push(event);
        }
        if bytes > MAX_COMMIT_BYTES {
            return Err(CommitError::TooLarge(format!(
                "{bytes} bytes of documents and events in one commit; {MAX_COMMIT_BYTES} are \
                 allowed: split it or store large content elsewhere"
            )));
        }
        let ids = raised.iter().map(|raised| raised.tag.id).collect();
        Ok(Plan { batch: DocumentBatch { partition_key, operations, events }, events: ids })
    }
}

/// The partition key that everything shares.
fn one_partition_key(written: &[&Tracked], raised: &[Raised]) -> Result<String> {
    let documents = written.iter().map(|tracked| {
        let entity = &tracked.entity;
        (format!("{} {}", entity.document_type(), entity.id()), entity.partition_key())
    });
    let events = raised.iter().map(|raised| {
        (format!("event {} {}", raised.event.event_type(), raised.tag.id), raised.event.key())
    });
    let mut all = documents.chain(events);
    let (first, partition_key) = all.next().expect("there is something to save");
    if let Some((other, its_key)) = all.find(|(_, key)| *key != partition_key) {
        return Err(Error::permanent(format!(
            "{first} has the partition key {partition_key:?} and {other} has {its_key:?}; one \
             commit saves one partition key: use a unit of work for each"
        )));
    }
    Key::new(partition_key.as_str())?;
    let mut ids = BTreeSet::new();
    if let Some(twice) = written.iter().find(|tracked| !ids.insert(tracked.entity.id())) {
        return Err(Error::permanent(format!(
            "{} {} is in this unit of work twice; change the first one through `entity_mut`",
            twice.entity.document_type(),
            twice.entity.id()
        )));
    }
    Ok(partition_key)
}

fn to_event(raised: &Raised, now: Timestamp, trace: Option<&TraceContext>) -> Result<NewEvent> {
    let event = &raised.event;
    let data = event_data(raised, raised.tag.at.unwrap_or(now))?;
    let builder = builder(event.topic(), event.event_type(), event.version(), &event.key(), data)?;
    let builder = builder.id(raised.tag.id);
    match trace {
        Some(trace) => builder.trace(trace)?.build(),
        None => builder.build(),
    }
}

fn event_bytes(event: &NewEvent) -> Result<usize> {
    let id = event.id().expect("a pending event has an id");
    let event: Event = event.clone().identified(|| id);
    Envelope::of_event(&event, i64::MAX)?.json_bytes()
}

impl Tracked {
    pub(crate) fn is<T: Entity>(&self, id: &str) -> bool {
        self.entity.as_any().downcast_ref::<T>().is_some_and(|entity| entity.id() == id)
    }

    fn is_written(&self) -> bool {
        match self.change {
            Change::Nothing { .. } => !self.entity.collect().is_empty(),
            Change::Create | Change::Update { .. } | Change::Delete { .. } => true,
        }
    }

    /// Its write, and how many bytes that is.
    fn operation(&self) -> Result<(DocumentOperation, usize)> {
        if let Change::Delete { if_match, removal: Removal::Hard } = &self.change {
            let id = self.entity.id();
            let bytes = id.len();
            return Ok((DocumentOperation::Delete { id, if_match: if_match.clone() }, bytes));
        }
        let document = self.document()?;
        let bytes = Envelope::of_document(&document)?.json_bytes()?;
        let operation = match &self.change {
            Change::Create => DocumentOperation::Create(document),
            Change::Nothing { etag: if_match }
            | Change::Update { if_match }
            | Change::Delete { if_match, .. } => {
                DocumentOperation::Replace { document, if_match: if_match.clone() }
            }
        };
        Ok((operation, bytes))
    }

    fn document(&self) -> Result<Document> {
        Ok(Document {
            id: self.entity.id(),
            partition_key: self.entity.partition_key(),
            document_type: self.entity.document_type().to_owned(),
            data: self.entity.data()?,
            ttl_seconds: -1,
            deleted: matches!(self.change, Change::Delete { .. }),
            etag: ETag::new(""),
            written_at: Timestamp::default(),
        })
    }
}

pub(crate) fn take_entity<T: Entity>(tracked: Tracked) -> Option<T> {
    tracked.entity.into_any().downcast::<T>().ok().map(|entity| *entity)
}

/// An entity whose type was left behind.
pub(crate) trait AnyEntity: Send + Sync {
    fn id(&self) -> String;
    fn partition_key(&self) -> String;
    fn document_type(&self) -> &'static str;
    fn data(&self) -> Result<Bytes>;
    fn collect(&self) -> Vec<Raised>;
    fn stamp(&mut self, now: Timestamp);
    fn saved(&mut self);
    fn as_any(&self) -> &dyn Any;
    fn as_any_mut(&mut self) -> &mut dyn Any;
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
}

impl<T: Entity> AnyEntity for T {
    fn id(&self) -> String {
        Entity::id(self)
    }

    fn partition_key(&self) -> String {
        Entity::partition_key(self)
    }

    fn document_type(&self) -> &'static str {
        T::TYPE
    }

    fn data(&self) -> Result<Bytes> {
        let json = serde_json::to_vec(self).map_err(|e| {
            let id = Entity::id(self);
            Error::permanent(format!("{} {id} has no JSON form", T::TYPE)).with_source(e)
        })?;
        Ok(Bytes::from(json))
    }

    fn collect(&self) -> Vec<Raised> {
        self.pending().collect(self)
    }

    fn stamp(&mut self, now: Timestamp) {
        self.pending_mut().stamp(now);
    }

    fn saved(&mut self) {
        self.pending_mut().saved();
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}
