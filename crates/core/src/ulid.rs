//! ULIDs: 16 bytes, big-endian, whose first 48 bits are a time in milliseconds.
//!
//! What lives here: the value, its Crockford base-32 text, and the allocator that never goes back.
//! What does not: randomness and clocks, which the caller brings.
//! Invariant: bytewise order is the order of allocation, whatever the caller's clock does.

use std::fmt;

use crate::{Error, Result, Timestamp};

/// Crockford's base 32: no I, L, O, U (<https://github.com/ulid/spec>).
const ALPHABET: &[u8; 32] = b"0123456789ABCDEFGHJKMNPQRSTVWXYZ";
const TEXT_CHARS: usize = 26;
/// Bit 62 of the low half is cleared in a fresh start value, so that 2^62 increments pass before
/// the counter could cross a signed database integer's sign bit.
const FRESH_LOW_MASK: u64 = 0xBFFF_FFFF_FFFF_FFFF;

/// A ULID; ordered bytewise.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ulid(u128);

impl Ulid {
    /// From 16 big-endian bytes.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(u128::from_be_bytes(bytes))
    }

    /// From a time, the 16 bits after it, and the low 64 bits.
    pub fn from_parts(time: Timestamp, middle: u16, low: u64) -> Self {
        Self(u128::from(time.as_millis()) << 80 | u128::from(middle) << 64 | u128::from(low))
    }

    /// The first position of a time: `T ‖ 0…0`.
    pub fn from_time(time: Timestamp) -> Self {
        Self::from_parts(time, 0, 0)
    }

    /// 16 big-endian bytes.
    pub const fn to_bytes(self) -> [u8; 16] {
        self.0.to_be_bytes()
    }

    /// The 48-bit time.
    pub fn time(self) -> Timestamp {
        Timestamp::from_millis(u64::try_from(self.0 >> 80).expect("48 bits fit 64"))
    }

    /// The 16 bits after the time.
    pub fn middle(self) -> u16 {
        u16::try_from(self.0 >> 64 & 0xffff).expect("masked to 16 bits")
    }

    /// The low 64 bits.
    pub fn low(self) -> u64 {
        u64::try_from(self.0 & u128::from(u64::MAX)).expect("masked to 64 bits")
    }

    /// Whether all after the time is zero: a position that names a time and no record.
    pub fn is_plain_time(self) -> bool {
        self.0 << 48 == 0
    }

    /// Reads 26 characters of Crockford's base 32, in either case.
    ///
    /// # Errors
    /// [`ErrorKind::Permanent`](crate::ErrorKind::Permanent) on another length, another character,
    /// or a value above 128 bits.
    pub fn parse(text: &str) -> Result<Self> {
        if text.len() != TEXT_CHARS {
            return Err(Error::permanent(format!(
                "{text:?} is no ULID: it needs {TEXT_CHARS} characters and has {}",
                text.chars().count()
            )));
        }
        let mut value = 0u128;
        for (i, byte) in text.bytes().enumerate() {
            let upper = byte.to_ascii_uppercase();
            let Some(digit) = ALPHABET.iter().position(|letter| *letter == upper) else {
                return Err(Error::permanent(format!(
                    "{text:?} is no ULID: byte {} is not in Crockford's base 32",
                    i + 1
                )));
            };
            if i == 0 && digit > 7 {
                return Err(Error::permanent(format!("{text:?} is no ULID: above 128 bits")));
            }
            value = value << 5 | digit as u128;
        }
        Ok(Self(value))
    }
}

impl fmt::Display for Ulid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = [0u8; TEXT_CHARS];
        let mut rest = self.0;
        for slot in text.iter_mut().rev() {
            *slot = ALPHABET[(rest & 31) as usize];
            rest >>= 5;
        }
        f.write_str(std::str::from_utf8(&text).expect("the alphabet is ASCII"))
    }
}

impl fmt::Debug for Ulid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The state of one partition from which ranges of ULIDs are allocated.
///
/// A newer time starts a fresh counter from ten random bytes; an equal or earlier one freezes the
/// time and goes on counting, so that a clock set back never repeats or reorders a position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct UlidAllocator {
    /// Time and 16 bits after it of the last allocation.
    high: Option<(Timestamp, u16)>,
    /// The first low half that the next allocation may use.
    next_low: u64,
}

impl UlidAllocator {
    /// Allocates `count` consecutive ULIDs and returns the first; the others follow by one each.
    ///
    /// # Panics
    /// Only after more than 2^62 allocations within one millisecond.
    pub fn allocate(&mut self, hint: Timestamp, count: u64, random: [u8; 10]) -> Ulid {
        let (time, middle, first) = match self.high {
            Some((time, middle)) if hint <= time => (time, middle, self.next_low),
            _ => {
                let [r0, r1, low @ ..] = random;
                let low = u64::from_be_bytes(low) & FRESH_LOW_MASK;
                (hint, u16::from_be_bytes([r0, r1]), low)
            }
        };
        self.high = Some((time, middle));
        self.next_low = first.checked_add(count).expect("2^62 allocations in one millisecond");
        Ulid::from_parts(time, middle, first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// 2023-01-02T15:04:05Z
    const VECTOR_MS: u64 = 1_672_671_845_000;

    #[test]
    fn vector_of_the_first_allocation() {
        let mut state = UlidAllocator::default();
        let first = state.allocate(Timestamp::from_millis(VECTOR_MS), 100, [0xff; 10]);
        assert_eq!(first.to_bytes(), 0x0185_7302_DA88_FFFF_BFFF_FFFF_FFFF_FFFF_u128.to_be_bytes());
        assert_eq!(first.to_string(), "01GNSG5PM8ZZZVZZZZZZZZZZZZ");
        let next = state.allocate(Timestamp::from_millis(VECTOR_MS), 1, [0; 10]);
        assert_eq!(next.to_string(), "01GNSG5PM8ZZZW000000000033");
        assert_eq!(
            Ulid::from_time(Timestamp::from_millis(VECTOR_MS)).to_string(),
            "01GNSG5PM80000000000000000"
        );
    }

    #[test]
    fn an_earlier_clock_freezes_the_time_and_goes_on_counting() {
        let mut state = UlidAllocator::default();
        let a = state.allocate(Timestamp::from_millis(2_000), 3, [1; 10]);
        let b = state.allocate(Timestamp::from_millis(1_000), 1, [9; 10]);
        assert_eq!(b.time(), a.time());
        assert_eq!(b.low(), a.low() + 3);
    }

    #[test]
    fn order_of_bytes_is_numeric_order_across_the_sign_bit_of_the_low_half() {
        let below = Ulid::from_parts(Timestamp::from_millis(5), 1, i64::MAX as u64);
        let above = Ulid::from_parts(Timestamp::from_millis(5), 1, 1 << 63);
        assert!(below < above && below.to_bytes() < above.to_bytes());
    }

    proptest! {
        #[test]
        fn text_reads_back(value: u128) {
            let ulid = Ulid(value);
            prop_assert_eq!(Ulid::parse(&ulid.to_string()).expect("own text"), ulid);
            prop_assert_eq!(Ulid::parse(&ulid.to_string().to_lowercase()).expect("own text"), ulid);
        }

        #[test]
        fn parsing_never_panics(text in ".{0,40}") {
            let _ = Ulid::parse(&text);
        }

        #[test]
        fn allocations_only_ever_grow(
            hints in prop::collection::vec((0u64..1_000, 1u64..50, any::<[u8; 10]>()), 1..60),
        ) {
            let mut state = UlidAllocator::default();
            let mut last = None;
            for (hint, count, random) in hints {
                let first = state.allocate(Timestamp::from_millis(hint), count, random);
                prop_assert!(last.is_none_or(|last| last < first));
                last = Some(Ulid(first.0 + u128::from(count) - 1));
            }
        }
    }
}
