//! Documents with ETags beside the outbox, and their events in the same transaction.
//!
//! What lives here: the seam over `[document]`. What does not: entities; applying operations, which
//! the server does (`sql/document_save.sql`).
//! Invariant: an ETag is the row's `rowversion`, which a database gives once in its life, so that
//! none ever returns, not even after a document was deleted and created anew.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use postrider_core::{
    Document, DocumentBatch, DocumentError, DocumentOperation, DocumentPage, DocumentRead,
    DocumentStore, ETag, Error, ErrorKind, Event, EventId, NewEvent, PageRequest, Result,
    SavedDocument,
};
use serde::Serialize;
use sha2::{Digest, Sha256};
use tiberius::Row;
use uuid::Uuid;

use crate::SqlServerStore;
use crate::append::{OnDuplicate, append_in};
use crate::connections::{Param, Session};
use crate::error::failed;
use crate::leases::short_answer;
use crate::names::{Names, exact};
use crate::row::{bytes, maybe_bytes, number, text, timestamp, uuid};
use crate::sql;

/// As a transactional batch of Azure Cosmos DB, so that services can move there.
const MAX_OPERATIONS: usize = 100;
/// 2 MB, as Cosmos DB counts.
const MAX_BATCH_BYTES: usize = 2 * 1024 * 1024;
/// Most documents in a page.
const MAX_PAGE: u32 = 1_000;
/// Longest id, partition key or type of a document, in UTF-16, so that they fit an index.
const MAX_NAME_CHARS: usize = 255;
/// A version that no row ever has.
const NO_VERSION: [u8; 8] = [0xff; 8];
const PLACE: &str = "save the documents";

fn etag(version: &[u8]) -> ETag {
    let hex: String = version.iter().map(|byte| format!("{byte:02x}")).collect();
    ETag::new(format!("\"{hex}\""))
}

/// The version that an ETag stands for; another store's stands for none.
fn version(tag: &ETag) -> [u8; 8] {
    let hex = tag.as_str().strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
    let hex = hex.filter(|hex| hex.len() == 16 && hex.bytes().all(|b| b.is_ascii_hexdigit()));
    let number = hex.and_then(|hex| u64::from_str_radix(hex, 16).ok());
    // Only as this store writes it.
    let same = |number: &u64| etag(&number.to_be_bytes()) == *tag;
    number.filter(same).map_or(NO_VERSION, u64::to_be_bytes)
}

fn from_row(row: &Row) -> Result<(Document, i64)> {
    let document = Document {
        id: text(row, 0, "id")?.to_owned(),
        partition_key: text(row, 1, "partition_key")?.to_owned(),
        document_type: text(row, 2, "type")?.to_owned(),
        data: Bytes::copy_from_slice(bytes(row, 3, "data")?),
        ttl_seconds: number(row, 4, "ttl")?,
        deleted: number(row, 5, "deleted")? != 0,
        etag: etag(bytes(row, 6, "etag")?),
        written_at: timestamp(number(row, 7, "written_ms")?),
    };
    Ok((document, number(row, 8, "number")?))
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
    check_name("partition key", &batch.partition_key)?;
    let mut bytes = 0usize;
    for operation in &batch.operations {
        check_name("document id", id_of(operation))?;
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

fn check_name(what: &str, name: &str) -> Result<(), DocumentError> {
    exact(what, name)?;
    let chars = name.encode_utf16().count();
    if chars > MAX_NAME_CHARS {
        return Err(DocumentError::TooLarge(format!(
            "the {what} has {chars} characters; {MAX_NAME_CHARS} are allowed"
        )));
    }
    Ok(())
}

fn check_document(batch: &DocumentBatch, document: &Document) -> Result<(), DocumentError> {
    check_name("document type", &document.document_type)?;
    if document.partition_key != batch.partition_key {
        return Err(Error::permanent(format!(
            "document {} has the partition key {:?}, its batch {:?}; commit them apart",
            document.id, document.partition_key, batch.partition_key
        ))
        .into());
    }
    if document.ttl_seconds != -1 && !(1..=i64::from(i32::MAX)).contains(&document.ttl_seconds) {
        return Err(Error::permanent(format!(
            "document {} has a time to live of {} s; give -1 (for ever) or 1 to {}",
            document.id,
            document.ttl_seconds,
            i32::MAX
        ))
        .into());
    }
    Ok(())
}

fn event_bytes(event: &NewEvent) -> usize {
    let nil = EventId::from_uuid(Uuid::nil());
    event.clone().identified(|| nil).cost_bytes() - Event::OVERHEAD_BYTES
}

fn id_of(operation: &DocumentOperation) -> &str {
    match operation {
        DocumentOperation::Create(document) | DocumentOperation::Replace { document, .. } => {
            &document.id
        }
        DocumentOperation::Delete { id, .. } => id,
    }
}

/// An operation as `document_save.sql` reads it.
#[derive(Serialize)]
struct OperationRow<'a> {
    n: usize,
    p: char,
    i: &'a str,
    t: Option<&'a str>,
    s: Option<i64>,
    d: Option<u8>,
    o: usize,
    l: usize,
    w: Option<usize>,
}

/// The operations as JSON, with their contents and versions one after the other.
fn request(operations: &[DocumentOperation]) -> (String, Vec<u8>) {
    let mut bytes = Vec::new();
    let rows: Vec<OperationRow<'_>> = operations
        .iter()
        .enumerate()
        .map(|(n, operation)| {
            let (p, document, wanted) = match operation {
                DocumentOperation::Create(document) => ('c', Some(document), None),
                DocumentOperation::Replace { document, if_match } => {
                    ('r', Some(document), if_match.as_ref())
                }
                DocumentOperation::Delete { if_match, .. } => ('d', None, if_match.as_ref()),
            };
            let w = wanted.map(|tag| {
                let at = bytes.len();
                bytes.extend(version(tag));
                at
            });
            let o = bytes.len();
            let data = document.map_or(&[][..], |document| &document.data);
            bytes.extend_from_slice(data);
            OperationRow {
                n,
                p,
                i: id_of(operation),
                t: document.map(|document| document.document_type.as_str()),
                s: document.map(|document| document.ttl_seconds),
                d: document.map(|document| u8::from(document.deleted)),
                o,
                l: data.len(),
                w,
            }
        })
        .collect();
    (serde_json::to_string(&rows).expect("texts always serialise"), bytes)
}

/// What the server made of the operations.
fn outcome(
    operations: &[DocumentOperation],
    sets: &[Vec<Row>],
) -> Result<Vec<SavedDocument>, DocumentError> {
    let [verdict, saved] = sets else { return Err(short_answer(PLACE).into()) };
    let verdict = verdict.first().ok_or_else(|| short_answer(PLACE))?;
    let at = |number: i64| usize::try_from(number).ok().and_then(|n| operations.get(n));
    let code = number(verdict, 0, "outcome")?;
    if code == 4 {
        return Err(Error::transient(format!(
            "{PLACE}: another commit to the partition did not end in time; try again"
        ))
        .into());
    }
    if code != 0 {
        let operation = at(number(verdict, 1, "n")?).ok_or_else(|| short_answer(PLACE))?;
        let id = id_of(operation).to_owned();
        return Err(match code {
            1 => DocumentError::Conflict { id },
            2 => DocumentError::NotFound { id },
            _ => {
                let current_etag = maybe_bytes(verdict, 2, "etag")?.map(etag);
                DocumentError::PreconditionFailed { id, current_etag }
            }
        });
    }
    if saved.len() != operations.len() {
        return Err(short_answer(PLACE).into());
    }
    let saved = saved.iter().zip(operations).map(|(row, operation)| {
        let etag = etag(bytes(row, 1, "etag")?);
        Ok(SavedDocument { id: id_of(operation).to_owned(), etag })
    });
    saved.collect::<Result<_>>().map_err(DocumentError::Store)
}

/// The application lock that keeps two commits to one logical partition apart.
fn lock_name(names: &Names, partition_key: &str) -> String {
    let hash = Sha256::digest(partition_key);
    let hash: String = hash.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    names.lock(&format!("document/{hash}"))
}

async fn save(
    session: &mut Session,
    names: &Names,
    batch: &DocumentBatch,
) -> Result<Vec<SavedDocument>, DocumentError> {
    let saved = if batch.operations.is_empty() {
        Vec::new()
    } else {
        let (json, bytes) = request(&batch.operations);
        let lock = lock_name(names, &batch.partition_key);
        let params: [Param<'_>; 4] = [&json, &bytes, &batch.partition_key, &lock];
        let sql = names.fill(sql::DOCUMENT_SAVE);
        let answer = session.query(&*sql, &params).await.map_err(failed(PLACE))?;
        outcome(&batch.operations, &answer.into_results().await.map_err(failed(PLACE))?)?
    };
    if !batch.events.is_empty() {
        append_in(session, names, &batch.events, OnDuplicate::Fail).await?;
    }
    Ok(saved)
}

/// An id as `append_known.sql` reads it.
#[derive(Serialize)]
struct IdRow {
    i: Uuid,
}

impl SqlServerStore {
    /// Which of the batch's events was appended before, or comes twice in it: asked once the append
    /// has failed.
    async fn repeated(&self, batch: &DocumentBatch) -> Result<Option<EventId>> {
        let ids = batch.events.iter().filter_map(NewEvent::id);
        let given: Vec<Uuid> = ids.map(|id| *id.as_uuid()).collect();
        if given.is_empty() {
            return Ok(None);
        }
        let rows: Vec<IdRow> = given.iter().map(|i| IdRow { i: *i }).collect();
        let rows = serde_json::to_string(&rows).expect("ids always serialise");
        let params: [Param<'_>; 1] = [&rows];
        let sets = self.run("look up the events' ids", sql::APPEND_KNOWN, &params).await?;
        if let Some(row) = sets.first().and_then(|set| set.first()) {
            return Ok(Some(EventId::from_uuid(uuid(row, 0, "id")?)));
        }
        let twice = given.iter().find(|id| given.iter().filter(|two| two == id).count() > 1);
        Ok(twice.copied().map(EventId::from_uuid))
    }
}

#[async_trait]
impl DocumentStore for SqlServerStore {
    async fn read(
        &self,
        partition_key: &str,
        id: &str,
        if_none_match: Option<&ETag>,
    ) -> Result<DocumentRead, Error> {
        // There is none of such a name, and SQL Server would show the one without the space.
        if exact("document id", id).and(exact("partition key", partition_key)).is_err() {
            return Ok(DocumentRead::NotFound);
        }
        let params: [Param<'_>; 2] = [&partition_key, &id];
        let sets = self.run("read the document", sql::DOCUMENT_READ, &params).await?;
        let Some(row) = sets.first().and_then(|set| set.first()) else {
            return Ok(DocumentRead::NotFound);
        };
        let (document, _) = from_row(row)?;
        Ok(match if_none_match == Some(&document.etag) {
            true => DocumentRead::NotModified,
            false => DocumentRead::Found(document),
        })
    }

    async fn read_page(&self, request: &PageRequest) -> Result<DocumentPage, Error> {
        let identity = &self.inner.identity;
        let after = page_after(identity, request)?;
        let size = request.size.clamp(1, MAX_PAGE) as usize;
        let most = i64::try_from(size + 1).unwrap_or(i64::MAX);
        let params: [Param<'_>; 3] = [&request.document_type, &after, &most];
        let sets = self.run("read a page of documents", sql::DOCUMENT_PAGE, &params).await?;
        let rows = sets.first().map_or(&[][..], Vec::as_slice);
        let mut found: Vec<(Document, i64)> = rows.iter().map(from_row).collect::<Result<_>>()?;
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
        let saved = self
            .transaction(move |session| Box::pin(async move { save(session, &names, &own).await }));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_etag_reads_back_and_anothers_stands_for_no_version() {
        let version_7 = [0, 0, 0, 0, 0, 0, 7, 0xd1];
        let tag = etag(&version_7);
        assert_eq!(tag.as_str(), "\"00000000000007d1\"");
        assert_eq!(version(&tag), version_7);
        for foreign in
            ["", "\"\"", "7d1", "\"7d1\"", "\"00000000000007D1\"", "\"+0000000000007d1\"", "*"]
        {
            assert_eq!(version(&ETag::new(foreign)), NO_VERSION, "{foreign}");
        }
    }

    #[test]
    fn operations_are_sent_with_their_contents_and_versions() {
        let document = |id: &str, data: &str| Document {
            id: id.to_owned(),
            partition_key: "p".to_owned(),
            document_type: "contact".to_owned(),
            data: data.to_owned().into(),
            ttl_seconds: -1,
            deleted: false,
            etag: ETag::new(""),
            written_at: timestamp(0),
        };
        let (json, bytes) = request(&[
            DocumentOperation::Create(document("a", "{}")),
            DocumentOperation::Replace {
                document: document("b", "[1]"),
                if_match: Some(etag(&[0, 0, 0, 0, 0, 0, 0, 9])),
            },
            DocumentOperation::Delete { id: "c".to_owned(), if_match: None },
        ]);
        assert_eq!(bytes, b"{}\0\0\0\0\0\0\0\x09[1]");
        let rows: serde_json::Value = serde_json::from_str(&json).expect("JSON");
        assert_eq!(rows[0]["p"], "c");
        assert_eq!(
            (&rows[1]["w"], &rows[1]["o"], &rows[1]["l"]),
            (&2.into(), &10.into(), &3.into())
        );
        assert_eq!((&rows[2]["p"], &rows[2]["t"]), (&"d".into(), &serde_json::Value::Null));
    }
}
