//! `kind = "rabbitmq-stream"`.
//!
//! What lives here: its keys, the sink that they make, and which two can't stand beside each other.
//! What does not: other kinds; RabbitMQ's exchanges (`rabbitmq.rs`).
//! Invariant: making it connects to nothing.

use std::sync::Arc;

use postrider_core::{Result, Sink};
use postrider_relay::SystemClock;
use postrider_sink_rabbitmq::{RabbitMqStream, RabbitMqStreamConfig, Unroutable};

use super::message;
use crate::config::keys::{Kind, Need, Shape, key};
use crate::config::{Problem, SinkConfig, SourceConfig};

pub(super) const NAME: &str = "rabbitmq-stream";

pub(super) const KIND: Kind = Kind {
    name: NAME,
    doc: "Each event as a message in a stream of RabbitMQ, once, over the stream protocol.",
    keys: &[
        key(
            "servers",
            Shape::Secrets,
            Need::Required,
            "Servers, tried in turn: rabbitmq-stream+tls://host:5551/vhost or \
             rabbitmq-stream://host:5552/vhost.",
        ),
        key("stream", Shape::Text, Need::Required, "The stream, or the super stream."),
        key(
            "super_stream",
            Shape::Switch,
            Need::Default("false"),
            "Whether stream is a super stream, over whose streams events are spread by their keys.",
        ),
        key(
            "producer",
            Shape::Text,
            Need::Required,
            "A name that no other sink of this stream has, and that stays: what the server knows \
             of publishing ids is kept under it.",
        ),
        key(
            "unroutable",
            Shape::Choice(&["retry", "park"]),
            Need::Default("\"retry\""),
            "What becomes of events whose stream does not exist.",
        ),
        message::USER,
        message::PASSWORD,
        message::CA_FILE,
        message::CLIENT_CERTIFICATE_FILE,
        message::CLIENT_KEY_FILE,
        message::ALLOW_PLAIN,
        message::ENCODING,
        message::SOURCE,
        message::timeout_ms("5000", "Time for one answer, in milliseconds."),
        message::CONNECT_TIMEOUT_MS,
    ],
};

/// References of producers that the server keeps for a stream.
const MAX_REFERENCES: u64 = 255;

/// Refuses a producer's name that an earlier sink of the same stream has, since each would keep the
/// other from sending, and more partitions than a stream remembers producers of.
pub(super) fn check_sinks(source: &SourceConfig, sinks: &[SinkConfig]) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut earlier: Vec<(&SinkConfig, RabbitMqStreamConfig)> = Vec::new();
    let partitions = source.fields.number("partitions").unwrap_or(1);
    for sink in sinks.iter().filter(|sink| sink.kind == NAME) {
        let mut problem = |text| {
            let place = Some(sink.fields.place("producer").unwrap_or(sink.place));
            problems.push(Problem { place, key: format!("{}.producer", sink.prefix), text });
        };
        let settings = settings(sink);
        if partitions > MAX_REFERENCES {
            problem(format!(
                "each of the source's {partitions} partitions is a producer of its own, and \
                 RabbitMQ remembers {MAX_REFERENCES} of a stream; use fewer partitions, or kind = \
                 \"rabbitmq\""
            ));
        }
        match earlier.iter().find(|(_, other)| settings.meets(other)) {
            Some((other, _)) => problem(format!(
                "\"{}\" is that of {} as well, for the same stream; give another",
                settings.producer, other.prefix
            )),
            None => earlier.push((sink, settings)),
        }
    }
    problems
}

pub(super) fn open(config: &SinkConfig) -> Result<Arc<dyn Sink>> {
    Ok(Arc::new(RabbitMqStream::new(&settings(config), Arc::new(SystemClock))?))
}

fn settings(config: &SinkConfig) -> RabbitMqStreamConfig {
    let fields = &config.fields;
    let text = |key| fields.text(key).map(str::to_owned);
    let file = |key| fields.text(key).map(|text| super::path(&config.folder, text));
    let servers = fields.secrets("servers").to_vec();
    let name = |key| text(key).unwrap_or_default();
    let mut settings = RabbitMqStreamConfig::new(servers, name("stream"), name("producer"));
    settings.super_stream = fields.switch("super_stream");
    settings.unroutable = match fields.text("unroutable") {
        Some("park") => Unroutable::Park,
        _ => Unroutable::Retry,
    };
    settings.user = text("user");
    settings.password = fields.secret("password").cloned();
    settings.ca_file = file("ca_file");
    settings.client_certificate_file = file("client_certificate_file");
    settings.client_key_file = file("client_key_file");
    settings.allow_plain = fields.switch("allow_plain");
    settings.encoding = message::encoding(fields);
    settings.source = text("source");
    settings.timeout_ms = fields.number("timeout_ms").unwrap_or(settings.timeout_ms);
    settings.connect_timeout_ms =
        fields.number("connect_timeout_ms").unwrap_or(settings.connect_timeout_ms);
    settings
}
