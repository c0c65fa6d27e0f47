//! Tokens: the node `$cbs`.
//!
//! What lives here: the request put-token. What does not: checking a token (`tokens.rs`).
//! Invariant: a token that was refused opens nothing, and what an earlier one opened stays open.

use std::sync::atomic::Ordering;

use bytes::Bytes;
use fe2o3_amqp_types::messaging::ApplicationProperties;
use fe2o3_amqp_types::primitives::SimpleValue;

use crate::address;
use crate::broker::message::text;
use crate::clock::millis;
use crate::connection::{Hands, Reply};
use crate::refusal::{Refusal, condition};
use crate::request::Request;
use crate::tokens;

/// Answers one request.
pub(crate) fn answer(bytes: &Bytes, hands: &mut Hands) -> Result<Reply, Refusal> {
    let request = Request::decode(bytes)?;
    let (code, description) = match put_token(&request, hands) {
        Ok(()) => (202, "Accepted".to_owned()),
        Err(refusal) => (refusal.status(), refusal.description),
    };
    let mut properties = ApplicationProperties::default();
    properties.insert("status-code".to_owned(), SimpleValue::Int(code));
    properties.insert("status-description".to_owned(), SimpleValue::String(description));
    let bytes = request.answer(properties, None)?;
    Ok(Reply { node: None, reply_to: request.reply_to, bytes })
}

fn put_token(request: &Request, hands: &mut Hands) -> Result<(), Refusal> {
    let shared = &hands.shared;
    shared.put_tokens.fetch_add(1, Ordering::Relaxed);
    if request.text_property("operation") != Some("put-token") {
        return Err(Refusal::new(condition::NOT_IMPLEMENTED, "Only put-token is known here."));
    }
    if shared.faults.refuses_token() {
        return Err(Refusal::new(condition::UNAUTHORIZED, "InvalidSignature: Refused on demand."));
    }
    let argument = |text: &str| Refusal::new(condition::ARGUMENT_ERROR, text);
    let name = request.text_property("name").ok_or_else(|| argument("There is no name."))?;
    let token = text(&request.body).ok_or_else(|| argument("There is no token."))?;
    let audience = address::key(name);
    let now_ms = shared.broker.clock.now_ms();
    let mut until_ms = tokens::verify(&shared.config, token, &audience, now_ms)?;
    if let Some(lifetime) = shared.faults.token_lifetime() {
        until_ms = until_ms.min(now_ms.saturating_add(millis(lifetime)));
    }
    hands.tokens.allow(&audience, until_ms)
}
