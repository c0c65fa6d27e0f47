//! What a position of the change feed is.
//!
//! What lives here: the parts of a position, their bytes, and which of two comes first. What does
//! not: reading on from one (`feed.rs`).
//! Invariant: within one consumer's work on one range, and on into its successors, the ordinal
//! grows with every document that is passed; a token never says more than was handed out.

use std::collections::BTreeSet;

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD as BASE64;
use postrider_core::{Error, Position, Result};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use sha2::{Digest, Sha256};

/// The layout of the bytes; another one is refused by name.
const VERSION: u8 = 1;

/// A place in a range's change feed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    /// Before everything: what every store calls the start.
    Start,
    /// After what was handed out.
    At(At),
}

/// After a page, or after one document within it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct At {
    #[serde(rename = "v")]
    version: u8,
    /// Documents that were passed since the consumer began; orders the places of one range.
    #[serde(rename = "n")]
    pub(crate) ordinal: u64,
    /// When the last document passed was written: seconds since 1970, by the database.
    #[serde(rename = "s")]
    pub(crate) seconds: u64,
    /// Where the consumer began by a time: events written before this second are passed over, also
    /// where the service gives them.
    #[serde(rename = "f", default, skip_serializing_if = "is_zero")]
    pub(crate) since: u64,
    /// The container's own identifier, which a container of the same name made anew has not.
    #[serde(rename = "r")]
    pub(crate) container: String,
    /// The library's token, from which the page is read again.
    #[serde(rename = "t")]
    pub(crate) token: String,
    /// The events after the token that were handed out, too.
    #[serde(rename = "p", default, skip_serializing_if = "Passed::is_empty")]
    pub(crate) passed: Passed,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Events that were handed out of a page that was not yet whole: told by marks of their own, since
/// neither their order nor their page need be the same when they are read again.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Passed(BTreeSet<u64>);

impl Passed {
    /// A document's mark: of its logical partition, its id and its version. Two of one page are
    /// told apart but for one in 2^64.
    pub(crate) fn mark(document: &Value) -> u64 {
        let mut digest = Sha256::new();
        for name in ["partitionKey", "id", "_etag"] {
            let part = document.get(name).and_then(Value::as_str).unwrap_or_default();
            digest.update((part.len() as u64).to_be_bytes());
            digest.update(part);
        }
        let digest = digest.finalize();
        let mut first = [0; 8];
        first.copy_from_slice(&digest[..8]);
        u64::from_be_bytes(first)
    }

    pub(crate) fn has(&self, mark: u64) -> bool {
        self.0.contains(&mark)
    }

    pub(crate) fn insert(&mut self, mark: u64) {
        self.0.insert(mark);
    }

    pub(crate) fn extend(&mut self, others: &Self) {
        self.0.extend(&others.0);
    }

    /// Those that are not among `met`.
    pub(crate) fn without(&self, met: &BTreeSet<u64>) -> Self {
        Self(self.0.difference(met).copied().collect())
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Base64 of eight bytes each: a page's worth fits into a position.
impl Serialize for Passed {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let bytes: Vec<u8> = self.0.iter().flat_map(|mark| mark.to_be_bytes()).collect();
        serializer.serialize_str(&BASE64.encode(bytes))
    }
}

impl<'de> Deserialize<'de> for Passed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let bytes = BASE64.decode(text).map_err(serde::de::Error::custom)?;
        let (marks, rest) = bytes.as_chunks::<8>();
        if !rest.is_empty() {
            return Err(serde::de::Error::custom("a mark has eight bytes"));
        }
        Ok(Self(marks.iter().map(|mark| u64::from_be_bytes(*mark)).collect()))
    }
}

impl At {
    /// At the token's own place.
    pub(crate) fn token(container: &str, token: String) -> Self {
        let container = container.to_owned();
        Self {
            version: VERSION,
            ordinal: 0,
            seconds: 0,
            since: 0,
            container,
            token,
            passed: Passed::default(),
        }
    }
}

impl Place {
    /// Reads a position.
    ///
    /// # Errors
    /// `Permanent` for bytes that are not this store's.
    pub(crate) fn read(position: &Position) -> Result<Self> {
        if *position == Position::START {
            return Ok(Self::Start);
        }
        let foreign = || {
            Error::permanent(format!(
                "position {position} is none of a change feed; it comes from another kind of source"
            ))
        };
        let at: At = serde_json::from_slice(position.as_bytes()).map_err(|_| foreign())?;
        if at.version != VERSION {
            return Err(Error::permanent(format!(
                "the position has layout {}, this version knows {VERSION}; run the version that \
                 wrote it",
                at.version
            )));
        }
        Ok(Self::At(at))
    }

    /// Orders the places of one range, as one consumer came by them.
    pub(crate) fn ordinal(&self) -> u64 {
        match self {
            Self::Start => 0,
            Self::At(at) => at.ordinal,
        }
    }

    /// The events after the token that were handed out.
    pub(crate) fn passed(&self) -> Passed {
        match self {
            Self::Start => Passed::default(),
            Self::At(at) => at.passed.clone(),
        }
    }

    /// From which second on events are wanted; 0 for all.
    pub(crate) fn since(&self) -> u64 {
        match self {
            Self::Start => 0,
            Self::At(at) => at.since,
        }
    }

    /// When the last document passed was written, in seconds since 1970; 0 where none was.
    pub(crate) fn seconds(&self) -> u64 {
        match self {
            Self::Start => 0,
            Self::At(at) => at.seconds,
        }
    }
}

impl At {
    /// The bytes.
    ///
    /// # Errors
    /// `Permanent` when they are too long for a position: a range in very many pieces.
    pub(crate) fn write(&self) -> Result<Position> {
        let bytes = serde_json::to_vec(self)
            .map_err(|error| Error::permanent("a position can't be written").with_source(error))?;
        Position::from_bytes(&bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at() -> At {
        let mut passed = Passed::default();
        (0..200).for_each(|mark| passed.insert(u64::MAX - mark));
        At { ordinal: 7, seconds: 9, passed, ..At::token("rid", "c1.x".to_owned()) }
    }

    #[test]
    fn a_position_reads_back() {
        let position = at().write().expect("short enough");
        assert_eq!(Place::read(&position).expect("own bytes"), Place::At(at()));
        assert_eq!(Place::read(&Position::START).expect("own bytes"), Place::Start);
    }

    #[test]
    fn foreign_bytes_and_other_layouts_are_refused() {
        let other = At { version: 2, ..at() }.write().expect("short enough");
        let error = Place::read(&other).expect_err("another layout");
        assert!(error.to_string().contains("layout 2"), "{error}");
        for bytes in [&b""[..], b"{}", b"\xff\xff", &[7; 16], b"{\"v\":1}"] {
            let position = Position::from_bytes(bytes).expect("short enough");
            let error = Place::read(&position).expect_err("not ours");
            assert!(error.to_string().contains("another kind of source"), "{error}");
        }
    }
}
