//! One transactional batch: what goes in, and what the service says of it.
//!
//! What lives here: the checks before it is sent, its operations in order (documents, then events),
//! and the reading of its answer. What does not: what a commit makes of that (`documents.rs`).
//! Invariant: an answer of 207 is a failure however it is wrapped; the first operation that did not
//! merely depend on another decides.

use azure_core::http::Etag;
use azure_data_cosmos::TransactionalBatch;
use azure_data_cosmos::models::{TransactionalBatchOperationResult, TransactionalBatchResponse};
use azure_data_cosmos::options::{BatchDeleteOptions, BatchReplaceOptions, Precondition};
use postrider_core::{DocumentError, DocumentOperation, ETag, Error, ErrorKind, Event, Result};
use serde_json::Value;

use crate::append::{Numbering, event_documents};
use crate::document_json::{check_id, to_json};
use crate::documents::Seen;
use crate::error::{
    CONFLICT, FAILED_DEPENDENCY, NOT_FOUND, PRECONDITION_FAILED, TOO_LARGE, cosmos_error, failed,
    status, status_error,
};
use crate::numbers::counting;
use crate::{CosmosStore, Inner};

const SAVE: &str = "save the documents";
/// The service's own limit.
pub(crate) const MAX_OPERATIONS: usize = 100;
/// The service's own limit on a request's content: 2 MB.
pub(crate) const MAX_BATCH_BYTES: usize = 2 * 1024 * 1024;
/// What wraps an operation's document: its type, its id and a demanded version, and the brackets.
const OPERATION_BYTES: usize = 128;

/// What a commit saves, its events under their ids.
pub(crate) struct Work {
    pub(crate) partition_key: String,
    pub(crate) operations: Vec<DocumentOperation>,
    pub(crate) events: Vec<Event>,
}

/// Everything that can be refused before the service is asked.
pub(crate) fn check(inner: &Inner, work: &Work) -> Result<(), DocumentError> {
    let operations = work.operations.len() + work.events.len();
    if operations > MAX_OPERATIONS {
        return Err(DocumentError::TooLarge(format!(
            "{operations} operations and events in one commit; {MAX_OPERATIONS} are allowed: \
             split it"
        )));
    }
    let mut bytes = operations * OPERATION_BYTES;
    for operation in &work.operations {
        bytes += match operation {
            DocumentOperation::Create(document) | DocumentOperation::Replace { document, .. } => {
                check_partition_key(work, &document.id, &document.partition_key)?;
                // The number of the last event takes less than what wraps an operation.
                json_bytes(&to_json(document, None)?) + document.id.len()
            }
            DocumentOperation::Delete { id, .. } => {
                check_id(id)?;
                id.len()
            }
        };
    }
    for event in &work.events {
        check_partition_key(work, &event.id().to_string(), event.key().as_str())?;
    }
    let numbering = Numbering::WithoutEntity;
    for document in event_documents(inner, &work.events, numbering) {
        bytes += json_bytes(&document);
    }
    if bytes > MAX_BATCH_BYTES {
        return Err(DocumentError::TooLarge(format!(
            "{bytes} bytes in one commit; {MAX_BATCH_BYTES} are allowed: split it"
        )));
    }
    Ok(())
}

fn check_partition_key(work: &Work, id: &str, key: &str) -> Result<()> {
    match key == work.partition_key {
        true => Ok(()),
        false => Err(Error::permanent(format!(
            "{id} has the partition key {key:?}, its batch {:?}; commit them apart: a batch is of \
             one logical partition, and so is a key's order",
            work.partition_key
        ))),
    }
}

fn json_bytes(document: &Value) -> usize {
    document.to_string().len()
}

/// A batch to be sent.
pub(crate) struct Batch {
    batch: TransactionalBatch,
    operations: usize,
    /// Of the entity that counts, once this is saved.
    last_seq: Option<u64>,
    /// Whose version the caller did not demand: another one is as good.
    ours: Vec<usize>,
}

impl Batch {
    /// Lays it out: documents, then events.
    pub(crate) fn prepare(inner: &Inner, work: &Work, seen: &[Seen]) -> Result<Self> {
        let counting = counting(work);
        let before = counting.and_then(|at| seen[at].last_seq);
        let events = work.events.len() as u64;
        let (numbering, last_seq) = match counting {
            Some(_) => {
                let before = before.unwrap_or(0);
                let last = before + events;
                (Numbering::After(before), (last > 0).then_some(last))
            }
            None => (Numbering::WithoutEntity, None),
        };
        let mut laid = TransactionalBatch::new(work.partition_key.clone());
        for (at, operation) in work.operations.iter().enumerate() {
            let number = last_seq.filter(|_| Some(at) == counting);
            laid = add(laid, operation, number, seen[at].etag.as_ref())?;
        }
        for document in event_documents(inner, &work.events, numbering) {
            laid = laid.create_item(document).map_err(failed(SAVE))?;
        }
        let ours = (0..seen.len()).filter(|at| seen[*at].ours).collect();
        let operations = work.operations.len() + work.events.len();
        Ok(Self { batch: laid, operations, last_seq, ours })
    }

    pub(crate) fn last_seq(&self) -> Option<u64> {
        self.last_seq
    }
}

fn add(
    batch: TransactionalBatch,
    operation: &DocumentOperation,
    last_seq: Option<u64>,
    demanded: Option<&ETag>,
) -> Result<TransactionalBatch> {
    let demanded =
        demanded.map(|etag| Precondition::if_match(Etag::from(etag.as_str().to_owned())));
    let added = match operation {
        DocumentOperation::Create(document) => batch.create_item(to_json(document, last_seq)?),
        DocumentOperation::Replace { document, .. } => {
            let json = to_json(document, last_seq)?;
            let options = demanded.map(|one| BatchReplaceOptions::default().with_precondition(one));
            batch.replace_item(document.id.clone(), json, options)
        }
        DocumentOperation::Delete { id, .. } => {
            let options = demanded.map(|one| BatchDeleteOptions::default().with_precondition(one));
            Ok(batch.delete_item(id.clone(), options))
        }
    };
    added.map_err(failed(SAVE))
}

/// What the service said.
pub(crate) enum Answer {
    /// All of it is saved; the new versions, in order.
    Saved(Vec<String>),
    /// Nothing is: a version that the caller did not demand is not current any more.
    Raced,
    /// Nothing is, for one operation's sake.
    Refused { at: usize, status: u16 },
    /// Perhaps.
    Failed(Error),
}

impl CosmosStore {
    /// Sends a batch.
    ///
    /// # Errors
    /// `TooLarge` as the service counts, and what no other try would change.
    pub(crate) async fn send(&self, batch: &Batch) -> Result<Answer, DocumentError> {
        let container = self.current_container().await;
        let answer = match container.execute_transactional_batch(batch.batch.clone(), None).await {
            Ok(answer) => answer,
            Err(error) => {
                let (code, _) = status(&error);
                // A batch of one operation may fail as that one does.
                return match code {
                    CONFLICT | PRECONDITION_FAILED | NOT_FOUND if batch.operations == 1 => {
                        Ok(batch.decided(0, code))
                    }
                    _ => failure(cosmos_error(SAVE, &error), code),
                };
            }
        };
        let answer: TransactionalBatchResponse = match answer.into_model() {
            Ok(answer) => answer,
            Err(_) => {
                let unread = "save the documents: the answer can't be read; try again";
                return Ok(Answer::Failed(Error::transient(unread)));
            }
        };
        batch.verdict(answer.results())
    }
}

/// What becomes of a failure that no operation is to blame for.
fn failure(error: Error, status: u16) -> Result<Answer, DocumentError> {
    if status == TOO_LARGE {
        return Err(DocumentError::TooLarge(error.to_string()));
    }
    match error.kind() {
        ErrorKind::Transient | ErrorKind::Throttled { .. } => Ok(Answer::Failed(error)),
        ErrorKind::Permanent | ErrorKind::Fenced | ErrorKind::Unsupported | ErrorKind::Corrupt => {
            Err(error.into())
        }
    }
}

impl Batch {
    fn decided(&self, at: usize, status: u16) -> Answer {
        match self.ours.contains(&at) && matches!(status, PRECONDITION_FAILED | NOT_FOUND) {
            true => Answer::Raced,
            false => Answer::Refused { at, status },
        }
    }

    /// Reads the operations' results.
    fn verdict(
        &self,
        results: &[TransactionalBatchOperationResult],
    ) -> Result<Answer, DocumentError> {
        let by_itself = |code: u16| !(200..300).contains(&code) && code != FAILED_DEPENDENCY;
        let failed = results.iter().position(|result| by_itself(result.status_code()));
        let Some(at) = failed else {
            let all = results.len() == self.operations;
            if !all || !results.iter().all(TransactionalBatchOperationResult::is_success) {
                let unclear = "save the documents: the answer has no result of its own; try again";
                return Ok(Answer::Failed(Error::transient(unclear)));
            }
            let etags = results.iter().map(|result| result.etag().unwrap_or_default().to_owned());
            return Ok(Answer::Saved(etags.collect()));
        };
        let result = &results[at];
        let code = result.status_code();
        match code {
            CONFLICT | PRECONDITION_FAILED | NOT_FOUND => Ok(self.decided(at, code)),
            _ => {
                let (sub_status, wait) = (result.substatus_code(), result.retry_after());
                failure(status_error(SAVE, code, sub_status, wait), code)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(operations: usize, ours: &[usize]) -> Batch {
        let batch = TransactionalBatch::new("p");
        Batch { batch, operations, last_seq: None, ours: ours.to_vec() }
    }

    fn results(statuses: &[u16]) -> Vec<TransactionalBatchOperationResult> {
        let results = statuses.iter().map(|status| {
            serde_json::json!({ "statusCode": status, "eTag": "e", "retryAfterMilliseconds": 7 })
        });
        serde_json::from_value(Value::Array(results.collect())).expect("results")
    }

    #[test]
    fn the_first_that_failed_by_itself_decides() {
        for (statuses, at, code) in
            [([424, 409], 1, 409), ([412, 424], 0, 412), ([404, 409], 0, 404)]
        {
            let answer = batch(2, &[]).verdict(&results(&statuses)).expect("an answer");
            let Answer::Refused { at: by, status } = answer else { panic!("{statuses:?}") };
            assert_eq!((by, status), (at, code));
        }
        let large = batch(2, &[]).verdict(&results(&[424, 413]));
        assert!(matches!(large, Err(DocumentError::TooLarge(_))));
        let refused = batch(2, &[]).verdict(&results(&[400, 424]));
        assert!(matches!(refused, Err(DocumentError::Store(_))));
    }

    #[test]
    fn a_throttled_operation_says_how_long_to_wait() {
        for code in [429, 449] {
            let answer = batch(2, &[]).verdict(&results(&[424, code])).expect("an answer");
            let Answer::Failed(error) = answer else { panic!("{code} is a failure") };
            let wait = Some(std::time::Duration::from_millis(7));
            assert_eq!(error.kind(), ErrorKind::Throttled { retry_after: wait });
        }
    }

    #[test]
    fn no_answer_is_taken_for_success_unless_every_operation_succeeded() {
        let saved = batch(2, &[]).verdict(&results(&[201, 200])).expect("an answer");
        assert!(matches!(saved, Answer::Saved(etags) if etags == ["e", "e"]));
        for statuses in [&[201][..], &[424, 424], &[201, 424], &[]] {
            let answer = batch(2, &[]).verdict(&results(statuses)).expect("an answer");
            assert!(matches!(answer, Answer::Failed(_)), "{statuses:?}");
        }
    }

    #[test]
    fn another_version_than_ours_is_no_refusal_of_the_callers() {
        let answer = batch(2, &[0]).verdict(&results(&[412, 424])).expect("an answer");
        assert!(matches!(answer, Answer::Raced));
        let answer = batch(2, &[0]).verdict(&results(&[424, 412])).expect("an answer");
        assert!(matches!(answer, Answer::Refused { at: 1, status: 412 }));
    }
}
