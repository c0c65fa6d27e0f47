//! `kind = "redis"`.
//!
//! What lives here: its keys, and the sink that they make. What does not: other kinds.
//! Invariant: making it connects to nothing.

use std::sync::Arc;

use postrider_core::{Result, Secret, Sink};
use postrider_sink_redis::{Redis, RedisConfig, Unroutable};

use super::message;
use crate::config::keys::{Kind, Need, Shape, key};
use crate::config::{Problem, SinkConfig};

pub(super) const NAME: &str = "redis";

pub(super) const KIND: Kind = Kind {
    name: NAME,
    doc: "Each event as an entry of a Redis stream.",
    keys: &[
        key(
            "url",
            Shape::Secret,
            Need::Required,
            "The server: rediss://host:6379/0 or redis://host:6379/0.",
        ),
        key(
            "stream",
            Shape::Text,
            Need::Default("\"{topic}\""),
            "Key of an event's stream, with placeholders such as {topic}, {type} and {key}.",
        ),
        key(
            "create_streams",
            Shape::Switch,
            Need::Default("true"),
            "Whether a missing stream is made by its first event.",
        ),
        key(
            "unroutable",
            Shape::Choice(&["retry", "park"]),
            Need::Default("\"retry\""),
            "What becomes of events whose stream is missing, if create_streams is off.",
        ),
        key(
            "seen_for_ms",
            Shape::Integer { min: 0, max: 7 * 86_400_000 },
            Need::Default("600000"),
            "How long the server remembers an event and drops its repetitions, in milliseconds; 0 \
             turns it off.",
        ),
        message::USER,
        message::PASSWORD,
        key(
            "ca_file",
            Shape::Text,
            Need::Optional,
            "PEM file with the certificate authorities to trust instead of the system's.",
        ),
        message::CLIENT_CERTIFICATE_FILE,
        message::CLIENT_KEY_FILE,
        message::ALLOW_PLAIN,
        message::ENCODING,
        message::SOURCE,
        message::timeout_ms("5000", "Time for one answer, in milliseconds."),
        message::CONNECT_TIMEOUT_MS,
    ],
};

/// Refuses a stream that an earlier sink of the same server has: the server would take the events
/// of the one for repetitions of the other's, and only one of two would be appended.
pub(super) fn check_sinks(sinks: &[SinkConfig]) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut earlier: Vec<(&SinkConfig, RedisConfig)> = Vec::new();
    for sink in sinks.iter().filter(|sink| sink.kind == NAME) {
        let settings = settings(sink);
        match earlier.iter().find(|(_, other)| settings.meets(other)) {
            Some((other, _)) => problems.push(Problem {
                place: Some(sink.fields.place("stream").unwrap_or(sink.place)),
                key: format!("{}.stream", sink.prefix),
                text: format!(
                    "\"{}\" is that of {} as well, on the same server, which would take the events \
                     of one for repetitions of the other's and drop them; give another stream, or \
                     seen_for_ms = 0 to one of them",
                    settings.stream, other.prefix
                ),
            }),
            None => earlier.push((sink, settings)),
        }
    }
    problems
}

pub(super) fn open(config: &SinkConfig) -> Result<Arc<dyn Sink>> {
    Ok(Arc::new(Redis::new(&settings(config))?))
}

fn settings(config: &SinkConfig) -> RedisConfig {
    let fields = &config.fields;
    let file = |key| fields.text(key).map(|text| super::path(&config.folder, text));
    let url = fields.secret("url").cloned().unwrap_or_else(|| Secret::new(""));
    let mut settings = RedisConfig::new(url);
    if let Some(stream) = fields.text("stream") {
        stream.clone_into(&mut settings.stream);
    }
    settings.create_streams = fields.switch("create_streams");
    settings.unroutable = match fields.text("unroutable") {
        Some("park") => Unroutable::Park,
        _ => Unroutable::Retry,
    };
    settings.seen_for_ms = fields.number("seen_for_ms").unwrap_or(settings.seen_for_ms);
    settings.user = fields.text("user").map(str::to_owned);
    settings.password = fields.secret("password").cloned();
    settings.ca_file = file("ca_file");
    settings.client_certificate_file = file("client_certificate_file");
    settings.client_key_file = file("client_key_file");
    settings.allow_plain = fields.switch("allow_plain");
    settings.encoding = message::encoding(fields);
    settings.source = fields.text("source").map(str::to_owned);
    settings.timeout_ms = fields.number("timeout_ms").unwrap_or(settings.timeout_ms);
    settings.connect_timeout_ms =
        fields.number("connect_timeout_ms").unwrap_or(settings.connect_timeout_ms);
    settings
}
