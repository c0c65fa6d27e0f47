//! `kind = "servicebus"`.
//!
//! What lives here: its keys, and the sink that they make. What does not: other kinds.
//! Invariant: making it connects to nothing.

use std::sync::Arc;
use std::time::Duration;

use postrider_core::{Result, Secret, Sink};
use postrider_encoding::Encoding;
use postrider_relay::SystemClock;
use postrider_sink_servicebus::{Auth, EntraCredential, LongKeys, ServiceBus, ServiceBusConfig};

use crate::config::SinkConfig;
use crate::config::keys::{Kind, Need, Shape, key, ms, s};
use crate::config::value::Fields;

pub(super) const NAME: &str = "servicebus";

pub(super) const KIND: Kind = Kind {
    name: NAME,
    doc: "Each event as a message of Azure Service Bus, in sessions by key.",
    keys: &[
        key(
            "connection_string",
            Shape::Secret,
            Need::Optional,
            "As the portal shows it: Endpoint=sb://…;SharedAccessKeyName=…;SharedAccessKey=…; \
             required but for auth = \"entra\".",
        ),
        key(
            "auth",
            Shape::Choice(&["connection-string", "entra"]),
            Need::Default("\"connection-string\""),
            "By what the namespace believes the sink: the connection string's key, or tokens of \
             Microsoft Entra ID.",
        ),
        key(
            "namespace",
            Shape::Text,
            Need::Optional,
            "With auth = \"entra\": the namespace's host, such as shop.servicebus.windows.net.",
        ),
        key(
            "credential",
            Shape::Choice(&["managed-identity", "workload-identity", "client-secret", "azure-cli"]),
            Need::Optional,
            "With auth = \"entra\": as whom to sign in; required.",
        ),
        key("tenant_id", Shape::Text, Need::Optional, "With auth = \"entra\": the directory's id."),
        key(
            "client_id",
            Shape::Text,
            Need::Optional,
            "With auth = \"entra\": the application's id, or a managed identity's.",
        ),
        key(
            "client_secret",
            Shape::Secret,
            Need::Optional,
            "With credential = \"client-secret\": the application's secret.",
        ),
        key(
            "authority",
            Shape::Text,
            Need::Optional,
            "With auth = \"entra\": where to sign in; AZURE_AUTHORITY_HOST or the public cloud's \
             without it.",
        ),
        key(
            "entity",
            Shape::Text,
            Need::Optional,
            "The queue or topic; may be left out where connection_string has an EntityPath.",
        ),
        key(
            "encoding",
            Shape::Choice(&["plain", "cloudevents-binary", "cloudevents-structured"]),
            Need::Default("\"plain\""),
            "How an event becomes a message.",
        ),
        key(
            "source",
            Shape::Text,
            Need::Optional,
            "The source attribute of CloudEvents; /postrider without it.",
        ),
        key(
            "long_keys",
            Shape::Choice(&["refuse", "hash"]),
            Need::Default("\"refuse\""),
            "What becomes of keys above 128 characters: refuse (the event is parked), hash (the \
             session id is a hash).",
        ),
        key(
            "dedup_window",
            Shape::Duration { min: s(20), max: s(7 * 86_400) },
            Need::Optional,
            "The entity's duplicate detection window, if it has one; it is not set by this.",
        ),
        key(
            "in_flight",
            Shape::Integer { min: 1, max: 2_048 },
            Need::Default("256"),
            "Transfers at a time, over all keys.",
        ),
        key(
            "timeout_ms",
            Shape::Integer { min: 1, max: 600_000 },
            Need::Default("15000"),
            "Time until a transfer is settled, in milliseconds.",
        ),
        key(
            "connect_timeout_ms",
            Shape::Integer { min: 1, max: 600_000 },
            Need::Default("10000"),
            "Time for connecting, up to the open link, in milliseconds.",
        ),
        key(
            "token_ttl",
            Shape::Duration { min: ms(1_000), max: s(86_400) },
            Need::Default("\"20m\""),
            "How long a token made of the key is valid; it is renewed before.",
        ),
        key(
            "ca_file",
            Shape::Text,
            Need::Optional,
            "PEM file with further certificate authorities to trust.",
        ),
    ],
};

pub(super) fn settings(config: &SinkConfig) -> ServiceBusConfig {
    let fields = &config.fields;
    let whole = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let text = fields.secret("connection_string").cloned().unwrap_or_else(|| Secret::new(""));
    let mut settings = ServiceBusConfig::new(text);
    entra(fields, &mut settings);
    settings.entity = fields.text("entity").map(str::to_owned);
    settings.encoding = match fields.text("encoding") {
        Some("cloudevents-binary") => Encoding::CloudEventsBinary,
        Some("cloudevents-structured") => Encoding::CloudEventsStructured,
        _ => Encoding::Plain,
    };
    settings.source = fields.text("source").map(str::to_owned);
    settings.long_keys = match fields.text("long_keys") {
        Some("hash") => LongKeys::Hash,
        _ => LongKeys::Refuse,
    };
    settings.dedup_window_ms = fields.duration("dedup_window").map(whole);
    if let Some(transfers) = fields.number("in_flight") {
        settings.in_flight = usize::try_from(transfers).unwrap_or(usize::MAX);
    }
    settings.timeout_ms = fields.number("timeout_ms").unwrap_or(settings.timeout_ms);
    settings.connect_timeout_ms =
        fields.number("connect_timeout_ms").unwrap_or(settings.connect_timeout_ms);
    settings.token_ttl_ms = fields.duration("token_ttl").map_or(settings.token_ttl_ms, whole);
    settings.ca_file = fields.text("ca_file").map(|text| super::path(&config.folder, text));
    settings
}

fn entra(fields: &Fields, settings: &mut ServiceBusConfig) {
    let text = |key| fields.text(key).map(str::to_owned);
    settings.auth = match fields.text("auth") {
        Some("entra") => Auth::Entra,
        _ => Auth::ConnectionString,
    };
    settings.namespace = text("namespace");
    settings.credential = match fields.text("credential") {
        Some("managed-identity") => Some(EntraCredential::ManagedIdentity),
        Some("workload-identity") => Some(EntraCredential::WorkloadIdentity),
        Some("client-secret") => Some(EntraCredential::ClientSecret),
        Some("azure-cli") => Some(EntraCredential::AzureCli),
        _ => None,
    };
    settings.tenant_id = text("tenant_id");
    settings.client_id = text("client_id");
    settings.client_secret = fields.secret("client_secret").cloned();
    settings.authority = text("authority");
}

pub(super) fn open(config: &SinkConfig) -> Result<Arc<dyn Sink>> {
    Ok(Arc::new(ServiceBus::new(&settings(config), Arc::new(SystemClock))?))
}
