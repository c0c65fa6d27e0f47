//! Who may use which entity: shared access signatures, and what a connection has shown.
//!
//! What lives here: checking a signature, remembering what it opens and until when. What does not:
//! the request that carries it (`cbs.rs`).
//! Invariant: a token is never kept, logged or told; only what it opens is.

use std::collections::HashMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use percent_encoding::percent_decode_str;
use sha2::Sha256;

use crate::address;
use crate::config::Config;
use crate::refusal::{Refusal, condition};

/// The most audiences that one connection remembers.
const AUDIENCES_MAX: usize = 1_024;
const SAS_PREFIX: &str = "SharedAccessSignature ";

/// What a connection may use, by lower-case path, until a time in milliseconds since 1970.
#[derive(Debug, Default)]
pub(crate) struct Tokens {
    open: HashMap<String, i64>,
    /// The connection proved by its user name and password that it may use everything.
    everything: bool,
}

impl Tokens {
    pub(crate) fn allow_everything(&mut self) {
        self.everything = true;
    }

    pub(crate) fn allow(&mut self, audience: &str, until_ms: i64) -> Result<(), Refusal> {
        if self.open.len() >= AUDIENCES_MAX && !self.open.contains_key(audience) {
            let text = "This connection has shown too many tokens.";
            return Err(Refusal::new(condition::RESOURCE_LIMIT, text));
        }
        self.open.insert(audience.to_owned(), until_ms);
        Ok(())
    }

    pub(crate) fn forget(&mut self) {
        self.open.clear();
    }

    /// Whether the connection may use an entity now.
    pub(crate) fn check(&self, key: &str, now_ms: i64) -> Result<(), Refusal> {
        let mut until = None;
        for (audience, one) in &self.open {
            if covers(audience, key) {
                until = until.max(Some(*one));
            }
        }
        match until {
            _ if self.everything => Ok(()),
            Some(until) if until > now_ms => Ok(()),
            Some(_) => Err(expired()),
            None => {
                let text = "Unauthorized access. 'Send' or 'Listen' claim(s) are required.";
                Err(Refusal::new(condition::UNAUTHORIZED, text))
            }
        }
    }

    /// When the next token expires.
    pub(crate) fn next_expiry_ms(&self, now_ms: i64) -> Option<i64> {
        self.open.values().copied().filter(|until| *until > now_ms).min()
    }
}

pub(crate) fn expired() -> Refusal {
    let text = "ExpiredToken: The token is expired.";
    Refusal::new(condition::UNAUTHORIZED, text)
}

/// Whether whoever may use one path may use another: the namespace covers all, an entity what lies
/// below it.
fn covers(audience: &str, key: &str) -> bool {
    match key.strip_prefix(audience) {
        Some(rest) => audience.is_empty() || rest.is_empty() || rest.starts_with('/'),
        None => false,
    }
}

/// Looks at a token for an audience; until when it is valid, in milliseconds since 1970.
///
/// Tokens that are no shared access signatures are taken as they are: nobody here could check them.
pub(crate) fn verify(
    config: &Config,
    token: &str,
    audience: &str,
    now_ms: i64,
) -> Result<i64, Refusal> {
    let Some(fields) = token.strip_prefix(SAS_PREFIX) else {
        return Ok(now_ms.saturating_add(3_600_000));
    };
    let invalid = |text: &str| Refusal::new(condition::UNAUTHORIZED, text);
    let field = |name: &str| {
        let mut pairs = fields.split('&').filter_map(|field| field.split_once('='));
        pairs.find(|(key, _)| *key == name).map(|(_, value)| value)
    };
    let (Some(resource), Some(signature)) = (field("sr"), field("sig")) else {
        return Err(invalid("InvalidSignature: The token has no resource or no signature."));
    };
    let (Some(expiry), Some(name)) = (field("se"), field("skn")) else {
        return Err(invalid("MalformedToken: The token has no expiry or no key name."));
    };
    if decoded(name) != config.shared_access_key_name {
        return Err(invalid("InvalidSignature: The token names an unknown key."));
    }
    let signature = STANDARD.decode(decoded(signature)).unwrap_or_default();
    let mac = Hmac::<Sha256>::new_from_slice(config.shared_access_key.as_bytes());
    let mut mac = mac.map_err(|_| invalid("InvalidSignature: The key can't be used."))?;
    mac.update(format!("{resource}\n{expiry}").as_bytes());
    if mac.verify_slice(&signature).is_err() {
        return Err(invalid("InvalidSignature: The token has an invalid signature."));
    }
    if !covers(&address::key(&decoded(resource)), audience) {
        return Err(invalid("InvalidAudience: The token is for another resource."));
    }
    let until_ms = expiry.parse::<i64>().ok().and_then(|seconds| seconds.checked_mul(1_000));
    let until_ms = until_ms.ok_or_else(|| invalid("MalformedToken: The expiry is no number."))?;
    if until_ms <= now_ms { Err(expired()) } else { Ok(until_ms) }
}

fn decoded(text: &str) -> String {
    percent_decode_str(text).decode_utf8_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(key: &str, resource: &str, expiry: i64) -> String {
        let mut mac = Hmac::<Sha256>::new_from_slice(key.as_bytes()).expect("any key will do");
        mac.update(format!("{resource}\n{expiry}").as_bytes());
        let signature = STANDARD.encode(mac.finalize().into_bytes());
        let signature =
            percent_encoding::utf8_percent_encode(&signature, percent_encoding::NON_ALPHANUMERIC);
        let name = "RootManageSharedAccessKey";
        format!("SharedAccessSignature sr={resource}&sig={signature}&se={expiry}&skn={name}")
    }

    #[test]
    fn a_signature_opens_what_it_names_until_it_expires() {
        let config = Config::default();
        let good = token(&config.shared_access_key, "sb%3a%2f%2fh%3a5672%2fOrders", 100);
        assert_eq!(verify(&config, &good, "orders", 99_999), Ok(100_000));
        assert_eq!(verify(&config, &good, "orders/$management", 0), Ok(100_000));
        assert!(verify(&config, &good, "orders", 100_000).is_err());
        assert!(verify(&config, &good, "orders2", 0).is_err());
        assert!(verify(&config, &good.replace("100", "200"), "orders", 0).is_err());
        let other = token("another key", "sb%3a%2f%2fh%2forders", 100);
        assert!(verify(&config, &other, "orders", 0).is_err());
    }

    #[test]
    fn the_namespace_covers_everything_and_an_entity_what_is_below_it() {
        let mut tokens = Tokens::default();
        assert!(tokens.check("orders", 0).is_err());
        tokens.allow("orders", 10).expect("there is room");
        assert_eq!(tokens.check("orders/$deadletterqueue", 9), Ok(()));
        assert_eq!(tokens.check("orders", 10), Err(expired()));
        assert!(tokens.check("orders-2", 0).is_err());
        tokens.allow("", 20).expect("there is room");
        assert_eq!(tokens.check("orders-2", 10), Ok(()));
        assert_eq!(tokens.next_expiry_ms(10), Some(20));
    }
}
