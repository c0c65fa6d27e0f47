//! What the sinks of messages have in common.
//!
//! What lives here: the keys that mean the same in each of them, and what they become. What does
//! not: a kind's own keys.
//! Invariant: a key of these reads alike in every section.

use postrider_encoding::Encoding;

use crate::config::keys::{Key, Need, Shape, key};
use crate::config::value::Fields;

/// How an event becomes a message.
pub(super) const ENCODING: Key = key(
    "encoding",
    Shape::Choice(&["plain", "cloudevents-binary", "cloudevents-structured"]),
    Need::Default("\"plain\""),
    "How an event becomes a message.",
);

/// Whose events they are.
pub(super) const SOURCE: Key = key(
    "source",
    Shape::Text,
    Need::Optional,
    "The source attribute of CloudEvents; /postrider without it.",
);

/// Time for connecting.
pub(super) const CONNECT_TIMEOUT_MS: Key = key(
    "connect_timeout_ms",
    TIMEOUT,
    Need::Default("5000"),
    "Time for connecting, in milliseconds.",
);

/// Up to ten minutes, in milliseconds.
const TIMEOUT: Shape = Shape::Integer { min: 1, max: 600_000 };

/// Time for one answer; `doc` says of what.
pub(super) const fn timeout_ms(default: &'static str, doc: &'static str) -> Key {
    key("timeout_ms", TIMEOUT, Need::Default(default), doc)
}

/// What [`ENCODING`] says.
pub(super) fn encoding(fields: &Fields) -> Encoding {
    match fields.text(ENCODING.name) {
        Some("cloudevents-binary") => Encoding::CloudEventsBinary,
        Some("cloudevents-structured") => Encoding::CloudEventsStructured,
        _ => Encoding::Plain,
    }
}
