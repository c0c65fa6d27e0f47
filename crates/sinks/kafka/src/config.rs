//! The settings of `kind = "kafka"` in a `[[sink]]` table.
//!
//! What lives here: the keys, their defaults and limits. What does not: fetching secrets, as `env:`
//! and `file:` texts are replaced before they come here; what may be set of the client library
//! (`overrides.rs`).
//! Invariant: every text that may be secret becomes a `Secret` while it is read.

use std::collections::BTreeMap;
use std::path::PathBuf;

use postrider_core::{Error, Result, Secret};
use postrider_encoding::Encoding;
use serde::{Deserialize, Deserializer};

use crate::encode::why_no_topic;
use crate::overrides;

/// Longest time that one confirmation may take.
const MAX_TIMEOUT_MS: u64 = 600_000;
/// Longest name of transactions: with a partition's name it is far below what Kafka takes.
const MAX_TRANSACTIONS_BYTES: usize = 200;

/// What becomes of an event whose topic does not exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Unroutable {
    /// It is tried again until somebody has made the topic.
    #[default]
    Retry,
    /// It is parked as a dead letter.
    Park,
}

/// Which time a record carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RecordTime {
    /// When it is sent. A broker deletes records by their time: an event that is older than the
    /// topic's retention would be deleted as soon as it arrives.
    #[default]
    Sent,
    /// When the event was appended.
    Appended,
}

/// How a user proves who it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub enum Sasl {
    /// The password as it is.
    #[serde(rename = "plain")]
    Plain,
    /// A proof of the password.
    #[serde(rename = "scram-sha-256")]
    ScramSha256,
    /// A proof of the password, by the longer hash.
    #[serde(rename = "scram-sha-512")]
    ScramSha512,
}

/// Settings of a [`Kafka`](crate::Kafka) sink.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KafkaConfig {
    /// Brokers to begin with: `host:9092`, separated by commas.
    pub brokers: String,
    /// Topic of an event's record; a template.
    #[serde(default = "default_topic")]
    pub topic: String,
    /// Whether the brokers may make a missing topic, as `auto.create.topics.enable` lets them.
    #[serde(default)]
    pub create_topics: bool,
    /// What becomes of events whose topic is missing.
    #[serde(default)]
    pub unroutable: Unroutable,
    /// Which time a record carries.
    #[serde(default)]
    pub record_time: RecordTime,
    /// Whether connections are encrypted; if not given they are, unless all brokers are on this
    /// machine.
    pub tls: Option<bool>,
    /// How the user is proven, with `user` and `password`.
    pub sasl: Option<Sasl>,
    /// The user, with `sasl` and `password`.
    pub user: Option<String>,
    /// The user's password.
    #[serde(default, deserialize_with = "optional_secret")]
    pub password: Option<Secret>,
    /// PEM file with the certificate authorities to trust instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// PEM file with this client's certificate, with `client_key_file`.
    pub client_certificate_file: Option<PathBuf>,
    /// PEM file with the certificate's private key.
    pub client_key_file: Option<PathBuf>,
    /// `plain`, `cloudevents-binary` or `cloudevents-structured`.
    #[serde(default)]
    pub encoding: Encoding,
    /// `source` of CloudEvents; `/postrider` without it.
    pub source: Option<String>,
    /// Time for one confirmation, in milliseconds, with all that the client tries for it.
    #[serde(default = "default_timeout_ms")]
    pub timeout_ms: u64,
    /// Time for connecting, in milliseconds.
    #[serde(default = "default_connect_timeout_ms")]
    pub connect_timeout_ms: u64,
    /// Sends events in transactions, so that each stands once for readers of what is committed. The
    /// name of these transactions: one that no other sink on these brokers has.
    pub transactions: Option<String>,
    /// The topic beside the events in which their ids are noted, with `transactions`.
    #[serde(default = "default_transactions_topic")]
    pub transactions_topic: String,
    /// Further settings of librdkafka by its own names, such as `compression.type`. What would
    /// lose, reorder or hide events is refused.
    #[serde(default, deserialize_with = "secrets")]
    pub librdkafka: BTreeMap<String, Secret>,
}

impl KafkaConfig {
    /// The defaults for some brokers: topic `{topic}`, which has to exist; nobody logged in; TLS
    /// unless they are on this machine.
    pub fn new(brokers: impl Into<String>) -> Self {
        Self {
            brokers: brokers.into(),
            topic: default_topic(),
            create_topics: false,
            unroutable: Unroutable::Retry,
            record_time: RecordTime::Sent,
            tls: None,
            sasl: None,
            user: None,
            password: None,
            ca_file: None,
            client_certificate_file: None,
            client_key_file: None,
            encoding: Encoding::Plain,
            source: None,
            timeout_ms: default_timeout_ms(),
            connect_timeout_ms: default_connect_timeout_ms(),
            transactions: None,
            transactions_topic: default_transactions_topic(),
            librdkafka: BTreeMap::new(),
        }
    }

    /// Refuses impossible and unsafe values, naming the key and the remedy.
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
        let login = [self.sasl.is_some(), self.user.is_some(), self.password.is_some()];
        if login.contains(&true) && login.contains(&false) {
            return Err(refused("sasl, user and password belong together; give all or none"));
        }
        if self.client_certificate_file.is_some() != self.client_key_file.is_some() {
            return Err(refused(
                "client_certificate_file and client_key_file belong together; give both or none",
            ));
        }
        if let Some(name) = &self.transactions {
            let is_name = (1..=MAX_TRANSACTIONS_BYTES).contains(&name.len());
            if !is_name || name.chars().any(char::is_control) {
                return Err(refused(format!(
                    "transactions: give a name of 1 to {MAX_TRANSACTIONS_BYTES} bytes that no \
                     other sink on these brokers has"
                )));
            }
        }
        if let Some(why) = why_no_topic(&self.transactions_topic) {
            return Err(refused(format!("transactions_topic: {why}")));
        }
        overrides::check(&self.librdkafka, self.timeout_ms)
    }
}

fn refused(text: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::permanent(text)
}

fn default_transactions_topic() -> String {
    "postrider-transactions".to_owned()
}

fn default_topic() -> String {
    "{topic}".to_owned()
}

/// Longer than electing a leader takes as a rule; within the relay's time for a call together with
/// the time in which a call sends.
fn default_timeout_ms() -> u64 {
    10_000
}

fn default_connect_timeout_ms() -> u64 {
    5_000
}

fn optional_secret<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Secret>, D::Error> {
    Ok(Option::<String>::deserialize(deserializer)?.map(Secret::new))
}

fn secrets<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeMap<String, Secret>, D::Error> {
    let texts = BTreeMap::<String, String>::deserialize(deserializer)?;
    Ok(texts.into_iter().map(|(name, text)| (name, Secret::new(text))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINIMAL: &str = "brokers = '127.0.0.1:9092'\n";

    fn read(more: &str) -> Result<KafkaConfig, String> {
        toml::from_str(&format!("{MINIMAL}{more}")).map_err(|error| error.to_string())
    }

    #[test]
    fn no_secret_shows_in_debug() {
        let more = "password = 'tok3n'\nlibrdkafka = { 'ssl.key.password' = 'hunter2' }";
        let text = format!("{:?}", read(more).expect("valid"));
        assert!(!text.contains("hunter2") && !text.contains("tok3n"), "{text}");
    }

    #[test]
    fn impossible_values_are_refused_by_key() {
        assert!(read("topics = 'a'").is_err());
        assert!(read("unroutable = 'drop'").expect_err("unknown").contains("park"));
        assert!(read("sasl = 'gssapi'").expect_err("unknown").contains("scram-sha-512"));
        for (more, key) in [
            ("timeout_ms = 0", "timeout_ms"),
            ("connect_timeout_ms = 600001", "connect_timeout_ms"),
            ("user = 'a'", "sasl"),
            ("sasl = 'plain'", "user"),
            ("sasl = 'plain'\nuser = 'a'", "password"),
            ("client_key_file = 'a'", "client_certificate_file"),
            ("transactions = ''", "no other sink"),
            ("transactions = 'a'\ntransactions_topic = 'a b'", "transactions_topic"),
            ("librdkafka = { 'acks' = '1' }", "librdkafka"),
        ] {
            let error = read(more).expect("well-formed").check().expect_err(more).to_string();
            assert!(error.contains(key), "{more}: {error}");
        }
        for more in ["sasl = 'plain'\nuser = 'a'\npassword = 'b'", "tls = true", ""] {
            assert!(read(more).expect("well-formed").check().is_ok(), "{more}");
        }
    }
}
