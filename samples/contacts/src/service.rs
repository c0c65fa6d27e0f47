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
use crate::receiver::{self, EventStream, Receiver};
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
            .merge(receiver::routes())
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
