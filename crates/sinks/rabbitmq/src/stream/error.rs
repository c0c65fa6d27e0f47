//! From the answers of the stream protocol to error kinds.
//!
//! What lives here: the mappings. What does not: what follows, which the relay decides; the answers
//! of AMQP 0-9-1 (`../error.rs`).
//! Invariant: what is wrong with *this event* is permanent. What is wrong with a stream, or leaves
//! its producer's events unknown, is throttled: other streams may go on, and who is only transient
//! is given up while others go on. What is wrong with the way to the server is transient. So an
//! outage parks nothing.
//!
//! | the broker says | kind |
//! |---|---|
//! | a message that no frame takes (found before it is sent) | permanent |
//! | the stream does not exist | throttled; by `unroutable` |
//! | access refused, not available, no answer in time; the producer was overtaken | throttled |
//! | a login refused, the connection lost or closed | transient |

use std::io;
use std::time::Duration;

use postrider_core::Error;

use super::connect::Refusal;
use super::lane::{FEWER, MAX_CONNECTIONS};
use super::wire::{
    ACCESS_REFUSED, Code, FRAME_TOO_LARGE, LOGIN_REFUSED, LOGIN_REFUSED_LOOPBACK, NO_MECHANISM,
    NO_PUBLISHER, NO_STREAM, NOT_AVAILABLE, Node, VHOST_REFUSED,
};
use crate::config::Unroutable;
use crate::error::throttled;

/// The server's own words for a code.
fn name(code: Code) -> String {
    let name = match code {
        NO_STREAM => "stream does not exist",
        NOT_AVAILABLE => "stream not available",
        NO_MECHANISM => "SASL mechanism not supported",
        LOGIN_REFUSED => "authentication failure",
        LOGIN_REFUSED_LOOPBACK => "authentication failure loopback",
        VHOST_REFUSED => "virtual host access failure",
        FRAME_TOO_LARGE => "frame too large",
        ACCESS_REFUSED => "access refused",
        NO_PUBLISHER => "publisher does not exist",
        _ => return format!("code {code}"),
    };
    name.to_owned()
}

/// The error of a connection that could not be made.
pub(crate) fn connect_error(code: Code) -> Error {
    let meaning = match code {
        LOGIN_REFUSED | LOGIN_REFUSED_LOOPBACK => "connect to RabbitMQ: the login is refused",
        NO_MECHANISM => "connect to RabbitMQ: it does not take this way of logging in",
        VHOST_REFUSED => {
            "connect to RabbitMQ: its virtual host does not exist, or the user may not use it"
        }
        _ => "connect to RabbitMQ: it refuses",
    };
    Error::transient(meaning).with_source(name(code))
}

/// What a stream's refusal of `what` means for the events that were to go there.
pub(crate) fn refused(refusal: Refusal, stream: &str, what: Doing, how: Unroutable) -> Error {
    let code = match refusal {
        Refusal::Answer(code) => code,
        Refusal::Lost(error) => return error,
    };
    let permission = match what {
        Doing::Publish => "write",
        Doing::Read => "read",
    };
    let error = match (code, how) {
        (NO_STREAM, Unroutable::Park) => {
            Error::permanent(format!("the stream {stream:?} does not exist"))
        }
        (NO_STREAM, Unroutable::Retry) => {
            throttled(format!("the stream {stream:?} does not exist; create it"))
        }
        (ACCESS_REFUSED, _) => throttled(format!(
            "the user may not use the stream {stream:?} (permission: {permission})"
        )),
        _ => throttled(format!("the stream {stream:?} cannot be used now")),
    };
    error.with_source(name(code))
}

/// What a stream was asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Doing {
    Publish,
    Read,
}

/// The connection ended.
pub(crate) fn lost(cause: io::Error) -> Error {
    Error::transient(
        "the connection to RabbitMQ was lost; whether the stream has the event is unknown",
    )
    .with_source(cause)
}

/// The server ended the connection.
pub(crate) fn closed(reason: &str) -> Error {
    Error::transient("RabbitMQ closed the connection").with_source(reason.to_owned())
}

/// A stream was deleted, or has another leader.
pub(crate) fn stream_changed() -> Error {
    throttled("the stream was deleted or has another leader; its producer begins anew")
}

/// Nothing came in time.
pub(crate) fn silent(patience: Duration) -> Error {
    throttled(format!(
        "the server did not answer within {} ms; whether the stream has the event is unknown",
        patience.as_millis()
    ))
}

/// The server does not speak the protocol.
pub(crate) fn garbled() -> Error {
    Error::transient("the server sent a frame that is none of the stream protocol")
}

/// The server sends more at once than is read.
pub(crate) fn too_much(bytes: usize, most: usize) -> Error {
    throttled(format!("the server sent a frame of {bytes} bytes; {most} are read"))
}

/// All connections of the sink are in use.
pub(crate) fn no_connection_left() -> Error {
    throttled(format!(
        "all {MAX_CONNECTIONS} connections that a sink has at most are in use; {FEWER}"
    ))
}

/// A super stream for which a sink has too few.
pub(crate) fn too_many_streams(stream: &str, streams: usize) -> Error {
    throttled(format!(
        "the super stream {stream:?} has {streams} streams, and a sink has {MAX_CONNECTIONS} \
         connections at most, of which each partition needs one for each stream; {FEWER}"
    ))
}

/// The node that leads a stream is not to be had.
pub(crate) fn leader_out_of_reach(stream: &str, (host, port): &Node) -> Error {
    throttled(format!(
        "the stream {stream:?} is led by the node at {host}:{port}, which is not behind the \
         servers of the list and cannot be reached there; name it in servers, or let it advertise \
         what can be reached (stream.advertised_host)"
    ))
}

/// A message that fits no frame.
pub(crate) fn too_large(bytes: usize, most: usize) -> Error {
    Error::permanent(format!(
        "the event's message has {bytes} bytes; the server takes {most} (stream.frame_max)"
    ))
}

/// A producer gave all its ids.
pub(crate) fn ids_used_up() -> Error {
    throttled("the producer gave all its publishing ids; the next call begins another")
}

/// Another producer of the same reference stored something since.
pub(crate) fn overtaken(reference: &str) -> Error {
    throttled(format!(
        "another producer took over as {reference:?}; which events are stored is looked up again"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_core::ErrorKind;

    #[test]
    fn each_answer_has_its_kind() {
        let (retry, park) = (Unroutable::Retry, Unroutable::Park);
        let throttled = ErrorKind::Throttled { retry_after: None };
        for (code, how, kind, part) in [
            (NO_STREAM, retry, throttled, "does not exist"),
            (NO_STREAM, park, ErrorKind::Permanent, "does not exist"),
            (ACCESS_REFUSED, park, throttled, "permission: write"),
            (NOT_AVAILABLE, park, throttled, "not available"),
            (NO_PUBLISHER, park, throttled, "publisher does not exist"),
            (0x99, park, throttled, "code 153"),
        ] {
            let error = refused(Refusal::Answer(code), "s", Doing::Publish, how);
            assert_eq!(error.kind(), kind, "{code}");
            assert!(error.chain().contains(part), "{}", error.chain());
        }
        let lost = Refusal::Lost(lost(io::ErrorKind::BrokenPipe.into()));
        assert_eq!(refused(lost, "s", Doing::Read, park).kind(), ErrorKind::Transient);
        assert_eq!(too_large(2, 1).kind(), ErrorKind::Permanent);
        assert_eq!(overtaken("r").kind(), throttled);
    }

    #[test]
    fn refusals_at_connecting_are_told_apart() {
        for (code, part) in [
            (LOGIN_REFUSED, "login is refused"),
            (VHOST_REFUSED, "virtual host"),
            (NO_MECHANISM, "way of logging in"),
            (0x0f, "it refuses"),
        ] {
            let error = connect_error(code);
            assert_eq!(error.kind(), ErrorKind::Transient);
            assert!(error.chain().contains(part), "{}", error.chain());
        }
    }
}
