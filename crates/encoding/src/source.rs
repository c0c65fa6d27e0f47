//! The CloudEvents `source`: where an event comes from.
//!
//! What lives here: the newtype and the check of its form. What does not: resolving it.
//! Invariant: it is a non-empty URI-reference (RFC 3986), as CloudEvents 1.0 demands.

use std::fmt;

use postrider_core::{Error, Result};

/// A URI-reference that names the system whose events these are, for example `/shop/orders`.
#[derive(Clone, PartialEq, Eq)]
pub struct EventSource(String);

impl EventSource {
    /// Checks and takes the text.
    ///
    /// # Errors
    /// [`ErrorKind::Permanent`](postrider_core::ErrorKind::Permanent) with the place of the first
    /// character that no URI may have.
    pub fn new(text: impl Into<String>) -> Result<Self> {
        let text = text.into();
        if text.is_empty() {
            return Err(Error::permanent("source is empty; name this system, e.g. /shop/orders"));
        }
        match first_illegal(text.as_bytes()) {
            Some(at) => Err(Error::permanent(format!(
                "source {text:?} is no URI-reference: byte {} is not allowed there; \
                 percent-encode it",
                at + 1
            ))),
            None => Ok(Self(text)),
        }
    }

    /// The text itself.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for EventSource {
    /// `/postrider`: valid, and enough while one system sends.
    fn default() -> Self {
        Self("/postrider".into())
    }
}

impl fmt::Debug for EventSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// Characters of RFC 3986 (unreserved, reserved), and `%` before two hexadecimal digits.
fn first_illegal(bytes: &[u8]) -> Option<usize> {
    let legal = |at: usize, byte: u8| match byte {
        b'%' => {
            let digits = bytes.get(at + 1..at + 3);
            digits.is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
        }
        _ => byte.is_ascii_alphanumeric() || b"-._~:/?#[]@!$&'()*+,;=".contains(&byte),
    };
    bytes.iter().enumerate().position(|(at, byte)| !legal(at, *byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_uri_references_are_taken() {
        for yes in ["/shop", "urn:uuid:1", "https://example.com/a%20b?x#y", "//h", "a"] {
            assert!(EventSource::new(yes).is_ok(), "{yes}");
        }
        for (no, place) in [("a b", "byte 2"), ("/é", "byte 2"), ("%2", "byte 1"), ("<", "byte 1")]
        {
            let text = EventSource::new(no).expect_err("no URI").to_string();
            assert!(text.contains(place), "{text}");
        }
        assert!(EventSource::new("").is_err());
        assert!(EventSource::new(EventSource::default().as_str()).is_ok());
    }
}
