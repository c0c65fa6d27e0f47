//! W3C trace context: the two headers that travel with an event.
//!
//! What lives here: the header names and their check. What does not: spans and exporters.
//! Invariant: a `traceparent` that does not have the W3C form is never passed on.

use crate::{Error, Result};

/// Name of the header that carries the caller's span (<https://www.w3.org/TR/trace-context/>).
pub const TRACEPARENT: &str = "traceparent";
/// Name of the header that carries vendors' additions.
pub const TRACESTATE: &str = "tracestate";

/// The caller's span, to be continued by whoever receives the event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceContext {
    /// `00-<32 hex>-<16 hex>-<2 hex>`.
    pub traceparent: String,
    /// Vendors' additions, if any.
    pub tracestate: Option<String>,
}

impl TraceContext {
    /// Takes a `traceparent` of W3C form.
    ///
    /// # Errors
    /// [`ErrorKind::Permanent`](crate::ErrorKind::Permanent) if it has another form.
    pub fn new(traceparent: impl Into<String>, tracestate: Option<String>) -> Result<Self> {
        let traceparent = traceparent.into();
        let mut parts = traceparent.split('-');
        let mut part = |len: usize| {
            parts.next().is_some_and(|part| {
                part.len() == len
                    && part.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
            })
        };
        let well_formed = part(2) && part(32) && part(16) && part(2);
        if !well_formed {
            return Err(Error::permanent(
                "traceparent has not the W3C form 00-<32 hex>-<16 hex>-<2 hex>",
            ));
        }
        Ok(Self { traceparent, tracestate })
    }
}
