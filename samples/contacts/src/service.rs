//! Contacts, read and changed through a unit of work.
//!
//! What lives here: the service and its use cases. What does not: HTTP (`api`), the contact's rules
//! (`domain.rs`) and the choice of a store (`compose.rs`).
//! Invariant: a change is made on the version that was read, or not at all: two clients can never
//! overwrite each other unseen, whether they send `If-Match` or not.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::middleware::from_fn;
use postrider::{
    Clock, CommitError, DocumentError, DocumentStore, ETag, EntityRead, ErrorKind, Removal,
    Repository, Timestamp, UnitOfWork,
};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::api::{self, IfMatch};
use crate::config::Preconditions;
use crate::domain::{Contact, NewContact};
use crate::problem::{Problem, answer_with_problems};
use crate::receiver::{EventStream, Receiver};
use crate::trace::{RequestTrace, continue_trace};
use crate::{page, server};

/// How often a change is tried when others change the same contact at the same time.
const MAX_ATTEMPTS: u32 = 8;

/// The contacts service. Cloning shares it.
#[derive(Clone)]
pub struct Service(Arc<Parts>);

/// What a service is composed of.
pub(crate) struct Parts {
    pub(crate) documents: Arc<dyn DocumentStore>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) preconditions: Preconditions,
    pub(crate) receiver: Receiver,
    /// Cancelled when the server drains.
    pub(crate) draining: CancellationToken,
}

impl Service {
    pub(crate) fn new(parts: Parts) -> Self {
        Self(Arc::new(parts))
    }

    /// Everything the service answers: the API, the receiver and the pages.
    pub fn router(&self) -> Router {
        api::routes()
            .merge(page::routes())
            .fallback(|| async { Problem::not_found("there is nothing at this path") })
            .method_not_allowed_fallback(|| async { Problem::method_not_allowed() })
            .layer(from_fn(answer_with_problems))
            .layer(from_fn(continue_trace))
            .with_state(self.clone())
    }

    /// Serves until `stop` completes; then drains: requests under way are answered, and event
    /// streams end.
    pub async fn serve(&self, listener: TcpListener, stop: impl Future<Output = ()>) {
        server::serve(listener, self.router(), self.draining().clone(), stop).await;
    }

    /// The events that the receiver gets, from the opening of this service on.
    pub fn received(&self) -> EventStream {
        self.receiver().follow_new(self.draining().clone())
    }

    pub(crate) fn preconditions(&self) -> Preconditions {
        self.0.preconditions
    }

    pub(crate) fn receiver(&self) -> &Receiver {
        &self.0.receiver
    }

    pub(crate) fn draining(&self) -> &CancellationToken {
        &self.0.draining
    }

    pub(crate) fn now(&self) -> Timestamp {
        self.0.clock.now()
    }

    fn contacts(&self) -> Repository<Contact, dyn DocumentStore> {
        Repository::new(Arc::clone(&self.0.documents))
    }

    /// Whether the store answers.
    pub(crate) async fn check(&self) -> Result<(), Problem> {
        self.contacts().read_page(1, None).await?;
        Ok(())
    }

    /// One contact with its version.
    pub(crate) async fn read(&self, id: Uuid) -> Result<(Contact, ETag), Problem> {
        match self.contacts().read(&id.to_string(), None).await? {
            EntityRead::Found(contact, etag) => Ok((contact, etag)),
            EntityRead::NotModified | EntityRead::NotFound => {
                Err(Problem::not_found("there is no contact of this id"))
            }
        }
    }

    /// One page of contacts, and where the next one begins.
    pub(crate) async fn page(
        &self,
        size: u32,
        continuation: Option<String>,
    ) -> Result<(Vec<Contact>, Option<String>), Problem> {
        let given = continuation.is_some();
        let page = self.contacts().read_page(size, continuation).await.map_err(|error| {
            // The size is within limits, so that only a token can be wrong for ever.
            if given && error.kind() == ErrorKind::Permanent {
                Problem::field("x-continuation-token", "is not one of this service's")
            } else {
                Problem::from(error)
            }
        })?;
        let contacts = page.entities.into_iter().map(|(contact, _)| contact).collect();
        Ok((contacts, page.continuation))
    }

    /// Creates a contact under a fresh id.
    pub(crate) async fn create(
        &self,
        new: NewContact,
        trace: &RequestTrace,
    ) -> Result<(Uuid, ETag), Problem> {
        let id = Uuid::now_v7();
        let mut unit = self.unit_of_work(trace);
        unit.create(Contact::new(id, new, self.now()));
        let etag = commit(&mut unit, id).await?;
        Ok((id, etag))
    }

    /// Changes a contact in a version that `condition` allows. When somebody else was faster, the
    /// change is made again on what they left, as long as the condition allows that.
    pub(crate) async fn change(
        &self,
        id: Uuid,
        condition: &IfMatch,
        trace: &RequestTrace,
        change: impl Fn(&mut Contact, Timestamp) + Send + Sync,
    ) -> Result<ETag, Problem> {
        for attempt in 0..MAX_ATTEMPTS {
            let (mut contact, etag) = self.read(id).await?;
            if !condition.allows(&etag) {
                return Err(Problem::precondition_failed());
            }
            change(&mut contact, self.now());
            let mut unit = self.unit_of_work(trace);
            if contact.is_deleted() {
                unit.delete(contact, etag, Removal::Soft);
            } else {
                unit.update(contact, etag);
            }
            match commit(&mut unit, id).await {
                Ok(etag) => return Ok(etag),
                Err(Failure::Overtaken) => tokio::time::sleep(pause(attempt)).await,
                Err(Failure::Other(problem)) => return Err(problem),
            }
        }
        Err(Problem::conflict("too many changes of this contact at the same time; try again"))
    }

    fn unit_of_work(&self, trace: &RequestTrace) -> UnitOfWork<dyn DocumentStore> {
        let mut unit = UnitOfWork::new(Arc::clone(&self.0.documents), Arc::clone(&self.0.clock));
        unit.trace(trace.context().clone());
        unit
    }
}

/// Why a commit saved nothing.
enum Failure {
    /// Somebody else changed the contact in between.
    Overtaken,
    Other(Problem),
}

impl From<Failure> for Problem {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Overtaken => Self::precondition_failed(),
            Failure::Other(problem) => problem,
        }
    }
}

async fn commit(unit: &mut UnitOfWork<dyn DocumentStore>, id: Uuid) -> Result<ETag, Failure> {
    let problem = match unit.commit().await {
        Ok(committed) => {
            let etag = committed.etag(&id.to_string()).cloned();
            return Ok(etag.expect("a unit of work with one contact saves that one"));
        }
        Err(CommitError::PreconditionFailed { .. }) => return Err(Failure::Overtaken),
        Err(CommitError::NotFound { id }) => DocumentError::NotFound { id }.into(),
        Err(CommitError::Conflict { id }) => DocumentError::Conflict { id }.into(),
        Err(CommitError::TooLarge(what)) => DocumentError::TooLarge(what).into(),
        Err(CommitError::Throttled { retry_after }) => {
            postrider::Error::new(ErrorKind::Throttled { retry_after }, "commit").into()
        }
        Err(CommitError::Invalid(error)) => Problem::internal(error.chain()),
        Err(CommitError::Handler(error)) => Problem::internal(error.to_string()),
        Err(CommitError::Store(error)) => error.into(),
    };
    Err(Failure::Other(problem))
}

/// Grows with each attempt; random, so that those who met once do not meet again.
fn pause(attempt: u32) -> Duration {
    let spread_ms = 2u64 << attempt;
    let (random, _) = Uuid::new_v4().as_u64_pair();
    Duration::from_millis(random % spread_ms)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use async_trait::async_trait;
    use axum::response::IntoResponse as _;
    use postrider::{
        Document, DocumentBatch, DocumentPage, DocumentRead, PageRequest, SavedDocument,
        SystemClock,
    };

    use super::*;
    use crate::receiver::NoJournal;
    use crate::values::{Address, Company, Name};

    /// A store whose every commit fails alike.
    struct Failing {
        commits: AtomicU32,
        failure: fn() -> DocumentError,
    }

    fn new_contact() -> NewContact {
        let name = Name::new("John".into(), "Doe".into()).expect("a valid name");
        let company = Company::new("Contoso".into(), Address::default()).expect("a valid company");
        NewContact { name, email: None, description: None, company }
    }

    #[async_trait]
    impl DocumentStore for Failing {
        async fn read(
            &self,
            partition_key: &str,
            id: &str,
            _: Option<&ETag>,
        ) -> postrider::Result<DocumentRead> {
            let contact = Contact::new(Uuid::nil(), new_contact(), Timestamp::default());
            Ok(DocumentRead::Found(Document {
                id: id.to_owned(),
                partition_key: partition_key.to_owned(),
                document_type: "contact".to_owned(),
                data: serde_json::to_vec(&contact).expect("serialises").into(),
                ttl_seconds: -1,
                deleted: false,
                etag: ETag::new("\"1\""),
                written_at: Timestamp::default(),
            }))
        }

        async fn read_page(&self, _: &PageRequest) -> postrider::Result<DocumentPage> {
            Ok(DocumentPage { documents: Vec::new(), continuation: None })
        }

        async fn commit(&self, _: DocumentBatch) -> Result<Vec<SavedDocument>, DocumentError> {
            self.commits.fetch_add(1, Ordering::Relaxed);
            Err((self.failure)())
        }
    }

    fn service(failure: fn() -> DocumentError) -> (Service, Arc<Failing>) {
        let documents = Arc::new(Failing { commits: AtomicU32::new(0), failure });
        let service = Service::new(Parts {
            documents: documents.clone(),
            clock: Arc::new(SystemClock),
            preconditions: Preconditions::default(),
            receiver: Receiver::new(None, Arc::new(NoJournal)),
            draining: CancellationToken::new(),
        });
        (service, documents)
    }

    async fn change(service: &Service) -> u16 {
        let condition = IfMatch::default();
        let trace = RequestTrace::default();
        let changed = service.change(Uuid::nil(), &condition, &trace, Contact::delete).await;
        changed.expect_err("the commit fails").into_response().status().as_u16()
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_that_is_overtaken_again_and_again_ends_with_409() {
        let overtaken =
            || DocumentError::PreconditionFailed { id: "1".to_owned(), current_etag: None };
        let (service, store) = service(overtaken);
        assert_eq!(change(&service).await, 409);
        assert_eq!(store.commits.load(Ordering::Relaxed), MAX_ATTEMPTS);
    }

    #[tokio::test]
    async fn each_failure_of_a_commit_has_its_status_and_is_not_tried_again() {
        let rows: [(fn() -> DocumentError, u16); 7] = [
            (|| DocumentError::NotFound { id: "1".to_owned() }, 404),
            (|| DocumentError::Conflict { id: "1".to_owned() }, 409),
            (|| DocumentError::TooLarge("too large".to_owned()), 413),
            (|| postrider::Error::transient("locked").into(), 503),
            (|| postrider::Error::new(throttled(), "busy").into(), 503),
            (|| postrider::Error::permanent("refused").into(), 500),
            (|| postrider::Error::corrupt("damaged").into(), 500),
        ];
        for (failure, status) in rows {
            let (service, store) = service(failure);
            assert_eq!(change(&service).await, status);
            assert_eq!(store.commits.load(Ordering::Relaxed), 1);
            let created = service.create(new_contact(), &RequestTrace::default()).await;
            let problem = created.expect_err("the commit fails");
            assert_eq!(problem.into_response().status().as_u16(), status);
        }
    }

    fn throttled() -> ErrorKind {
        ErrorKind::Throttled { retry_after: Some(Duration::from_millis(1_500)) }
    }
}
