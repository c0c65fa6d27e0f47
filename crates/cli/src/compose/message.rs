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

/// Who logs in.
pub(super) const USER: Key =
    key("user", Shape::Text, Need::Optional, "User, with password; the URL's without.");

/// That user's password.
pub(super) const PASSWORD: Key =
    key("password", Shape::Secret, Need::Optional, "The user's password.");

/// Whom a server's certificate may come from, besides the system's authorities.
pub(super) const CA_FILE: Key = key(
    "ca_file",
    Shape::Text,
    Need::Optional,
    "PEM file with further certificate authorities to trust.",
);

/// This client's own certificate.
pub(super) const CLIENT_CERTIFICATE_FILE: Key = key(
    "client_certificate_file",
    Shape::Text,
    Need::Optional,
    "PEM file with this client's certificate, with client_key_file.",
);

/// The key of that certificate.
pub(super) const CLIENT_KEY_FILE: Key = key(
    "client_key_file",
    Shape::Text,
    Need::Optional,
    "PEM file with the key of client_certificate_file.",
);

/// Whether other hosts may be spoken to in the clear.
pub(super) const ALLOW_PLAIN: Key = key(
    "allow_plain",
    Shape::Switch,
    Need::Default("false"),
    "Permits connections without TLS to hosts other than loopback.",
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
