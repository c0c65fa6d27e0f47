//! The settings of `kind = "nats"` in a `[[sink]]` table.
//!
//! What lives here: the keys, their defaults and limits. What does not: fetching secrets; `env:`
//! and `file:` texts are replaced before they come here.
//! Invariant: every text that may be secret becomes a `Secret` while it is read.

use std::path::PathBuf;

use postrider_core::{Error, Result, RetryPolicy, Secret};
use postrider_encoding::Encoding;
use serde::{Deserialize, Deserializer};

use crate::login::places;

/// Longest time that one acknowledgement may take.
const MAX_TIMEOUT_MS: u64 = 600_000;
/// Most servers in the list: a cluster tells about its others by itself.
const MAX_SERVERS: usize = 64;

/// What becomes of an event for whose subject no stream answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Unroutable {
    /// It is tried again until a stream takes it: the stream may be made, or have no leader now.
    #[default]
    Retry,
    /// It is parked as a dead letter.
    Park,
}

/// Settings of a [`Nats`](crate::Nats) sink.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NatsConfig {
    /// Servers to begin with: `nats://host:4222` or `tls://host:4222`. Secret, since they may
    /// carry a user and a password.
    #[serde(deserialize_with = "secrets")]
    pub servers: Vec<Secret>,
    /// Subject of an event's message; a template.
    #[serde(default = "default_subject")]
    pub subject: String,
    /// Stream that has to take the events; another one whose subjects overlap is refused.
    pub stream: Option<String>,
    /// User, with `password`.
    pub user: Option<String>,
    /// The user's password.
    #[serde(default, deserialize_with = "optional_secret")]
    pub password: Option<Secret>,
    /// A token instead.
    #[serde(default, deserialize_with = "optional_secret")]
    pub token: Option<Secret>,
    /// The seed of an NKEY instead: `SU…`.
    #[serde(default, deserialize_with = "optional_secret")]
    pub nkey: Option<Secret>,
    /// The text of a credentials file (a JWT and its seed) instead.
    #[serde(default, deserialize_with = "optional_secret")]
    pub credentials: Option<Secret>,
    /// PEM file with further certificate authorities to trust.
    pub ca_file: Option<PathBuf>,
    /// PEM file with this client's certificate, with `client_key_file`.
    pub client_certificate_file: Option<PathBuf>,
    /// PEM file with the certificate's private key.
    pub client_key_file: Option<PathBuf>,
    /// Permits connections without TLS to hosts other than loopback.
    #[serde(default)]
    pub allow_plain: bool,
    /// What becomes of events that no stream takes.
    #[serde(default)]
    pub unroutable: Unroutable,
    /// `plain`, `cloudevents-binary` or `cloudevents-structured`.
    #[serde(default)]
    pub encoding: Encoding,
    /// `source` of CloudEvents; `/postrider` without it.
    pub source: Option<String>,
    /// Time for one acknowledgement, in milliseconds.
    #[serde(default = "default_timeout_ms")]
    pub timeout_ms: u64,
    /// Time for connecting, in milliseconds.
    #[serde(default = "default_connect_timeout_ms")]
    pub connect_timeout_ms: u64,
    /// How the relay tries again, as far as it is known here: a stream that forgets ids before the
    /// last attempt is warned of. No key of the table; the relay has its own.
    #[serde(skip)]
    pub retry: RetryPolicy,
}

impl NatsConfig {
    /// The defaults for some servers: subject `{topic}`, any stream, nobody logged in.
    pub fn new(servers: Vec<Secret>) -> Self {
        Self {
            servers,
            subject: default_subject(),
            stream: None,
            user: None,
            password: None,
            token: None,
            nkey: None,
            credentials: None,
            ca_file: None,
            client_certificate_file: None,
            client_key_file: None,
            allow_plain: false,
            unroutable: Unroutable::Retry,
            encoding: Encoding::Plain,
            source: None,
            timeout_ms: default_timeout_ms(),
            connect_timeout_ms: default_connect_timeout_ms(),
            retry: RetryPolicy::default(),
        }
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
        if self.servers.is_empty() || self.servers.len() > MAX_SERVERS {
            let count = self.servers.len();
            return Err(refused(format!("servers has {count} of them; give 1 to {MAX_SERVERS}")));
        }
        if self.user.is_some() != self.password.is_some() {
            return Err(refused("user and password belong together; give both or none"));
        }
        if self.client_certificate_file.is_some() != self.client_key_file.is_some() {
            return Err(refused(
                "client_certificate_file and client_key_file belong together; give both or none",
            ));
        }
        let ways = [
            ("user", self.user.is_some()),
            ("token", self.token.is_some()),
            ("nkey", self.nkey.is_some()),
            ("credentials", self.credentials.is_some()),
        ];
        let given: Vec<&str> = ways.iter().filter(|way| way.1).map(|way| way.0).collect();
        match given.as_slice() {
            [first, second, ..] => {
                Err(refused(format!("{second}: {first} is given as well; keep one of them")))
            }
            _ => stream_name(self.stream.as_deref()),
        }
    }

    /// Whether the events of both sinks may go into one stream: on a server that both name, into
    /// the same stream or into one that the settings don't name.
    ///
    /// A stream takes an event's id once, whatever the subject: of two sinks with one stream, the
    /// events of the second would be on no subject of its own, and count as repetitions. Logins
    /// make no difference, since they don't tell whose streams they see.
    pub fn may_share_a_stream(&self, other: &Self) -> bool {
        let streams_differ = match (&self.stream, &other.stream) {
            (Some(own), Some(others)) => own != others,
            (None, _) | (_, None) => false,
        };
        let others = places(&other.servers);
        !streams_differ && places(&self.servers).iter().any(|place| others.contains(place))
    }
}

/// Characters that no stream's name has (NATS: ADR-6).
fn stream_name(stream: Option<&str>) -> Result<()> {
    let illegal = |c: char| c.is_whitespace() || c.is_control() || ".*>/\\".contains(c);
    match stream {
        Some(name) if name.is_empty() || name.len() > 255 || name.contains(illegal) => {
            Err(refused("stream is no stream's name; it has no spaces and none of . * > / \\"))
        }
        _ => Ok(()),
    }
}

fn refused(text: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::permanent(text)
}

fn default_subject() -> String {
    "{topic}".to_owned()
}

/// As the broker's own clients wait.
fn default_timeout_ms() -> u64 {
    5_000
}

fn default_connect_timeout_ms() -> u64 {
    5_000
}

fn optional_secret<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Secret>, D::Error> {
    Ok(Option::<String>::deserialize(deserializer)?.map(Secret::new))
}

fn secrets<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Secret>, D::Error> {
    let texts = Vec::<String>::deserialize(deserializer)?;
    Ok(texts.into_iter().map(Secret::new).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINIMAL: &str = "servers = ['nats://u:hunter2@127.0.0.1']\n";

    fn read(more: &str) -> Result<NatsConfig, String> {
        toml::from_str(&format!("{MINIMAL}{more}")).map_err(|error| error.to_string())
    }

    #[test]
    fn no_secret_shows_in_debug() {
        for key in ["password", "token", "nkey", "credentials"] {
            let text = format!("{:?}", read(&format!("{key} = 'tok3n'")).expect("valid"));
            assert!(!text.contains("hunter2") && !text.contains("tok3n"), "{text}");
        }
    }

    #[test]
    fn impossible_values_are_refused_by_key() {
        assert!(read("subjct = 'a'").is_err());
        assert!(read("unroutable = 'drop'").expect_err("unknown").contains("park"));
        for (more, key) in [
            ("timeout_ms = 0", "timeout_ms"),
            ("connect_timeout_ms = 600001", "connect_timeout_ms"),
            ("user = 'a'", "password"),
            ("client_key_file = 'a'", "client_certificate_file"),
            ("token = 'a'\nnkey = 'b'", "nkey"),
            ("stream = 'a.b'", "stream"),
            ("stream = ''", "stream"),
        ] {
            let error = read(more).expect("well-formed").check().expect_err(more).to_string();
            assert!(error.contains(key), "{more}: {error}");
        }
        assert!(NatsConfig::new(Vec::new()).check().is_err());
        assert!(read("user = 'a'\npassword = 'b'").expect("well-formed").check().is_ok());
    }

    #[test]
    fn sinks_that_may_have_one_stream_are_told() {
        let sink = |servers: &[&str], stream: Option<&str>| NatsConfig {
            stream: stream.map(str::to_owned),
            ..NatsConfig::new(servers.iter().map(|text| Secret::new(*text)).collect())
        };
        let one = sink(&["tls://a.example", "tls://u:hunter2@B.example:4222"], Some("A"));
        for (other, shares) in [
            (sink(&["tls://b.example:4222"], Some("A")), true),
            (sink(&["tls://c.example", "a.example:4222"], None), true),
            (sink(&["tls://other:login@a.example"], Some("A")), true),
            (sink(&["tls://a.example"], Some("B")), false),
            (sink(&["tls://a.example:4223"], Some("A")), false),
            (sink(&["tls://c.example"], None), false),
        ] {
            assert_eq!(one.may_share_a_stream(&other), shares, "{other:?}");
            assert_eq!(other.may_share_a_stream(&one), shares, "{other:?}");
        }
    }
}
