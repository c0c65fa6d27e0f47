//! Partitions: independent feeds of one outbox.
//!
//! What lives here: the identifier and the stable hash from key to number. What does not: how a
//! store lists, splits or raises its partitions.
//! Invariant: `key_hash` never changes; SQL of every store computes the same value.

use std::fmt;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::limits::MAX_NAME_BYTES;
use crate::names::check_text;
use crate::{Key, Result};

/// Names one partition of one source. The text is the store's own: `3/8` on SQL stores
/// (number 3 of 8), a range of hash values on Cosmos DB.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PartitionId(Arc<str>);

impl PartitionId {
    /// Takes a store's own name for a partition.
    ///
    /// # Errors
    /// [`ErrorKind::Permanent`](crate::ErrorKind::Permanent) if it is empty, too long, or has
    /// control characters.
    pub fn new(text: impl Into<Arc<str>>) -> Result<Self> {
        let text = text.into();
        check_text("partition", &text, MAX_NAME_BYTES)?;
        Ok(Self(text))
    }

    /// Number `index` of `count`, as SQL stores name theirs.
    ///
    /// # Panics
    /// If `index` is not below `count`.
    pub fn numbered(index: u32, count: u32) -> Self {
        assert!(index < count, "partition {index} of {count} does not exist");
        Self(format!("{index}/{count}").into())
    }

    /// The two numbers of a SQL store's partition, or nothing for another store's.
    pub fn to_numbers(&self) -> Option<(u32, u32)> {
        let (index, count) = self.0.split_once('/')?;
        let (index, count) = (index.parse().ok()?, count.parse().ok()?);
        (index < count).then_some((index, count))
    }

    /// The text itself.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for PartitionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for PartitionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The stable hash of a key: the first four bytes, big-endian, of SHA-256 of its UTF-8 text.
///
/// A key's partition is `key_hash(key) % count`. SHA-256 because every SQL dialect has it.
pub fn key_hash(key: &Key) -> u32 {
    let digest = Sha256::digest(key.as_str().as_bytes());
    u32::from_be_bytes([digest[0], digest[1], digest[2], digest[3]])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same vectors stand in every SQL store's tests.
    #[test]
    fn vectors_of_the_key_hash() {
        for (key, hash) in [
            ("a", 0xca97_8112),
            ("order-42", 0x3bf8_b157),
            ("Zoë", 0xc6a1_2698),
            ("日本", 0xcf2a_bf0c),
        ] {
            let key = Key::new(key).expect("a valid key");
            assert_eq!(key_hash(&key), hash, "{key}: {:08x}", key_hash(&key));
        }
    }

    #[test]
    fn numbers_read_back_and_nonsense_is_none() {
        assert_eq!(PartitionId::numbered(3, 8).to_numbers(), Some((3, 8)));
        for text in ["8/8", "x/3", "3", "-1/2", "00-1F"] {
            assert_eq!(PartitionId::new(text).expect("a valid name").to_numbers(), None);
        }
    }
}
