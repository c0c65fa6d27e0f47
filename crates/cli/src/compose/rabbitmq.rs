//! `kind = "rabbitmq"`.
//!
//! What lives here: its keys, and the sink that they make. What does not: other kinds.
//! Invariant: making it connects to nothing.

use std::sync::Arc;

use postrider_core::{Result, Sink};
use postrider_sink_rabbitmq::{ExchangeType, QueueType, RabbitMq, RabbitMqConfig, Unroutable};

use super::message;
use crate::config::SinkConfig;
use crate::config::keys::{Kind, Need, Shape, key};

pub(super) const NAME: &str = "rabbitmq";

pub(super) const KIND: Kind = Kind {
    name: NAME,
    doc: "Each event as a message of RabbitMQ, over AMQP 0-9-1.",
    keys: &[
        key(
            "servers",
            Shape::Secrets,
            Need::Required,
            "Servers, tried in turn: amqps://host:5671/vhost or amqp://host:5672/vhost.",
        ),
        key(
            "exchange",
            Shape::Text,
            Need::Required,
            "Exchange of an event's message, with placeholders such as {topic}; empty for the \
             default exchange.",
        ),
        key(
            "routing_key",
            Shape::Text,
            Need::Default("\"{topic}\""),
            "Routing key of an event's message, with placeholders such as {topic} and {type}.",
        ),
        key(
            "unroutable",
            Shape::Choice(&["retry", "park"]),
            Need::Default("\"retry\""),
            "What becomes of events that no queue takes, or whose exchange does not exist.",
        ),
        key("queue", Shape::Text, Need::Optional, "A queue that has to exist."),
        key(
            "declare",
            Shape::Switch,
            Need::Default("false"),
            "Makes the exchange, and the queue with its binding, where they are missing; durable.",
        ),
        key(
            "exchange_type",
            Shape::Choice(&["topic", "direct", "fanout", "headers"]),
            Need::Default("\"topic\""),
            "Type of the exchange that declare makes.",
        ),
        key(
            "queue_type",
            Shape::Choice(&["quorum", "classic"]),
            Need::Default("\"quorum\""),
            "Type of the queue that declare makes.",
        ),
        key(
            "binding_key",
            Shape::Text,
            Need::Default("\"#\""),
            "Binding key of the queue that declare makes.",
        ),
        message::USER,
        message::PASSWORD,
        key(
            "external",
            Shape::Switch,
            Need::Default("false"),
            "Logs in as whom the client certificate names (SASL EXTERNAL).",
        ),
        message::CA_FILE,
        message::CLIENT_CERTIFICATE_FILE,
        message::CLIENT_KEY_FILE,
        message::ALLOW_PLAIN,
        message::ENCODING,
        message::SOURCE,
        key(
            "max_message_bytes",
            Shape::Integer { min: 1, max: 512 << 20 },
            Need::Default("134217728"),
            "The server's max_message_size, in bytes; larger events are parked.",
        ),
        key(
            "in_flight",
            Shape::Integer { min: 1, max: 640 },
            Need::Default("256"),
            "Events under way at a time, over all keys; each has a channel.",
        ),
        message::timeout_ms("5000", "Time for one confirmation, in milliseconds."),
        message::CONNECT_TIMEOUT_MS,
    ],
};

pub(super) fn open(config: &SinkConfig) -> Result<Arc<dyn Sink>> {
    Ok(Arc::new(RabbitMq::new(&settings(config))?))
}

fn settings(config: &SinkConfig) -> RabbitMqConfig {
    let fields = &config.fields;
    let text = |key| fields.text(key).map(str::to_owned);
    let file = |key| fields.text(key).map(|text| super::path(&config.folder, text));
    let size = |key| fields.number(key).map(|n| usize::try_from(n).unwrap_or(usize::MAX));
    let exchange = text("exchange").unwrap_or_default();
    let mut settings = RabbitMqConfig::new(fields.secrets("servers").to_vec(), exchange);
    settings.routing_key = text("routing_key").unwrap_or(settings.routing_key);
    settings.unroutable = match fields.text("unroutable") {
        Some("park") => Unroutable::Park,
        _ => Unroutable::Retry,
    };
    settings.queue = text("queue");
    settings.declare = fields.switch("declare");
    settings.exchange_type = match fields.text("exchange_type") {
        Some("direct") => ExchangeType::Direct,
        Some("fanout") => ExchangeType::Fanout,
        Some("headers") => ExchangeType::Headers,
        _ => ExchangeType::Topic,
    };
    settings.queue_type = match fields.text("queue_type") {
        Some("classic") => QueueType::Classic,
        _ => QueueType::Quorum,
    };
    settings.binding_key = text("binding_key").unwrap_or(settings.binding_key);
    settings.user = text("user");
    settings.password = fields.secret("password").cloned();
    settings.external = fields.switch("external");
    settings.ca_file = file("ca_file");
    settings.client_certificate_file = file("client_certificate_file");
    settings.client_key_file = file("client_key_file");
    settings.allow_plain = fields.switch("allow_plain");
    settings.encoding = message::encoding(fields);
    settings.source = text("source");
    settings.max_message_bytes = size("max_message_bytes").unwrap_or(settings.max_message_bytes);
    settings.in_flight = size("in_flight").unwrap_or(settings.in_flight);
    settings.timeout_ms = fields.number("timeout_ms").unwrap_or(settings.timeout_ms);
    settings.connect_timeout_ms =
        fields.number("connect_timeout_ms").unwrap_or(settings.connect_timeout_ms);
    settings
}
