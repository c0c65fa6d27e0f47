//! Tokens: what a namespace believes a sender by.
//!
//! What lives here: the seam for tokens from elsewhere, and shared access signatures made of a key.
//! What does not: handing them to the namespace (`connect.rs`), and when (`worker.rs`).
//! Invariant: a token and the key it is made of are never printed.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use postrider_core::{Error, Result, Secret, Timestamp};
use sha2::Sha256;

use crate::connection_string::Credential;

/// Kind of tokens from Microsoft Entra ID.
pub const JWT: &str = "jwt";
const SAS: &str = "servicebus.windows.net:sastoken";

/// RFC 3986's unreserved characters stay, as the official clients have it.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// A token for one audience.
#[derive(Clone)]
pub struct Token {
    /// The token itself.
    pub text: Secret,
    /// What kind it is: [`JWT`], or a shared access signature's.
    pub kind: &'static str,
    /// From when on it is refused; none, if that is not known and it can't be renewed.
    pub expires_at: Option<Timestamp>,
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token({}, expires {:?})", self.kind, self.expires_at)
    }
}

/// Where tokens come from, when not from the connection string: for example Entra ID.
#[async_trait]
pub trait TokenSource: Send + Sync {
    /// A token that lets its bearer send to `audience`, such as
    /// `sb://shop.servicebus.windows.net/orders`.
    ///
    /// # Errors
    /// Whatever kept it from being made. Everything is held back meanwhile, and it is asked again.
    async fn token(&self, audience: &str, now: Timestamp) -> Result<Token>;
}

/// Tokens of the connection string's own credential.
pub(crate) struct SharedAccess {
    pub(crate) credential: Credential,
    pub(crate) ttl: Duration,
}

#[async_trait]
impl TokenSource for SharedAccess {
    async fn token(&self, audience: &str, now: Timestamp) -> Result<Token> {
        match &self.credential {
            Credential::Key { name, key } => {
                let expires_at = now.plus(self.ttl).as_millis() / 1_000;
                Ok(Token {
                    text: sign(audience, name, key, expires_at),
                    kind: SAS,
                    expires_at: Some(Timestamp::from_millis(expires_at * 1_000)),
                })
            }
            Credential::Signature(text) => match expiry(text) {
                Some(at) if at <= now => Err(Error::transient(
                    "the SharedAccessSignature of connection_string is no longer valid; put a new \
                     one there, or a key, of which tokens are made",
                )),
                _ => Ok(Token { text: text.clone(), kind: SAS, expires_at: None }),
            },
        }
    }
}

/// A shared access signature: HMAC-SHA256 over the audience and the second at which it expires.
fn sign(audience: &str, name: &str, key: &Secret, expires_at: u64) -> Secret {
    let resource = utf8_percent_encode(audience, ENCODED).to_string();
    let mut mac = Hmac::<Sha256>::new_from_slice(key.expose().as_bytes())
        .expect("HMAC takes a key of any length");
    mac.update(format!("{resource}\n{expires_at}").as_bytes());
    let signature = STANDARD.encode(mac.finalize().into_bytes());
    let signature = utf8_percent_encode(&signature, ENCODED);
    let name = utf8_percent_encode(name, ENCODED);
    Secret::new(format!(
        "SharedAccessSignature sr={resource}&sig={signature}&se={expires_at}&skn={name}"
    ))
}

/// When a token that was given expires, as far as it says so.
fn expiry(text: &Secret) -> Option<Timestamp> {
    let fields = text.expose().strip_prefix("SharedAccessSignature ")?;
    let seconds = fields.split('&').find_map(|field| field.strip_prefix("se="))?;
    Some(Timestamp::from_millis(seconds.parse::<u64>().ok()?.saturating_mul(1_000)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp::from_millis(1_672_671_845_678);

    /// The signature was computed by Python: `hmac.new(b"hunter2",
    /// b"sb%3A%2F%2Fshop.servicebus.windows.net%2Forders\n1672673045", "sha256")`.
    #[tokio::test]
    async fn a_key_signs_the_audience_and_the_second_of_expiry() {
        let credential = Credential::Key { name: "send only".into(), key: Secret::new("hunter2") };
        let source = SharedAccess { credential, ttl: Duration::from_secs(1_200) };
        let audience = "sb://shop.servicebus.windows.net/orders";
        let token = source.token(audience, NOW).await.expect("signed");
        assert_eq!(
            token.text.expose(),
            "SharedAccessSignature sr=sb%3A%2F%2Fshop.servicebus.windows.net%2Forders&\
             sig=ZIzXwCN0g2BIq2cEZnvIurJjlZIvZ8ggH8007oZRT9Q%3D&se=1672673045&skn=send%20only"
        );
        assert_eq!(token.expires_at, Some(Timestamp::from_millis(1_672_673_045_000)));
        assert!(!format!("{token:?}").contains("sig"), "{token:?}");
    }

    #[tokio::test]
    async fn a_given_signature_is_used_until_it_expires() {
        let given = |se: &str| SharedAccess {
            credential: Credential::Signature(Secret::new(format!(
                "SharedAccessSignature sr=a&sig=hunter2&se={se}&skn=b"
            ))),
            ttl: Duration::from_secs(1),
        };
        for se in ["1672671846", "99999999999999999999", "x"] {
            let token = given(se).token("sb://h/q", NOW).await.expect("still valid");
            assert_eq!(token.expires_at, None, "it can't be renewed");
        }
        let error = given("1672671845").token("sb://h/q", NOW).await.expect_err("expired");
        assert!(error.to_string().contains("no longer valid"), "{error}");
        assert!(!error.chain().contains("hunter2"), "{error:?}");
    }
}
