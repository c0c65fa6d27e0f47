//! The lease container: small documents, read one by one and written in batches.
//!
//! What lives here: reading, querying and batched writing there, each write conditional. What does
//! not: what the documents mean (`leases.rs`, `checkpoints.rs`, `dead_letters.rs`, `ranges.rs`).
//! Invariant: all documents of one monitored container share one logical partition, so that a batch
//! over any of them is one transaction; no document is overwritten unseen.

use std::collections::HashSet;
use std::sync::Arc;

use azure_data_cosmos::clients::ContainerClient;
use azure_data_cosmos::feed::FeedScope;
use azure_data_cosmos::models::{TransactionalBatchOperationResult, TransactionalBatchResponse};
use azure_data_cosmos::options::{BatchDeleteOptions, BatchReplaceOptions, Precondition};
use azure_data_cosmos::{CosmosError, Query, TransactionalBatch};
use futures_util::TryStreamExt;
use postrider_core::{Error, Result, Timestamp};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::connection::Connection;
use crate::error::{
    CONFLICT, FAILED_DEPENDENCY, NOT_FOUND, PRECONDITION_FAILED, failed, status, status_error,
};

/// Operations that one batch may have: the service's own limit.
pub(crate) const MAX_BATCH_OPERATIONS: usize = 100;
/// Bytes that one batch may have: the service's 2 MB, less room for what wraps the documents.
pub(crate) const MAX_BATCH_BYTES: usize = 1_900_000;

/// A document as it is kept.
#[derive(Debug, Clone)]
pub(crate) struct Kept<T> {
    /// What it says.
    pub(crate) body: T,
    /// Its version.
    pub(crate) etag: String,
    /// When it was written, by the database; to the second.
    pub(crate) written_at: Timestamp,
}

/// One write of a batch. Each needs what was seen to be true still.
#[derive(Debug)]
pub(crate) enum Write {
    /// Must not exist yet.
    Create(Value),
    /// Must be the version that was read.
    Replace(Value, String),
    /// Must be the version that was read.
    Delete(String, String),
    /// Must be there, in whatever version.
    Drop(String),
}

/// What became of a batch.
#[derive(Debug)]
pub(crate) enum Written {
    /// All of it is there; the new versions, in order.
    All(Vec<String>),
    /// Nothing is: something is not as it was read. Read again.
    Stale,
}

/// The documents kept for one monitored container.
#[derive(Clone)]
pub(crate) struct Control {
    connection: Arc<Connection>,
    partition_key: String,
}

/// A document's id: what it is, and a digest of whatever names it, so that any name will do.
pub(crate) fn id(kind: &str, names: &[&[u8]]) -> String {
    let mut digest = Sha256::new();
    for name in names {
        digest.update((name.len() as u64).to_be_bytes());
        digest.update(name);
    }
    let digest = digest.finalize();
    let hexadecimal: String = digest[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{kind}-{hexadecimal}")
}

impl Control {
    /// Keeps what belongs to one monitored container apart from that of others.
    pub(crate) fn new(connection: Arc<Connection>, partition_key: String) -> Self {
        Self { connection, partition_key }
    }

    fn container(&self) -> ContainerClient {
        self.connection.containers().leases
    }

    /// A document to be written.
    pub(crate) fn document<T: Serialize>(&self, kind: &str, id: &str, body: &T) -> Result<Value> {
        let mut document = serde_json::to_value(body)
            .map_err(|error| Error::permanent("a document can't be written").with_source(error))?;
        document["id"] = id.into();
        document["partitionKey"] = self.partition_key.as_str().into();
        document["kind"] = kind.into();
        Ok(document)
    }

    /// A document, if it is there.
    pub(crate) async fn read<T: DeserializeOwned>(&self, id: &str) -> Result<Option<Kept<T>>> {
        let place = "read the lease container";
        let read = self.container().read_item(self.partition_key.clone(), id, None).await;
        match read {
            Ok(found) => {
                let document: Value = found.into_model().map_err(failed(place))?;
                kept(document).map(Some)
            }
            Err(error) if is_missing(&error) => Ok(None),
            Err(error) => Err(failed(place)(error)),
        }
    }

    /// The documents of a kind that match, at most `most`, as the clause orders them. It may use
    /// the names given, and begins with AND or ORDER BY.
    pub(crate) async fn query<T: DeserializeOwned>(
        &self,
        kind: &str,
        clause: &str,
        values: &[(&str, Value)],
        most: usize,
    ) -> Result<Vec<Kept<T>>> {
        self.find(&format!("c.kind = @kind {clause}"), &of_kind(kind, values), most).await
    }

    /// The properties named of the documents of a kind that match; [`query`](Self::query) else.
    pub(crate) async fn heads<T: DeserializeOwned>(
        &self,
        kind: &str,
        properties: &str,
        clause: &str,
        values: &[(&str, Value)],
        most: usize,
    ) -> Result<Vec<Kept<T>>> {
        let text = format!("SELECT {properties} FROM c WHERE c.kind = @kind {clause}");
        self.all(text, &of_kind(kind, values), most).await
    }

    /// The documents for which `clause` is true, at most `most`.
    pub(crate) async fn find<T: DeserializeOwned>(
        &self,
        clause: &str,
        values: &[(&str, Value)],
        most: usize,
    ) -> Result<Vec<Kept<T>>> {
        self.all(format!("SELECT * FROM c WHERE {clause}"), values, most).await
    }

    async fn all<T: DeserializeOwned>(
        &self,
        text: String,
        values: &[(&str, Value)],
        most: usize,
    ) -> Result<Vec<Kept<T>>> {
        let mut found = Vec::new();
        let mut documents = self.documents::<Value>(text, values).await?;
        let place = "query the lease container";
        while let Some(document) = documents.try_next().await.map_err(failed(place))? {
            found.push(kept(document)?);
            if found.len() == most {
                break;
            }
        }
        Ok(found)
    }

    /// The different texts that one property of the documents that match has, until so many are
    /// known; nothing else of the documents is read.
    pub(crate) async fn texts(
        &self,
        kind: &str,
        property: &str,
        clause: &str,
        values: &[(&str, Value)],
        most: usize,
    ) -> Result<HashSet<String>> {
        let text = format!("SELECT VALUE {property} FROM c WHERE c.kind = @kind {clause}");
        let mut found = HashSet::new();
        let mut texts = self.documents::<String>(text, &of_kind(kind, values)).await?;
        let place = "query the lease container";
        while let Some(text) = texts.try_next().await.map_err(failed(place))? {
            found.insert(text);
            if found.len() == most {
                break;
            }
        }
        Ok(found)
    }

    /// How many documents match.
    pub(crate) async fn count(
        &self,
        kind: &str,
        clause: &str,
        values: &[(&str, Value)],
    ) -> Result<u64> {
        let text = format!("SELECT VALUE COUNT(1) FROM c WHERE c.kind = @kind {clause}");
        let counts = self.documents::<u64>(text, &of_kind(kind, values)).await?;
        let counts: Vec<u64> =
            counts.try_collect().await.map_err(failed("count in the lease container"))?;
        Ok(counts.into_iter().sum())
    }

    async fn documents<T: DeserializeOwned + Send + 'static>(
        &self,
        text: String,
        values: &[(&str, Value)],
    ) -> Result<azure_data_cosmos::feed::QueryItemIterator<T>> {
        let place = "query the lease container";
        let mut query = Query::from(text);
        for (name, value) in values {
            query = query.with_parameter(*name, value).map_err(failed(place))?;
        }
        let scope = FeedScope::partition(self.partition_key.clone());
        self.container().query_items(query, scope, None).await.map_err(failed(place))
    }

    /// Writes all of a batch, or nothing.
    pub(crate) async fn write(&self, writes: &[Write]) -> Result<Written> {
        let place = "write to the lease container";
        self.connection.mend().await;
        let mut batch = TransactionalBatch::new(self.partition_key.clone());
        for write in writes {
            batch = match write {
                Write::Create(document) => batch.create_item(document).map_err(failed(place))?,
                Write::Replace(document, etag) => {
                    let id = document["id"].as_str().unwrap_or_default().to_owned();
                    let seen = BatchReplaceOptions::default()
                        .with_precondition(Precondition::if_match(etag.clone()));
                    batch.replace_item(id, document, Some(seen)).map_err(failed(place))?
                }
                Write::Delete(id, etag) => {
                    let seen = BatchDeleteOptions::default()
                        .with_precondition(Precondition::if_match(etag.clone()));
                    batch.delete_item(id.clone(), Some(seen))
                }
                Write::Drop(id) => batch.delete_item(id.clone(), None),
            };
        }
        let answer = match self.container().execute_transactional_batch(batch, None).await {
            Ok(answer) => answer,
            // A batch of one may fail as that one does.
            Err(error) if is_missing(&error) || is_taken(status(&error).0) => {
                return Ok(Written::Stale);
            }
            Err(error) => return Err(failed(place)(error)),
        };
        let answer: TransactionalBatchResponse = answer.into_model().map_err(failed(place))?;
        verdict(answer.results(), writes.len())
    }
}

/// The values of a query that names its kind.
fn of_kind<'a>(kind: &str, values: &[(&'a str, Value)]) -> Vec<(&'a str, Value)> {
    let mut all = vec![("@kind", json!(kind))];
    all.extend_from_slice(values);
    all
}

/// Whether a document is missing, and not a whole container, or a replica's news of it.
fn is_missing(error: &CosmosError) -> bool {
    matches!(status(error), (NOT_FOUND, None | Some(0)))
}

/// Whether something is not as it was read.
fn is_stale(status: u16) -> bool {
    status == NOT_FOUND || is_taken(status)
}

fn is_taken(status: u16) -> bool {
    matches!(status, CONFLICT | PRECONDITION_FAILED)
}

/// A batch that failed is told apart by its operations alone: the first that did not merely depend
/// on another decides.
fn verdict(results: &[TransactionalBatchOperationResult], count: usize) -> Result<Written> {
    let place = "write to the lease container";
    let failure = results
        .iter()
        .find(|result| !result.is_success() && result.status_code() != FAILED_DEPENDENCY)
        .or_else(|| results.iter().find(|result| !result.is_success()));
    match failure {
        Some(result) if is_stale(result.status_code()) => Ok(Written::Stale),
        Some(result) => {
            let (status, substatus) = (result.status_code(), result.substatus_code());
            Err(status_error(place, status, substatus, result.retry_after()))
        }
        None if results.len() == count => {
            let etags = results.iter().map(|result| result.etag().unwrap_or_default().to_owned());
            Ok(Written::All(etags.collect()))
        }
        None => Err(Error::transient(format!(
            "{place}: {} operations were answered of {count}",
            results.len()
        ))),
    }
}

/// What was read as JSON, as what it is.
pub(crate) fn read_as<T: DeserializeOwned>(found: Kept<Value>) -> Result<Kept<T>> {
    kept(found.body)
}

fn kept<T: DeserializeOwned>(document: Value) -> Result<Kept<T>> {
    let etag = document["_etag"].as_str().unwrap_or_default().to_owned();
    let seconds = document["_ts"].as_u64().unwrap_or(0);
    let id = document["id"].as_str().unwrap_or_default().to_owned();
    let body = serde_json::from_value(document).map_err(|error| {
        Error::corrupt(format!("document {id} of the lease container can't be read"))
            .with_source(error)
    })?;
    Ok(Kept { body, etag, written_at: Timestamp::from_millis(seconds.saturating_mul(1_000)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_differ_however_the_names_are_cut() {
        assert_ne!(id("lease", &[b"ab", b"c"]), id("lease", &[b"a", b"bc"]));
        assert_ne!(id("lease", &[b"a"]), id("relay", &[b"a"]));
        assert!(
            id("lease", &["a/b?#\\".as_bytes()])
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b == b'-')
        );
    }

    fn results(statuses: &[u16]) -> Vec<TransactionalBatchOperationResult> {
        let results = statuses.iter().map(|status| serde_json::json!({ "statusCode": status }));
        serde_json::from_value(Value::Array(results.collect())).expect("results")
    }

    #[test]
    fn the_first_that_failed_by_itself_decides() {
        for stale in [[404, 424], [424, 409], [424, 412]] {
            let answer = verdict(&results(&stale), 2).expect("an answer");
            assert!(matches!(answer, Written::Stale), "{stale:?}");
        }
        for failed in [[424, 413], [429, 424], [424, 424]] {
            assert!(verdict(&results(&failed), 2).is_err(), "{failed:?}");
        }
        assert!(matches!(verdict(&results(&[201, 200]), 2), Ok(Written::All(_))));
        assert!(verdict(&results(&[201]), 2).is_err(), "an answer is missing");
    }
}
