//! The settings of `kind = "rabbitmq"` in a `[[sink]]` table.
//!
//! What lives here: the keys, their defaults and limits. What does not: fetching secrets; `env:`
//! and `file:` texts are replaced before they come here.
//! Invariant: every text that may be secret becomes a `Secret` while it is read.

use std::path::{Path, PathBuf};

use postrider_core::{Error, Result, Secret};
use postrider_encoding::Encoding;
use serde::{Deserialize, Deserializer};

/// Longest time that one confirmation may take.
const MAX_TIMEOUT_MS: u64 = 600_000;
/// Most servers in the list: more nodes than any cluster has.
const MAX_SERVERS: usize = 64;
/// Most events under way: less than a third of the channels that a server allows one connection
/// (2,047), since it closes a channel with each event that it refuses, and no number is used again.
pub(crate) const MAX_IN_FLIGHT: usize = 640;
/// The largest message that any version takes (`max_message_size`): 512 MiB.
const MAX_MESSAGE_BYTES: usize = 512 << 20;

/// What becomes of an event that no queue takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Unroutable {
    /// It is tried again until a queue takes it: one may be bound, or its node come back.
    #[default]
    Retry,
    /// It is parked as a dead letter.
    Park,
}

/// Type of an exchange that is declared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExchangeType {
    /// By the words of the routing key.
    #[default]
    Topic,
    /// By the whole routing key.
    Direct,
    /// To every queue that is bound.
    Fanout,
    /// By the message's headers.
    Headers,
}

/// Type of a queue that is declared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum QueueType {
    /// Replicated over the nodes of a cluster.
    #[default]
    Quorum,
    /// On one node.
    Classic,
}

/// Settings of a [`RabbitMq`](crate::RabbitMq) sink.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RabbitMqConfig {
    /// Servers, tried in turn: `amqps://user:password@host:5671/vhost`. Secret, since they may
    /// carry a password.
    #[serde(deserialize_with = "secrets")]
    pub servers: Vec<Secret>,
    /// Exchange of an event's message, a template; empty for the default exchange, whose routing
    /// key is the queue's name.
    pub exchange: String,
    /// Routing key of an event's message; a template.
    #[serde(default = "default_routing_key")]
    pub routing_key: String,
    /// What becomes of events that no queue takes, or whose exchange does not exist.
    #[serde(default)]
    pub unroutable: Unroutable,
    /// A queue that has to exist.
    pub queue: Option<String>,
    /// Makes the exchange, and the queue with its binding, where they are missing; both durable.
    #[serde(default)]
    pub declare: bool,
    /// Type of the exchange that `declare` makes.
    #[serde(default)]
    pub exchange_type: ExchangeType,
    /// Type of the queue that `declare` makes.
    #[serde(default)]
    pub queue_type: QueueType,
    /// Binding key of the queue that `declare` makes.
    #[serde(default = "default_binding_key")]
    pub binding_key: String,
    /// User, with `password`; the URL's without.
    pub user: Option<String>,
    /// The user's password.
    #[serde(default, deserialize_with = "optional_secret")]
    pub password: Option<Secret>,
    /// Logs in as whom the client certificate names (SASL EXTERNAL).
    #[serde(default)]
    pub external: bool,
    /// PEM file with further certificate authorities to trust.
    pub ca_file: Option<PathBuf>,
    /// PEM file with this client's certificate, with `client_key_file`.
    pub client_certificate_file: Option<PathBuf>,
    /// PEM file with the certificate's private key.
    pub client_key_file: Option<PathBuf>,
    /// Permits connections without TLS to hosts other than loopback.
    #[serde(default)]
    pub allow_plain: bool,
    /// `plain`, `cloudevents-binary` or `cloudevents-structured`.
    #[serde(default)]
    pub encoding: Encoding,
    /// `source` of CloudEvents; `/postrider` without it.
    pub source: Option<String>,
    /// The server's `max_message_size`, in bytes. Larger events are parked unsent; where the
    /// server's own is lower, it refuses them and they are parked as well.
    #[serde(default = "default_max_message_bytes")]
    pub max_message_bytes: usize,
    /// Events under way at a time, over all keys: each on a channel of its own.
    #[serde(default = "default_in_flight")]
    pub in_flight: usize,
    /// Time for one confirmation, in milliseconds.
    #[serde(default = "default_timeout_ms")]
    pub timeout_ms: u64,
    /// Time for connecting and logging in, in milliseconds.
    #[serde(default = "default_timeout_ms")]
    pub connect_timeout_ms: u64,
}

impl RabbitMqConfig {
    /// The defaults for some servers and an exchange: routing key `{topic}`, nothing declared.
    pub fn new(servers: Vec<Secret>, exchange: impl Into<String>) -> Self {
        Self {
            servers,
            exchange: exchange.into(),
            routing_key: default_routing_key(),
            unroutable: Unroutable::Retry,
            queue: None,
            declare: false,
            exchange_type: ExchangeType::Topic,
            queue_type: QueueType::Quorum,
            binding_key: default_binding_key(),
            user: None,
            password: None,
            external: false,
            ca_file: None,
            client_certificate_file: None,
            client_key_file: None,
            allow_plain: false,
            encoding: Encoding::Plain,
            source: None,
            max_message_bytes: default_max_message_bytes(),
            in_flight: default_in_flight(),
            timeout_ms: default_timeout_ms(),
            connect_timeout_ms: default_timeout_ms(),
        }
    }

    /// Refuses impossible values, naming the key and the remedy.
    ///
    /// # Errors
    /// [`ErrorKind::Permanent`](postrider_core::ErrorKind::Permanent).
    pub fn check(&self) -> Result<()> {
        self.access().check()?;
        check_times(self.timeout_ms, self.connect_timeout_ms)?;
        for (key, value, most) in [
            ("in_flight", self.in_flight, MAX_IN_FLIGHT),
            ("max_message_bytes", self.max_message_bytes, MAX_MESSAGE_BYTES),
        ] {
            if !(1..=most).contains(&value) {
                return Err(refused(format!("{key}: {value} of it; give 1 to {most}")));
            }
        }
        let names = [("binding_key", Some(&self.binding_key)), ("queue", self.queue.as_ref())];
        for (key, name) in names {
            if name.is_some_and(|name| name.len() > 255 || name.is_empty() && key == "queue") {
                return Err(refused(format!("{key}: give 1 to 255 bytes")));
            }
        }
        Ok(())
    }

    pub(crate) fn access(&self) -> Access<'_> {
        Access {
            scheme: Scheme::Amqp,
            servers: &self.servers,
            user: self.user.as_deref(),
            password: self.password.as_ref(),
            external: self.external,
            ca_file: self.ca_file.as_deref(),
            client_certificate_file: self.client_certificate_file.as_deref(),
            client_key_file: self.client_key_file.as_deref(),
            allow_plain: self.allow_plain,
        }
    }
}

/// Which servers, as whom, and whom to trust: what both ways into RabbitMQ are told.
pub(crate) struct Access<'a> {
    pub(crate) scheme: Scheme,
    pub(crate) servers: &'a [Secret],
    pub(crate) user: Option<&'a str>,
    pub(crate) password: Option<&'a Secret>,
    pub(crate) external: bool,
    pub(crate) ca_file: Option<&'a Path>,
    pub(crate) client_certificate_file: Option<&'a Path>,
    pub(crate) client_key_file: Option<&'a Path>,
    pub(crate) allow_plain: bool,
}

/// Which protocol a server's URL names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scheme {
    /// AMQP 0-9-1.
    Amqp,
    /// The stream protocol.
    Stream,
}

impl Access<'_> {
    /// Refuses what does not fit together, naming the key.
    pub(crate) fn check(&self) -> Result<()> {
        if !(1..=MAX_SERVERS).contains(&self.servers.len()) {
            let count = self.servers.len();
            return Err(refused(format!("servers: {count} of it; give 1 to {MAX_SERVERS}")));
        }
        if self.user.is_some() != self.password.is_some() {
            return Err(refused("user and password belong together; give both or none"));
        }
        if self.client_certificate_file.is_some() != self.client_key_file.is_some() {
            return Err(refused(
                "client_certificate_file and client_key_file belong together; give both or none",
            ));
        }
        if self.external && self.client_certificate_file.is_none() {
            return Err(refused("external: it needs client_certificate_file and client_key_file"));
        }
        if self.external && self.user.is_some() {
            return Err(refused("external: user is given as well; keep one of them"));
        }
        Ok(())
    }
}

/// Refuses times that are none, naming the key.
pub(crate) fn check_times(timeout_ms: u64, connect_timeout_ms: u64) -> Result<()> {
    for (key, value) in [("timeout_ms", timeout_ms), ("connect_timeout_ms", connect_timeout_ms)] {
        if !(1..=MAX_TIMEOUT_MS).contains(&value) {
            return Err(refused(format!("{key} is {value}; give 1 to {MAX_TIMEOUT_MS}")));
        }
    }
    Ok(())
}

pub(crate) fn refused(text: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::permanent(text)
}

fn default_routing_key() -> String {
    "{topic}".to_owned()
}

fn default_binding_key() -> String {
    "#".to_owned()
}

/// The default of 3.8 to 3.13; the default of 4 is 16 MiB, which is as much as `append` takes.
fn default_max_message_bytes() -> usize {
    128 << 20
}

/// Hides a round trip of several milliseconds at the rates of one connection.
fn default_in_flight() -> usize {
    256
}

/// As long as the sink of NATS waits.
pub(crate) fn default_timeout_ms() -> u64 {
    5_000
}

pub(crate) fn optional_secret<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Secret>, D::Error> {
    Ok(Option::<String>::deserialize(deserializer)?.map(Secret::new))
}

pub(crate) fn secrets<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Secret>, D::Error> {
    let texts = Vec::<String>::deserialize(deserializer)?;
    Ok(texts.into_iter().map(Secret::new).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINIMAL: &str = "servers = ['amqp://u:hunter2@127.0.0.1']\nexchange = 'e'\n";

    fn read(more: &str) -> Result<RabbitMqConfig, String> {
        toml::from_str(&format!("{MINIMAL}{more}")).map_err(|error| error.to_string())
    }

    #[test]
    fn no_secret_shows_in_debug() {
        let text = format!("{:?}", read("password = 'tok3n'").expect("valid"));
        assert!(!text.contains("hunter2") && !text.contains("tok3n"), "{text}");
    }

    #[test]
    fn impossible_values_are_refused_by_key() {
        assert!(read("exchnge = 'a'").is_err());
        assert!(read("unroutable = 'drop'").expect_err("unknown").contains("park"));
        for (more, key) in [
            ("timeout_ms = 0", "timeout_ms"),
            ("connect_timeout_ms = 600001", "connect_timeout_ms"),
            ("in_flight = 641", "in_flight"),
            ("max_message_bytes = 0", "max_message_bytes"),
            ("user = 'a'", "password"),
            ("client_key_file = 'a'", "client_certificate_file"),
            ("external = true", "client_certificate_file"),
            ("queue = ''", "queue"),
        ] {
            let error = read(more).expect("well-formed").check().expect_err(more).to_string();
            assert!(error.contains(key), "{more}: {error}");
        }
        assert!(RabbitMqConfig::new(Vec::new(), "e").check().is_err());
        assert!(read("user = 'a'\npassword = 'b'").expect("well-formed").check().is_ok());
    }
}
