//! Bytes and frames of AMQP 1.0.
//!
//! What lives here: cutting frames out of bytes and putting them together, and looking over values
//! before they are decoded. What does not: what a frame makes a connection do.
//! Invariant: no bytes whatever make it panic, or take memory beyond their own and the limits here.

pub(crate) mod frame;
pub(crate) mod scan;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Bytes that are no AMQP, and why. It never holds the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Malformed(pub &'static str);

/// Decodes one value that fills `bytes`.
pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Malformed> {
    if scan::value_len(bytes)? != bytes.len() {
        return Err(Malformed("there is more than one value"));
    }
    serde_amqp::from_slice(bytes).map_err(|_| Malformed("a value has an unexpected type"))
}

/// Encodes one value.
pub(crate) fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, Malformed> {
    serde_amqp::to_vec(value).map_err(|_| Malformed("a value can't be encoded"))
}
