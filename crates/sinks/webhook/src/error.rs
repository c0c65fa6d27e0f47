//! From HTTP's answers and failures to error kinds.
//!
//! What lives here: the two mappings, by status and by what went wrong on the way. What does not:
//! what follows, which the relay decides.
//! Invariant: what is wrong with *this event* is permanent; what is wrong with the endpoint (its
//! credentials, its route, its load) is transient, so that an outage parks nothing. No text holds
//! the URL or the answer's body.

use std::error::Error as StdError;
use std::io;
use std::time::{Duration, UNIX_EPOCH};

use postrider_core::{Error, ErrorKind, Timestamp};
use reqwest::StatusCode;
use reqwest::header::{HeaderMap, RETRY_AFTER};

use crate::resolve::ResolveError;

/// The error of an answer that is not 2xx.
pub(crate) fn status_error(status: StatusCode, headers: &HeaderMap, now: Timestamp) -> Error {
    let retry_after = || retry_after(headers, now);
    let (kind, meaning) = match status.as_u16() {
        300..=399 => (ErrorKind::Permanent, "a redirect, which is not followed; correct the url"),
        401 | 403 | 407 => (ErrorKind::Transient, "the credentials are refused"),
        404 | 405 => (ErrorKind::Transient, "nothing takes events at this url"),
        408 | 425 => (ErrorKind::Transient, "the receiver asks for another attempt"),
        409 | 421 | 423 => (ErrorKind::Transient, "the receiver is in no state to take it now"),
        410 => (ErrorKind::Permanent, "the receiver wants no more of these events"),
        413 => (ErrorKind::Permanent, "the event is too large for the receiver"),
        429 => (ErrorKind::Throttled { retry_after: retry_after() }, "the receiver asks to wait"),
        431 => (ErrorKind::Permanent, "the event's headers are too large for the receiver"),
        400..=499 => (ErrorKind::Permanent, "the receiver refuses the event"),
        503 => match retry_after() {
            None => (ErrorKind::Transient, "the receiver is unavailable"),
            wait => (ErrorKind::Throttled { retry_after: wait }, "the receiver is unavailable"),
        },
        _ => (ErrorKind::Transient, "the receiver failed"),
    };
    Error::new(kind, format!("webhook answered {}: {meaning}", status.as_u16()))
}

/// The wait that the header names: seconds, or a date (RFC 9110, 10.2.3).
fn retry_after(headers: &HeaderMap, now: Timestamp) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        // More digits than a u64 holds mean "for ever"; the relay has its own bound.
        return Some(Duration::from_secs(text.parse().unwrap_or(u64::MAX)));
    }
    let date = httpdate::parse_http_date(text).ok()?.duration_since(UNIX_EPOCH).ok()?;
    Some(Timestamp::default().plus(date).since(now))
}

/// The error of a request that got no answer.
pub(crate) fn transport_error(error: reqwest::Error) -> Error {
    let error = error.without_url();
    let builder = error.is_builder();
    let meaning = match (find::<ResolveError>(&error), find::<io::Error>(&error)) {
        (Some(ResolveError::Lookup(_) | ResolveError::Empty), _) => "its host cannot be resolved",
        (Some(ResolveError::Refused(_)), _) => {
            "its host has no public address; if that is meant, say allow_private = true"
        }
        _ if error.is_timeout() && error.is_connect() => "connecting took too long",
        _ if error.is_timeout() => "there was no answer in time",
        (None, Some(cause)) => match cause.kind() {
            io::ErrorKind::ConnectionRefused => "the connection was refused",
            io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::UnexpectedEof => "the connection was reset",
            io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => {
                "its host cannot be reached"
            }
            _ if error.is_connect() => "no TLS connection could be made",
            _ => "the connection failed",
        },
        (None, None) if builder => "the request cannot be built",
        (None, None) => "the connection was closed before an answer came",
    };
    // An event whose fate is unknown was not acknowledged: it will be sent again.
    let kind = if builder { ErrorKind::Permanent } else { ErrorKind::Transient };
    Error::new(kind, format!("webhook got no answer: {meaning}")).with_source(error)
}

/// The error of a check at start: a refused address is the configuration's to correct.
pub(crate) fn resolve_error(error: ResolveError) -> Error {
    match error {
        ResolveError::Refused(address) => Error::permanent(format!(
            "the webhook's host resolves to {address}, no public address; if that is meant, say \
             allow_private = true"
        )),
        ResolveError::Lookup(_) | ResolveError::Empty => {
            Error::transient("resolve the webhook's host").with_source(error)
        }
    }
}

/// The innermost cause of a type: layers wrap causes in errors of the same type.
fn find<'a, T: StdError + 'static>(error: &'a (dyn StdError + 'static)) -> Option<&'a T> {
    let mut found = None;
    let mut layer = Some(error);
    while let Some(current) = layer {
        found = current.downcast_ref::<T>().or(found);
        // An `io::Error` with a custom cause shows that cause's source, not the cause itself.
        let inner = current.downcast_ref::<io::Error>().and_then(|error| error.get_ref());
        layer = match inner {
            Some(inner) => Some(inner),
            None => current.source(),
        };
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(status: u16, retry_after: Option<&str>) -> ErrorKind {
        let mut headers = HeaderMap::new();
        if let Some(text) = retry_after {
            headers.insert(RETRY_AFTER, text.parse().expect("a header value"));
        }
        let now = Timestamp::from_millis(784_111_770_000); // Sun, 06 Nov 1994 08:49:30 GMT
        status_error(StatusCode::from_u16(status).expect("valid"), &headers, now).kind()
    }

    #[test]
    fn every_row_of_the_table() {
        for status in [301, 302, 304, 307, 308] {
            assert_eq!(answer(status, None), ErrorKind::Permanent, "{status}");
        }
        for status in
            [400, 402, 406, 410, 411, 412, 413, 414, 415, 417, 422, 424, 426, 428, 431, 451]
        {
            assert_eq!(answer(status, None), ErrorKind::Permanent, "{status}");
        }
        for status in [401, 403, 404, 405, 407, 408, 409, 421, 423, 425] {
            assert_eq!(answer(status, None), ErrorKind::Transient, "{status}");
        }
        for status in [500, 501, 502, 503, 504, 507, 599] {
            assert_eq!(answer(status, None), ErrorKind::Transient, "{status}");
        }
        assert_eq!(answer(429, None), ErrorKind::Throttled { retry_after: None });
    }

    #[test]
    fn retry_after_is_read_as_seconds_and_as_a_date() {
        let wait =
            |seconds| ErrorKind::Throttled { retry_after: Some(Duration::from_secs(seconds)) };
        assert_eq!(answer(429, Some("120")), wait(120));
        assert_eq!(answer(503, Some(" 7 ")), wait(7));
        assert_eq!(answer(503, Some("Sun, 06 Nov 1994 08:49:37 GMT")), wait(7));
        assert_eq!(answer(429, Some("Sunday, 06-Nov-94 08:49:37 GMT")), wait(7));
        assert_eq!(answer(429, Some("Sun, 06 Nov 1994 08:00:00 GMT")), wait(0));
        assert_eq!(answer(429, Some("99999999999999999999999")), wait(u64::MAX));
        for nonsense in ["", "-1", "soon", "1.5"] {
            assert_eq!(answer(429, Some(nonsense)), ErrorKind::Throttled { retry_after: None });
            assert_eq!(answer(503, Some(nonsense)), ErrorKind::Transient);
        }
    }
}
