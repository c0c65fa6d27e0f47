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
//! | no stream has the subject, or another than the one asked for | throttled; by `unroutable` |
//! | stream full, storage or account resources used up; no leader, sealed, offline | throttled |
//! | no acknowledgement, no permission | throttled |
//! | anything else: another answer, connection lost | transient |

use std::borrow::Cow;
use std::error::Error as _;

use async_nats::jetstream::context::{PublishError, PublishErrorKind};
use async_nats::jetstream::{self, ErrorCode};
use async_nats::{ConnectError, ConnectErrorKind};
use postrider_core::{Error, ErrorKind};

use crate::config::Unroutable;

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
        PublishErrorKind::MaxPayloadExceeded => {
            Error::permanent("the event is larger than the server's max_payload").with_source(error)
        }
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
    let (kind, meaning) = match answer.error_code() {
        ErrorCode::STREAM_MESSAGE_EXCEEDS_MAXIMUM => {
            (ErrorKind::Permanent, "the event is larger than the stream's max_msg_size")
        }
        ErrorCode::STREAM_HEADER_EXCEEDS_MAXIMUM => {
            (ErrorKind::Permanent, "the event's headers are larger than the broker takes")
        }
        ErrorCode::STREAM_NOT_MATCH => {
            let text = "another stream than the one in the settings takes the subject";
            return unroutable(how, text.to_owned()).with_source(answer.to_string());
        }
        ErrorCode::STREAM_STORE_FAILED
        | ErrorCode::STORAGE_RESOURCES_EXCEEDED
        | ErrorCode::MEMORY_RESOURCES_EXCEEDED
        | ErrorCode::ACCOUNT_RESOURCES_EXCEEDED
        | ErrorCode::INSUFFICIENT_RESOURCES => {
            (ErrorKind::Throttled { retry_after: None }, "the stream or its storage is full")
        }
        ErrorCode::CLUSTER_NOT_AVAILABLE
        | ErrorCode::CLUSTER_NOT_LEADER
        | ErrorCode::STREAM_OFFLINE
        | ErrorCode::STREAM_OFFLINE_REASON
        | ErrorCode::STREAM_SEALED => {
            (ErrorKind::Throttled { retry_after: None }, "the stream takes no events now")
        }
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
