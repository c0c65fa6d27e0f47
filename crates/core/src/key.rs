//! The key: events that share it keep their order.
//!
//! What lives here: `Key` and its rule. What does not: hashing it to a partition (`partition.rs`).
//! Invariant: a key is 1 to `MAX_KEY_BYTES` bytes of UTF-8 without control characters.

use std::fmt;
use std::sync::Arc;

use crate::Result;
use crate::limits::MAX_KEY_BYTES;
use crate::names::check_text;

/// Events with the same key are delivered in the order in which they were committed.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(Arc<str>);

impl Key {
    /// Takes the text as a key.
    ///
    /// # Errors
    /// [`ErrorKind::Permanent`](crate::ErrorKind::Permanent) if it is empty, longer than
    /// [`MAX_KEY_BYTES`], or has a control character.
    pub fn new(text: impl Into<Arc<str>>) -> Result<Self> {
        let text = text.into();
        check_text("key", &text, MAX_KEY_BYTES)?;
        Ok(Self(text))
    }

    /// The text itself.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &*self.0)
    }
}
