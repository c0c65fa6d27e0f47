//! The settings of `kind = "webhook"` in a `[[sink]]` table.
//!
//! What lives here: the keys and their defaults. What does not: fetching secrets; `env:` and
//! `file:` texts are replaced before they come here.
//! Invariant: every text that may be secret becomes a `Secret` while it is read.

use std::collections::BTreeMap;
use std::path::PathBuf;

use postrider_core::{Error, Result, Secret};
use postrider_encoding::Encoding;
use serde::{Deserialize, Deserializer};

/// Longest time a request may take; the relay's byte budget waits for it meanwhile.
const MAX_TIMEOUT_MS: u64 = 600_000;
/// Most requests at a time to one host.
const MAX_CONCURRENCY: usize = 1_024;

/// Settings of a [`Webhook`](crate::Webhook) sink. Limits: at most 16 signing keys and 64 headers.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WebhookConfig {
    /// Where to send: `https://…`, with placeholders after the host if needed. Secret, since
    /// many services carry a token in it.
    #[serde(deserialize_with = "secret")]
    pub url: Secret,
    /// Keys to sign with, each of which adds a signature: `whsec_…` or `whsk_…`.
    #[serde(default, deserialize_with = "secrets")]
    pub signing_keys: Vec<Secret>,
    /// Sends without signatures; has to be said, since receivers can't tell who sends.
    #[serde(default)]
    pub unsigned: bool,
    /// Fixed headers, for example `authorization`.
    #[serde(default, deserialize_with = "secret_map")]
    pub headers: BTreeMap<String, Secret>,
    /// `plain`, `cloudevents-binary` or `cloudevents-structured`.
    #[serde(default)]
    pub encoding: Encoding,
    /// `source` of CloudEvents; `/postrider` without it.
    pub source: Option<String>,
    /// Permits private, loopback and link-local addresses.
    #[serde(default)]
    pub allow_private: bool,
    /// Permits `http://` to hosts other than loopback.
    #[serde(default)]
    pub allow_http: bool,
    /// Requests at a time to this host, shared by all sinks of the process that send to it.
    #[serde(default = "default_concurrency")]
    pub concurrency: usize,
    /// Time for one request, from connecting to the answer's status, in milliseconds.
    #[serde(default = "default_timeout_ms")]
    pub timeout_ms: u64,
    /// Time for connecting, in milliseconds.
    #[serde(default = "default_connect_timeout_ms")]
    pub connect_timeout_ms: u64,
    /// PEM file with further certificate authorities to trust.
    pub ca_file: Option<PathBuf>,
    /// Proxy to send through. Variables such as `HTTPS_PROXY` are never read.
    #[serde(default, deserialize_with = "optional_secret")]
    pub proxy: Option<Secret>,
}

impl WebhookConfig {
    /// The defaults for a URL: signed with `signing_keys`, public addresses only, https only.
    pub fn new(url: Secret, signing_keys: Vec<Secret>) -> Self {
        Self {
            url,
            signing_keys,
            unsigned: false,
            headers: BTreeMap::new(),
            encoding: Encoding::Plain,
            source: None,
            allow_private: false,
            allow_http: false,
            concurrency: default_concurrency(),
            timeout_ms: default_timeout_ms(),
            connect_timeout_ms: default_connect_timeout_ms(),
            ca_file: None,
            proxy: None,
        }
    }

    /// Refuses impossible values, naming the key and the remedy.
    ///
    /// # Errors
    /// [`ErrorKind::Permanent`](postrider_core::ErrorKind::Permanent).
    pub fn check(&self) -> Result<()> {
        let within = |key: &str, value: u64, most: u64| match (1..=most).contains(&value) {
            true => Ok(()),
            false => Err(Error::permanent(format!("{key} is {value}; give 1 to {most}"))),
        };
        within("timeout_ms", self.timeout_ms, MAX_TIMEOUT_MS)?;
        within("connect_timeout_ms", self.connect_timeout_ms, MAX_TIMEOUT_MS)?;
        within("concurrency", self.concurrency as u64, MAX_CONCURRENCY as u64)?;
        match (self.signing_keys.len(), self.unsigned) {
            (0, false) => Err(Error::permanent(
                "signing_keys is missing: receivers could not tell who sends; give a key \
                 (whsec_…), or say unsigned = true",
            )),
            (1.., true) => Err(Error::permanent(
                "unsigned = true contradicts signing_keys; remove one of them",
            )),
            (17.., _) => Err(Error::permanent("signing_keys has more than 16 keys")),
            _ if self.headers.len() > 64 => {
                Err(Error::permanent("headers has more than 64 of them"))
            }
            _ => Ok(()),
        }
    }
}

/// Enough to hide the latency of a distant host, and few enough for a small one.
fn default_concurrency() -> usize {
    16
}

fn default_timeout_ms() -> u64 {
    10_000
}

fn default_connect_timeout_ms() -> u64 {
    5_000
}

fn secret<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Secret, D::Error> {
    String::deserialize(deserializer).map(Secret::new)
}

fn optional_secret<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Secret>, D::Error> {
    Ok(Option::<String>::deserialize(deserializer)?.map(Secret::new))
}

fn secrets<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Secret>, D::Error> {
    let texts = Vec::<String>::deserialize(deserializer)?;
    Ok(texts.into_iter().map(Secret::new).collect())
}

fn secret_map<'de, D>(deserializer: D) -> Result<BTreeMap<String, Secret>, D::Error>
where
    D: Deserializer<'de>,
{
    let texts = BTreeMap::<String, String>::deserialize(deserializer)?;
    Ok(texts.into_iter().map(|(name, text)| (name, Secret::new(text))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINIMAL: &str = "url = 'https://u:hunter2@example.com/tok3n'\n";

    fn read(more: &str) -> Result<WebhookConfig, String> {
        toml::from_str(&format!("{MINIMAL}{more}")).map_err(|error| error.to_string())
    }

    #[test]
    fn no_secret_shows_in_debug() {
        let config = read(
            "signing_keys = ['whsec_tok3n']\nproxy = 'http://hunter2@p'\n\
             headers = { authorization = 'Bearer hunter2' }",
        );
        let text = format!("{:?}", config.expect("valid"));
        assert!(!text.contains("hunter2") && !text.contains("tok3n"), "{text}");
        assert!(text.contains("authorization"), "{text}");
    }

    #[test]
    fn impossible_values_are_refused_by_key() {
        assert!(read("sgining_keys = []").is_err());
        assert!(read("encoding = 'cloudevents'").expect_err("unknown").contains("plain"));
        for (more, key) in [
            ("", "signing_keys"),
            ("signing_keys = ['a']\nunsigned = true", "unsigned"),
            ("unsigned = true\ntimeout_ms = 0", "timeout_ms"),
            ("unsigned = true\nconnect_timeout_ms = 999999999", "connect_timeout_ms"),
            ("unsigned = true\nconcurrency = 0", "concurrency"),
        ] {
            let error = read(more).expect("well-formed").check().expect_err(more).to_string();
            assert!(error.contains(key), "{more}: {error}");
        }
        assert!(read("unsigned = true").expect("well-formed").check().is_ok());
    }
}
