//! Documents with ETags beside the outbox, and their events in the same transaction.
//!
//! What lives here: the seam over `postrider_document`. What does not: entities.
//! Invariant: a version is given once in the life of a database, so that no ETag ever returns,
//! not even after a document was deleted and created anew.

use async_trait::async_trait;
use postrider_core::{
    Document, DocumentBatch, DocumentError, DocumentOperation, DocumentPage, DocumentRead,
    DocumentStore, ETag, Error, Event, PageRequest, Result, SavedDocument,
};
use rusqlite::{Connection, OptionalExtension, Row, Transaction};
use sha2::{Digest, Sha256};

use crate::SqliteStore;
use crate::append::{OnDuplicate, append_at};
use crate::error::failed;
use crate::positions::timestamp;

/// As a transactional batch of Azure Cosmos DB, so that services can move there.
const MAX_OPERATIONS: usize = 100;
/// 2 MB, as Cosmos DB counts.
const MAX_BATCH_BYTES: usize = 2 * 1024 * 1024;
/// Most documents in a page.
const MAX_PAGE: u32 = 1_000;

const COLUMNS: &str = "id, partition_key, type, data, ttl, deleted, version, written_ms, number";
/// Not past its time to live at the moment `?1`.
const ALIVE: &str = "(ttl < 0 OR written_ms + ttl * 1000 > ?1)";

fn etag(version: i64) -> ETag {
    ETag::new(format!("\"{version:016x}\""))
}

fn from_row(row: &Row<'_>) -> rusqlite::Result<(Document, i64)> {
    let data: Vec<u8> = row.get(3)?;
    let document = Document {
        id: row.get(0)?,
        partition_key: row.get(1)?,
        document_type: row.get(2)?,
        data: data.into(),
        ttl_seconds: row.get(4)?,
        deleted: row.get(5)?,
        etag: etag(row.get(6)?),
        written_at: timestamp(row.get(7)?),
    };
    Ok((document, row.get(8)?))
}

/// Called by retention, under its write lock.
pub(crate) fn remove_expired(tx: &Transaction<'_>, most: u32, now_ms: i64) -> Result<usize> {
    tx.prepare_cached(
        "DELETE FROM postrider_document WHERE number IN (
             SELECT number FROM postrider_document
             WHERE ttl > 0 AND written_ms + ttl * 1000 <= ?1 LIMIT ?2)",
    )
    .and_then(|mut statement| statement.execute((now_ms, most)))
    .map_err(failed("remove expired documents"))
}

fn read(tx: &Connection, partition_key: &str, id: &str, now_ms: i64) -> Result<Option<Document>> {
    tx.prepare_cached(&format!(
        "SELECT {COLUMNS} FROM postrider_document
         WHERE partition_key = ?2 AND id = ?3 AND {ALIVE}"
    ))
    .and_then(|mut statement| statement.query_row((now_ms, partition_key, id), from_row).optional())
    .map(|found| found.map(|(document, _)| document))
    .map_err(failed("read the document"))
}

/// The continuation after document `number`, and a seal by which it is known again.
fn continuation(identity: &str, document_type: &str, number: i64) -> String {
    let seal = Sha256::new()
        .chain_update(identity)
        .chain_update([0])
        .chain_update(document_type)
        .chain_update([0])
        .chain_update(number.to_be_bytes())
        .finalize();
    let seal: String = seal.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    format!("{number:016x}{seal}")
}

fn page_after(identity: &str, request: &PageRequest) -> Result<i64> {
    let Some(text) = &request.continuation else { return Ok(0) };
    let number = text.get(..16).and_then(|digits| i64::from_str_radix(digits, 16).ok());
    number
        .filter(|number| continuation(identity, &request.document_type, *number) == *text)
        .ok_or_else(|| {
            Error::permanent(
                "the continuation is not one that this store gave for this type; begin at the \
                 first page",
            )
        })
}

fn read_page(
    tx: &Connection,
    identity: &str,
    request: &PageRequest,
    now_ms: i64,
) -> Result<DocumentPage> {
    let place = "read a page of documents";
    let after = page_after(identity, request)?;
    let size = request.size.clamp(1, MAX_PAGE) as usize;
    let mut statement = tx
        .prepare_cached(&format!(
            "SELECT {COLUMNS} FROM postrider_document
             WHERE type = ?2 AND number > ?3 AND deleted = 0 AND {ALIVE}
             ORDER BY number LIMIT ?4"
        ))
        .map_err(failed(place))?;
    let most = i64::try_from(size + 1).unwrap_or(i64::MAX);
    let rows = statement
        .query_map((now_ms, &request.document_type, after, most), from_row)
        .map_err(failed(place))?;
    let mut found: Vec<(Document, i64)> =
        rows.collect::<rusqlite::Result<_>>().map_err(failed(place))?;
    let more = found.len() > size;
    found.truncate(size);
    let last = found.last().map(|(_, number)| *number);
    let continuation = match (more, last) {
        (true, Some(last)) => Some(continuation(identity, &request.document_type, last)),
        (true, None) | (false, _) => None,
    };
    Ok(DocumentPage { documents: found.into_iter().map(|(doc, _)| doc).collect(), continuation })
}

/// Everything that can be refused before the database is asked.
fn check(batch: &DocumentBatch) -> Result<(), DocumentError> {
    let operations = batch.operations.len() + batch.events.len();
    if operations > MAX_OPERATIONS {
        return Err(DocumentError::TooLarge(format!(
            "{operations} operations and events in one commit; {MAX_OPERATIONS} are allowed: \
             split it"
        )));
    }
    let mut bytes = 0usize;
    for operation in &batch.operations {
        let (DocumentOperation::Create(document) | DocumentOperation::Replace { document, .. }) =
            operation
        else {
            continue;
        };
        if document.partition_key != batch.partition_key {
            return Err(Error::permanent(format!(
                "document {} has the partition key {:?}, its batch {:?}; commit them apart",
                document.id, document.partition_key, batch.partition_key
            ))
            .into());
        }
        if document.ttl_seconds != -1 && !(1..=i64::from(i32::MAX)).contains(&document.ttl_seconds)
        {
            return Err(Error::permanent(format!(
                "document {} has a time to live of {} s; give -1 (for ever) or 1 to {}",
                document.id,
                document.ttl_seconds,
                i32::MAX
            ))
            .into());
        }
        bytes += document.data.len() + document.id.len() + document.partition_key.len();
    }
    bytes += batch.events.iter().map(event_bytes).sum::<usize>();
    if bytes > MAX_BATCH_BYTES {
        return Err(DocumentError::TooLarge(format!(
            "{bytes} bytes in one commit; {MAX_BATCH_BYTES} are allowed: split it"
        )));
    }
    Ok(())
}

fn event_bytes(event: &postrider_core::NewEvent) -> usize {
    let nil = postrider_core::EventId::from_uuid(uuid::Uuid::nil());
    event.clone().identified(|| nil).cost_bytes() - Event::OVERHEAD_BYTES
}

/// What is there under the write lock: version and number of the row; an expired one is removed.
fn current(
    tx: &Transaction<'_>,
    partition_key: &str,
    id: &str,
    now_ms: i64,
) -> Result<Option<(i64, i64)>> {
    let place = "read the document's version";
    tx.prepare_cached(&format!(
        "DELETE FROM postrider_document WHERE partition_key = ?2 AND id = ?3 AND NOT {ALIVE}"
    ))
    .and_then(|mut statement| statement.execute((now_ms, partition_key, id)))
    .map_err(failed(place))?;
    tx.prepare_cached(
        "SELECT version, number FROM postrider_document WHERE partition_key = ?1 AND id = ?2",
    )
    .and_then(|mut statement| {
        statement.query_row((partition_key, id), |row| Ok((row.get(0)?, row.get(1)?))).optional()
    })
    .map_err(failed(place))
}

fn next_version(tx: &Transaction<'_>) -> Result<i64> {
    tx.prepare_cached(
        "UPDATE postrider_state SET last_version = last_version + 1 RETURNING last_version",
    )
    .and_then(|mut statement| statement.query_row([], |row| row.get(0)))
    .map_err(failed("give a version"))
}

/// Refuses to go on unless the document exists in the version asked for.
fn expect_version(
    found: Option<(i64, i64)>,
    id: &str,
    if_match: Option<&ETag>,
) -> Result<(i64, i64), DocumentError> {
    let (version, number) = found.ok_or_else(|| DocumentError::NotFound { id: id.to_owned() })?;
    let current_etag = etag(version);
    if if_match.is_some_and(|wanted| *wanted != current_etag) {
        let current_etag = Some(current_etag);
        return Err(DocumentError::PreconditionFailed { id: id.to_owned(), current_etag });
    }
    Ok((version, number))
}

fn create(tx: &Transaction<'_>, document: &Document, now_ms: i64) -> Result<i64, DocumentError> {
    if current(tx, &document.partition_key, &document.id, now_ms)?.is_some() {
        return Err(DocumentError::Conflict { id: document.id.clone() });
    }
    let version = next_version(tx)?;
    tx.prepare_cached(
        "INSERT INTO postrider_document
             (number, partition_key, id, type, data, ttl, deleted, version, written_ms)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?1, ?8)",
    )
    .and_then(|mut statement| {
        statement.execute((
            version,
            &document.partition_key,
            &document.id,
            &document.document_type,
            document.data.as_ref(),
            document.ttl_seconds,
            document.deleted,
            now_ms,
        ))
    })
    .map_err(failed("create the document"))?;
    Ok(version)
}

fn replace(
    tx: &Transaction<'_>,
    document: &Document,
    if_match: Option<&ETag>,
    now_ms: i64,
) -> Result<i64, DocumentError> {
    let found = current(tx, &document.partition_key, &document.id, now_ms)?;
    let (_, number) = expect_version(found, &document.id, if_match)?;
    let version = next_version(tx)?;
    tx.prepare_cached(
        "UPDATE postrider_document
         SET type = ?2, data = ?3, ttl = ?4, deleted = ?5, version = ?6, written_ms = ?7
         WHERE number = ?1",
    )
    .and_then(|mut statement| {
        statement.execute((
            number,
            &document.document_type,
            document.data.as_ref(),
            document.ttl_seconds,
            document.deleted,
            version,
            now_ms,
        ))
    })
    .map_err(failed("replace the document"))?;
    Ok(version)
}

fn apply(
    tx: &Transaction<'_>,
    partition_key: &str,
    operation: &DocumentOperation,
    now_ms: i64,
) -> Result<SavedDocument, DocumentError> {
    let (id, version) = match operation {
        DocumentOperation::Create(document) => (&document.id, create(tx, document, now_ms)?),
        DocumentOperation::Replace { document, if_match } => {
            (&document.id, replace(tx, document, if_match.as_ref(), now_ms)?)
        }
        DocumentOperation::Delete { id, if_match } => {
            let found = current(tx, partition_key, id, now_ms)?;
            let (version, number) = expect_version(found, id, if_match.as_ref())?;
            tx.prepare_cached("DELETE FROM postrider_document WHERE number = ?1")
                .and_then(|mut statement| statement.execute([number]))
                .map_err(failed("delete the document"))?;
            (id, version)
        }
    };
    Ok(SavedDocument { id: id.clone(), etag: etag(version) })
}

/// Both the documents' versions and the events' ids are checked under the one write lock.
fn commit(
    tx: &Transaction<'_>,
    batch: &DocumentBatch,
    now_ms: i64,
) -> Result<Vec<SavedDocument>, DocumentError> {
    let operations = batch.operations.iter();
    let saved = operations
        .map(|operation| apply(tx, &batch.partition_key, operation, now_ms))
        .collect::<Result<Vec<_>, _>>()?;
    for event in &batch.events {
        let Some(id) = event.id() else { continue };
        let twice = tx
            .prepare_cached("SELECT 1 FROM postrider_outbox WHERE id = ?1")
            .and_then(|mut known| known.exists([id.as_uuid().as_bytes().as_slice()]))
            .map_err(failed("look up the event's id"))?;
        if twice {
            return Err(DocumentError::Conflict { id: id.to_string() });
        }
    }
    append_at(tx, &batch.events, OnDuplicate::Fail, now_ms)?;
    Ok(saved)
}

#[async_trait]
impl DocumentStore for SqliteStore {
    async fn read(
        &self,
        partition_key: &str,
        id: &str,
        if_none_match: Option<&ETag>,
    ) -> Result<DocumentRead, Error> {
        let (partition_key, id) = (partition_key.to_owned(), id.to_owned());
        let (known, now_ms) = (if_none_match.cloned(), self.inner.clock.wall_ms());
        self.read_tx(move |tx| {
            Ok(match read(tx, &partition_key, &id, now_ms)? {
                None => DocumentRead::NotFound,
                Some(document) if known.as_ref() == Some(&document.etag) => {
                    DocumentRead::NotModified
                }
                Some(document) => DocumentRead::Found(document),
            })
        })
        .await
    }

    async fn read_page(&self, request: &PageRequest) -> Result<DocumentPage, Error> {
        let (request, now_ms) = (request.clone(), self.inner.clock.wall_ms());
        let identity = self.inner.identity.clone();
        self.read_tx(move |tx| read_page(tx, &identity, &request, now_ms)).await
    }

    async fn commit(&self, batch: DocumentBatch) -> Result<Vec<SavedDocument>, DocumentError> {
        check(&batch)?;
        if batch.operations.is_empty() && batch.events.is_empty() {
            return Ok(Vec::new());
        }
        let clock = self.inner.clock.clone();
        self.transaction(move |tx| commit(tx, &batch, clock.wall_ms())).await
    }
}
