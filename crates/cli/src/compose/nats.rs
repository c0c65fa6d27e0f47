//! `kind = "nats"`.
//!
//! What lives here: its keys, and the sink that they make. What does not: other kinds.
//! Invariant: making it connects to nothing.

use std::sync::Arc;

use postrider_core::{Result, Sink};
use postrider_sink_nats::{Nats, NatsConfig, Unroutable};

use super::message;
use crate::config::keys::{Kind, Need, Shape, key};
use crate::config::{Problem, SinkConfig};

pub(super) const NAME: &str = "nats";

pub(super) const KIND: Kind = Kind {
    name: NAME,
    doc: "Each event as a message of NATS JetStream.",
    keys: &[
        key(
            "servers",
            Shape::Secrets,
            Need::Required,
            "Servers to begin with: nats://host:4222 or tls://host:4222.",
        ),
        key(
            "subject",
            Shape::Text,
            Need::Default("\"{topic}\""),
            "Subject of an event's message, with placeholders such as {topic}, {type} and {key}.",
        ),
        key(
            "stream",
            Shape::Text,
            Need::Optional,
            "Stream that has to take the events; any one that has their subjects without it.",
        ),
        key("user", Shape::Text, Need::Optional, "User, with password."),
        message::PASSWORD,
        key("token", Shape::Secret, Need::Optional, "A token, instead of a user."),
        key("nkey", Shape::Secret, Need::Optional, "The seed of an NKEY, instead of a user."),
        key(
            "credentials",
            Shape::Secret,
            Need::Optional,
            "The text of a credentials file, such as \"file:app.creds\", instead of a user.",
        ),
        message::CA_FILE,
        message::CLIENT_CERTIFICATE_FILE,
        message::CLIENT_KEY_FILE,
        message::ALLOW_PLAIN,
        key(
            "unroutable",
            Shape::Choice(&["retry", "park"]),
            Need::Default("\"retry\""),
            "What becomes of events that no stream takes.",
        ),
        message::ENCODING,
        message::SOURCE,
        message::timeout_ms("5000", "Time for one acknowledgement, in milliseconds."),
        message::CONNECT_TIMEOUT_MS,
    ],
};

/// Refuses a sink whose events may go into an earlier sink's stream: the stream takes each id once,
/// so that one of the two would publish nothing, and count it as published.
pub(super) fn check_sinks(sinks: &[SinkConfig]) -> Vec<Problem> {
    let mut earlier: Vec<(&SinkConfig, NatsConfig)> = Vec::new();
    let mut problems = Vec::new();
    for sink in sinks.iter().filter(|sink| sink.kind == NAME) {
        let own = settings(sink);
        if let Some((other, _)) = earlier.iter().find(|(_, other)| own.may_share_a_stream(other)) {
            let stream = match &own.stream {
                Some(name) => format!("is \"{name}\""),
                None => "is left out".to_owned(),
            };
            problems.push(Problem {
                place: Some(sink.fields.place("stream").unwrap_or(sink.place)),
                key: format!("{}.stream", sink.prefix),
                text: format!(
                    "{stream}, and may be that of {} as well, on the same server: a stream takes \
                     each event once, whatever its subject, and the other sink's would be dropped \
                     as repetitions; give each sink a stream of its own, and name both",
                    other.prefix
                ),
            });
        }
        earlier.push((sink, own));
    }
    problems
}

pub(super) fn open(config: &SinkConfig) -> Result<Arc<dyn Sink>> {
    Ok(Arc::new(Nats::new(&settings(config))?))
}

fn settings(config: &SinkConfig) -> NatsConfig {
    let fields = &config.fields;
    let file = |key| fields.text(key).map(|text| super::path(&config.folder, text));
    let mut settings = NatsConfig::new(fields.secrets("servers").to_vec());
    if let Some(subject) = fields.text("subject") {
        subject.clone_into(&mut settings.subject);
    }
    settings.stream = fields.text("stream").map(str::to_owned);
    settings.user = fields.text("user").map(str::to_owned);
    settings.password = fields.secret("password").cloned();
    settings.token = fields.secret("token").cloned();
    settings.nkey = fields.secret("nkey").cloned();
    settings.credentials = fields.secret("credentials").cloned();
    settings.ca_file = file("ca_file");
    settings.client_certificate_file = file("client_certificate_file");
    settings.client_key_file = file("client_key_file");
    settings.allow_plain = fields.switch("allow_plain");
    settings.unroutable = match fields.text("unroutable") {
        Some("park") => Unroutable::Park,
        _ => Unroutable::Retry,
    };
    settings.encoding = message::encoding(fields);
    settings.source = fields.text("source").map(str::to_owned);
    settings.timeout_ms = fields.number("timeout_ms").unwrap_or(settings.timeout_ms);
    settings.connect_timeout_ms =
        fields.number("connect_timeout_ms").unwrap_or(settings.connect_timeout_ms);
    settings.retry = config.retry.clone();
    settings
}
