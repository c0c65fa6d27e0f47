//! What clients are told when they may not have what they ask for.
//!
//! What lives here: conditions, descriptions, and the number that goes with them in answers to
//! requests. What does not: who decides.
//! Invariant: a description holds no payload and no token.

use fe2o3_amqp_types::definitions::{Error, ErrorCondition, Fields};
use fe2o3_amqp_types::messaging::{DeliveryState, Rejected};
use serde_amqp::primitives::Symbol;

use crate::wire;

/// Conditions that Azure Service Bus uses beside those of AMQP itself.
pub mod condition {
    /// Too many requests: wait and come again.
    pub const SERVER_BUSY: &str = "com.microsoft:server-busy";
    /// The service took too long, or nothing came in time.
    pub const TIMEOUT: &str = "com.microsoft:timeout";
    /// An administrator has switched the entity off.
    pub const ENTITY_DISABLED: &str = "com.microsoft:entity-disabled";
    /// An argument has a value that can't be.
    pub const ARGUMENT_ERROR: &str = "com.microsoft:argument-error";
    /// Another receiver holds the session.
    pub const SESSION_CANNOT_BE_LOCKED: &str = "com.microsoft:session-cannot-be-locked";
    /// The session's lock has expired.
    pub const SESSION_LOCK_LOST: &str = "com.microsoft:session-lock-lost";
    /// The message's lock has expired.
    pub const MESSAGE_LOCK_LOST: &str = "com.microsoft:message-lock-lost";
    /// No message has this number.
    pub const MESSAGE_NOT_FOUND: &str = "com.microsoft:message-not-found";
    /// A receiver's wish to dead-letter a message.
    pub const DEAD_LETTER: &str = "com.microsoft:dead-letter";
    /// There is no such entity.
    pub const NOT_FOUND: &str = "amqp:not-found";
    /// It can't be done with this entity, or not now.
    pub const NOT_ALLOWED: &str = "amqp:not-allowed";
    /// The token is missing, wrong or expired.
    pub const UNAUTHORIZED: &str = "amqp:unauthorized-access";
    /// The entity is full.
    pub const RESOURCE_LIMIT: &str = "amqp:resource-limit-exceeded";
    /// A message is larger than its link allows.
    pub const MESSAGE_SIZE: &str = "amqp:link:message-size-exceeded";
    /// More messages than the link has credit for.
    pub const TRANSFER_LIMIT: &str = "amqp:link:transfer-limit-exceeded";
    /// The link is taken away; attach again.
    pub const DETACH_FORCED: &str = "amqp:link:detach-forced";
    /// The connection is taken away; connect again.
    pub const CONNECTION_FORCED: &str = "amqp:connection:forced";
    /// Bytes are no AMQP.
    pub const DECODE_ERROR: &str = "amqp:decode-error";
    /// A frame is not as the specification has it.
    pub const FRAMING_ERROR: &str = "amqp:connection:framing-error";
    /// Nothing like this is known here.
    pub const NOT_IMPLEMENTED: &str = "amqp:not-implemented";
    /// The service failed.
    pub const INTERNAL_ERROR: &str = "amqp:internal-error";
    /// The session has no link of this handle.
    pub const UNATTACHED_HANDLE: &str = "amqp:session:unattached-handle";
    /// The link's name or handle is in use.
    pub const HANDLE_IN_USE: &str = "amqp:session:handle-in-use";
}

/// A condition as it is spelled on the wire.
pub(crate) fn name(condition: &ErrorCondition) -> String {
    let spelled = wire::encode(condition).and_then(|bytes| wire::decode::<Symbol>(&bytes));
    spelled.map(|Symbol(name)| name).unwrap_or_default()
}

/// A condition and what goes with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub condition: String,
    pub description: String,
}

impl Refusal {
    pub(crate) fn new(condition: &str, description: impl Into<String>) -> Self {
        Self { condition: condition.to_owned(), description: description.into() }
    }

    /// As a link, session or connection is ended with.
    pub(crate) fn error(&self) -> Error {
        Error {
            condition: ErrorCondition::Custom(Symbol::new(self.condition.as_str())),
            description: Some(self.description.clone()),
            // The Python SDK reads all three fields, so none may be left out.
            info: Some(Box::new(Fields::new())),
        }
    }

    /// As a message is settled with.
    pub(crate) fn rejected(&self) -> DeliveryState {
        DeliveryState::Rejected(Rejected { error: Some(self.error()) })
    }

    /// As a request is answered with.
    pub(crate) fn status(&self) -> i32 {
        match self.condition.as_str() {
            condition::NOT_FOUND | condition::MESSAGE_NOT_FOUND => 404,
            condition::UNAUTHORIZED => 401,
            condition::NOT_IMPLEMENTED => 501,
            condition::MESSAGE_LOCK_LOST
            | condition::SESSION_LOCK_LOST
            | condition::SESSION_CANNOT_BE_LOCKED => 410,
            condition::RESOURCE_LIMIT => 403,
            condition::SERVER_BUSY => 503,
            condition::INTERNAL_ERROR => 500,
            _ => 400,
        }
    }
}
