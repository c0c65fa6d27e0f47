//! How an event becomes a message: plain and CloudEvents, and templates over an event.
//!
//! What lives here: the encodings that every sink offers, their decoding, and the `{topic}`
//! placeholders of sink settings. What does not: any medium's own framing, which is its sink's.
//! Invariant: payload bytes are never changed; whatever is encoded decodes to the same bytes.

mod cloud_events;
mod encoder;
mod http;
mod payload;
mod source;
mod template;
mod time;

pub use cloud_events::{CloudEvent, Extensions, SPEC_VERSION, STRUCTURED_CONTENT_TYPE};
pub use encoder::{Encoder, Encoding, Message};
pub use http::{CLOUD_EVENTS_PREFIX, decode_header_value, encode_header_value};
pub use payload::{as_json, is_json};
pub use source::EventSource;
pub use template::{Escape, Template};
pub use time::{format_rfc3339, parse_rfc3339};
