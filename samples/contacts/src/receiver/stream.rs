//! The received events as a stream that goes on: for pages and for a terminal.
//!
//! What lives here: following the journal, and Server-Sent Events. What does not: receiving.
//! Invariant: a reader sees the events in the journal's order without gaps, from where it was; a
//! slow one costs a page of them in memory, and loses only what the journal keeps no longer.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, Stream};
use postrider::Result;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::journal::{Journal, ReceivedEvent};
use crate::problem::{Problem, ProblemDocument};
use crate::service::Service;

const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");
/// Events read from the journal at a time.
const PAGE: u32 = 50;
/// Another process may write to the same journal and cannot wake this one.
const POLL: Duration = Duration::from_secs(1);
/// Comments that keep proxies from closing a quiet stream.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// How soon a browser connects again.
const RECONNECT: Duration = Duration::from_secs(1);

/// The received events, from some place on; ends when the service drains.
pub struct EventStream {
    journal: Arc<dyn Journal>,
    arrivals: watch::Receiver<u64>,
    draining: CancellationToken,
    last: u64,
    read: VecDeque<ReceivedEvent>,
}

impl EventStream {
    pub(super) fn new(
        journal: Arc<dyn Journal>,
        arrivals: watch::Receiver<u64>,
        draining: CancellationToken,
        last: u64,
    ) -> Self {
        Self { journal, arrivals, draining, last, read: VecDeque::new() }
    }

    /// Waits for the next event; nothing once the service drains.
    ///
    /// # Errors
    /// As the journal's database; a `Transient` one may be called again.
    ///
    /// # Cancellation
    /// Cancel-safe: a dropped call loses nothing.
    pub async fn next(&mut self) -> Result<Option<ReceivedEvent>> {
        loop {
            if let Some(event) = self.read.pop_front() {
                self.last = event.number;
                return Ok(Some(event));
            }
            // Marked as seen before the read: what arrives during it wakes the next turn.
            self.arrivals.borrow_and_update();
            self.read.extend(self.journal.after(self.last, PAGE).await?);
            if !self.read.is_empty() {
                continue;
            }
            tokio::select! {
                () = self.draining.cancelled() => return Ok(None),
                _ = timeout(POLL, self.arrivals.changed()) => {}
            }
        }
    }
}

/// `<journal>.<number>`: a browser that comes back to another journal begins at its start.
fn position(journal: Uuid, headers: &HeaderMap) -> u64 {
    let text = headers.get(LAST_EVENT_ID).and_then(|value| value.to_str().ok());
    let parts = text.and_then(|text| text.split_once('.'));
    match parts {
        Some((name, number)) if name == journal.to_string() => number.parse().unwrap_or(0),
        Some(_) | None => 0,
    }
}

fn sse_event(journal: Uuid, event: &ReceivedEvent) -> SseEvent {
    let data = serde_json::to_string(event).expect("texts, a number and JSON serialise");
    SseEvent::default().id(format!("{journal}.{}", event.number)).retry(RECONNECT).data(data)
}

fn messages(
    journal: Uuid,
    events: EventStream,
    permit: tokio::sync::OwnedSemaphorePermit,
) -> impl Stream<Item = Result<SseEvent, Infallible>> {
    stream::unfold((events, permit), move |(mut events, permit)| async move {
        match events.next().await {
            Ok(Some(event)) => Some((Ok(sse_event(journal, &event)), (events, permit))),
            Ok(None) => None,
            Err(error) => {
                // The stream ends; the browser connects again and goes on where it was.
                tracing::warn!(cause = error.chain(), "event stream ended: read the journal");
                None
            }
        }
    })
}

/// Follow the received events
#[utoipa::path(get, path = "/api/events", tag = "receiver",
    description = "Server-Sent Events: what is kept of what arrived, then what arrives.",
    params(
        ("last-event-id" = Option<String>, Header,
            description = "The id of the last event that you have; what follows it is sent"),
    ),
    responses(
        (status = 200, description = "A stream without an end", body = ReceivedEvent,
            content_type = "text/event-stream"),
        (status = 503, description = "Too many streams are open", body = ProblemDocument,
            content_type = "application/problem+json"),
    ))]
pub(super) async fn follow(
    State(service): State<Service>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let receiver = service.receiver();
    let permit = receiver.stream_permit().ok_or_else(|| {
        let wait = Some(Duration::from_secs(5));
        Problem::unavailable("too many event streams are open", wait, "event stream limit")
    })?;
    let journal = receiver.journal_identity();
    let events = receiver.follow(position(journal, &headers), service.draining().clone());
    let stream = Sse::new(messages(journal, events, permit))
        .keep_alive(KeepAlive::new().interval(KEEP_ALIVE));
    let headers = [(header::CACHE_CONTROL, HeaderValue::from_static("no-store"))];
    Ok((headers, stream).into_response())
}
