//! Which settings of the client library a user may give, and which would be unsafe.
//!
//! What lives here: the rules, each with its reason. What does not: the settings that the sink
//! makes by itself (`login.rs`).
//! Invariant: nothing that could lose events, put them out of order, or call something confirmed
//! that is not, gets past `check`.

use std::collections::BTreeMap;

use postrider_core::{Error, Result, Secret};
use rdkafka::ClientConfig;

use crate::login::RETRY_BACKOFF_MS;

/// The key of the table, for errors.
const KEY: &str = "librdkafka";
/// Requests under way on one connection that an idempotent producer keeps in order.
const MAX_IN_FLIGHT: i64 = 5;

/// A setting that has one safe value, or some, and why.
struct Rule {
    names: &'static [&'static str],
    is_safe: fn(&str) -> bool,
    why: &'static str,
}

const RULES: &[Rule] = &[
    Rule {
        names: &["enable.idempotence"],
        is_safe: |value| value.eq_ignore_ascii_case("true"),
        why: "without it a repetition inside the client doubles events and puts them out of order",
    },
    Rule {
        names: &["acks", "request.required.acks"],
        is_safe: |value| value == "all" || value == "-1",
        why: "an event counts as confirmed only when every in-sync replica has it",
    },
    Rule {
        names: &["max.in.flight.requests.per.connection", "max.in.flight"],
        is_safe: |value| number(value).is_some_and(|n| (1..=MAX_IN_FLIGHT).contains(&n)),
        why: "a broker keeps the order of at most five requests of a producer; give 1 to 5",
    },
    Rule {
        names: &["retries", "message.send.max.retries"],
        is_safe: |value| number(value).is_some_and(|n| n >= 1),
        why: "without retries each change of a leader fails events",
    },
    Rule {
        names: &["retry.backoff.ms", "retry.backoff.max.ms"],
        is_safe: |value| number(value).is_some_and(|n| n >= RETRY_BACKOFF_MS.cast_signed()),
        why: "what a relay sent last before it lost its lease could be sent again after another \
              relay's events; give 200 or more",
    },
    Rule {
        names: &["queuing.strategy"],
        is_safe: |value| value.eq_ignore_ascii_case("fifo"),
        why: "later events would overtake earlier ones",
    },
    Rule {
        names: &["delivery.report.only.error"],
        is_safe: |value| value.eq_ignore_ascii_case("false"),
        why: "the sink would never hear of a confirmation",
    },
    Rule {
        names: &["partitioner"],
        is_safe: |value| value != "random",
        why: "events of one key would go to different partitions, whose order is not kept",
    },
    Rule {
        names: &["enable.ssl.certificate.verification"],
        is_safe: |value| value.eq_ignore_ascii_case("true"),
        why: "anybody could take the brokers' place; name a ca_file",
    },
    Rule {
        names: &["ssl.endpoint.identification.algorithm"],
        is_safe: |value| value == "https",
        why: "anybody with a certificate could take the brokers' place; name a ca_file",
    },
];

/// What the sink's own settings say, and which one.
const OWN: &[(&str, &str)] = &[
    ("bootstrap.servers", "brokers"),
    ("metadata.broker.list", "brokers"),
    ("security.protocol", "tls and sasl"),
    ("sasl.mechanism", "sasl"),
    ("sasl.mechanisms", "sasl"),
    ("sasl.username", "user"),
    ("sasl.password", "password"),
    ("ssl.ca.location", "ca_file"),
    ("ssl.certificate.location", "client_certificate_file"),
    ("ssl.key.location", "client_key_file"),
    ("message.timeout.ms", "timeout_ms"),
    ("delivery.timeout.ms", "timeout_ms"),
    ("request.timeout.ms", "timeout_ms"),
    ("socket.timeout.ms", "timeout_ms"),
    ("socket.connection.setup.timeout.ms", "connect_timeout_ms"),
    ("allow.auto.create.topics", "create_topics"),
    ("transactional.id", "transactions"),
    ("transaction.timeout.ms", "timeout_ms"),
];

/// Why nothing is loaded from a library that is named in the settings.
const FOREIGN_CODE: &str = "it would run foreign code in the relay";

/// What has no place here, by how it begins.
const FOREIGN: &[(&str, &str)] = &[
    ("test.mock.", "events would go to a broker that is none"),
    ("plugin.library.paths", FOREIGN_CODE),
    ("ssl.engine.", FOREIGN_CODE),
    ("ssl.providers", FOREIGN_CODE),
    ("enable.gapless.guarantee", "one oversize event would stop the whole producer"),
];

/// Refuses unknown and unsafe settings.
///
/// # Errors
/// `Permanent`, with the setting's name and the reason; never with a value.
pub(crate) fn check(overrides: &BTreeMap<String, Secret>, timeout_ms: u64) -> Result<()> {
    for (name, value) in overrides {
        check_one(name, value.expose(), timeout_ms)?;
    }
    let mut config = ClientConfig::new();
    apply(overrides, &mut config);
    config.create_native_config().map(|_| ()).map_err(|error| match error {
        // The library's text may repeat the value.
        rdkafka::error::KafkaError::ClientConfig(_, _, name, _) => {
            refused(&name, "is no setting of librdkafka, or this is no value of it")
        }
        _ => Error::permanent(format!("{KEY}: a name or a value has a NUL in it")),
    })
}

fn check_one(name: &str, value: &str, timeout_ms: u64) -> Result<()> {
    if let Some(rule) = RULES.iter().find(|rule| rule.names.contains(&name))
        && !(rule.is_safe)(value)
    {
        return Err(refused(name, &format!("may not be set so: {}", rule.why)));
    }
    if let Some((_, own)) = OWN.iter().find(|(foreign, _)| *foreign == name) {
        return Err(refused(name, &format!("is set by the sink's own {own}")));
    }
    if let Some((_, why)) = FOREIGN.iter().find(|(begin, _)| name.starts_with(begin)) {
        return Err(refused(name, &format!("may not be set: {why}")));
    }
    let lingers = matches!(name, "linger.ms" | "queue.buffering.max.ms");
    if lingers && value.parse::<f64>().is_ok_and(|linger| linger * 2.0 > timeout_ms as f64) {
        return Err(refused(name, "is longer than half of timeout_ms; events would time out"));
    }
    Ok(())
}

/// Sets them, over what the sink has set.
pub(crate) fn apply(overrides: &BTreeMap<String, Secret>, config: &mut ClientConfig) {
    for (name, value) in overrides {
        config.set(name, value.expose());
    }
}

fn number(text: &str) -> Option<i64> {
    text.trim().parse().ok()
}

fn refused(name: &str, why: &str) -> Error {
    Error::permanent(format!("{KEY}: {name} {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(name: &str, value: &str) -> Option<String> {
        let table = BTreeMap::from([(name.to_owned(), Secret::new(value))]);
        check(&table, 10_000).err().map(|error| error.chain())
    }

    #[test]
    fn what_is_unsafe_is_refused_with_the_reason() {
        for (name, value, reason) in [
            ("enable.idempotence", "false", "doubles events"),
            ("acks", "1", "in-sync replica"),
            ("acks", "0", "in-sync replica"),
            ("request.required.acks", "1", "in-sync replica"),
            ("max.in.flight", "6", "five requests"),
            ("max.in.flight.requests.per.connection", "1000000", "five requests"),
            ("retries", "0", "change of a leader"),
            ("message.send.max.retries", "0", "change of a leader"),
            ("retry.backoff.ms", "199", "lost its lease"),
            ("retry.backoff.max.ms", "50", "lost its lease"),
            ("queuing.strategy", "lifo", "overtake"),
            ("delivery.report.only.error", "true", "hear of a confirmation"),
            ("partitioner", "random", "different partitions"),
            ("enable.ssl.certificate.verification", "false", "ca_file"),
            ("ssl.endpoint.identification.algorithm", "none", "ca_file"),
            ("bootstrap.servers", "a:9092", "brokers"),
            ("sasl.password", "hunter2", "own password"),
            ("message.timeout.ms", "0", "timeout_ms"),
            ("delivery.timeout.ms", "0", "timeout_ms"),
            ("allow.auto.create.topics", "true", "create_topics"),
            ("test.mock.num.brokers", "3", "none"),
            ("transactional.id", "a", "own transactions"),
            ("plugin.library.paths", "/tmp/x.so", "foreign code"),
            ("ssl.engine.location", "/tmp/x.so", "foreign code"),
            ("ssl.engine.id", "x", "foreign code"),
            ("ssl.providers", "default,legacy", "foreign code"),
            ("enable.gapless.guarantee", "true", "whole producer"),
            ("linger.ms", "9000", "half of timeout_ms"),
            ("linger", "5", "no setting"),
            ("batch.size", "many", "no setting of librdkafka, or this is no value"),
        ] {
            let error = refusal(name, value).unwrap_or_else(|| panic!("{name} = {value}"));
            assert!(error.starts_with(&format!("librdkafka: {name} ")), "{error}");
            assert!(error.contains(reason) && !error.contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn what_is_safe_is_taken() {
        for (name, value) in [
            ("enable.idempotence", "true"),
            ("acks", "all"),
            ("acks", "-1"),
            ("max.in.flight", "1"),
            ("retries", "10"),
            ("retry.backoff.ms", "500"),
            ("partitioner", "consistent_random"),
            ("compression.type", "zstd"),
            ("compression.type", "lz4"),
            ("compression.type", "gzip"),
            ("linger.ms", "20"),
            ("batch.size", "100000"),
            ("client.id", "orders"),
            ("ssl.key.password", "hunter2"),
        ] {
            assert_eq!(refusal(name, value), None, "{name} = {value}");
        }
    }
}
