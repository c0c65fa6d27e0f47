//! Who the sink is: the brokers' addresses, the login, certificates, and the client's settings.
//!
//! What lives here: turning settings into what the client library takes. What does not: the
//! producer (`connect.rs`).
//! Invariant: no connection without TLS leaves this machine unless the settings say so; a
//! certificate is always verified; the settings that keep events safe and in order are always set.

use std::path::Path;
use std::time::Duration;

use postrider_core::{Error, Result};
use rdkafka::ClientConfig;
use rdkafka::config::RDKafkaLogLevel;

use crate::config::{KafkaConfig, Sasl};
use crate::overrides;

/// The client's own limit of a record, in bytes: above the largest payload as base64 with the
/// largest headers, so that the broker's limit is the one that counts.
const MAX_RECORD_BYTES: usize = 32 << 20;
/// Most that waits in the client, in KiB: twice what a relay has under way by default.
const QUEUE_KIB: usize = 64 << 10;
/// How long the client waits for more events to send with one, in milliseconds. What comes while
/// requests are under way goes together anyway: waiting gained nothing at full rate, and made a
/// single key ten times slower.
const LINGER_MS: &str = "0";
/// How soon the client sends a record again whose request failed, in milliseconds, give or take a
/// fifth; the next times later.
pub(crate) const RETRY_BACKOFF_MS: u64 = 200;
/// How much longer than twice the time of a confirmation, for its events' and its end's, brokers
/// leave a transaction open, in milliseconds: the time in which a call sends, and as much again.
const TRANSACTION_BEYOND_MS: u64 = 20_000;
/// The longest that brokers permit unless they are set otherwise (`transaction.max.timeout.ms`).
const MAX_TRANSACTION_MS: u64 = 900_000;
/// How soon a broker that went away is tried again, in milliseconds: up to a second.
const RECONNECT_MS: (&str, &str) = ("50", "1000");
/// As the client library takes its times, in milliseconds.
const SOCKET_TIMEOUT_MS: (u64, u64) = (10, 300_000);
const SETUP_TIMEOUT_MS: u64 = 1_000;

const _: () = assert!(
    postrider_core::limits::MAX_PAYLOAD_BYTES / 3 * 4
        + postrider_core::limits::MAX_HEADERS
            * (postrider_core::limits::MAX_HEADER_NAME_BYTES
                + postrider_core::limits::MAX_HEADER_VALUE_BYTES)
        < MAX_RECORD_BYTES,
    "the client must not refuse what a broker may take"
);

/// Where the sink connects to and as whom, checked.
pub(crate) struct Login {
    config: KafkaConfig,
    is_local: bool,
}

impl Login {
    /// Checks addresses, login and the library's settings; connects to nothing and reads no file.
    pub(crate) fn new(config: &KafkaConfig) -> Result<Self> {
        config.check()?;
        let mut is_local = true;
        for (index, broker) in config.brokers.split(',').enumerate() {
            let host = host(broker.trim()).ok_or_else(|| {
                Error::permanent(format!(
                    "brokers: number {} of the list is no address; give host:9092",
                    index + 1
                ))
            })?;
            is_local &= is_loopback(host);
        }
        Ok(Self { config: config.clone(), is_local })
    }

    /// Whether connections are encrypted.
    fn has_tls(&self) -> bool {
        self.config.tls.unwrap_or(!self.is_local)
    }

    /// Whether a broker may be anywhere, by what the settings say of encryption.
    pub(crate) fn permits(&self, host: &str) -> bool {
        self.has_tls() || self.config.tls == Some(false) || is_loopback(host)
    }

    /// Time for connecting, with the login and the first look at the brokers.
    pub(crate) fn patience(&self) -> Duration {
        Duration::from_millis(self.config.connect_timeout_ms)
    }

    /// Whether the files of certificates can be read: the library does not say which can't. One may
    /// be replaced at this very moment, and is looked for again.
    pub(crate) fn read_files(&self) -> Result<()> {
        for (key, file) in [
            ("ca_file", &self.config.ca_file),
            ("client_certificate_file", &self.config.client_certificate_file),
            ("client_key_file", &self.config.client_key_file),
        ] {
            if let Some(file) = file {
                std::fs::File::open(file).map_err(|cause| {
                    let text = format!("{key}: {} can't be read", file.display());
                    Error::transient(text).with_source(cause)
                })?;
            }
        }
        Ok(())
    }

    /// What every client of the brokers needs. Files of certificates are read when a client is
    /// made.
    fn client(&self) -> ClientConfig {
        let config = &self.config;
        let mut client = ClientConfig::new();
        client.set_log_level(RDKafkaLogLevel::Warning);
        let (least, most) = SOCKET_TIMEOUT_MS;
        let setup = config.connect_timeout_ms.max(SETUP_TIMEOUT_MS);
        let protocol = match (self.has_tls(), config.sasl.is_some()) {
            (false, false) => "plaintext",
            (false, true) => "sasl_plaintext",
            (true, false) => "ssl",
            (true, true) => "sasl_ssl",
        };
        for (name, value) in [
            ("bootstrap.servers", config.brokers.as_str()),
            ("client.id", "postrider"),
            ("security.protocol", protocol),
            ("socket.timeout.ms", &config.timeout_ms.clamp(least, most).to_string()),
            ("socket.connection.setup.timeout.ms", &setup.to_string()),
            ("socket.nagle.disable", "true"),
            ("socket.keepalive.enable", "true"),
            ("reconnect.backoff.ms", RECONNECT_MS.0),
            ("reconnect.backoff.max.ms", RECONNECT_MS.1),
            ("log.connection.close", "false"),
            ("enable.metrics.push", "false"),
        ] {
            client.set(name, value);
        }
        for (name, value) in [
            ("sasl.mechanism", config.sasl.map(mechanism)),
            ("sasl.username", config.user.as_deref()),
            ("sasl.password", config.password.as_ref().map(|password| password.expose())),
            ("ssl.ca.location", text(config.ca_file.as_deref())),
            ("ssl.certificate.location", text(config.client_certificate_file.as_deref())),
            ("ssl.key.location", text(config.client_key_file.as_deref())),
        ] {
            if let Some(value) = value {
                client.set(name, value);
            }
        }
        client
    }

    /// What a client needs that asks about topics.
    pub(crate) fn admin(&self) -> ClientConfig {
        let mut client = self.client();
        overrides::apply(&self.config.librdkafka, &mut client);
        client
    }

    /// What a producer needs whose events go in transactions. Only one with this id is heard.
    pub(crate) fn transactional(&self, id: &str) -> ClientConfig {
        let mut client = self.producer(Batches::Full);
        let timeout = (2 * self.config.timeout_ms + TRANSACTION_BEYOND_MS).min(MAX_TRANSACTION_MS);
        client.set("transactional.id", id);
        client.set("transaction.timeout.ms", timeout.to_string());
        client
    }

    /// What a producer needs beside. `Alone` sends each event in a request of its own.
    pub(crate) fn producer(&self, batches: Batches) -> ClientConfig {
        let config = &self.config;
        let mut client = self.client();
        let timeout = config.timeout_ms.to_string();
        for (name, value) in [
            ("enable.idempotence", "true"),
            ("acks", "all"),
            ("max.in.flight.requests.per.connection", "5"),
            ("partitioner", "murmur2_random"),
            ("message.timeout.ms", timeout.as_str()),
            ("request.timeout.ms", timeout.as_str()),
            ("linger.ms", LINGER_MS),
            ("retry.backoff.ms", &RETRY_BACKOFF_MS.to_string()),
            ("message.max.bytes", &MAX_RECORD_BYTES.to_string()),
            ("queue.buffering.max.kbytes", &QUEUE_KIB.to_string()),
            ("allow.auto.create.topics", if config.create_topics { "true" } else { "false" }),
        ] {
            client.set(name, value);
        }
        overrides::apply(&config.librdkafka, &mut client);
        if batches == Batches::Alone {
            client.set("batch.num.messages", "1");
        }
        client
    }
}

/// How many events a producer sends in one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Batches {
    /// As many as there are.
    Full,
    /// One.
    Alone,
}

fn mechanism(sasl: Sasl) -> &'static str {
    match sasl {
        Sasl::Plain => "PLAIN",
        Sasl::ScramSha256 => "SCRAM-SHA-256",
        Sasl::ScramSha512 => "SCRAM-SHA-512",
    }
}

/// The library takes paths as UTF-8.
fn text(path: Option<&Path>) -> Option<&str> {
    path.and_then(Path::to_str)
}

/// The host of `host:port`, if it is such an address.
fn host(broker: &str) -> Option<&str> {
    let (host, port) = broker.rsplit_once(':')?;
    let host = match host.strip_prefix('[') {
        Some(rest) => rest.strip_suffix(']')?,
        None if host.contains(':') => return None,
        None => host,
    };
    let legal = |c: char| c.is_alphanumeric() || "._-:%".contains(c);
    let is_host = !host.is_empty() && host.chars().all(legal);
    (is_host && port.parse::<u16>().is_ok_and(|port| port > 0)).then_some(host)
}

fn is_loopback(host: &str) -> bool {
    host.eq_ignore_ascii_case("localhost")
        || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_core::Secret;

    fn login(config: &KafkaConfig) -> Login {
        Login::new(config).expect("valid")
    }

    fn protocol(config: &KafkaConfig) -> String {
        login(config).client().get("security.protocol").expect("set").to_owned()
    }

    #[test]
    fn distant_brokers_get_tls_unless_told_otherwise() {
        for local in ["127.0.0.1:9092", "localhost:9092, [::1]:9093", "127.0.0.2:1"] {
            assert_eq!(protocol(&KafkaConfig::new(local)), "plaintext", "{local}");
        }
        for distant in ["kafka.example:9093", "127.0.0.1:9092,kafka.example:9093"] {
            let config = KafkaConfig::new(distant);
            assert_eq!(protocol(&config), "ssl", "{distant}");
            let plain = KafkaConfig { tls: Some(false), ..config };
            assert_eq!(protocol(&plain), "plaintext", "{distant}");
        }
        let user = KafkaConfig {
            sasl: Some(Sasl::ScramSha512),
            user: Some("app".into()),
            password: Some(Secret::new("p4ss")),
            ..KafkaConfig::new("kafka.example:9093")
        };
        assert_eq!(protocol(&user), "sasl_ssl");
        assert_eq!(login(&user).client().get("sasl.mechanism"), Some("SCRAM-SHA-512"));
    }

    /// Brokers tell clients where to connect; on this machine they may tell of others.
    #[test]
    fn a_broker_elsewhere_is_not_spoken_to_in_the_clear() {
        let local = login(&KafkaConfig::new("127.0.0.1:9092"));
        assert!(local.permits("localhost") && !local.permits("kafka.example"));
        let told = KafkaConfig { tls: Some(false), ..KafkaConfig::new("127.0.0.1:9092") };
        assert!(login(&told).permits("kafka.example"));
        assert!(login(&KafkaConfig::new("kafka.example:9093")).permits("kafka.example"));
    }

    #[test]
    fn what_is_no_address_is_named_by_its_number() {
        for bad in [
            "",
            "kafka",
            "kafka:",
            "kafka:x",
            "kafka:0",
            ":9092",
            "a:1,",
            "kafka://a:1",
            "::1:9092",
        ] {
            let error = Login::new(&KafkaConfig::new(bad)).err().expect(bad).chain();
            assert!(error.starts_with("brokers: number "), "{bad}: {error}");
        }
    }

    #[test]
    fn a_transaction_may_take_as_long_as_its_parts() {
        for (timeout_ms, expected) in [(1, "20002"), (10_000, "40000"), (600_000, "900000")] {
            let config = KafkaConfig { timeout_ms, ..KafkaConfig::new("127.0.0.1:9092") };
            let client = login(&config).transactional("orders");
            assert_eq!(client.get("transaction.timeout.ms"), Some(expected));
            client.create_native_config().expect("names and values that the library has");
        }
    }

    #[test]
    fn safe_settings_are_set_and_survive_what_the_user_adds() {
        let mut config = KafkaConfig::new("127.0.0.1:9092");
        config.librdkafka.insert("compression.type".into(), Secret::new("zstd"));
        config.librdkafka.insert("linger.ms".into(), Secret::new("20"));
        let login = login(&config);
        let producer = login.producer(Batches::Full);
        for (name, value) in [
            ("enable.idempotence", "true"),
            ("acks", "all"),
            ("max.in.flight.requests.per.connection", "5"),
            ("partitioner", "murmur2_random"),
            ("allow.auto.create.topics", "false"),
            ("message.timeout.ms", "10000"),
            ("compression.type", "zstd"),
            ("linger.ms", "20"),
        ] {
            assert_eq!(producer.get(name), Some(value), "{name}");
        }
        assert_eq!(producer.get("batch.num.messages"), None);
        assert_eq!(login.producer(Batches::Alone).get("batch.num.messages"), Some("1"));
        producer.create_native_config().expect("names and values that the library has");
    }
}
