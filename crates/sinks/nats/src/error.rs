//! From the broker's answers and the client's failures to error kinds.
//!
//! What lives here: the mappings. What does not: what follows, which the relay decides.
//! Invariant: what is wrong with *this event* is permanent. What is wrong with one stream is
//! throttled: others may go on, and who is only transient is given up while others go on. What is
//! wrong with the connection is transient, since then nothing goes on. So an outage parks nothing.
//!
//! | the broker says | kind |
//! |---|---|
//! | larger than `max_payload` or the stream's `max_msg_size`; headers too large | permanent |
//! | no stream has the subject, or another one, or one of counters | throttled; by `unroutable` |
//! | stream full, storage or account resources used up; sealed, busy | throttled |
//! | any other answer with the status 500 and above: no leader, offline | throttled |
//! | no acknowledgement, no permission | throttled |
//! | anything else: another answer, connection lost | transient |

use std::borrow::Cow;
use std::error::Error as _;

use async_nats::jetstream::context::{PublishError, PublishErrorKind};
use async_nats::jetstream::{self, ErrorCode};
use async_nats::{ConnectError, ConnectErrorKind};
use postrider_core::{Error, ErrorKind};

use crate::config::Unroutable;

/// From this status on an answer of JetStream is about the broker, and below about the request, as
/// with HTTP.
const SERVERS_FAULT: usize = 500;

/// Of a subject that no stream takes.
pub(crate) fn unroutable(how: Unroutable, text: String) -> Error {
    match how {
        Unroutable::Retry => throttled(text),
        Unroutable::Park => Error::permanent(text),
    }
}

/// Of an event that is to wait, however long, while others may go on.
pub(crate) fn throttled(text: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::Throttled { retry_after: None }, text)
}

/// Whether a stream answered, and the connection therefore works.
pub(crate) fn is_answer(error: &PublishError) -> bool {
    error.source().is_some_and(|source| source.is::<jetstream::Error>())
}

/// Whether a stream refused an event as larger than it takes.
pub(crate) fn is_beyond_the_stream(error: &PublishError) -> bool {
    let answer = error.source().and_then(|source| source.downcast_ref::<jetstream::Error>());
    answer.is_some_and(|a| a.error_code() == ErrorCode::STREAM_MESSAGE_EXCEEDS_MAXIMUM)
}

/// The error of an event that is larger than its stream takes: the limit in bytes, if it is known.
pub(crate) fn beyond_the_stream(error: PublishError, limit: Option<i32>) -> Error {
    let text = "the event is larger than the stream's max_msg_size";
    let text: Cow<'static, str> = match limit {
        Some(bytes) => format!("{text} of {bytes} bytes").into(),
        None => text.into(),
    };
    Error::permanent(text).with_source(error)
}

/// The error of an event that is larger than the server takes; the cause has the limit.
pub(crate) fn beyond_the_server(error: PublishError) -> Error {
    Error::permanent("the event is larger than the server's max_payload").with_source(error)
}

/// The error of one event.
pub(crate) fn publish_error(error: PublishError, subject: &str, how: Unroutable) -> Error {
    match error.kind() {
        PublishErrorKind::StreamNotFound => unroutable(
            how,
            format!(
                "no stream takes the subject {subject}, or it has no leader now; make one whose \
                 subjects cover it"
            ),
        ),
        PublishErrorKind::MaxPayloadExceeded => beyond_the_server(error),
        PublishErrorKind::TimedOut => throttled("no acknowledgement came in time"),
        PublishErrorKind::BrokenPipe => Error::transient("the connection to NATS was lost"),
        PublishErrorKind::Other => {
            let answer = error.source().and_then(|source| source.downcast_ref());
            match answer {
                Some(answer) => answer_error(answer, how),
                None => Error::transient("send an event to NATS").with_source(error),
            }
        }
        PublishErrorKind::WrongLastMessageId
        | PublishErrorKind::WrongLastSequence
        | PublishErrorKind::MaxAckPending => {
            Error::transient("send an event to NATS").with_source(error)
        }
    }
}

/// The error of an answer in which a stream refuses an event. The broker's own text follows: it
/// holds names and limits, and nothing of the event.
fn answer_error(answer: &jetstream::Error, how: Unroutable) -> Error {
    let throttled = ErrorKind::Throttled { retry_after: None };
    let (kind, meaning) = match answer.error_code() {
        ErrorCode::STREAM_HEADER_EXCEEDS_MAXIMUM => {
            (ErrorKind::Permanent, "the event's headers are larger than the broker takes")
        }
        ErrorCode::STREAM_NOT_MATCH => {
            let text = "another stream than the one in the settings takes the subject";
            return unroutable(how, text.to_owned()).with_source(answer.to_string());
        }
        ErrorCode::MESSAGE_INCR_MISSING
        | ErrorCode::MESSAGE_INCR_INVALID
        | ErrorCode::MESSAGE_INCR_PAYLOAD
        | ErrorCode::MESSAGE_COUNTER_BROKEN => {
            let text = "the subject's stream is one of counters, which takes no events";
            return unroutable(how, text.to_owned()).with_source(answer.to_string());
        }
        ErrorCode::STREAM_STORE_FAILED
        | ErrorCode::STORAGE_RESOURCES_EXCEEDED
        | ErrorCode::MEMORY_RESOURCES_EXCEEDED
        | ErrorCode::ACCOUNT_RESOURCES_EXCEEDED
        | ErrorCode::INSUFFICIENT_RESOURCES
        | ErrorCode::NO_LIMITS => (throttled, "the stream or its storage is full"),
        ErrorCode::STREAM_SEALED => (throttled, "the stream takes no events now"),
        ErrorCode::STREAM_DUPLICATE_MESSAGE_CONFLICT => {
            (throttled, "the stream is storing the event already, and has not said how it went")
        }
        ErrorCode::STREAM_TOO_MANY_REQUESTS => (throttled, "the stream is asked too much"),
        // By the broker's list of answers from here on it is a stream's, an account's or a
        // cluster's trouble, and not the event's: no leader, offline, JetStream turned off.
        _ if answer.code() >= SERVERS_FAULT => (throttled, "the stream takes no events now"),
        _ => (ErrorKind::Transient, "the stream did not take the event"),
    };
    Error::new(kind, meaning).with_source(answer.to_string())
}

/// The error of a connection that could not be made.
pub(crate) fn connect_error(error: ConnectError) -> Error {
    let meaning = match error.kind() {
        ConnectErrorKind::ServerParse => "connect to NATS: a server's address is none",
        ConnectErrorKind::Dns => "connect to NATS: its host cannot be resolved",
        ConnectErrorKind::Authentication | ConnectErrorKind::AuthorizationViolation => {
            "connect to NATS: the login is refused"
        }
        ConnectErrorKind::TimedOut => "connect to NATS: there was no answer in time",
        ConnectErrorKind::Tls => "connect to NATS: no TLS connection could be made",
        ConnectErrorKind::Io => "connect to NATS",
        ConnectErrorKind::MaxReconnects => {
            "connect to NATS: no server of the list could be reached"
        }
    };
    Error::transient(meaning).with_source(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Codes and statuses as in the server's own list of JetStream's errors.
    #[test]
    fn answers_are_told_apart_by_their_codes() {
        let told = |status: usize, code: u64, how: Unroutable| {
            let text = format!(r#"{{"code":{status},"err_code":{code},"description":"why"}}"#);
            answer_error(&serde_json::from_str(&text).expect("an answer"), how)
        };
        let throttled = ErrorKind::Throttled { retry_after: None };
        for (status, code) in [
            (503, 10077), // store failed
            (500, 10047), // no storage
            (500, 10028), // no memory
            (400, 10002), // the account's limits
            (503, 10023), // resources
            (400, 10120), // no limits for the account
            (503, 10008), // no JetStream now
            (500, 10009), // no leader
            (500, 10118), // offline
            (500, 10194), // offline, with the reason
            (400, 10109), // sealed
            (409, 10158), // in process
            (429, 10167), // too many requests
            (503, 10039), // turned off for the account
            (503, 10076), // turned off
            (500, 10041), // the cluster's own trouble
            (503, 19999), // one that a later server may have
        ] {
            let error = told(status, code, Unroutable::Park);
            assert_eq!(error.kind(), throttled, "{code}: {}", error.chain());
            assert!(error.chain().contains("why"), "{}", error.chain());
        }
        // Another stream, and streams that only count.
        for code in [10060, 10169, 10170, 10171, 10172] {
            assert_eq!(told(400, code, Unroutable::Park).kind(), ErrorKind::Permanent, "{code}");
            assert_eq!(told(400, code, Unroutable::Retry).kind(), throttled, "{code}");
        }
        assert_eq!(told(400, 10097, Unroutable::Retry).kind(), ErrorKind::Permanent);
        assert_eq!(told(400, 19999, Unroutable::Park).kind(), ErrorKind::Transient);
    }
}
