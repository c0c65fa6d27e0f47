//! Standard Webhooks signatures: keys and signing (<https://www.standardwebhooks.com>).
//!
//! What lives here: the two kinds of keys, their texts, and the signature of a message. What does
//! not: checking one (`verify.rs`).
//! Invariant: what is signed is exactly `id.timestamp.body`, and no key is ever printed.

use std::fmt;

use base64::Engine;
use base64::alphabet;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig, STANDARD};
use ed25519_dalek::Signer;
use hmac::{Hmac, KeyInit, Mac};
use postrider_core::{Error, Result, Secret};
use sha2::Sha256;

/// Header with the event's id.
pub const WEBHOOK_ID_HEADER: &str = "webhook-id";
/// Header with the time of signing, in seconds since 1970.
pub const TIMESTAMP_HEADER: &str = "webhook-timestamp";
/// Header with the signatures, one for each active key, separated by spaces.
pub const SIGNATURE_HEADER: &str = "webhook-signature";

pub(crate) const HMAC_PREFIX: &str = "whsec_";
const ED25519_PREFIX: &str = "whsk_";
/// Bounds of a symmetric key, from the specification: 192 to 512 bits.
const HMAC_KEY_BYTES: std::ops::RangeInclusive<usize> = 24..=64;

/// Keys are accepted with or without padding, as tools write them both ways.
const LENIENT: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// A key to sign with.
#[derive(Clone)]
pub struct SigningKey(Kind);

#[derive(Clone)]
enum Kind {
    Hmac(HmacKey),
    Ed25519(Box<ed25519_dalek::SigningKey>),
}

impl SigningKey {
    /// Reads `whsec_…` (HMAC-SHA256, 24 to 64 bytes) or `whsk_…` (ed25519: the 32 bytes of the
    /// seed, or those and the public key), in base 64.
    ///
    /// # Errors
    /// [`ErrorKind::Permanent`](postrider_core::ErrorKind::Permanent) with the form to use.
    pub fn parse(text: &Secret) -> Result<Self> {
        let text = text.expose();
        if text.starts_with(HMAC_PREFIX) {
            return Ok(Self(Kind::Hmac(HmacKey::parse(text)?)));
        }
        let bad = |what| Error::permanent(format!("signing key {what}"));
        let Some(encoded) = text.strip_prefix(ED25519_PREFIX) else {
            return Err(bad("starts neither with whsec_ (HMAC) nor with whsk_ (ed25519)"));
        };
        let bytes = decode(encoded).ok_or_else(|| bad("whsk_… is not base 64 after its prefix"))?;
        let key = match bytes.len() {
            32 => bytes.first_chunk().map(ed25519_dalek::SigningKey::from_bytes),
            64 => bytes
                .first_chunk()
                .and_then(|pair| ed25519_dalek::SigningKey::from_keypair_bytes(pair).ok()),
            _ => None,
        };
        let key = key.ok_or_else(|| bad("whsk_… is no ed25519 key of 32 or 64 bytes"))?;
        Ok(Self(Kind::Ed25519(Box::new(key))))
    }

    /// One signature with its version: `v1,…` or `v1a,…`.
    pub fn sign(&self, id: &str, timestamp: u64, body: &[u8]) -> String {
        match &self.0 {
            Kind::Hmac(key) => {
                let mac = key.mac(id, &timestamp.to_string(), body).finalize().into_bytes();
                format!("v1,{}", STANDARD.encode(mac))
            }
            Kind::Ed25519(key) => {
                let content = signed_content(id, &timestamp.to_string(), body);
                format!("v1a,{}", STANDARD.encode(key.sign(&content).to_bytes()))
            }
        }
    }
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.0 {
            Kind::Hmac(_) => "SigningKey(HMAC)",
            Kind::Ed25519(_) => "SigningKey(ed25519)",
        })
    }
}

/// A symmetric key, prepared.
#[derive(Clone)]
pub(crate) struct HmacKey(Hmac<Sha256>);

impl HmacKey {
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let bad = |what: String| Error::permanent(format!("signing key whsec_… {what}"));
        let encoded = text.strip_prefix(HMAC_PREFIX).unwrap_or(text);
        let bytes = decode(encoded).ok_or_else(|| bad("is not base 64 after its prefix".into()))?;
        if !HMAC_KEY_BYTES.contains(&bytes.len()) {
            return Err(bad(format!("has {} bytes; 24 to 64 are allowed", bytes.len())));
        }
        let mac = Hmac::new_from_slice(&bytes).expect("HMAC takes a key of any length");
        Ok(Self(mac))
    }

    /// The code over `id.timestamp.body`; the timestamp as it stands in its header.
    pub(crate) fn mac(&self, id: &str, timestamp: &str, body: &[u8]) -> Hmac<Sha256> {
        let mut mac = self.0.clone();
        for part in [id.as_bytes(), b".", timestamp.as_bytes(), b".", body] {
            mac.update(part);
        }
        mac
    }
}

pub(crate) fn signed_content(id: &str, timestamp: &str, body: &[u8]) -> Vec<u8> {
    [id.as_bytes(), timestamp.as_bytes(), body].join(&b'.')
}

pub(crate) fn decode(text: &str) -> Option<Vec<u8>> {
    LENIENT.decode(text).ok()
}
