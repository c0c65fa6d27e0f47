//! The settings of `kind = "redis"` in a `[[sink]]` table.
//!
//! What lives here: the keys, their defaults and limits. What does not: fetching secrets; `env:`
//! and `file:` texts are replaced before they come here.
//! Invariant: every text that may be secret becomes a `Secret` while it is read.

use std::path::PathBuf;

use postrider_core::{Error, Result, Secret};
use postrider_encoding::Encoding;
use serde::{Deserialize, Deserializer};

use crate::login::place;

/// Longest time that one answer may take.
const MAX_TIMEOUT_MS: u64 = 600_000;
/// Longest duplicate window: seven days.
const MAX_SEEN_FOR_MS: u64 = 7 * 86_400_000;

/// What becomes of an event whose stream does not exist and may not be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Unroutable {
    /// It is tried again until somebody has made the stream.
    #[default]
    Retry,
    /// It is parked as a dead letter.
    Park,
}

/// Settings of a [`Redis`](crate::Redis) sink.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RedisConfig {
    /// The server: `redis://host:6379/0` or `rediss://host:6379/0`. Secret, since it may carry a
    /// user and a password.
    #[serde(deserialize_with = "secret")]
    pub url: Secret,
    /// The stream's key for an event; a template.
    #[serde(default = "default_stream")]
    pub stream: String,
    /// Whether a stream that does not exist is made by its first event.
    #[serde(default = "default_create_streams")]
    pub create_streams: bool,
    /// The duplicate window: how long the server remembers an event's id, in milliseconds; 0 turns
    /// it off.
    #[serde(default = "default_seen_for_ms")]
    pub seen_for_ms: u64,
    /// User of the server's access control list, with `password`.
    pub user: Option<String>,
    /// The user's password; without `user` that of the user `default`.
    #[serde(default, deserialize_with = "optional_secret")]
    pub password: Option<Secret>,
    /// PEM file with the certificate authorities to trust instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// PEM file with this client's certificate, with `client_key_file`.
    pub client_certificate_file: Option<PathBuf>,
    /// PEM file with the certificate's private key.
    pub client_key_file: Option<PathBuf>,
    /// Permits connections without TLS to hosts other than loopback.
    #[serde(default)]
    pub allow_plain: bool,
    /// What becomes of events whose stream is missing and may not be made.
    #[serde(default)]
    pub unroutable: Unroutable,
    /// `plain`, `cloudevents-binary` or `cloudevents-structured`.
    #[serde(default)]
    pub encoding: Encoding,
    /// `source` of CloudEvents; `/postrider` without it.
    pub source: Option<String>,
    /// Time for one answer, in milliseconds; a second more for each 256 KiB on the way to the
    /// server.
    #[serde(default = "default_timeout_ms")]
    pub timeout_ms: u64,
    /// Time for connecting, in milliseconds.
    #[serde(default = "default_connect_timeout_ms")]
    pub connect_timeout_ms: u64,
}

impl RedisConfig {
    /// The defaults for a server: stream `{topic}`, made when it is missing; a duplicate window of
    /// ten minutes; nobody logged in.
    pub fn new(url: Secret) -> Self {
        Self {
            url,
            stream: default_stream(),
            create_streams: default_create_streams(),
            seen_for_ms: default_seen_for_ms(),
            user: None,
            password: None,
            ca_file: None,
            client_certificate_file: None,
            client_key_file: None,
            allow_plain: false,
            unroutable: Unroutable::Retry,
            encoding: Encoding::Plain,
            source: None,
            timeout_ms: default_timeout_ms(),
            connect_timeout_ms: default_connect_timeout_ms(),
        }
    }

    /// Whether this sink and another would take each other's events for repetitions of their own,
    /// and append one of two: they have the server, its database and `stream` in common, and a
    /// duplicate window each. A server that is named in two ways, and templates that differ and
    /// give the same stream, are not seen.
    #[must_use]
    pub fn meets(&self, other: &Self) -> bool {
        let remembers = self.seen_for_ms > 0 && other.seen_for_ms > 0;
        let (own, others) = (place(self.url.expose()), place(other.url.expose()));
        remembers && self.stream == other.stream && own.is_some() && own == others
    }

    /// Refuses impossible values, naming the key and the remedy.
    ///
    /// # Errors
    /// [`ErrorKind::Permanent`](postrider_core::ErrorKind::Permanent).
    pub fn check(&self) -> Result<()> {
        for (key, value) in
            [("timeout_ms", self.timeout_ms), ("connect_timeout_ms", self.connect_timeout_ms)]
        {
            if !(1..=MAX_TIMEOUT_MS).contains(&value) {
                return Err(refused(format!("{key} is {value}; give 1 to {MAX_TIMEOUT_MS}")));
            }
        }
        if self.seen_for_ms > MAX_SEEN_FOR_MS {
            let value = self.seen_for_ms;
            return Err(refused(format!("seen_for_ms is {value}; give 0 to {MAX_SEEN_FOR_MS}")));
        }
        if self.user.is_some() && self.password.is_none() {
            return Err(refused("user is given without a password; give both"));
        }
        if self.client_certificate_file.is_some() != self.client_key_file.is_some() {
            return Err(refused(
                "client_certificate_file and client_key_file belong together; give both or none",
            ));
        }
        Ok(())
    }
}

fn refused(text: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::permanent(text)
}

fn default_stream() -> String {
    "{topic}".to_owned()
}

fn default_create_streams() -> bool {
    true
}

/// Ten minutes: far longer than a relay needs to send again what it has had no answer for, and an
/// hour's events are not remembered.
fn default_seen_for_ms() -> u64 {
    600_000
}

fn default_timeout_ms() -> u64 {
    5_000
}

fn default_connect_timeout_ms() -> u64 {
    5_000
}

fn secret<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Secret, D::Error> {
    Ok(Secret::new(String::deserialize(deserializer)?))
}

fn optional_secret<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Secret>, D::Error> {
    Ok(Option::<String>::deserialize(deserializer)?.map(Secret::new))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINIMAL: &str = "url = 'redis://u:hunter2@127.0.0.1'\n";

    fn read(more: &str) -> Result<RedisConfig, String> {
        toml::from_str(&format!("{MINIMAL}{more}")).map_err(|error| error.to_string())
    }

    #[test]
    fn no_secret_shows_in_debug() {
        let text = format!("{:?}", read("password = 'tok3n'").expect("valid"));
        assert!(!text.contains("hunter2") && !text.contains("tok3n"), "{text}");
    }

    #[test]
    fn impossible_values_are_refused_by_key() {
        assert!(read("strem = 'a'").is_err());
        assert!(read("unroutable = 'drop'").expect_err("unknown").contains("park"));
        for (more, key) in [
            ("timeout_ms = 0", "timeout_ms"),
            ("connect_timeout_ms = 600001", "connect_timeout_ms"),
            ("seen_for_ms = 604800001", "seen_for_ms"),
            ("user = 'a'", "password"),
            ("client_key_file = 'a'", "client_certificate_file"),
        ] {
            let error = read(more).expect("well-formed").check().expect_err(more).to_string();
            assert!(error.contains(key), "{more}: {error}");
        }
        for more in ["user = 'a'\npassword = 'b'", "password = 'b'", "seen_for_ms = 0"] {
            assert!(read(more).expect("well-formed").check().is_ok(), "{more}");
        }
    }
}
