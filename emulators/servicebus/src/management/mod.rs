//! Requests about an entity: its node `$management`.
//!
//! What lives here: which operation is asked for, and its answer's status. What does not: the
//! operations (`operations.rs`).
//! Invariant: every request gets an answer; one that is not known gets 501 and says so.

mod operations;

use bytes::Bytes;
use fe2o3_amqp_types::messaging::ApplicationProperties;
use fe2o3_amqp_types::primitives::SimpleValue;
use serde_amqp::Value;
use serde_amqp::primitives::Symbol;

use crate::broker::key;
use crate::connection::Reply;
use crate::refusal::{Refusal, condition};
use crate::request::Request;
use crate::shared::Shared;

/// What an operation gives back: nothing at all is 204.
type Outcome = Result<Option<Value>, Refusal>;

/// Answers one request about the entity at `path`.
pub(crate) fn answer(path: &str, bytes: &Bytes, shared: &Shared) -> Result<Reply, Refusal> {
    let request = Request::decode(bytes)?;
    let operation = request.text_property("operation").unwrap_or_default();
    let outcome = operations::perform(operation, path, &request, shared);
    let mut properties = ApplicationProperties::default();
    let mut put = |name: &str, value| properties.insert(name.to_owned(), value);
    let (code, description) = match &outcome {
        Ok(Some(_)) => (200, "OK"),
        Ok(None) => (204, "No content"),
        Err(refusal) => (refusal.status(), refusal.description.as_str()),
    };
    put("statusCode", SimpleValue::Int(code));
    put("statusDescription", SimpleValue::String(description.to_owned()));
    if let Err(Refusal { condition, .. }) = &outcome {
        put("errorCondition", SimpleValue::Symbol(Symbol::new(condition.as_str())));
    }
    if let Some(id) = request.property("com.microsoft:tracking-id") {
        put("com.microsoft:tracking-id", id.clone());
    }
    let body = outcome.ok().flatten();
    let bytes = request.answer(properties, body.as_ref())?;
    Ok(Reply { node: Some(key(path)), reply_to: request.reply_to, bytes })
}

fn unknown(operation: &str) -> Refusal {
    let operation: String = operation.chars().take(64).collect();
    let text = format!("The operation '{operation}' is not known to this emulator.");
    Refusal::new(condition::NOT_IMPLEMENTED, text)
}
