//! `kind = "kafka"`.
//!
//! What lives here: its keys, and the sink that they make. What does not: other kinds.
//! Invariant: making it connects to nothing.

use std::collections::HashMap;
use std::sync::Arc;

use postrider_core::{Result, Sink};
use postrider_sink_kafka::{Kafka, KafkaConfig, RecordTime, Sasl, Unroutable};

use super::message;
use crate::config::keys::{Kind, Need, Shape, key};
use crate::config::{Problem, SinkConfig};

pub(super) const NAME: &str = "kafka";

pub(super) const KIND: Kind = Kind {
    name: NAME,
    doc: "Each event as a record of a Kafka topic.",
    keys: &[
        key(
            "brokers",
            Shape::Text,
            Need::Required,
            "Brokers to begin with: host:9093, separated by commas.",
        ),
        key(
            "topic",
            Shape::Text,
            Need::Default("\"{topic}\""),
            "An event's topic, with placeholders such as {topic}, {type} and {key}.",
        ),
        key(
            "create_topics",
            Shape::Switch,
            Need::Default("false"),
            "Whether brokers may make a missing topic, as they are set to.",
        ),
        key(
            "unroutable",
            Shape::Choice(&["retry", "park"]),
            Need::Default("\"retry\""),
            "What becomes of events whose topic is missing.",
        ),
        key(
            "record_time",
            Shape::Choice(&["sent", "appended"]),
            Need::Default("\"sent\""),
            "Which time a record carries; Kafka deletes records by it.",
        ),
        key(
            "tls",
            Shape::Switch,
            Need::Optional,
            "Whether connections are encrypted; if left out they are, unless all brokers are on \
             this machine.",
        ),
        key(
            "sasl",
            Shape::Choice(&["plain", "scram-sha-256", "scram-sha-512"]),
            Need::Optional,
            "How the user is proven, with user and password.",
        ),
        key("user", Shape::Text, Need::Optional, "The user, with sasl and password."),
        message::PASSWORD,
        key(
            "ca_file",
            Shape::Text,
            Need::Optional,
            "PEM file with the certificate authorities to trust instead of the system's.",
        ),
        message::CLIENT_CERTIFICATE_FILE,
        message::CLIENT_KEY_FILE,
        key(
            "transactions",
            Shape::Text,
            Need::Optional,
            "A name that no other sink on these brokers has: events are sent in transactions.",
        ),
        key(
            "transactions_topic",
            Shape::Text,
            Need::Default("\"postrider-transactions\""),
            "The topic in which ids of events are noted, with transactions.",
        ),
        key(
            "librdkafka",
            Shape::SecretTable,
            Need::Optional,
            "Further settings of the client library by its own names, as texts; unsafe ones are \
             refused.",
        ),
        message::ENCODING,
        message::SOURCE,
        message::timeout_ms("10000", "Time for one confirmation, in milliseconds."),
        message::CONNECT_TIMEOUT_MS,
    ],
};

/// Refuses a name of transactions that an earlier sink has: each would keep the other from sending,
/// and take what the other sent for its own.
pub(super) fn check_sinks(sinks: &[SinkConfig]) -> Vec<Problem> {
    let mut names: HashMap<&str, &SinkConfig> = HashMap::new();
    let mut problems = Vec::new();
    for sink in sinks.iter().filter(|sink| sink.kind == NAME) {
        let Some(name) = sink.fields.text("transactions") else { continue };
        match names.get(name) {
            Some(other) => problems.push(Problem {
                place: Some(sink.fields.place("transactions").unwrap_or(sink.place)),
                key: format!("{}.transactions", sink.prefix),
                text: format!("\"{name}\" is that of {} as well; give another", other.prefix),
            }),
            None => drop(names.insert(name, sink)),
        }
    }
    problems
}

pub(super) fn open(config: &SinkConfig) -> Result<Arc<dyn Sink>> {
    Ok(Arc::new(Kafka::new(&settings(config))?))
}

fn settings(config: &SinkConfig) -> KafkaConfig {
    let fields = &config.fields;
    let file = |key| fields.text(key).map(|text| super::path(&config.folder, text));
    let mut settings = KafkaConfig::new(fields.text("brokers").unwrap_or_default());
    if let Some(topic) = fields.text("topic") {
        topic.clone_into(&mut settings.topic);
    }
    settings.create_topics = fields.switch("create_topics");
    settings.unroutable = match fields.text("unroutable") {
        Some("park") => Unroutable::Park,
        _ => Unroutable::Retry,
    };
    settings.record_time = match fields.text("record_time") {
        Some("appended") => RecordTime::Appended,
        _ => RecordTime::Sent,
    };
    settings.tls = fields.place("tls").map(|_| fields.switch("tls"));
    settings.sasl = match fields.text("sasl") {
        Some("plain") => Some(Sasl::Plain),
        Some("scram-sha-256") => Some(Sasl::ScramSha256),
        Some("scram-sha-512") => Some(Sasl::ScramSha512),
        _ => None,
    };
    settings.user = fields.text("user").map(str::to_owned);
    settings.password = fields.secret("password").cloned();
    settings.ca_file = file("ca_file");
    settings.client_certificate_file = file("client_certificate_file");
    settings.client_key_file = file("client_key_file");
    settings.transactions = fields.text("transactions").map(str::to_owned);
    if let Some(topic) = fields.text("transactions_topic") {
        topic.clone_into(&mut settings.transactions_topic);
    }
    settings.librdkafka = fields.secret_table("librdkafka").iter().cloned().collect();
    settings.encoding = message::encoding(fields);
    settings.source = fields.text("source").map(str::to_owned);
    settings.timeout_ms = fields.number("timeout_ms").unwrap_or(settings.timeout_ms);
    settings.connect_timeout_ms =
        fields.number("connect_timeout_ms").unwrap_or(settings.connect_timeout_ms);
    settings
}
