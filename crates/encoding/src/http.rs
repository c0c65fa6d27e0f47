//! Attribute values in HTTP headers: the percent-encoding of the CloudEvents HTTP binding.
//!
//! What lives here: encoding and decoding of one value. What does not: header names and requests.
//! Invariant: an encoded value is visible ASCII without spaces, and decodes to the same text.

use std::borrow::Cow;

use percent_encoding::{AsciiSet, CONTROLS, percent_decode, utf8_percent_encode};
use postrider_core::{Error, Result};

/// What CloudEvents attributes are prefixed with in HTTP headers.
pub const CLOUD_EVENTS_PREFIX: &str = "ce-";

/// Space, double quote, percent, and all outside U+0021–U+007E
/// (CloudEvents 1.0.2, HTTP protocol binding, 3.1.3.2).
const ENCODED: &AsciiSet = &CONTROLS.add(b' ').add(b'"').add(b'%');

/// The value as it stands in a header.
pub fn encode_header_value(value: &str) -> Cow<'_, str> {
    utf8_percent_encode(value, ENCODED).into()
}

/// Reads a header's value back; a quoted value loses its quotes first, as the binding asks.
///
/// # Errors
/// [`ErrorKind::Permanent`](postrider_core::ErrorKind::Permanent) if the decoded bytes are no
/// UTF-8.
pub fn decode_header_value(value: &[u8]) -> Result<String> {
    let unquoted = match value {
        [b'"', inner @ .., b'"'] => Cow::Owned(unescape(inner)),
        _ => Cow::Borrowed(value),
    };
    let bytes: Vec<u8> = percent_decode(&unquoted).collect();
    String::from_utf8(bytes).map_err(|cause| {
        Error::permanent("header value is not percent-encoded UTF-8").with_source(cause)
    })
}

/// Removes the backslashes of a quoted string (RFC 9110, 5.6.4).
fn unescape(quoted: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(quoted.len());
    let mut rest = quoted.iter();
    while let Some(byte) = rest.next() {
        let escaped = if *byte == b'\\' { rest.next() } else { None };
        bytes.push(*escaped.unwrap_or(byte));
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The specification's own examples.
    #[test]
    fn vectors_of_the_binding() {
        assert_eq!(encode_header_value("Euro € 😀"), "Euro%20%E2%82%AC%20%F0%9F%98%80");
        assert_eq!(encode_header_value("a\"b%c~!"), "a%22b%25c~!");
        assert_eq!(decode_header_value(b"\"a \\\"b\\\" %41\"").expect("quoted"), "a \"b\" A");
        assert_eq!(decode_header_value(b"100%").expect("a lone percent stays"), "100%");
        assert!(decode_header_value(b"%ff").is_err());
    }

    proptest! {
        #[test]
        fn values_read_back_and_are_visible_ascii(value in any::<String>()) {
            let encoded = encode_header_value(&value);
            prop_assert!(encoded.bytes().all(|b| (0x21..=0x7e).contains(&b)), "{}", encoded);
            prop_assert_eq!(decode_header_value(encoded.as_bytes()).expect("own text"), value);
        }

        #[test]
        fn decoding_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = decode_header_value(&bytes);
        }
    }
}
