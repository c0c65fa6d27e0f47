//! The guide, as far as it can be run here.
//!
//! What lives here: docs/sinks/servicebus.md's settings against the emulator, and that its snippets
//! for Azure agree with them. What does not: the snippets themselves, which need Azure.
//! Invariant: the guide's tables name what the code does.

use std::collections::BTreeMap;

use postrider_servicebus_emulator::Entity;
use postrider_sink_servicebus::ServiceBusConfig;

use crate::{Bus, confirm, record, sink};

const GUIDE: &str = include_str!("../../../../../docs/sinks/servicebus.md");

fn block(language: &str) -> &'static str {
    let opening = format!("```{language}\n");
    let (_, rest) = GUIDE.split_once(&opening).expect("the guide has such a block");
    rest.split_once("```").expect("its end").0
}

#[tokio::test]
async fn the_settings_of_the_guide_deliver_to_an_entity_as_it_is_set_up_there() {
    let (_, sink_table) = block("toml").split_once("[[sink]]\n").expect("a sink");
    let mut table: toml::Table = toml::from_str(sink_table).expect("TOML");
    assert_eq!(table.remove("kind"), Some("servicebus".into()));
    // The binary reads lengths of time as text, and this crate as milliseconds.
    assert_eq!(table.remove("dedup_window"), Some("10m".into()));
    table.insert("dedup_window_ms".into(), 600_000.into());
    let bus = Bus::with(Entity {
        requires_session: true,
        duplicate_detection_window: Some(std::time::Duration::from_secs(600)),
        ..Entity::default()
    })
    .await;
    let secret = bus.config().connection_string.expose().to_owned();
    let reference = table.insert("connection_string".into(), secret.into());
    assert_eq!(reference, Some("env:SERVICEBUS_CONNECTION_STRING".into()));
    let config: ServiceBusConfig = table.try_into().expect("settings");
    assert_eq!(config.dedup_window_ms, Some(600_000));
    confirm(&sink(&config), &[record(1, "k", b"{}")]).await;
    assert_eq!(bus.stored().len(), 1);
}

#[test]
fn the_snippets_for_azure_agree_with_the_settings() {
    for (language, names) in [
        ("sh", ["--name orders", "--enable-session true", "PT10M", "--rights Send"]),
        ("bicep", ["name: 'orders'", "requiresSession: true", "'PT10M'", "rights: ['Send']"]),
    ] {
        let text = block(language);
        for name in names {
            assert!(text.contains(name), "{language}: {name}");
        }
        let detects = text.contains("--enable-duplicate-detection true")
            || text.contains("requiresDuplicateDetection: true");
        assert!(detects, "{language}");
    }
}

#[test]
fn the_settings_for_entra_are_complete() {
    let (_, part) = GUIDE.split_once("## Microsoft Entra ID").expect("such a part");
    let (_, rest) = part.split_once("[[sink]]\n").expect("a sink");
    let mut table: toml::Table =
        toml::from_str(rest.split_once("```").expect("its end").0).expect("TOML");
    assert_eq!(table.remove("kind"), Some("servicebus".into()));
    let of = |credential: &str| {
        let mut table = table.clone();
        table.insert("credential".into(), credential.into());
        if credential == "client-secret" {
            for key in ["tenant_id", "client_id", "client_secret"] {
                table.insert(key.into(), "x".into());
            }
        }
        let config: ServiceBusConfig = table.try_into().expect("settings");
        config.check().expect("complete");
    };
    let mut rows = 0;
    for line in part.lines().filter_map(|line| line.strip_prefix("| `")) {
        let (name, _) = line.split_once("` |").expect("a cell");
        if name.contains('-') {
            of(name);
            rows += 1;
        }
    }
    assert_eq!(rows, 4);
}

#[cfg(not(feature = "entra"))]
#[test]
fn a_build_without_entra_says_so() {
    let mut config = ServiceBusConfig::new(postrider_core::Secret::new(""));
    config.auth = postrider_sink_servicebus::Auth::Entra;
    config.namespace = Some("shop.servicebus.windows.net".into());
    config.entity = Some("orders".into());
    config.credential = Some(postrider_sink_servicebus::EntraCredential::ManagedIdentity);
    let made =
        postrider_sink_servicebus::ServiceBus::new(&config, std::sync::Arc::new(crate::Wall));
    let error = made.expect_err("not built in").to_string();
    assert!(error.starts_with("auth: ") && error.contains("--features entra"), "{error}");
}

#[test]
fn every_setting_is_in_the_guide_with_its_default() {
    let (_, table) = GUIDE.split_once("## All settings").expect("the table");
    let rows: BTreeMap<&str, &str> = table
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once("` | "))
        .map(|(name, rest)| (name, rest.split(" | ").next().expect("a default").trim_matches('`')))
        .collect();
    let config = ServiceBusConfig::new(postrider_core::Secret::new(""));
    for (name, default) in [
        ("in_flight", config.in_flight.to_string()),
        ("timeout_ms", config.timeout_ms.to_string()),
        ("connect_timeout_ms", config.connect_timeout_ms.to_string()),
        ("token_ttl", format!("\"{}m\"", config.token_ttl_ms / 60_000)),
        ("long_keys", "\"refuse\"".into()),
        ("encoding", "\"plain\"".into()),
        ("auth", "\"connection-string\"".into()),
    ] {
        assert_eq!(rows.get(name), Some(&default.as_str()), "{name}");
    }
    assert_eq!(rows.len(), 18, "{rows:?}");
}
