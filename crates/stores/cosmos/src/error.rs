//! From the service's status codes to reactions; nowhere else in this crate.
//!
//! What lives here: the mapping, with a remedy for each row. What does not: what is refused before
//! the service is asked, and what a status means for one document of a batch (`documents.rs`).
//! Invariant: matched by status and sub-status, never by text; no answer's content is in an error.

use std::time::Duration;

use azure_data_cosmos::CosmosError;
use postrider_core::{Error, ErrorKind};

/// Statuses and sub-statuses that code branches on.
pub(crate) const NOT_FOUND: u16 = 404;
pub(crate) const CONFLICT: u16 = 409;
pub(crate) const PRECONDITION_FAILED: u16 = 412;
pub(crate) const TOO_LARGE: u16 = 413;
/// What the operations of a failed batch say that did not fail themselves.
pub(crate) const FAILED_DEPENDENCY: u16 = 424;

/// The kind of a status, and what a person should do about it.
fn classify(
    status: u16,
    sub_status: Option<u32>,
    retry_after: Option<Duration>,
) -> (ErrorKind, &'static str) {
    let throttled = ErrorKind::Throttled { retry_after };
    match (status, sub_status.unwrap_or_default()) {
        (429, _) => (throttled, "the request units are used up for now; raise the throughput"),
        (449, _) => (throttled, "another write was under way; it is tried again"),
        (404, 1002) => (ErrorKind::Transient, "a replica is behind the session; try again"),
        (404, 1003) => (
            ErrorKind::Permanent,
            "the database or container does not exist; make it, or check names",
        ),
        (404, _) => (ErrorKind::Permanent, "there is no such document, database or container"),
        (410, _) => {
            (ErrorKind::Transient, "the container is being split, merged or moved; try again")
        }
        (401, _) => (ErrorKind::Permanent, "the key or token is refused; check it, and the clock"),
        (403, 3) => (ErrorKind::Transient, "the region takes no writes now; try again"),
        (403, 1008) => (ErrorKind::Transient, "the region left the account; try again"),
        (403, _) => {
            (ErrorKind::Permanent, "the identity has no right to it, or a firewall refuses it")
        }
        (409, _) => (ErrorKind::Permanent, "a document of this id exists already"),
        (412, _) => {
            (ErrorKind::Permanent, "the document was changed by somebody else; read it again")
        }
        (413, _) => (ErrorKind::Permanent, "the document or batch is too large; make it smaller"),
        (400, _) => (ErrorKind::Permanent, "the service refuses the request as malformed"),
        // The client's own: no page with such a document will ever be read.
        (500, 20020) => (
            ErrorKind::Corrupt,
            "a document can't be read by the SDK; one that is nested more than 120 deep is none",
        ),
        (408, _) | (500..=599, _) => {
            (ErrorKind::Transient, "the account could not be reached or did not answer; try again")
        }
        _ => (ErrorKind::Permanent, "the service refuses the request"),
    }
}

/// Turns a status of the service into a reaction; `place` is a verb and an object.
pub(crate) fn status_error(
    place: &str,
    status: u16,
    sub_status: Option<u32>,
    retry_after: Option<Duration>,
) -> Error {
    let (kind, remedy) = classify(status, sub_status, retry_after);
    let code = sub_status.map_or_else(|| status.to_string(), |sub| format!("{status}/{sub}"));
    Error::new(kind, format!("{place}: {remedy} ({code})"))
}

/// Turns the SDK's error into a reaction; `place` is a verb and an object. Its text may hold parts
/// of documents, and so is not taken over.
pub fn cosmos_error(place: &str, error: &CosmosError) -> Error {
    let (status, sub_status) = status(error);
    status_error(place, status, sub_status, retry_after(error))
}

/// [`cosmos_error`] as the argument of `map_err`.
pub(crate) fn failed(place: &'static str) -> impl FnOnce(CosmosError) -> Error {
    move |error| cosmos_error(place, &error)
}

/// The status, and what tells one from another.
pub(crate) fn status(error: &CosmosError) -> (u16, Option<u32>) {
    let status = error.status();
    let sub_status = status.sub_status().map(|sub| u32::from(sub.value()));
    (u16::from(status.status_code()), sub_status)
}

/// The wait that the service named.
pub(crate) fn retry_after(error: &CosmosError) -> Option<Duration> {
    let headers = error.response()?.headers();
    headers.retry_after_ms.map(Duration::from_millis)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_has_its_reaction() {
        let throttled = ErrorKind::Throttled { retry_after: Some(Duration::from_millis(7)) };
        for (status, sub_status, kind) in [
            (429, Some(3200), throttled),
            (449, None, throttled),
            (404, Some(1002), ErrorKind::Transient),
            (404, Some(1003), ErrorKind::Permanent),
            (404, None, ErrorKind::Permanent),
            (410, Some(1002), ErrorKind::Transient),
            (410, Some(1007), ErrorKind::Transient),
            (410, Some(1000), ErrorKind::Transient),
            (401, None, ErrorKind::Permanent),
            (403, Some(3), ErrorKind::Transient),
            (403, Some(1008), ErrorKind::Transient),
            (403, Some(5300), ErrorKind::Permanent),
            (400, Some(1001), ErrorKind::Permanent),
            (409, None, ErrorKind::Permanent),
            (412, None, ErrorKind::Permanent),
            (413, None, ErrorKind::Permanent),
            (408, Some(20008), ErrorKind::Transient),
            (500, None, ErrorKind::Transient),
            (500, Some(20020), ErrorKind::Corrupt),
            (503, Some(20003), ErrorKind::Transient),
            (418, None, ErrorKind::Permanent),
        ] {
            let wait = Some(Duration::from_millis(7));
            let error = status_error("do it", status, sub_status, wait);
            assert_eq!(error.kind(), kind, "{status} {sub_status:?}");
            assert!(error.to_string().contains(&status.to_string()), "{error}");
        }
    }
}
