//! Who connects.
//!
//! What lives here: what is offered, and judging what comes. What does not: tokens (`tokens.rs`).
//! Invariant: a wrong password ends the connection; none at all opens nothing, tokens must follow.

use bytes::Bytes;
use fe2o3_amqp_types::sasl::{SaslCode, SaslInit, SaslMechanisms, SaslOutcome};
use serde_amqp::primitives::{Array, Symbol};

use super::Hands;
use crate::refusal::{Refusal, condition};
use crate::wire;

const ANONYMOUS: &str = "ANONYMOUS";
const PLAIN: &str = "PLAIN";

/// Says what is understood.
pub(crate) fn offer(hands: &mut Hands) -> Result<(), Refusal> {
    let names = [ANONYMOUS, PLAIN].map(Symbol::from).to_vec();
    hands.out.sasl(&SaslMechanisms { sasl_server_mechanisms: Array::from(names) })
}

/// Judges what was chosen, and says so.
pub(crate) fn authenticate(hands: &mut Hands, body: &Bytes) -> Result<(), Refusal> {
    let init: SaslInit = wire::decode(body)
        .map_err(|error| Refusal::new(condition::DECODE_ERROR, error.to_string()))?;
    let welcome = match init.mechanism.as_str() {
        ANONYMOUS => true,
        PLAIN => {
            let response = init.initial_response.unwrap_or_default();
            let known = knows(hands, &response);
            if known {
                hands.tokens.allow_everything();
            }
            known
        }
        _ => false,
    };
    let code = if welcome { SaslCode::Ok } else { SaslCode::Auth };
    hands.out.sasl(&SaslOutcome { code, additional_data: None })?;
    if welcome {
        return Ok(());
    }
    Err(Refusal::new(condition::UNAUTHORIZED, "The name, the key or the mechanism is wrong."))
}

/// `identity NUL name NUL key`; the first may be empty.
fn knows(hands: &Hands, response: &[u8]) -> bool {
    let config = &hands.shared.config;
    let mut parts = response.split(|byte| *byte == 0).skip(1);
    let name = parts.next() == Some(config.shared_access_key_name.as_bytes());
    let key = parts.next() == Some(config.shared_access_key.as_bytes());
    name && key && parts.next().is_none()
}
