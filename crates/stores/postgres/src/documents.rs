//! Documents with ETags beside the outbox, and their events in the same transaction.
//!
//! What lives here: the seam over the table `document`. What does not: entities.
//! Invariant: a version is given once in the life of a database, so that no ETag ever returns, not
//! even after a document was deleted and created anew; a batch is decided on what stands there
//! under the rows' locks, and written whole or not at all.

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use postrider_core::{
    Document, DocumentBatch, DocumentError, DocumentOperation, DocumentPage, DocumentRead,
    DocumentStore, ETag, Error, ErrorKind, Event, EventId, NewEvent, PageRequest, Result,
    SavedDocument,
};
use sha2::{Digest, Sha256};
use tokio_postgres::types::Type;
use tokio_postgres::{Row, Transaction};
use uuid::Uuid;

use crate::PostgresStore;
use crate::append::{OnDuplicate, append_in};
use crate::checkpoints::timestamp;
use crate::connections::{Connections, Param};
use crate::error::failed;
use crate::names::Names;

/// As a transactional batch of Azure Cosmos DB, so that services can move there.
const MAX_OPERATIONS: usize = 100;
/// 2 MB, as Cosmos DB counts.
const MAX_BATCH_BYTES: usize = 2 * 1024 * 1024;
/// Most documents in a page.
const MAX_PAGE: u32 = 1_000;

/// A document `d`, in the order in which [`from_row`] takes it.
macro_rules! columns {
    () => {
        "d.id, d.partition_key, d.type, d.data, d.ttl, d.deleted, d.version,
            (extract(epoch FROM d.written_at) * 1000)::bigint, d.number"
    };
}
/// Whether document `d` is past its time to live.
macro_rules! expired {
    () => {
        "(d.ttl > 0 AND d.written_at + d.ttl * interval '1 second' <= clock_timestamp())"
    };
}

const READ: &str = concat!(
    "SELECT ",
    columns!(),
    " FROM {schema}.document AS d WHERE d.partition_key = $1 AND d.id = $2 AND NOT ",
    expired!()
);

const READ_PAGE: &str = concat!(
    "SELECT ",
    columns!(),
    " FROM {schema}.document AS d WHERE d.type = $1 AND d.number > $2 AND NOT d.deleted AND NOT ",
    expired!(),
    " ORDER BY d.number LIMIT $3"
);

/// Locks what a batch touches, in one order for all batches; waits for another batch's end and then
/// finds its versions.
const CURRENT: &str = concat!(
    "SELECT d.id, d.number, d.version, ",
    expired!(),
    " FROM {schema}.document AS d WHERE d.partition_key = $1 AND d.id = ANY ($2)
    ORDER BY d.id FOR UPDATE"
);

const VERSIONS: &str = "SELECT nextval(({schema_ident_text} || '.document_version')::regclass)
    FROM generate_series(1, $1)";

/// The rows are locked.
const REMOVE: &str = "DELETE FROM {schema}.document WHERE number = ANY ($1)";

/// A document that another batch creates at the same time is waited for, and then left as it is.
const CREATE: &str = "INSERT INTO {schema}.document
        (partition_key, id, type, data, ttl, deleted, version)
    SELECT $1, n.id, n.type, n.data, n.ttl, n.deleted, n.version
    FROM unnest($2::text[], $3::text[], $4::bytea[], $5::bigint[], $6::boolean[], $7::bigint[])
        WITH ORDINALITY AS n (id, type, data, ttl, deleted, version, place)
    ORDER BY n.place
    ON CONFLICT (partition_key, id) DO NOTHING
    RETURNING id";

/// The rows are locked.
const REPLACE: &str = "UPDATE {schema}.document AS d
    SET type = n.type, data = n.data, ttl = n.ttl, deleted = n.deleted, version = n.version,
        written_at = clock_timestamp()
    FROM unnest($2::text[], $3::text[], $4::bytea[], $5::bigint[], $6::boolean[], $7::bigint[])
        AS n (id, type, data, ttl, deleted, version)
    WHERE d.partition_key = $1 AND d.id = n.id";

/// One that a batch has locked is left for the next time.
const REMOVE_EXPIRED: &str = concat!(
    "WITH gone AS (
        DELETE FROM {schema}.document WHERE number IN (
            SELECT d.number FROM {schema}.document AS d WHERE ",
    expired!(),
    " LIMIT $1 FOR UPDATE SKIP LOCKED)
        RETURNING 1)
    SELECT count(*) FROM gone"
);

const GIVEN: &str = "SELECT id FROM {schema}.{outbox_given} WHERE id = ANY ($1) LIMIT 1";

fn etag(version: i64) -> ETag {
    ETag::new(format!("\"{version:016x}\""))
}

fn from_row(row: &Row) -> (Document, i64) {
    let document = Document {
        id: row.get(0),
        partition_key: row.get(1),
        document_type: row.get(2),
        data: Bytes::copy_from_slice(row.get(3)),
        ttl_seconds: row.get(4),
        deleted: row.get(5),
        etag: etag(row.get(6)),
        written_at: timestamp(row.get(7)),
    };
    (document, row.get(8))
}

/// Removes up to `most` documents that are past their time, and returns how many: retention's part.
pub(crate) async fn remove_expired(
    connections: &Connections,
    names: &Names,
    most: u32,
) -> Result<u64> {
    let most = i64::from(most);
    let sql = names.fill(REMOVE_EXPIRED);
    let params: [Param<'_>; 1] = [(&most, Type::INT8)];
    let rows = connections.query("remove expired documents", &sql, &params).await?;
    Ok(rows[0].get::<_, i64>(0).unsigned_abs())
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
        check_document(batch, document)?;
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

fn check_document(batch: &DocumentBatch, document: &Document) -> Result<()> {
    if document.partition_key != batch.partition_key {
        return Err(Error::permanent(format!(
            "document {} has the partition key {:?}, its batch {:?}; commit them apart",
            document.id, document.partition_key, batch.partition_key
        )));
    }
    if document.ttl_seconds != -1 && !(1..=i64::from(i32::MAX)).contains(&document.ttl_seconds) {
        return Err(Error::permanent(format!(
            "document {} has a time to live of {} s; give -1 (for ever) or 1 to {}",
            document.id,
            document.ttl_seconds,
            i32::MAX
        )));
    }
    Ok(())
}

fn event_bytes(event: &NewEvent) -> usize {
    let nil = EventId::from_uuid(Uuid::nil());
    event.clone().identified(|| nil).cost_bytes() - Event::OVERHEAD_BYTES
}

/// One document in the course of a batch.
#[derive(Default)]
struct Slot<'a> {
    /// Its row, locked.
    row: Option<i64>,
    /// Whether that row goes: it is past its time, or an operation deletes it.
    row_goes: bool,
    /// The version after the operations so far; nothing while there is no such document.
    version: Option<i64>,
    /// What is to be written.
    write: Option<&'a Document>,
}

/// What a batch comes to, decided before anything is written.
struct Plan<'a> {
    slots: HashMap<&'a str, Slot<'a>>,
    /// In the order in which the batch named them first.
    order: Vec<&'a str>,
    saved: Vec<SavedDocument>,
}

fn id_of(operation: &DocumentOperation) -> &str {
    match operation {
        DocumentOperation::Create(document) | DocumentOperation::Replace { document, .. } => {
            &document.id
        }
        DocumentOperation::Delete { id, .. } => id,
    }
}

/// Refuses to go on unless the document exists in the version asked for.
fn expect_version(
    version: Option<i64>,
    id: &str,
    if_match: Option<&ETag>,
) -> Result<i64, DocumentError> {
    let version = version.ok_or_else(|| DocumentError::NotFound { id: id.to_owned() })?;
    let current_etag = etag(version);
    if if_match.is_some_and(|wanted| *wanted != current_etag) {
        let current_etag = Some(current_etag);
        return Err(DocumentError::PreconditionFailed { id: id.to_owned(), current_etag });
    }
    Ok(version)
}

impl<'a> Plan<'a> {
    /// Applies the operations in order to what was found; each write takes the next of `versions`.
    fn make(
        operations: &'a [DocumentOperation],
        found: &[Row],
        mut versions: impl Iterator<Item = i64>,
    ) -> Result<Self, DocumentError> {
        let mut plan = Self { slots: HashMap::new(), order: Vec::new(), saved: Vec::new() };
        for operation in operations {
            let id = id_of(operation);
            if !plan.slots.contains_key(id) {
                let row = found.iter().find(|row| row.get::<_, &str>(0) == id);
                let slot = row.map_or_else(Slot::default, |row| {
                    let (version, expired): (i64, bool) = (row.get(2), row.get(3));
                    let version = (!expired).then_some(version);
                    Slot { row: Some(row.get(1)), row_goes: expired, version, write: None }
                });
                plan.slots.insert(id, slot);
                plan.order.push(id);
            }
            let slot = plan.slots.get_mut(id).expect("inserted above");
            let mut next = || versions.next().expect("one was drawn for each write");
            let version = match operation {
                DocumentOperation::Create(_) if slot.version.is_some() => {
                    return Err(DocumentError::Conflict { id: id.to_owned() });
                }
                DocumentOperation::Create(document) => slot.put(document, next()),
                DocumentOperation::Replace { document, if_match } => {
                    expect_version(slot.version, id, if_match.as_ref())?;
                    slot.put(document, next())
                }
                DocumentOperation::Delete { if_match, .. } => {
                    let last = expect_version(slot.version, id, if_match.as_ref())?;
                    *slot = Slot { row: slot.row, row_goes: true, version: None, write: None };
                    last
                }
            };
            plan.saved.push(SavedDocument { id: id.to_owned(), etag: etag(version) });
        }
        Ok(plan)
    }

    fn in_order(&self) -> impl Iterator<Item = &Slot<'a>> {
        self.order.iter().filter_map(|id| self.slots.get(id))
    }
}

impl<'a> Slot<'a> {
    fn put(&mut self, document: &'a Document, version: i64) -> i64 {
        self.version = Some(version);
        self.write = Some(document);
        version
    }

    fn is_replaced(&self) -> bool {
        self.row.is_some() && !self.row_goes
    }
}

/// Documents to write, a column each, as [`CREATE`] and [`REPLACE`] take them.
#[derive(Default)]
struct Columns<'a> {
    ids: Vec<&'a str>,
    types: Vec<&'a str>,
    data: Vec<&'a [u8]>,
    ttls: Vec<i64>,
    deleted: Vec<bool>,
    versions: Vec<i64>,
}

impl<'a> Columns<'a> {
    fn of<'s>(slots: impl Iterator<Item = &'s Slot<'a>>) -> Self
    where
        'a: 's,
    {
        let mut columns = Self::default();
        for slot in slots {
            let Some((document, version)) = slot.write.zip(slot.version) else { continue };
            columns.ids.push(&document.id);
            columns.types.push(&document.document_type);
            columns.data.push(&document.data);
            columns.ttls.push(document.ttl_seconds);
            columns.deleted.push(document.deleted);
            columns.versions.push(version);
        }
        columns
    }

    async fn write(
        &self,
        tx: &Transaction<'_>,
        sql: &str,
        partition_key: &str,
    ) -> Result<Vec<Row>> {
        if self.ids.is_empty() {
            return Ok(Vec::new());
        }
        let params: [Param<'_>; 7] = [
            (&partition_key, Type::TEXT),
            (&self.ids, Type::TEXT_ARRAY),
            (&self.types, Type::TEXT_ARRAY),
            (&self.data, Type::BYTEA_ARRAY),
            (&self.ttls, Type::INT8_ARRAY),
            (&self.deleted, Type::BOOL_ARRAY),
            (&self.versions, Type::INT8_ARRAY),
        ];
        tx.query_typed(sql, &params).await.map_err(failed("write the documents"))
    }
}

/// Finds what is there, decides, and writes the documents.
async fn save(
    tx: &Transaction<'_>,
    names: &Names,
    batch: &DocumentBatch,
) -> Result<Vec<SavedDocument>, DocumentError> {
    let place = "read the documents' versions";
    let ids: Vec<&str> = batch.operations.iter().map(id_of).collect();
    let writes = batch.operations.iter();
    let writes = writes.filter(|one| !matches!(one, DocumentOperation::Delete { .. })).count();
    let writes = i32::try_from(writes).expect("at most MAX_OPERATIONS");
    let current: [Param<'_>; 2] = [(&batch.partition_key, Type::TEXT), (&ids, Type::TEXT_ARRAY)];
    let drawn: [Param<'_>; 1] = [(&writes, Type::INT4)];
    let (current_sql, versions_sql) = (names.fill(CURRENT), names.fill(VERSIONS));
    // Both are sent before either is answered.
    let (found, versions) = futures_util::future::try_join(
        tx.query_typed(&current_sql, &current),
        tx.query_typed(&versions_sql, &drawn),
    )
    .await
    .map_err(failed(place))?;
    let plan = Plan::make(&batch.operations, &found, versions.iter().map(|row| row.get(0)))?;
    let gone: Vec<i64> =
        plan.in_order().filter(|slot| slot.row_goes).filter_map(|slot| slot.row).collect();
    if !gone.is_empty() {
        let params: [Param<'_>; 1] = [(&gone, Type::INT8_ARRAY)];
        let removed = tx.query_typed(&names.fill(REMOVE), &params).await;
        removed.map_err(failed("delete the documents"))?;
    }
    let created = Columns::of(plan.in_order().filter(|slot| !slot.is_replaced()));
    let made = created.write(tx, &names.fill(CREATE), &batch.partition_key).await?;
    let was_made = |id: &&&str| made.iter().any(|row| row.get::<_, &str>(0) == **id);
    if let Some(id) = created.ids.iter().find(|id| !was_made(id)) {
        return Err(DocumentError::Conflict { id: (*id).to_owned() });
    }
    let replaced = Columns::of(plan.in_order().filter(|slot| slot.is_replaced()));
    replaced.write(tx, &names.fill(REPLACE), &batch.partition_key).await?;
    Ok(plan.saved)
}

impl PostgresStore {
    /// Which of the batch's events was appended before, or comes twice in it: asked once the append
    /// has failed.
    async fn repeated(&self, batch: &DocumentBatch) -> Result<Option<EventId>> {
        let ids = batch.events.iter().filter_map(NewEvent::id);
        let given: Vec<Uuid> = ids.map(|id| *id.as_uuid()).collect();
        if given.is_empty() {
            return Ok(None);
        }
        let params: [Param<'_>; 1] = [(&given, Type::UUID_ARRAY)];
        let rows = self.query("look up the events' ids", GIVEN, &params).await?;
        let known = rows.first().map(|row| row.get::<_, Uuid>(0));
        let twice = || given.iter().find(|id| given.iter().filter(|two| two == id).count() > 1);
        Ok(known.or_else(|| twice().copied()).map(EventId::from_uuid))
    }
}

#[async_trait]
impl DocumentStore for PostgresStore {
    async fn read(
        &self,
        partition_key: &str,
        id: &str,
        if_none_match: Option<&ETag>,
    ) -> Result<DocumentRead, Error> {
        let params: [Param<'_>; 2] = [(&partition_key, Type::TEXT), (&id, Type::TEXT)];
        let rows = self.query("read the document", READ, &params).await?;
        Ok(match rows.first().map(from_row) {
            None => DocumentRead::NotFound,
            Some((document, _)) if if_none_match == Some(&document.etag) => {
                DocumentRead::NotModified
            }
            Some((document, _)) => DocumentRead::Found(document),
        })
    }

    async fn read_page(&self, request: &PageRequest) -> Result<DocumentPage, Error> {
        let identity = &self.inner.identity;
        let after = page_after(identity, request)?;
        let size = request.size.clamp(1, MAX_PAGE) as usize;
        let params: [Param<'_>; 3] = [
            (&request.document_type, Type::TEXT),
            (&after, Type::INT8),
            (&i64::try_from(size + 1).unwrap_or(i64::MAX), Type::INT8),
        ];
        let rows = self.query("read a page of documents", READ_PAGE, &params).await?;
        let mut found: Vec<(Document, i64)> = rows.iter().map(from_row).collect();
        let more = found.len() > size;
        found.truncate(size);
        let last = found.last().map(|(_, number)| *number).filter(|_| more);
        let continuation = last.map(|last| continuation(identity, &request.document_type, last));
        let documents = found.into_iter().map(|(document, _)| document).collect();
        Ok(DocumentPage { documents, continuation })
    }

    async fn commit(&self, batch: DocumentBatch) -> Result<Vec<SavedDocument>, DocumentError> {
        check(&batch)?;
        if batch.operations.is_empty() && batch.events.is_empty() {
            return Ok(Vec::new());
        }
        let batch = Arc::new(batch);
        let (names, own) = (self.inner.names.clone(), Arc::clone(&batch));
        let saved = self.transaction(move |tx| {
            Box::pin(async move {
                let saved = save(tx, &names, &own).await?;
                if !own.events.is_empty() {
                    append_in(tx, &names, &own.events, OnDuplicate::Fail).await?;
                }
                Ok(saved)
            })
        });
        match saved.await {
            Err(DocumentError::Store(error)) if error.kind() == ErrorKind::Permanent => {
                Err(match self.repeated(&batch).await? {
                    Some(id) => DocumentError::Conflict { id: id.to_string() },
                    None => error.into(),
                })
            }
            Ok(saved) => Ok(saved),
            Err(error) => Err(error),
        }
    }
}
