//! The receiver's side: whether a request really comes from the sender, and recently.
//!
//! What lives here: `Verifier`. What does not: HTTP; any server's request will do.
//! Invariant: comparison takes the same time whatever is compared, and no input makes it panic.
//!
//! Verify the body's bytes as they arrived, before any parsing, then drop repetitions by the id.

use std::fmt;
use std::time::Duration;

use ed25519_dalek::{Signature, VerifyingKey};
use hmac::Mac;
use postrider_core::{Error, Result, Secret, Timestamp};

use crate::signature::{HMAC_PREFIX, HmacKey, decode, signed_content};

const ED25519_PREFIX: &str = "whpk_";
/// How far the sender's clock may be off, by default (as the reference implementations have it).
const TOLERANCE: Duration = Duration::from_secs(300);
/// Signatures looked at; a sender has two or three active keys.
const MAX_SIGNATURES: usize = 16;

/// A request's signed parts, as they arrived.
#[derive(Clone, Copy)]
pub struct SignedRequest<'a> {
    /// Header `webhook-id`.
    pub id: &'a str,
    /// Header `webhook-timestamp`.
    pub timestamp: &'a str,
    /// Header `webhook-signature`.
    pub signature: &'a str,
    /// The body.
    pub body: &'a [u8],
}

/// Checks requests against the keys that are active; during a rotation the old and the new one.
#[derive(Clone)]
pub struct Verifier {
    keys: Vec<Key>,
    tolerance: Duration,
}

#[derive(Clone)]
enum Key {
    Hmac(HmacKey),
    Ed25519(Box<VerifyingKey>),
}

/// Why a request is not to be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VerifyError {
    /// The id is empty or holds a full stop, which would make the signed text ambiguous.
    MalformedId,
    /// The timestamp is no number of seconds.
    MalformedTimestamp,
    /// It was signed longer ago than is tolerated: perhaps a replay.
    TooOld,
    /// It was signed further in the future than is tolerated.
    TooNew,
    /// No signature fits any of the keys.
    NoMatch,
}

impl Verifier {
    /// Takes `whsec_…` (HMAC) and `whpk_…` (ed25519) keys.
    ///
    /// # Errors
    /// [`ErrorKind::Permanent`](postrider_core::ErrorKind::Permanent) if there is no key, or one
    /// has another form.
    pub fn new(keys: &[Secret]) -> Result<Self> {
        if keys.is_empty() {
            return Err(Error::permanent("there is no key to verify with"));
        }
        let keys = keys.iter().map(|key| Key::parse(key.expose())).collect::<Result<_>>()?;
        Ok(Self { keys, tolerance: TOLERANCE })
    }

    /// How far the time of signing may be from now, either way; five minutes by default.
    #[must_use]
    pub fn tolerance(mut self, tolerance: Duration) -> Self {
        self.tolerance = tolerance;
        self
    }

    /// Whether one of the request's signatures is right and its time close enough to `now`.
    ///
    /// # Errors
    /// The reason not to trust the request; answer it with 401 and do nothing else.
    pub fn verify(&self, request: &SignedRequest<'_>, now: Timestamp) -> Result<(), VerifyError> {
        if request.id.is_empty() || request.id.contains('.') {
            return Err(VerifyError::MalformedId);
        }
        let digits = request.timestamp.bytes().all(|byte| byte.is_ascii_digit());
        let seconds = request.timestamp.parse::<u64>().ok().filter(|_| digits);
        let seconds = seconds.ok_or(VerifyError::MalformedTimestamp)?;
        let signed_at = Timestamp::from_millis(seconds.saturating_mul(1_000));
        if now.since(signed_at) > self.tolerance {
            return Err(VerifyError::TooOld);
        }
        if signed_at.since(now) > self.tolerance {
            return Err(VerifyError::TooNew);
        }
        let signatures = request.signature.split(' ').take(MAX_SIGNATURES);
        let mut versioned = signatures.filter_map(|signature| signature.split_once(','));
        let fits = versioned.any(|(version, encoded)| {
            decode(encoded)
                .is_some_and(|bytes| self.keys.iter().any(|key| key.fits(version, request, &bytes)))
        });
        if fits { Ok(()) } else { Err(VerifyError::NoMatch) }
    }
}

impl Key {
    fn parse(text: &str) -> Result<Self> {
        if text.starts_with(HMAC_PREFIX) {
            return Ok(Self::Hmac(HmacKey::parse(text)?));
        }
        let encoded = text.strip_prefix(ED25519_PREFIX).ok_or_else(|| {
            Error::permanent("key starts neither with whsec_ (HMAC) nor with whpk_ (ed25519)")
        })?;
        let bytes = decode(encoded).and_then(|bytes| <[u8; 32]>::try_from(bytes).ok());
        let key = bytes.and_then(|bytes| VerifyingKey::from_bytes(&bytes).ok());
        key.map(|key| Self::Ed25519(Box::new(key)))
            .ok_or_else(|| Error::permanent("key whpk_… is no ed25519 public key of 32 bytes"))
    }

    fn fits(&self, version: &str, request: &SignedRequest<'_>, signature: &[u8]) -> bool {
        let SignedRequest { id, timestamp, body, .. } = *request;
        match self {
            Self::Hmac(key) => {
                version == "v1" && key.mac(id, timestamp, body).verify_slice(signature).is_ok()
            }
            Self::Ed25519(key) => {
                version == "v1a"
                    && Signature::from_slice(signature).is_ok_and(|signature| {
                        let content = signed_content(id, timestamp, body);
                        key.verify_strict(&content, &signature).is_ok()
                    })
            }
        }
    }
}

impl fmt::Debug for Verifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Verifier({} keys, ±{:?})", self.keys.len(), self.tolerance)
    }
}

impl fmt::Display for VerifyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::MalformedId => "webhook-id is empty or holds a full stop",
            Self::MalformedTimestamp => "webhook-timestamp is no number of seconds",
            Self::TooOld => "webhook-timestamp is too old",
            Self::TooNew => "webhook-timestamp lies in the future",
            Self::NoMatch => "no signature fits a key",
        })
    }
}

impl std::error::Error for VerifyError {}
