//! A place in one partition's feed.
//!
//! What lives here: the opaque bytes and their hexadecimal text. What does not: their meaning,
//! which belongs to the store that made them.
//! Invariant: only the store that made a position may compare it with another.

use std::fmt;
use std::sync::Arc;

use crate::limits::MAX_POSITION_BYTES;
use crate::ulid::Ulid;
use crate::{Error, Result};

const INLINE_BYTES: usize = 22;

/// Opaque bytes, at most 4 KiB. Positions are exclusive: reading starts after one.
///
/// On the SQL stores it is a [`Ulid`], and [`Position::START`] is 16 zero bytes.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Position(Repr);

/// Short positions are stored in place: a relay holds one for each record in flight.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Repr {
    Inline { len: u8, bytes: [u8; INLINE_BYTES] },
    Shared(Arc<[u8]>),
}

impl Position {
    /// Before the first record of a SQL store's feed.
    pub const START: Self = Self(Repr::Inline { len: 16, bytes: [0; INLINE_BYTES] });

    /// Takes a store's bytes.
    ///
    /// # Errors
    /// [`ErrorKind::Permanent`](crate::ErrorKind::Permanent) above
    /// [`MAX_POSITION_BYTES`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        if bytes.len() > MAX_POSITION_BYTES {
            return Err(Error::permanent(format!(
                "position has {} bytes; {MAX_POSITION_BYTES} are allowed",
                bytes.len()
            )));
        }
        if bytes.len() > INLINE_BYTES {
            return Ok(Self(Repr::Shared(bytes.into())));
        }
        let mut inline = [0; INLINE_BYTES];
        inline[..bytes.len()].copy_from_slice(bytes);
        let len = u8::try_from(bytes.len()).expect("at most INLINE_BYTES, which fits a byte");
        Ok(Self(Repr::Inline { len, bytes: inline }))
    }

    /// The bytes, as the store made them.
    pub fn as_bytes(&self) -> &[u8] {
        match &self.0 {
            Repr::Inline { len, bytes } => &bytes[..usize::from(*len)],
            Repr::Shared(bytes) => bytes,
        }
    }

    /// The ULID that a SQL store's position is.
    ///
    /// # Errors
    /// [`ErrorKind::Permanent`](crate::ErrorKind::Permanent) if it has not 16 bytes: a position of
    /// another kind of source.
    pub fn to_ulid(&self) -> Result<Ulid> {
        let bytes: [u8; 16] = self.as_bytes().try_into().map_err(|_| {
            Error::permanent(format!(
                "position {self} has {} bytes, a feed's has 16; it comes from another kind of \
                 source",
                self.as_bytes().len()
            ))
        })?;
        Ok(Ulid::from_bytes(bytes))
    }

    /// Reads what `Display` wrote: a ULID's 26 characters, or hexadecimal after `0x`.
    ///
    /// # Errors
    /// [`ErrorKind::Permanent`](crate::ErrorKind::Permanent) with what was expected.
    pub fn parse(text: &str) -> Result<Self> {
        let Some(digits) = text.strip_prefix("0x") else {
            return Ok(Ulid::parse(text)?.into());
        };
        let bad = || Error::permanent(format!("position {text:?} is not hexadecimal after 0x"));
        if !digits.is_ascii() || digits.len() % 2 != 0 {
            return Err(bad());
        }
        let bytes = (0..digits.len() / 2)
            .map(|i| u8::from_str_radix(&digits[2 * i..2 * i + 2], 16).map_err(|_| bad()))
            .collect::<Result<Vec<u8>>>()?;
        Self::from_bytes(&bytes)
    }
}

impl From<Ulid> for Position {
    fn from(ulid: Ulid) -> Self {
        Self::from_bytes(&ulid.to_bytes()).expect("16 bytes are a short position")
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Ok(ulid) = self.as_bytes().try_into().map(Ulid::from_bytes) {
            return write!(f, "{ulid}");
        }
        f.write_str("0x")?;
        self.as_bytes().iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_reads_back_for_ulids_and_for_opaque_bytes() {
        for bytes in [&[0u8; 16][..], &[0xff; 16], b"x", &[7; 300], &[]] {
            let position = Position::from_bytes(bytes).expect("short enough");
            assert_eq!(Position::parse(&position.to_string()).expect("own text"), position);
            assert_eq!(position.as_bytes(), bytes);
        }
    }

    #[test]
    fn nonsense_is_refused_and_never_panics() {
        for text in ["", "0x1", "0xzz", "0xé", "hello", "ééééééééééééé"] {
            assert!(Position::parse(text).is_err(), "{text}");
        }
        assert!(Position::from_bytes(&[0; MAX_POSITION_BYTES + 1]).is_err());
    }
}
