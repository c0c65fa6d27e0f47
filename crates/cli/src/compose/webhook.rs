//! `kind = "webhook"`.
//!
//! What lives here: its keys, and the sink that they make. What does not: other kinds.
//! Invariant: making it connects to nothing.

use std::sync::Arc;

use postrider_core::{Result, Secret, Sink};
use postrider_relay::SystemClock;
use postrider_sink_webhook::{Webhook, WebhookConfig};

use super::message;
use crate::config::SinkConfig;
use crate::config::keys::{Kind, Need, Shape, key};

pub(super) const NAME: &str = "webhook";

pub(super) const KIND: Kind = Kind {
    name: NAME,
    doc: "Each event as a signed HTTP request (Standard Webhooks).",
    keys: &[
        key(
            "url",
            Shape::Secret,
            Need::Required,
            "Where to send: https://…, with placeholders such as {topic} after the host.",
        ),
        key(
            "signing_keys",
            Shape::Secrets,
            Need::Optional,
            "Keys to sign with, each of which adds a signature: whsec_… or whsk_….",
        ),
        key(
            "unsigned",
            Shape::Switch,
            Need::Default("false"),
            "Sends without signatures; has to be said when there are no signing_keys.",
        ),
        key(
            "headers",
            Shape::SecretTable,
            Need::Optional,
            "Fixed headers, such as { authorization = \"env:TOKEN\" }.",
        ),
        message::ENCODING,
        message::SOURCE,
        key(
            "allow_private",
            Shape::Switch,
            Need::Default("false"),
            "Permits private, loopback and link-local addresses.",
        ),
        key(
            "allow_http",
            Shape::Switch,
            Need::Default("false"),
            "Permits http:// to hosts other than loopback.",
        ),
        key(
            "concurrency",
            Shape::Integer { min: 1, max: 1_024 },
            Need::Default("16"),
            "Requests at a time to this host, over all sinks of the process.",
        ),
        message::timeout_ms("10000", "Time for one request, in milliseconds."),
        message::CONNECT_TIMEOUT_MS,
        message::CA_FILE,
        key(
            "proxy",
            Shape::Secret,
            Need::Optional,
            "Proxy to send through; variables such as HTTPS_PROXY are never read.",
        ),
    ],
};

pub(super) fn settings(config: &SinkConfig) -> WebhookConfig {
    let fields = &config.fields;
    let url = fields.secret("url").cloned().unwrap_or_else(|| Secret::new(""));
    let mut settings = WebhookConfig::new(url, fields.secrets("signing_keys").to_vec());
    settings.unsigned = fields.switch("unsigned");
    settings.headers = fields.secret_table("headers").iter().cloned().collect();
    settings.encoding = message::encoding(fields);
    settings.source = fields.text("source").map(str::to_owned);
    settings.allow_private = fields.switch("allow_private");
    settings.allow_http = fields.switch("allow_http");
    if let Some(requests) = fields.number("concurrency") {
        settings.concurrency = usize::try_from(requests).unwrap_or(usize::MAX);
    }
    settings.timeout_ms = fields.number("timeout_ms").unwrap_or(settings.timeout_ms);
    settings.connect_timeout_ms =
        fields.number("connect_timeout_ms").unwrap_or(settings.connect_timeout_ms);
    settings.ca_file = fields.text("ca_file").map(|text| super::path(&config.folder, text));
    settings.proxy = fields.secret("proxy").cloned();
    settings
}

pub(super) fn open(config: &SinkConfig) -> Result<Arc<dyn Sink>> {
    Ok(Arc::new(Webhook::new(&settings(config), Arc::new(SystemClock))?))
}
