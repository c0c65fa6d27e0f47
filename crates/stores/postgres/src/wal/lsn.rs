//! A place in the server's write-ahead log.
//!
//! What lives here: the number and its text. What does not: what an event's position is made of
//! (`position.rs`).
//! Invariant: two of them are compared only when they come from one system.

use std::fmt;

use postrider_core::{Error, Result};

/// Bytes since the log began. The default is before all of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct Lsn(pub(crate) u64);

impl Lsn {
    /// Reads `16/B374D848`: two hexadecimal halves of up to 32 bits.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let half = |text: &str| u32::from_str_radix(text, 16).ok().map(u64::from);
        let both = text.split_once('/').and_then(|(high, low)| half(high).zip(half(low)));
        both.map(|(high, low)| Self(high << 32 | low))
            .ok_or_else(|| Error::corrupt(format!("{text:?} is no place in a log, as 16/B374D848")))
    }
}

impl fmt::Display for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:X}/{:X}", self.0 >> 32, self.0 & 0xffff_ffff)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_reads_back_and_nonsense_is_refused() {
        for (text, number) in [("0/0", 0), ("16/B374D848", 0x16_b374_d848), ("1/1", 1 << 32 | 1)] {
            let lsn = Lsn::parse(text).expect("a place");
            assert_eq!((lsn.0, lsn.to_string()), (number, text.to_owned()));
        }
        for text in ["", "/", "16", "G/1", "1/123456789", "-1/0"] {
            assert!(Lsn::parse(text).is_err(), "{text}");
        }
    }
}
