//! Whether a payload can stand inside a JSON document without a byte of it changed.
//!
//! What lives here: the test for JSON media types and the check of the bytes. What does not:
//! parsing them; nobody needs the values.
//! Invariant: what `as_json` returns is exactly the payload's bytes.

use postrider_core::Event;
use serde_json::value::RawValue;

/// Whether a media type is JSON: subtype `json` or one that ends in `+json` (RFC 6839).
pub fn is_json(content_type: &str) -> bool {
    let essence = content_type.split(';').next().unwrap_or_default().trim();
    let Some((_, subtype)) = essence.split_once('/') else { return false };
    let ends = |suffix: &str| {
        let start = subtype.len().checked_sub(suffix.len());
        let tail = start.and_then(|start| subtype.get(start..));
        tail.is_some_and(|tail| tail.eq_ignore_ascii_case(suffix))
    };
    subtype.eq_ignore_ascii_case("json") || ends("+json")
}

/// The payload as JSON text to embed byte for byte, if its media type and its bytes are JSON.
///
/// White space around the value cannot be embedded (a reader would not get it back), so a payload
/// with any is treated as bytes.
pub fn as_json(event: &Event) -> Option<&RawValue> {
    if !is_json(event.content_type().as_str()) {
        return None;
    }
    let text = std::str::from_utf8(event.payload()).ok()?;
    let raw: &RawValue = serde_json::from_str(text).ok()?;
    (raw.get().len() == text.len()).then_some(raw)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_media_types_are_known_in_any_case_and_with_parameters() {
        for yes in ["application/json", "Application/JSON; charset=utf-8", "a/vnd.x+json"] {
            assert!(is_json(yes), "{yes}");
        }
        for no in ["text/plain", "json", "application/jsonl", "application/json-seq", "a/é", ""] {
            assert!(!is_json(no), "{no}");
        }
    }
}
