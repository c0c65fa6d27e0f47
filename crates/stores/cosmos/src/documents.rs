//! Business documents and their events in one container: the document seam.
//!
//! What lives here: reading, and one commit from its checks to its answer. What does not: what the
//! service says of a batch (`batch.rs`), pages (`pages.rs`), JSON (`document_json.rs`).
//! Invariant: a commit is one transactional batch of one logical partition, and what it answers is
//! what the container has: one that was saved before its answer was lost is found again by its
//! events and is no failure.

use std::time::Duration;

use async_trait::async_trait;
use azure_core::http::Etag;
use azure_data_cosmos::options::{ItemReadOptions, Precondition};
use postrider_core::{
    DocumentBatch, DocumentError, DocumentOperation, DocumentPage, DocumentRead, DocumentStore,
    ETag, Error, Event, PageRequest, Result, SavedDocument,
};
use serde_json::Value;

use crate::CosmosStore;
use crate::append::identified;
use crate::batch::{Answer, Batch, Work, check};
use crate::document_json::{Stored, Wire};
use crate::error::{CONFLICT, NOT_FOUND, cosmos_error, failed, status};
use crate::event_document;
use crate::numbers::{counting, id};

const READ: &str = "read the document";
const NOT_MODIFIED: u16 = 304;
/// How often a write that demanded no version is made again because somebody else's came between.
const TRIES: u32 = 10;
/// Before the next try; others get their turn meanwhile.
const PAUSE: Duration = Duration::from_millis(10);
/// A version that no document has: what a commit answers for a document that was changed again
/// before the answer to the commit was found.
const SUPERSEDED: &str = "\"superseded\"";

/// The answer to a point read.
enum Point {
    Found(Stored),
    NotModified,
    NotFound,
}

impl CosmosStore {
    async fn point_read(&self, key: &str, id: &str, known: Option<&ETag>) -> Result<Point> {
        let mut options = ItemReadOptions::default();
        if let Some(etag) = known {
            let unless = Precondition::if_none_match(Etag::from(etag.as_str().to_owned()));
            options = options.with_precondition(unless);
        }
        let read = self.container().read_item(key.to_owned(), id, Some(options)).await;
        let found = match read {
            Ok(found) if u16::from(found.status().status_code()) == NOT_MODIFIED => {
                return Ok(Point::NotModified);
            }
            Ok(found) => found,
            Err(error) => {
                return match status(&error) {
                    (NOT_MODIFIED, _) => Ok(Point::NotModified),
                    (NOT_FOUND, None | Some(0)) => Ok(Point::NotFound),
                    _ => Err(cosmos_error(READ, &error)),
                };
            }
        };
        let wire: Wire = found.into_model().map_err(|error| {
            let (status, _) = status(&error);
            Error::corrupt(format!(
                "document {id} is none of Postrider's: it needs the members partitionKey, type and \
                 data ({status})"
            ))
        })?;
        let stored = Stored::from(wire);
        self.inner.numbers.note(key, &stored.document.etag, stored.last_seq);
        Ok(Point::Found(stored))
    }

    /// A document as it is now, if it is there.
    pub(crate) async fn current(&self, key: &str, id: &str) -> Result<Option<Stored>> {
        match self.point_read(key, id, None).await? {
            Point::Found(stored) => Ok(Some(stored)),
            Point::NotFound | Point::NotModified => Ok(None),
        }
    }

    /// One try: every version that the batch relies on is looked up, and demanded.
    async fn try_commit(&self, work: &Work) -> Result<Attempt, DocumentError> {
        let seen = match self.look_up(work).await? {
            Looked::All(seen) => seen,
            Looked::Refused(error) => return Ok(Attempt::Refused(error)),
        };
        let prepared = Batch::prepare(&self.inner, work, &seen)?;
        Ok(match self.send(&prepared).await? {
            Answer::Saved(etags) => {
                let last = prepared.last_seq();
                if let Some(at) = counting(work) {
                    self.inner.numbers.note(&work.partition_key, &ETag::new(&*etags[at]), last);
                }
                Attempt::Saved(answers(work, &seen, &etags))
            }
            Answer::Raced => Attempt::Raced,
            Answer::Refused { at, status } => {
                let refused = self.refused(work, at, status).await?;
                Attempt::Refused(refused)
            }
            Answer::Failed(error) => Attempt::Unknown(error),
        })
    }

    /// The versions that a batch relies on without naming them: of a document that carries the
    /// number of its events, and of one that goes.
    async fn look_up(&self, work: &Work) -> Result<Looked, DocumentError> {
        let (key, counting) = (&work.partition_key, counting(work));
        let mut seen = Vec::with_capacity(work.operations.len());
        for (at, operation) in work.operations.iter().enumerate() {
            let (id, if_match, counts) = match operation {
                DocumentOperation::Create(_) => {
                    seen.push(Seen::default());
                    continue;
                }
                DocumentOperation::Replace { document, if_match } => {
                    (&document.id, if_match.as_ref(), Some(at) == counting)
                }
                DocumentOperation::Delete { id, if_match } => {
                    (id, if_match.as_ref(), Some(at) == counting)
                }
            };
            let made_here = work.operations[..at].iter().any(|other| self::id(other) == id);
            let leaves = matches!(operation, DocumentOperation::Delete { .. });
            let needed = counts || (leaves && if_match.is_none());
            let known = if_match.and_then(|etag| self.inner.numbers.of(key, etag));
            seen.push(match (needed && !made_here, known) {
                (false, _) => Seen { etag: if_match.cloned(), ..Seen::default() },
                (true, Some(last_seq)) => {
                    Seen { etag: if_match.cloned(), last_seq, ..Seen::default() }
                }
                (true, None) => match self.current(key, id).await? {
                    None => return Ok(Looked::Refused(DocumentError::NotFound { id: id.clone() })),
                    Some(found) => {
                        let etag = found.document.etag;
                        if if_match.is_some_and(|wanted| *wanted != etag) {
                            let (id, current_etag) = (id.clone(), Some(etag));
                            let stale = DocumentError::PreconditionFailed { id, current_etag };
                            return Ok(Looked::Refused(stale));
                        }
                        let ours = if_match.is_none();
                        Seen { etag: Some(etag), last_seq: found.last_seq, ours }
                    }
                },
            });
        }
        Ok(Looked::All(seen))
    }

    /// Why an operation was refused, as the seam tells it.
    async fn refused(
        &self,
        work: &Work,
        at: usize,
        status: u16,
    ) -> Result<DocumentError, DocumentError> {
        let Some(operation) = work.operations.get(at) else {
            let event = work.events.get(at - work.operations.len());
            let id = event.map(|event| event.id().to_string()).unwrap_or_default();
            return Ok(DocumentError::Conflict { id });
        };
        let id = id(operation).to_owned();
        Ok(match status {
            CONFLICT => DocumentError::Conflict { id },
            NOT_FOUND => DocumentError::NotFound { id },
            _ => match self.current(&work.partition_key, &id).await? {
                Some(found) => {
                    let current_etag = Some(found.document.etag);
                    DocumentError::PreconditionFailed { id, current_etag }
                }
                None => DocumentError::NotFound { id },
            },
        })
    }

    /// What the container has, if it has this very batch: its events, which are nobody else's.
    /// Whoever saved one of them has saved them all.
    async fn saved_before(&self, work: &Work) -> Result<Option<Vec<SavedDocument>>> {
        if work.events.is_empty() {
            return Ok(None);
        }
        for event in &work.events {
            if !self.has_event(event).await? {
                return Ok(None);
            }
        }
        let mut saved = Vec::with_capacity(work.operations.len());
        for operation in &work.operations {
            let id = id(operation);
            let now = self.current(&work.partition_key, id).await?;
            let etag = match (operation, now) {
                (
                    DocumentOperation::Create(document)
                    | DocumentOperation::Replace { document, .. },
                    Some(now),
                ) if now.is(document) => now.document.etag,
                (DocumentOperation::Delete { if_match: Some(etag), .. }, None) => etag.clone(),
                _ => ETag::new(SUPERSEDED),
            };
            saved.push(SavedDocument { id: id.to_owned(), etag });
        }
        Ok(Some(saved))
    }

    /// Whether the container has an event with this very content.
    async fn has_event(&self, event: &Event) -> Result<bool> {
        let (key, id) = (event.key().as_str().to_owned(), event.id().to_string());
        let found = match self.container().read_item(key, &id, None).await {
            Ok(found) => found,
            Err(error) if status(&error).0 == NOT_FOUND => return Ok(false),
            Err(error) => return Err(cosmos_error("look for the event", &error)),
        };
        let mut found: Value = found.into_model().map_err(failed("look for the event"))?;
        let topic = self.inner.default_topic.as_str();
        let mut ours = event_document::document(event, self.inner.event_ttl_seconds, 0, topic);
        // Numbers differ when it is sent again; the rest is the service's own.
        for json in [&mut found, &mut ours] {
            if let Value::Object(json) = json {
                json.retain(|name, _| name != "seq" && name != "ttl" && !name.starts_with('_'));
            }
        }
        Ok(found == ours)
    }
}

/// What a batch relies on for one operation.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// The version to demand, if any.
    pub(crate) etag: Option<ETag>,
    /// The number that its last event had.
    pub(crate) last_seq: Option<u64>,
    /// Whether the caller demanded no version, so that another one is as good.
    pub(crate) ours: bool,
}

enum Looked {
    All(Vec<Seen>),
    Refused(DocumentError),
}

/// What became of one try.
enum Attempt {
    Saved(Vec<SavedDocument>),
    /// Somebody else's write came between, and the caller demanded no version.
    Raced,
    Refused(DocumentError),
    /// Whether it was saved is not known, or it was not and may be later.
    Unknown(Error),
}

fn answers(work: &Work, seen: &[Seen], etags: &[String]) -> Vec<SavedDocument> {
    let operations = work.operations.iter().zip(seen).zip(etags);
    operations
        .map(|((operation, seen), etag)| {
            let etag = match operation {
                DocumentOperation::Delete { .. } => {
                    seen.etag.clone().unwrap_or_else(|| ETag::new(&**etag))
                }
                DocumentOperation::Create(_) | DocumentOperation::Replace { .. } => {
                    ETag::new(&**etag)
                }
            };
            SavedDocument { id: id(operation).to_owned(), etag }
        })
        .collect()
}

#[async_trait]
impl DocumentStore for CosmosStore {
    async fn read(
        &self,
        partition_key: &str,
        id: &str,
        if_none_match: Option<&ETag>,
    ) -> Result<DocumentRead, Error> {
        crate::document_json::check_id(id)?;
        Ok(match self.point_read(partition_key, id, if_none_match).await? {
            Point::Found(stored) => DocumentRead::Found(stored.document),
            Point::NotModified => DocumentRead::NotModified,
            Point::NotFound => DocumentRead::NotFound,
        })
    }

    async fn read_page(&self, request: &PageRequest) -> Result<DocumentPage, Error> {
        self.page(request).await
    }

    /// Beside what the seam promises: a commit whose events the container has already, each with
    /// this very content, was saved before and succeeds again, without saving anything. A document
    /// that was changed since then is answered with a version that none has.
    async fn commit(&self, batch: DocumentBatch) -> Result<Vec<SavedDocument>, DocumentError> {
        if batch.operations.is_empty() && batch.events.is_empty() {
            return Ok(Vec::new());
        }
        let DocumentBatch { partition_key, operations, events } = batch;
        let work = Work { partition_key, operations, events: identified(&events) };
        check(&self.inner, &work)?;
        for _ in 0..TRIES {
            let attempt = match self.try_commit(&work).await? {
                Attempt::Saved(saved) => return Ok(saved),
                Attempt::Raced => {
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
                Attempt::Refused(error) => error,
                Attempt::Unknown(error) => error.into(),
            };
            return match self.saved_before(&work).await {
                Ok(Some(saved)) => Ok(saved),
                // The first failure says more than one of looking what became of it.
                Ok(None) | Err(_) => Err(attempt),
            };
        }
        Err(Error::transient(
            "save the documents: others changed the same document again and again; try again",
        )
        .into())
    }
}
