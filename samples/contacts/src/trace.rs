//! The request's trace: continued from the caller's `traceparent`, else begun here.
//!
//! What lives here: the middleware and the context that events are raised under. What does not:
//! exporting spans.
//! Invariant: every request has a trace id, shown in problems and carried by the events it raises.

use std::sync::Arc;

use axum::extract::Request;
use axum::http::HeaderMap;
use axum::middleware::Next;
use axum::response::Response;
use postrider::{TRACEPARENT, TRACESTATE, TraceContext};
use uuid::Uuid;

/// The trace of one request.
#[derive(Debug, Clone)]
pub(crate) struct RequestTrace(Arc<TraceContext>);

impl RequestTrace {
    fn from_headers(headers: &HeaderMap) -> Self {
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
        let caller = text(TRACEPARENT)
            .and_then(|parent| TraceContext::new(parent, text(TRACESTATE).map(str::to_owned)).ok());
        caller.map_or_else(Self::default, |context| Self(Arc::new(context)))
    }

    /// The 32 hexadecimal digits that name the trace.
    pub(crate) fn trace_id(&self) -> &str {
        self.0.traceparent.split('-').nth(1).unwrap_or_default()
    }

    /// What events carry.
    pub(crate) fn context(&self) -> &TraceContext {
        &self.0
    }
}

impl Default for RequestTrace {
    /// A new trace. Version 4 UUIDs are random and never all zero, as W3C asks.
    fn default() -> Self {
        let trace = Uuid::new_v4().simple().to_string();
        let span = Uuid::new_v4().simple().to_string();
        let traceparent = format!("00-{trace}-{}-00", &span[..16]);
        let context = TraceContext::new(traceparent, None).expect("made in the W3C form");
        Self(Arc::new(context))
    }
}

/// Puts the request's trace where handlers and problems find it.
pub(crate) async fn continue_trace(mut request: Request, next: Next) -> Response {
    let trace = RequestTrace::from_headers(request.headers());
    request.extensions_mut().insert(trace);
    next.run(request).await
}
