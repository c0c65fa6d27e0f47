//! The settings of `kind = "rabbitmq-stream"`, in a `[[sink]]` table.
//!
//! What lives here: the keys, their defaults and limits. What does not: those of the way over AMQP
//! 0-9-1 (`../config.rs`), fetching secrets.
//! Invariant: every text that may be secret becomes a `Secret` while it is read.

use std::collections::HashSet;
use std::path::PathBuf;

use postrider_core::{Result, Secret};
use postrider_encoding::Encoding;
use serde::Deserialize;

use crate::config::{
    Access, Scheme, Unroutable, check_times, default_timeout_ms, optional_secret, refused, secrets,
};
use crate::login::{Place, stream_place};

/// Longest reference of a producer, in bytes, as the server takes it.
pub(crate) const MAX_REFERENCE_BYTES: usize = 255;
/// Longest name of a producer, so that a partition's name fits behind it.
const MAX_PRODUCER_BYTES: usize = 128;

/// Settings of a [`RabbitMqStream`](crate::RabbitMqStream) sink.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RabbitMqStreamConfig {
    /// Servers, tried in turn: `rabbitmq-stream+tls://user:password@host:5551/vhost`. Secret, since
    /// they may carry a password.
    #[serde(deserialize_with = "secrets")]
    pub servers: Vec<Secret>,
    /// The stream, or the super stream with `super_stream`.
    pub stream: String,
    /// Whether `stream` is a super stream: an event goes to one of its streams, by its key.
    #[serde(default)]
    pub super_stream: bool,
    /// A name that no other sink of this stream has. With each partition's name it is the reference
    /// under which the server keeps the last publishing id.
    pub producer: String,
    /// What becomes of events whose stream does not exist.
    #[serde(default)]
    pub unroutable: Unroutable,
    /// User, with `password`; the URL's without.
    pub user: Option<String>,
    /// The user's password.
    #[serde(default, deserialize_with = "optional_secret")]
    pub password: Option<Secret>,
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
    /// Time for one answer, in milliseconds.
    #[serde(default = "default_timeout_ms")]
    pub timeout_ms: u64,
    /// Time for connecting and logging in, in milliseconds.
    #[serde(default = "default_timeout_ms")]
    pub connect_timeout_ms: u64,
}

impl RabbitMqStreamConfig {
    /// The defaults for some servers, a stream and a producer's name.
    pub fn new(
        servers: Vec<Secret>,
        stream: impl Into<String>,
        producer: impl Into<String>,
    ) -> Self {
        Self {
            servers,
            stream: stream.into(),
            super_stream: false,
            producer: producer.into(),
            unroutable: Unroutable::Retry,
            user: None,
            password: None,
            ca_file: None,
            client_certificate_file: None,
            client_key_file: None,
            allow_plain: false,
            encoding: Encoding::Plain,
            source: None,
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
        for (key, text, most) in [
            ("stream", &self.stream, MAX_REFERENCE_BYTES),
            ("producer", &self.producer, MAX_PRODUCER_BYTES),
        ] {
            if !(1..=most).contains(&text.len()) {
                return Err(refused(format!("{key}: give 1 to {most} bytes")));
            }
        }
        Ok(())
    }

    /// Whether this sink and another would be one producer of one stream, of which each keeps the
    /// other from sending: they have a server in common, the same `producer`, and the same
    /// `stream`; or one has a super stream and the other, by its name (`NAME-…`, as RabbitMQ's own
    /// tools give it), one of its streams. A stream that is bound under another name, and a server
    /// that is named in two ways, are not seen.
    #[must_use]
    pub fn meets(&self, other: &Self) -> bool {
        let is_part = |part: &Self, whole: &Self| {
            whole.super_stream
                && !part.super_stream
                && part.stream.strip_prefix(&whole.stream).is_some_and(|rest| rest.starts_with('-'))
        };
        let places = |config: &Self| -> HashSet<Place> {
            config.servers.iter().filter_map(|server| stream_place(server.expose())).collect()
        };
        self.producer == other.producer
            && (self.stream == other.stream || is_part(self, other) || is_part(other, self))
            && !places(self).is_disjoint(&places(other))
    }

    pub(crate) fn access(&self) -> Access<'_> {
        Access {
            scheme: Scheme::Stream,
            servers: &self.servers,
            user: self.user.as_deref(),
            password: self.password.as_ref(),
            // The plugin of 3.10 ends the connection of who logs in so.
            external: false,
            ca_file: self.ca_file.as_deref(),
            client_certificate_file: self.client_certificate_file.as_deref(),
            client_key_file: self.client_key_file.as_deref(),
            allow_plain: self.allow_plain,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINIMAL: &str =
        "servers = ['rabbitmq-stream://u:hunter2@127.0.0.1']\nstream = 's'\nproducer = 'p'\n";

    fn read(more: &str) -> Result<RabbitMqStreamConfig, String> {
        toml::from_str(&format!("{MINIMAL}{more}")).map_err(|error| error.to_string())
    }

    #[test]
    fn no_secret_shows_in_debug() {
        let text = format!("{:?}", read("password = 'tok3n'").expect("valid"));
        assert!(!text.contains("hunter2") && !text.contains("tok3n"), "{text}");
    }

    #[test]
    fn two_sinks_that_are_one_producer_meet() {
        let sink = |server: &str, stream: &str, is_super| RabbitMqStreamConfig {
            servers: vec![Secret::new("rabbitmq-stream://10.0.0.9"), Secret::new(server)],
            super_stream: is_super,
            ..RabbitMqStreamConfig::new(Vec::new(), stream, "p")
        };
        let one = sink("rabbitmq-stream+tls://Rabbit.example/shop", "events", true);
        for (mut other, meets) in [
            (sink("rabbitmq-stream://u:p@127.0.0.1", "events", true), true),
            (sink("rabbitmq-stream://127.0.0.1", "events-0", false), true),
            (sink("rabbitmq-stream://127.0.0.1", "events-new", true), false),
            (sink("rabbitmq-stream://127.0.0.1", "eventsource", false), false),
        ] {
            assert_eq!((one.meets(&other), other.meets(&one)), (meets, meets), "{other:?}");
            other.producer = "q".into();
            assert!(!one.meets(&other) && !other.meets(&one), "{other:?}");
        }
        let alone = |server: &str| RabbitMqStreamConfig {
            servers: vec![Secret::new(server)],
            ..sink("", "events", false)
        };
        let one = alone("rabbitmq-stream+tls://u:p@Rabbit.example/shop");
        for (server, meets) in [
            ("rabbitmq-stream+tls://rabbit.example:5551/shop", true),
            ("rabbitmq-stream+tls://rabbit.example:5553/shop", false),
            ("rabbitmq-stream+tls://rabbit.example", false),
            ("rabbitmq-stream+tls://other.example/shop", false),
        ] {
            assert_eq!(one.meets(&alone(server)), meets, "{server}");
        }
        let here = ["rabbitmq-stream://127.0.0.1", "rabbitmq-stream://localhost:5552/%2f"];
        assert!(alone(here[0]).meets(&alone(here[1])));
    }

    #[test]
    fn impossible_values_are_refused_by_key() {
        assert!(read("exchange = 'a'").is_err());
        assert!(read("").expect("well-formed").check().is_ok());
        let long = "x".repeat(256);
        for (change, key) in [
            (
                &(|config: &mut RabbitMqStreamConfig| config.timeout_ms = 0) as &dyn Fn(&mut _),
                "timeout_ms",
            ),
            (&|config: &mut RabbitMqStreamConfig| config.stream.clear(), "stream"),
            (&|config: &mut RabbitMqStreamConfig| config.stream.clone_from(&long), "stream"),
            (&|config: &mut RabbitMqStreamConfig| config.producer.clear(), "producer"),
            (&|config: &mut RabbitMqStreamConfig| config.user = Some("a".into()), "password"),
            (&|config: &mut RabbitMqStreamConfig| config.servers.clear(), "servers"),
        ] {
            let mut config = read("").expect("well-formed");
            change(&mut config);
            let error = config.check().expect_err(key).to_string();
            assert!(error.contains(key), "{key}: {error}");
        }
    }
}
