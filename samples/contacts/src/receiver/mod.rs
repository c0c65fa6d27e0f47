//! The receiver: a consumer of the contacts' events, such as any other service would have.
//!
//! What lives here: the webhook's endpoint. What does not: the sender, which is Postrider's relay;
//! the journal (`journal.rs`) and its followers (`stream.rs`).
//! Invariant: only signed words are believed. An answer of 2xx means that the event stands in the
//! journal, once, however often it is delivered.

mod journal;
mod postgres;
mod sqlite;
mod stream;

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, StatusCode};
use postrider::sinks::webhook::verify::{SignedRequest, Verifier};
use postrider::sinks::webhook::{SIGNATURE_HEADER, TIMESTAMP_HEADER, WEBHOOK_ID_HEADER};
use postrider::{EventId, Timestamp};
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio_util::sync::CancellationToken;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

#[cfg(test)]
pub(crate) use journal::NoJournal;
pub use journal::ReceivedEvent;
pub(crate) use journal::{Journal, Receipt};
pub(crate) use postgres::PostgresJournal;
pub(crate) use sqlite::SqliteJournal;
pub use stream::EventStream;

use crate::problem::{Problem, ProblemDocument};
use crate::service::Service;
use journal::Arrival;

/// Largest delivery: a created event at all limits is below 32 KiB.
const MAX_DELIVERY_BYTES: usize = 256 * 1024;
/// Most event streams at a time.
const MAX_STREAMS: usize = 64;

/// Receives events, keeps them in a journal, and tells those who follow it.
pub(crate) struct Receiver {
    verifier: Option<Verifier>,
    journal: Arc<dyn Journal>,
    arrivals: watch::Sender<u64>,
    streams: Arc<Semaphore>,
}

impl Receiver {
    /// Without a verifier nothing is received.
    pub(crate) fn new(verifier: Option<Verifier>, journal: Arc<dyn Journal>) -> Self {
        let streams = Arc::new(Semaphore::new(MAX_STREAMS));
        Self { verifier, journal, arrivals: watch::Sender::new(0), streams }
    }

    pub(crate) fn follow(&self, last: u64, draining: CancellationToken) -> EventStream {
        EventStream::new(Arc::clone(&self.journal), self.arrivals.subscribe(), draining, last)
    }

    /// What arrives from the opening of the journal on.
    pub(crate) fn follow_new(&self, draining: CancellationToken) -> EventStream {
        self.follow(self.journal.opened_at(), draining)
    }

    fn journal_identity(&self) -> Uuid {
        self.journal.identity()
    }

    fn stream_permit(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.streams).try_acquire_owned().ok()
    }

    async fn receive(&self, arrival: Arrival) -> Result<Receipt, Problem> {
        let receipt = self.journal.receive(arrival).await?;
        if receipt == Receipt::First {
            self.arrivals.send_modify(|count| *count += 1);
        }
        Ok(receipt)
    }
}

/// The receiver's endpoints.
pub(crate) fn routes() -> OpenApiRouter<Service> {
    OpenApiRouter::new()
        .routes(routes!(receive))
        .layer(DefaultBodyLimit::max(MAX_DELIVERY_BYTES))
        .routes(routes!(stream::follow))
}

/// The signed words of a delivery that this consumer reads.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Words {
    action: String,
    contact_id: Uuid,
    id: Uuid,
}

/// Receive an event
#[utoipa::path(post, path = "/webhooks/contacts", tag = "receiver",
    description = "Takes a delivery that is signed by the rules of Standard Webhooks.",
    params(
        ("webhook-id" = String, Header, description = "The event's id"),
        ("webhook-timestamp" = u64, Header, description = "When it was signed, in seconds"),
        ("webhook-signature" = String, Header, description = "v1,<HMAC-SHA256 in base 64>"),
    ),
    request_body(content = Object, description = "The event's payload"),
    responses(
        (status = 204, description = "Kept, now or before"),
        (status = 400, description = "No contact event", body = ProblemDocument,
            content_type = "application/problem+json"),
        (status = 401, description = "The signature does not fit", body = ProblemDocument,
            content_type = "application/problem+json"),
        (status = 404, description = "Nothing is received here", body = ProblemDocument,
            content_type = "application/problem+json"),
    ))]
async fn receive(
    State(service): State<Service>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<StatusCode, Problem> {
    let receiver = service.receiver();
    let Some(verifier) = &receiver.verifier else {
        return Err(Problem::not_found("this service was started without a webhook secret"));
    };
    let body = body.map_err(unreadable)?;
    verify(verifier, &headers, &body, service.now())?;
    receiver.receive(read(&headers, &body)?).await?;
    Ok(StatusCode::NO_CONTENT)
}

fn verify(
    verifier: &Verifier,
    headers: &HeaderMap,
    body: &[u8],
    now: Timestamp,
) -> Result<(), Problem> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let request = SignedRequest {
        id: text(WEBHOOK_ID_HEADER),
        timestamp: text(TIMESTAMP_HEADER),
        signature: text(SIGNATURE_HEADER),
        body,
    };
    verifier.verify(&request, now).map_err(|error| Problem::unauthorized(error.to_string()))
}

fn unreadable(rejection: BytesRejection) -> Problem {
    if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE {
        Problem::too_large(format!("a delivery has at most {MAX_DELIVERY_BYTES} bytes"))
    } else {
        Problem::bad_request(rejection.body_text())
    }
}

/// Reads a verified delivery. Type and key come from the body, which the signature covers; headers
/// that say something else are refused.
fn read(headers: &HeaderMap, body: &[u8]) -> Result<Arrival, Problem> {
    let words: Words = serde_json::from_slice(body)
        .map_err(|error| Problem::bad_request(format!("the body is no contact event: {error}")))?;
    let key = words.contact_id.to_string();
    let says = [
        (WEBHOOK_ID_HEADER, words.id.to_string()),
        ("postrider-type", words.action.clone()),
        ("postrider-key", key.clone()),
    ];
    for (name, signed) in says {
        if headers.get(name).is_some_and(|value| value.as_bytes() != signed.as_bytes()) {
            return Err(Problem::bad_request(format!("header {name} is not what the body says")));
        }
    }
    let payload: Box<RawValue> = serde_json::from_slice(body)
        .map_err(|error| Problem::bad_request(format!("the body is no JSON: {error}")))?;
    Ok(Arrival { id: EventId::from_uuid(words.id), event_type: words.action, key, payload })
}
