//! From AMQP's conditions, outcomes and failures to error kinds.
//!
//! What lives here: the one table of codes. What does not: what follows, which the relay decides,
//! and splitting a batch that was refused as a whole (`publish.rs`).
//! Invariant: only what the service says of *these messages* is permanent. What it says of the
//! link, the entity, the credentials or its load is not, so that an outage parks nothing.
//!
//! | said | of a delivery | of a link, session or connection |
//! |---|---|---|
//! | `amqp:link:message-size-exceeded` | permanent; a batch is split first | transient |
//! | `amqp:not-allowed`, `amqp:not-implemented` | permanent | transient |
//! | `amqp:invalid-field`, `amqp:decode-error` | permanent | transient |
//! | `amqp:precondition-failed` | permanent | transient |
//! | `com.microsoft:argument-error`, `…:argument-out-of-range` | permanent | transient |
//! | `com.microsoft:server-busy` | throttled: as long as its text says, or 10 s | the same |
//! | `amqp:resource-limit-exceeded` (the entity is full) | throttled, 10 s | the same |
//! | `amqp:unauthorized-access`, `com.microsoft:auth-failed` | transient | transient |
//! | `amqp:not-found`, `amqp:resource-deleted` | transient | transient |
//! | `com.microsoft:entity-disabled` | transient | transient |
//! | `com.microsoft:timeout`, `amqp:internal-error` | transient | transient |
//! | `amqp:link:detach-forced`, `…:stolen`, `…:redirect` | transient | transient |
//! | `amqp:connection:forced` | transient | transient |
//! | any other condition, or none | transient | transient |
//! | outcome `released`, `modified` | transient | – |
//! | outcome `modified` with `undeliverable-here` | permanent | – |
//! | put-token 429, 503 | – | throttled, 10 s |
//! | put-token 401, 403, 404, 408, 5xx, others | – | transient |
//! | no token could be made, for whatever reason | – | transient, or throttled if so said |
//! | no answer in time; socket, TLS, SASL or AMQP failures | transient, fate unknown | transient |

use std::fmt;
use std::io;
use std::time::Duration;

use fe2o3_amqp::connection::{ConnectionStopReason, OpenError};
use fe2o3_amqp::link::{
    DetachError, LinkStateError, SendError, SenderAttachError, SessionStopReason,
};
use fe2o3_amqp::session::BeginError;
use fe2o3_amqp::types::definitions::{self, ErrorCondition};
use fe2o3_amqp::types::messaging::Outcome;
use fe2o3_amqp::types::primitives::Symbol;
use fe2o3_amqp_management::error::{AttachError, Error as ManagementError};
use postrider_core::{Error, ErrorKind};

use crate::connect::NotTaken;

const SIZE_EXCEEDED: &str = "amqp:link:message-size-exceeded";
/// What the service's own clients wait when it says that it is busy and not for how long.
const BUSY_WAIT: Duration = Duration::from_secs(10);
/// An entity that is full empties as fast as its receivers are.
const FULL_WAIT: Duration = Duration::from_secs(10);
/// Longest text of the service that is passed on.
const MAX_SHOWN_CHARS: usize = 240;

/// What went wrong, to be told to several at once.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) kind: ErrorKind,
    text: String,
}

impl Failure {
    pub(crate) fn new(kind: ErrorKind, text: impl Into<String>) -> Self {
        Self { kind, text: text.into() }
    }

    pub(crate) fn transient(text: impl Into<String>) -> Self {
        Self::new(ErrorKind::Transient, text)
    }

    /// Of whoever makes the tokens. Whatever its kind, no event is to blame for it: the secret may
    /// have expired, and everything flows once there is another one.
    pub(crate) fn of_tokens(error: &Error) -> Self {
        let kind = match error.kind() {
            kind @ ErrorKind::Throttled { .. } => kind,
            ErrorKind::Transient
            | ErrorKind::Permanent
            | ErrorKind::Fenced
            | ErrorKind::Unsupported
            | ErrorKind::Corrupt => ErrorKind::Transient,
        };
        Self::new(kind, format!("no token: {}", error.chain()))
    }

    pub(crate) fn error(&self) -> Error {
        Error::new(self.kind, format!("servicebus: {}", self.text))
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.text, self.kind)
    }
}

/// What became of a transfer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It is durable.
    Accepted,
    /// It was refused for good, because of something in it: the size, if so said.
    Refused(Failure),
    /// It was not taken.
    Failed(Failure),
    /// Nobody knows whether it was taken.
    Unknown(Failure),
}

impl Fate {
    /// What a failure means of a transfer that the link had already.
    pub(crate) fn after_hand_over(self) -> Self {
        match self {
            Self::Failed(failure) => Self::Unknown(failure),
            other @ (Self::Accepted | Self::Refused(_) | Self::Unknown(_)) => other,
        }
    }
}

/// Whom a condition is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum About {
    Delivery,
    Link,
}

fn kind(condition: &str, description: &str, about: About) -> ErrorKind {
    match (condition, about) {
        ("com.microsoft:server-busy", _) => {
            let wait = named_wait(description).unwrap_or(BUSY_WAIT);
            ErrorKind::Throttled { retry_after: Some(wait) }
        }
        ("amqp:resource-limit-exceeded", _) => {
            let wait = named_wait(description).unwrap_or(FULL_WAIT);
            ErrorKind::Throttled { retry_after: Some(wait) }
        }
        (
            SIZE_EXCEEDED
            | "amqp:not-allowed"
            | "amqp:not-implemented"
            | "amqp:invalid-field"
            | "amqp:decode-error"
            | "amqp:precondition-failed"
            | "com.microsoft:argument-error"
            | "com.microsoft:argument-out-of-range",
            About::Delivery,
        ) => ErrorKind::Permanent,
        _ => ErrorKind::Transient,
    }
}

/// What to do about it, where that is known.
fn meaning(condition: &str) -> &'static str {
    match condition {
        SIZE_EXCEEDED => "larger than the entity takes",
        "com.microsoft:server-busy" => "the namespace or entity asks to wait",
        "amqp:resource-limit-exceeded" => "the entity or the namespace is full; receivers empty it",
        "amqp:unauthorized-access" | "com.microsoft:auth-failed" => {
            "the credentials are refused; the rule or the identity needs the right to send"
        }
        "amqp:not-found" | "amqp:resource-deleted" => {
            "there is no such queue or topic; create it, or correct entity"
        }
        "com.microsoft:entity-disabled" => {
            "the entity is disabled; set its status to Active, and everything flows"
        }
        "com.microsoft:timeout" => "the service took too long",
        "amqp:not-allowed" => "the entity does not take messages of this form",
        "amqp:internal-error" => "the service failed",
        "amqp:link:detach-forced" | "amqp:connection:forced" => "the service ended it",
        _ => "the service says no more",
    }
}

/// The wait in texts such as `… Please wait 2 seconds and try again.`
fn named_wait(description: &str) -> Option<Duration> {
    let (_, rest) = description.split_once("wait ")?;
    let (number, rest) = rest.split_once(' ')?;
    rest.starts_with("second").then(|| number.parse().ok().map(Duration::from_secs))?
}

fn of_condition(error: &definitions::Error, about: About, what: &str) -> Failure {
    let condition = condition(&error.condition);
    let description = error.description.as_deref().unwrap_or_default();
    let kind = kind(&condition, description, about);
    let meaning = meaning(&condition);
    Failure::new(kind, format!("{what}: {meaning} ({condition}{})", shown(description)))
}

fn condition(condition: &ErrorCondition) -> String {
    let symbol = match condition {
        ErrorCondition::AmqpError(error) => Symbol::from(error),
        ErrorCondition::ConnectionError(error) => Symbol::from(error),
        ErrorCondition::SessionError(error) => Symbol::from(error),
        ErrorCondition::LinkError(error) => Symbol::from(error),
        ErrorCondition::Custom(symbol) => symbol.clone(),
    };
    clean(symbol.as_str())
}

/// The service's own words, which hold tracking ids that its support asks for.
fn shown(description: &str) -> String {
    // Whoever puts a token into a text shall not make us log it.
    if description.is_empty() || description.contains("sig=") || description.contains("Bearer ") {
        return String::new();
    }
    format!(": {}", clean(description))
}

/// On one line, and bounded.
pub(crate) fn clean(text: &str) -> String {
    let visible = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    visible.take(MAX_SHOWN_CHARS).collect()
}

/// The fate of a settled transfer.
pub(crate) fn of_outcome(outcome: &Outcome) -> Fate {
    match outcome {
        Outcome::Accepted(_) => Fate::Accepted,
        Outcome::Rejected(rejected) => {
            let failure = match &rejected.error {
                Some(error) => of_condition(error, About::Delivery, "rejected"),
                None => Failure::transient("rejected, and the service does not say why"),
            };
            refused_or_failed(failure)
        }
        Outcome::Released(_) => {
            Fate::Failed(Failure::transient("released: the service did not take it now"))
        }
        Outcome::Modified(modified) if modified.undeliverable_here == Some(true) => Fate::Refused(
            Failure::new(ErrorKind::Permanent, "modified: the service will not take it here"),
        ),
        Outcome::Modified(_) => {
            Fate::Failed(Failure::transient("modified: the service did not take it now"))
        }
    }
}

fn refused_or_failed(failure: Failure) -> Fate {
    match failure.kind {
        ErrorKind::Permanent => Fate::Refused(failure),
        _ => Fate::Failed(failure),
    }
}

/// The fate of a transfer that was not settled.
pub(crate) fn of_send(error: &SendError) -> Fate {
    match error {
        // The link's limit may have changed since the batch was filled.
        SendError::MessageSizeExceeded(size) => Fate::Refused(Failure::new(
            ErrorKind::Permanent,
            format!("the message has {} bytes; the entity takes {}", size.size, size.max_size),
        )),
        SendError::LinkStateError(error) => Fate::Failed(of_link_state(error)),
        SendError::Detached(error) => Fate::Failed(of_detach(error)),
        SendError::NonTerminalDeliveryState | SendError::IllegalDeliveryState => {
            Fate::Failed(Failure::transient("settled with no outcome"))
        }
        SendError::MessageEncodeError => {
            Fate::Refused(Failure::new(ErrorKind::Permanent, "the event can't be encoded as AMQP"))
        }
    }
}

/// Whether this says only that the link is gone, and nothing of the reason.
pub(crate) fn is_bare_end(error: &SendError) -> bool {
    matches!(
        error,
        SendError::LinkStateError(
            LinkStateError::IllegalState | LinkStateError::ExpectImmediateDetach
        )
    )
}

/// A transfer that was not settled in time.
pub(crate) fn unsettled(after: Duration) -> Failure {
    Failure::transient(format!("not settled within {after:?}; whether it was taken is unknown"))
}

/// Events for which a call had no time left.
pub(crate) fn not_begun(after: Duration) -> Failure {
    Failure::transient(format!("not sent: other transfers took the {after:?} of this call"))
}

/// A link that was not to be had in time.
pub(crate) fn no_link(after: Duration) -> Failure {
    Failure::transient(format!("no link could be had within {after:?}"))
}

/// A transfer whose link was given up.
pub(crate) fn given_up() -> Failure {
    Failure::transient("the connection was given up; whether the transfer was taken is unknown")
}

/// A transfer whose link went away before it was handed over.
pub(crate) fn not_handed_over() -> Failure {
    Failure::transient("the connection was lost before the transfer; it is made anew")
}

fn of_link_state(error: &LinkStateError) -> Failure {
    match error {
        LinkStateError::SessionStopped(reason) => of_session_stop(reason),
        LinkStateError::RemoteDetachedWithError(error)
        | LinkStateError::RemoteClosedWithError(error) => {
            of_condition(error, About::Link, "the link ended")
        }
        LinkStateError::RemoteDetached | LinkStateError::RemoteClosed => {
            Failure::transient("the link ended, and the service does not say why")
        }
        LinkStateError::IllegalState | LinkStateError::ExpectImmediateDetach => {
            Failure::transient("the link is gone")
        }
    }
}

#[expect(deprecated, reason = "the library still produces this variant")]
pub(crate) fn of_detach(error: &DetachError) -> Failure {
    match error {
        DetachError::SessionStopped(reason) => of_session_stop(reason),
        DetachError::RemoteDetachedWithError(error) | DetachError::RemoteClosedWithError(error) => {
            of_condition(error, About::Link, "the link ended")
        }
        DetachError::ClosedByRemote | DetachError::DetachedByRemote => {
            Failure::transient("the link ended, and the service does not say why")
        }
        DetachError::IllegalState => Failure::transient("the link is gone"),
    }
}

fn of_session_stop(reason: &SessionStopReason) -> Failure {
    match reason {
        SessionStopReason::RemoteEndedWithError(error)
        | SessionStopReason::EndedWithError(error) => {
            of_condition(error, About::Link, "the session ended")
        }
        SessionStopReason::Ended | SessionStopReason::RemoteEnded => {
            Failure::transient("the session ended")
        }
        SessionStopReason::ConnectionStopped(reason) => of_connection_stop(reason),
    }
}

fn of_connection_stop(reason: &ConnectionStopReason) -> Failure {
    match reason {
        ConnectionStopReason::RemoteClosedWithError(error)
        | ConnectionStopReason::ClosedWithError(error) => {
            of_condition(error, About::Link, "the connection ended")
        }
        ConnectionStopReason::Closed | ConnectionStopReason::RemoteClosed => {
            Failure::transient("the connection was closed or broke")
        }
    }
}

/// A connection that could not be opened.
pub(crate) fn of_open(error: &OpenError) -> Failure {
    Failure::transient(match error {
        OpenError::RemoteClosedWithError(error) => {
            return of_condition(error, About::Link, "the connection was refused");
        }
        OpenError::Io(cause) => return of_io(cause, "connect"),
        OpenError::SaslError { .. } => "the service refuses anonymous SASL, which comes first",
        OpenError::ProtocolHeaderMismatch(_) | OpenError::DecodeError(_) => {
            "what answers does not speak AMQP 1.0; look at the host and the port"
        }
        OpenError::RemoteClosed => "the service closed the connection while it was opened",
        _ => "the connection broke while it was opened",
    })
}

/// A socket's failure.
pub(crate) fn of_io(cause: &io::Error, what: &str) -> Failure {
    let meaning = match cause.kind() {
        io::ErrorKind::ConnectionRefused => "the connection was refused",
        io::ErrorKind::ConnectionReset
        | io::ErrorKind::ConnectionAborted
        | io::ErrorKind::BrokenPipe
        | io::ErrorKind::UnexpectedEof => "the connection was reset",
        io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => {
            "the host cannot be reached"
        }
        io::ErrorKind::InvalidData => "no TLS connection could be made",
        _ => "the host cannot be resolved, or the connection failed",
    };
    Failure::transient(format!("{what}: {meaning} ({cause})"))
}

/// A session that could not be begun.
pub(crate) fn of_begin(error: &BeginError) -> Failure {
    match error {
        BeginError::RemoteEndedWithError(error) => {
            of_condition(error, About::Link, "the session was refused")
        }
        BeginError::ConnectionStopped(reason) => of_connection_stop(reason),
        _ => Failure::transient("no session could be begun"),
    }
}

/// A link that could not be attached.
pub(crate) fn of_attach(error: &SenderAttachError) -> Failure {
    match error {
        SenderAttachError::RemoteClosedWithError(error) => {
            of_condition(error, About::Link, "the entity can't be sent to")
        }
        SenderAttachError::SessionStopped(reason) => of_session_stop(reason),
        SenderAttachError::IncomingTargetIsNone => {
            Failure::transient("the entity can't be sent to, and the service does not say why")
        }
        _ => Failure::transient("the link to the entity could not be attached"),
    }
}

/// The pair of links for tokens could not be attached.
pub(crate) fn of_token_link(error: &AttachError) -> Failure {
    match error {
        AttachError::Sender(error) => of_attach(error),
        AttachError::Receiver(_) => {
            Failure::transient("the links for tokens could not be attached")
        }
    }
}

/// A token that was not accepted; none, if it was after all.
pub(crate) fn of_put_token(error: &ManagementError) -> Option<NotTaken> {
    let ManagementError::Status(status) = error else {
        let failure = match error {
            ManagementError::Send(SendError::LinkStateError(error)) => of_link_state(error),
            ManagementError::Send(SendError::Detached(error)) => of_detach(error),
            ManagementError::NotAccepted(outcome) => match of_outcome(outcome) {
                Fate::Failed(failure) | Fate::Unknown(failure) => failure,
                Fate::Accepted | Fate::Refused(_) => Failure::transient("the token is not taken"),
            },
            _ => Failure::transient("the service did not answer to the token"),
        };
        return Some(NotTaken { failure, may_ask_again: false });
    };
    let code = status.code.0.get();
    let description = shown(status.description.as_deref().unwrap_or_default());
    let throttled = ErrorKind::Throttled { retry_after: Some(BUSY_WAIT) };
    let (kind, meaning) = match code {
        // The library takes 202 alone for a success; the service's clients take all of these.
        200..=299 => return None,
        401 | 403 => (ErrorKind::Transient, meaning("amqp:unauthorized-access")),
        404 => (ErrorKind::Transient, meaning("amqp:not-found")),
        429 | 503 => (throttled, meaning("com.microsoft:server-busy")),
        _ => (ErrorKind::Transient, "the service failed"),
    };
    let text = format!("the token was answered {code}: {meaning}{description}");
    Some(NotTaken { failure: Failure::new(kind, text), may_ask_again: true })
}

#[cfg(test)]
mod tests;
