//! From the broker's answers and the client's failures to error kinds.
//!
//! What lives here: the mappings. What does not: what follows, which the relay decides.
//! Invariant: what is wrong with *this event* is permanent. What is wrong with an exchange or a
//! queue is throttled: others may go on, and who is only transient is given up while others go on.
//! What is wrong with the connection is transient, since then nothing goes on. So an outage parks
//! nothing.
//!
//! | the broker says | kind |
//! |---|---|
//! | 406, 311 for a message: larger than `max_message_size` | permanent |
//! | returned as unroutable (312); no such exchange (404) | throttled; by `unroutable` |
//! | nack (a queue is full or lost its leader); `connection.blocked` | throttled |
//! | 403 for a message; no confirmation in time | throttled |
//! | anything else: a login refused, no channel, shut down, connection lost | transient |

use std::borrow::Cow;

use lapin::ErrorKind as Failure;
use lapin::message::BasicReturnMessage;
use lapin::protocol::{AMQPErrorKind, AMQPHardError, AMQPSoftError};
use postrider_core::{Error, ErrorKind};

use crate::config::Unroutable;

/// Of an event that no queue takes.
fn unroutable(how: Unroutable, text: String) -> Error {
    match how {
        Unroutable::Retry => throttled(text),
        Unroutable::Park => Error::permanent(text),
    }
}

/// Of an event that the broker returned. Its text is the broker's own: `NO_ROUTE`.
pub(crate) fn returned(message: &BasicReturnMessage, how: Unroutable) -> Error {
    let text = format!(
        "no queue takes the routing key {:?} at the exchange {:?}; bind one, or give the exchange \
         an alternate",
        message.routing_key.as_str(),
        message.exchange.as_str()
    );
    unroutable(how, text).with_source(message.reply_text.to_string())
}

/// Of an event that a queue did not take.
pub(crate) fn refused_by_a_queue() -> Error {
    throttled(
        "a queue did not take the event: it is full (x-overflow: reject-publish) or in trouble",
    )
}

/// Of an event that was not sent, since the broker takes none now.
pub(crate) fn blocked(reason: &str) -> Error {
    throttled("the broker takes no messages now").with_source(reason.to_owned())
}

/// Of an event that is to wait, however long, while others may go on.
pub(crate) fn throttled(text: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::Throttled { retry_after: None }, text)
}

/// Of an event whose connection ended before its answer came.
pub(crate) fn connection_lost() -> Error {
    Error::transient(
        "the connection to RabbitMQ was lost; whether a queue has the event is unknown",
    )
}

/// Of an event for which no channel could be opened. Whatever the failure says, it is not of the
/// event, of which nothing was sent.
pub(crate) fn no_channel(failure: &lapin::Error) -> Error {
    Error::transient("no channel could be opened; the event was not sent")
        .with_source(failure.to_string())
}

/// The error of one event's channel, while its connection lives. The broker's own text follows: it
/// holds names and limits, and nothing of the event.
pub(crate) fn publish_error(failure: &lapin::Error, exchange: &str, how: Unroutable) -> Error {
    let Failure::ProtocolError(said) = failure.kind() else {
        return connection_lost().with_source(failure.to_string());
    };
    let error = match said.kind() {
        AMQPErrorKind::Soft(AMQPSoftError::NOTFOUND) => {
            unroutable(how, format!("the exchange {exchange:?} does not exist"))
        }
        AMQPErrorKind::Soft(AMQPSoftError::ACCESSREFUSED) => throttled(format!(
            "the user may not publish to the exchange {exchange:?} (permission: write)"
        )),
        AMQPErrorKind::Soft(AMQPSoftError::PRECONDITIONFAILED | AMQPSoftError::CONTENTTOOLARGE) => {
            Error::permanent("the broker refuses the event")
        }
        AMQPErrorKind::Soft(_) => Error::transient("the broker did not take the event"),
        AMQPErrorKind::Hard(_) => Error::transient(
            "the broker ended the connection; whether a queue has the event is unknown",
        ),
    };
    error.with_source(said.get_message().to_string())
}

/// The error of a connection that could not be made.
pub(crate) fn connect_error(failure: &lapin::Error) -> Error {
    let Failure::ProtocolError(said) = failure.kind() else {
        return Error::transient("connect to RabbitMQ").with_source(failure.to_string());
    };
    let meaning = match said.kind() {
        AMQPErrorKind::Soft(AMQPSoftError::ACCESSREFUSED) => {
            "connect to RabbitMQ: the login is refused"
        }
        AMQPErrorKind::Hard(AMQPHardError::NOTALLOWED) => {
            "connect to RabbitMQ: its virtual host does not exist, or the user may not use it"
        }
        AMQPErrorKind::Soft(_) | AMQPErrorKind::Hard(_) => "connect to RabbitMQ: it refuses",
    };
    Error::transient(meaning).with_source(said.get_message().to_string())
}

/// The error of an exchange or queue that could not be looked at or made.
pub(crate) fn topology_error(failure: &lapin::Error, what: &str) -> Error {
    let text = match failure.kind() {
        Failure::ProtocolError(said) => said.get_message().to_string(),
        _ => failure.to_string(),
    };
    Error::transient(format!("{what} cannot be used")).with_source(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use lapin::protocol::AMQPError;

    fn failure(kind: impl Into<AMQPErrorKind>) -> lapin::Error {
        Failure::ProtocolError(AMQPError::new(kind.into(), "what it said".into())).into()
    }

    #[test]
    fn each_answer_has_its_kind() {
        let kind = |failure: &lapin::Error, how| publish_error(failure, "e", how).kind();
        let (retry, park) = (Unroutable::Retry, Unroutable::Park);
        let throttled = ErrorKind::Throttled { retry_after: None };
        for (answer, how, expected) in [
            (failure(AMQPSoftError::NOTFOUND), retry, throttled),
            (failure(AMQPSoftError::NOTFOUND), park, ErrorKind::Permanent),
            (failure(AMQPSoftError::PRECONDITIONFAILED), retry, ErrorKind::Permanent),
            (failure(AMQPSoftError::CONTENTTOOLARGE), retry, ErrorKind::Permanent),
            (failure(AMQPSoftError::ACCESSREFUSED), park, throttled),
            (failure(AMQPSoftError::RESOURCELOCKED), park, ErrorKind::Transient),
            (failure(AMQPHardError::CONNECTIONFORCED), park, ErrorKind::Transient),
            (Failure::MissingHeartbeatError.into(), park, ErrorKind::Transient),
        ] {
            assert_eq!(kind(&answer, how), expected, "{answer}");
        }
        assert_eq!(refused_by_a_queue().kind(), throttled);
        assert_eq!(blocked("low on memory").kind(), throttled);
        // An old channel's error, told to a new one of its number.
        assert_eq!(
            no_channel(&failure(AMQPSoftError::PRECONDITIONFAILED)).kind(),
            ErrorKind::Transient
        );
    }

    #[test]
    fn refusals_at_connecting_are_told_apart() {
        let text = |kind: AMQPErrorKind| connect_error(&failure(kind)).chain();
        assert!(text(AMQPSoftError::ACCESSREFUSED.into()).contains("login is refused"));
        assert!(text(AMQPHardError::NOTALLOWED.into()).contains("virtual host"));
        assert!(text(AMQPHardError::INTERNALERROR.into()).contains("what it said"));
        let silent = connect_error(&Failure::MissingHeartbeatError.into());
        assert_eq!(silent.kind(), ErrorKind::Transient);
    }
}
