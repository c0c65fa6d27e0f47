//! Documents with ETags, saved together with events.
//!
//! What lives here: the documents, the plan of a batch, and pages. What does not: entities.
//! Invariant: a batch is planned whole against the present state before anything changes, and the
//! lock is held from plan to write.

use std::collections::BTreeMap;

use async_trait::async_trait;
use postrider_core::{
    Document, DocumentBatch, DocumentError, DocumentOperation, DocumentPage, DocumentRead,
    DocumentStore, ETag, Error, NewEvent, PageRequest, Result, SavedDocument, Timestamp,
};
use std::time::Duration;

use crate::MemoryStore;

/// Most operations and events in one batch: the limit of an Azure Cosmos DB transactional batch,
/// kept here so that a service moves between stores.
pub const MAX_BATCH_OPERATIONS: usize = 100;
/// Most bytes of content in one batch: the same batch's limit.
pub const MAX_BATCH_BYTES: usize = 2 * 1024 * 1024;

/// Partition key and id.
type Place = (String, String);

/// All documents.
#[derive(Default)]
pub(crate) struct Documents {
    last_version: u64,
    by_place: BTreeMap<Place, Document>,
}

/// What a batch will do, once nothing can fail any more.
#[derive(Default)]
pub(crate) struct Plan {
    last_version: u64,
    changes: BTreeMap<Place, Option<Document>>,
    saved: Vec<SavedDocument>,
}

fn expired(document: &Document, now: Timestamp) -> bool {
    u64::try_from(document.ttl_seconds)
        .is_ok_and(|ttl| now.since(document.written_at) >= Duration::from_secs(ttl))
}

impl Documents {
    fn live(&self, place: &Place, now: Timestamp) -> Option<&Document> {
        self.by_place.get(place).filter(|document| !expired(document, now))
    }

    /// Checks the operations in order, each seeing the ones before it.
    pub(crate) fn plan(
        &self,
        operations: &[(String, DocumentOperation)],
        now: Timestamp,
    ) -> Result<Plan, DocumentError> {
        let mut plan = Plan { last_version: self.last_version, ..Plan::default() };
        for (partition_key, operation) in operations {
            let id = match operation {
                DocumentOperation::Create(document)
                | DocumentOperation::Replace { document, .. } => {
                    if document.partition_key != *partition_key {
                        return Err(DocumentError::Store(Error::permanent(format!(
                            "document {} belongs to another partition than its batch",
                            document.id
                        ))));
                    }
                    document.id.clone()
                }
                DocumentOperation::Delete { id, .. } => id.clone(),
            };
            let place = (partition_key.clone(), id);
            let current = match plan.changes.get(&place) {
                Some(changed) => changed.as_ref(),
                None => self.live(&place, now),
            };
            let current = current.map(|document| document.etag.clone());
            plan.step(place, current, operation, now)?;
        }
        Ok(plan)
    }

    /// Writes a plan that was made under the same lock.
    pub(crate) fn apply(&mut self, plan: Plan) -> Vec<SavedDocument> {
        self.last_version = plan.last_version;
        for (place, change) in plan.changes {
            match change {
                Some(document) => self.by_place.insert(place, document),
                None => self.by_place.remove(&place),
            };
        }
        plan.saved
    }

    /// Frees what can't be read any more.
    pub(crate) fn remove_expired(&mut self, now: Timestamp) {
        self.by_place.retain(|_, document| !expired(document, now));
    }
}

impl Plan {
    fn step(
        &mut self,
        place: Place,
        current: Option<ETag>,
        operation: &DocumentOperation,
        now: Timestamp,
    ) -> Result<(), DocumentError> {
        let id = place.1.clone();
        match operation {
            DocumentOperation::Create(document) => {
                if current.is_some() {
                    return Err(DocumentError::Conflict { id });
                }
                self.write(place, document, now);
            }
            DocumentOperation::Replace { document, if_match } => {
                check_version(&id, current, if_match.as_ref())?;
                self.write(place, document, now);
            }
            DocumentOperation::Delete { if_match, .. } => {
                let etag = check_version(&id, current, if_match.as_ref())?;
                self.changes.insert(place, None);
                self.saved.push(SavedDocument { id, etag });
            }
        }
        Ok(())
    }

    fn write(&mut self, place: Place, document: &Document, now: Timestamp) {
        self.last_version += 1;
        let etag = ETag::new(format!("\"{:016x}\"", self.last_version));
        self.saved.push(SavedDocument { id: document.id.clone(), etag: etag.clone() });
        let document = Document { etag, written_at: now, ..document.clone() };
        self.changes.insert(place, Some(document));
    }
}

fn check_version(
    id: &str,
    current: Option<ETag>,
    if_match: Option<&ETag>,
) -> Result<ETag, DocumentError> {
    let Some(current) = current else {
        return Err(DocumentError::NotFound { id: id.to_owned() });
    };
    if if_match.is_some_and(|wanted| *wanted != current) {
        return Err(DocumentError::PreconditionFailed {
            id: id.to_owned(),
            current_etag: Some(current),
        });
    }
    Ok(current)
}

fn check_limits(batch: &DocumentBatch, event_bytes: usize) -> Result<(), DocumentError> {
    let operations = batch.operations.len() + batch.events.len();
    if operations > MAX_BATCH_OPERATIONS {
        return Err(DocumentError::TooLarge(format!(
            "a batch has {operations} operations and events; {MAX_BATCH_OPERATIONS} are allowed"
        )));
    }
    let content = |operation: &DocumentOperation| match operation {
        DocumentOperation::Create(document) | DocumentOperation::Replace { document, .. } => {
            document.data.len()
        }
        DocumentOperation::Delete { .. } => 0,
    };
    let bytes = batch.operations.iter().map(content).sum::<usize>() + event_bytes;
    if bytes > MAX_BATCH_BYTES {
        return Err(DocumentError::TooLarge(format!(
            "a batch has {bytes} bytes of content; {MAX_BATCH_BYTES} are allowed"
        )));
    }
    Ok(())
}

#[async_trait]
impl DocumentStore for MemoryStore {
    async fn read(
        &self,
        partition_key: &str,
        id: &str,
        if_none_match: Option<&ETag>,
    ) -> Result<DocumentRead> {
        let now = self.inner.clock.now();
        let documents = self.inner.documents();
        let place = (partition_key.to_owned(), id.to_owned());
        Ok(match documents.live(&place, now) {
            None => DocumentRead::NotFound,
            Some(document) if Some(&document.etag) == if_none_match => DocumentRead::NotModified,
            Some(document) => DocumentRead::Found(document.clone()),
        })
    }

    async fn read_page(&self, request: &PageRequest) -> Result<DocumentPage> {
        let now = self.inner.clock.now();
        let after = request.continuation.as_deref();
        let after =
            after.map(|text| continuation::read(&request.document_type, text)).transpose()?;
        let documents = self.inner.documents();
        let visible = |document: &&Document| {
            document.document_type == request.document_type
                && !document.deleted
                && !expired(document, now)
        };
        let size = request.size.max(1) as usize;
        let rows = documents.by_place.iter();
        let rows = rows.filter(|(place, _)| after.as_ref().is_none_or(|after| *place > after));
        let mut page: Vec<Document> =
            rows.map(|(_, document)| document).filter(visible).take(size + 1).cloned().collect();
        let more = page.len() > size;
        page.truncate(size);
        let last = page.last().filter(|_| more);
        let continuation = last.map(continuation::write);
        Ok(DocumentPage { documents: page, continuation })
    }

    async fn commit(&self, batch: DocumentBatch) -> Result<Vec<SavedDocument>, DocumentError> {
        let given = batch.events.iter().filter_map(NewEvent::id);
        if let Some(id) = given.into_iter().find(|id| self.inner.has_event(*id)) {
            return Err(DocumentError::Conflict { id: id.to_string() });
        }
        let mut transaction = self.begin();
        transaction.append(&batch.events)?;
        check_limits(&batch, transaction.payload_bytes())?;
        for operation in batch.operations {
            transaction.write_document(batch.partition_key.clone(), operation);
        }
        transaction.save()
    }
}

/// The text that carries a page's end to the next page: opaque, and checked when it comes back.
mod continuation {
    use super::{Document, Error, Place, Result};

    const SEPARATOR: char = '\u{1f}';

    pub(super) fn write(last: &Document) -> String {
        let parts = [&last.document_type, &last.partition_key, &last.id];
        let text = parts.map(String::as_str).join(&SEPARATOR.to_string());
        text.bytes().map(|byte| format!("{byte:02x}")).collect()
    }

    pub(super) fn read(document_type: &str, text: &str) -> Result<Place> {
        parse(document_type, text).ok_or_else(|| {
            Error::permanent("the continuation is not this store's own; begin with the first page")
        })
    }

    fn parse(document_type: &str, text: &str) -> Option<Place> {
        let digits = text.as_bytes();
        let byte = |pair: &[u8]| match pair {
            [high, low] => {
                let digit = |digit: u8| char::from(digit).to_digit(16);
                u8::try_from(digit(*high)? * 16 + digit(*low)?).ok()
            }
            _ => None,
        };
        let bytes: Option<Vec<u8>> = digits.chunks(2).map(byte).collect();
        let text = String::from_utf8(bytes?).ok()?;
        let mut parts = text.splitn(3, SEPARATOR);
        let (kind, partition_key, id) = (parts.next()?, parts.next()?, parts.next()?);
        (kind == document_type).then(|| (partition_key.to_owned(), id.to_owned()))
    }
}
