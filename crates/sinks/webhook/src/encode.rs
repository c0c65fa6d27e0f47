//! The headers of a request.
//!
//! What lives here: fixed headers of the configuration and those made from an event. What does
//! not: signatures (`signature.rs`) and the body (`postrider-encoding`).
//! Invariant: every text from an event is percent-encoded, so that it arrives as it was appended
//! and can neither end a header nor start another.

use std::collections::BTreeMap;

use postrider_core::{Error, Record, Result, Secret, TRACEPARENT, TRACESTATE};
use postrider_encoding::{CLOUD_EVENTS_PREFIX, Message, encode_header_value};
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};

/// Prefix of the headers that carry an event's own ones.
const EVENT_HEADER_PREFIX: &str = "postrider-header-";
/// Headers that the sink or HTTP itself sets.
const RESERVED: [&str; 9] = [
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "host",
    TRACEPARENT,
    TRACESTATE,
    "transfer-encoding",
    "upgrade",
];
const RESERVED_PREFIXES: [&str; 3] = ["webhook-", "postrider-", CLOUD_EVENTS_PREFIX];

/// The configured headers, checked. Errors name the header and never its value.
pub(crate) fn fixed_headers(headers: &BTreeMap<String, Secret>) -> Result<HeaderMap> {
    let mut map = HeaderMap::with_capacity(headers.len());
    for (name, value) in headers {
        let lower = name.to_ascii_lowercase();
        let reserved = RESERVED.contains(&lower.as_str())
            || RESERVED_PREFIXES.iter().any(|prefix| lower.starts_with(prefix));
        if reserved {
            return Err(Error::permanent(format!(
                "headers: {name} is set by the sink itself; remove it"
            )));
        }
        let name: HeaderName = lower.parse().map_err(|_| {
            Error::permanent(format!("headers: {name:?} is no name of a HTTP header"))
        })?;
        let mut value = HeaderValue::from_str(value.expose()).map_err(|_| {
            Error::permanent(format!("headers: the value of {name} has an illegal character"))
        })?;
        value.set_sensitive(true);
        map.insert(name, value);
    }
    Ok(map)
}

/// The headers that describe the event.
pub(crate) fn event_headers(record: &Record, message: &Message, map: &mut HeaderMap) -> Result<()> {
    let event = &record.event;
    map.insert(CONTENT_TYPE, raw(&message.content_type)?);
    for (name, value) in [
        ("postrider-topic", event.topic().as_str()),
        ("postrider-key", event.key().as_str()),
        ("postrider-type", event.event_type().as_str()),
    ] {
        map.insert(HeaderName::from_static(name), encoded(value)?);
    }
    for (name, value) in &message.attributes {
        map.insert(named(CLOUD_EVENTS_PREFIX, name)?, encoded(value)?);
    }
    if let Some(trace) = event.trace() {
        map.insert(HeaderName::from_static(TRACEPARENT), raw(&trace.traceparent)?);
        if let Some(state) = &trace.tracestate {
            map.insert(HeaderName::from_static(TRACESTATE), raw(state)?);
        }
    }
    for (name, value) in event.headers().iter() {
        if !name.eq_ignore_ascii_case(TRACEPARENT) && !name.eq_ignore_ascii_case(TRACESTATE) {
            map.insert(named(EVENT_HEADER_PREFIX, name)?, encoded(value)?);
        }
    }
    Ok(())
}

fn named(prefix: &str, name: &str) -> Result<HeaderName> {
    let bytes = [prefix.as_bytes(), name.as_bytes()].concat();
    HeaderName::from_bytes(&bytes).map_err(|cause| {
        Error::permanent(format!("event header {name:?} cannot be sent over HTTP"))
            .with_source(cause)
    })
}

fn encoded(value: &str) -> Result<HeaderValue> {
    raw(&encode_header_value(value))
}

fn raw(value: &str) -> Result<HeaderValue> {
    HeaderValue::from_bytes(value.as_bytes()).map_err(|cause| {
        Error::permanent("a value of the event cannot stand in a HTTP header").with_source(cause)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fixed_headers_are_checked_and_their_values_never_shown() {
        let one = |name: &str, value: &str| {
            fixed_headers(&BTreeMap::from([(name.to_owned(), Secret::new(value))]))
        };
        let map = one("Authorization", "Bearer hunter2").expect("valid");
        assert!(!format!("{map:?}").contains("hunter2"));
        for name in ["Host", "webhook-id", "ce-id", "Postrider-Key", "traceparent", "a b", ""] {
            let error = one(name, "hunter2").expect_err(name);
            assert!(!error.chain().contains("hunter2"), "{error:?}");
        }
        let error = one("x", "hunter2\n").expect_err("illegal").chain();
        assert!(error.contains("value of x") && !error.contains("hunter2"), "{error}");
    }
}
