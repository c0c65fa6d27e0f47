//! Places in the feed and the positions that name them.
//!
//! What lives here: a place (a tick's stamp and a sequence number) and its ULID. What does not: the
//! check of a place, which the database makes where it reads.
//! Invariant: the order of places is the bytewise order of their positions.

use postrider_core::ulid::Ulid;
use postrider_core::{Error, Position, Result, Timestamp};

/// Bits of a stamp below its milliseconds: the number of a tick within its millisecond.
const STAMP_MS_SHIFT: u32 = 16;

/// Where a record stands; `Default` is the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct Place {
    /// The upper half of the ULID: its tick. Milliseconds << 16 | number within them.
    pub(crate) stamp: i64,
    /// The lower half. 0 with a plain stamp names a time.
    pub(crate) seq: i64,
}

impl Place {
    pub(crate) fn position(self) -> Position {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.stamp.to_be_bytes());
        bytes[8..].copy_from_slice(&self.seq.to_be_bytes());
        Ulid::from_bytes(bytes).into()
    }

    /// The place that a position names, not checked to exist.
    pub(crate) fn of(position: &Position) -> Result<Self> {
        let bytes = position.to_ulid()?.to_bytes();
        let half = |at: usize| {
            let mut half = [0; 8];
            half.copy_from_slice(&bytes[at..at + 8]);
            i64::from_be_bytes(half)
        };
        let place = Self { stamp: half(0), seq: half(8) };
        if place.stamp < 0 || place.seq < 0 {
            // Neither the year 6429 nor a sequence above 2^63: nothing of ours.
            return Err(Error::permanent(format!(
                "position {position} is beyond the head; it comes from another kind of source"
            )));
        }
        Ok(place)
    }

    /// Before everything appended at or after `time`.
    pub(crate) fn of_time(time: Timestamp) -> Self {
        let milliseconds = i64::try_from(time.as_millis()).unwrap_or(i64::MAX);
        let stamp = milliseconds.checked_shl(STAMP_MS_SHIFT).filter(|stamp| *stamp >= 0);
        Self { stamp: stamp.unwrap_or(i64::MAX), seq: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_reads_back_from_its_position_and_keeps_its_order() {
        let places = [(0, 0), (1 << 16, 0), (1 << 16, 7), ((1 << 16) + 1, 2), (i64::MAX, i64::MAX)];
        let places = places.map(|(stamp, seq)| Place { stamp, seq });
        assert!(places.is_sorted());
        assert!(places.map(|place| place.position().to_ulid().expect("16 bytes")).is_sorted());
        for place in places {
            assert_eq!(Place::of(&place.position()).expect("its own"), place);
        }
        assert_eq!(Place::default().position(), Position::START);
        let time = Timestamp::from_millis(5);
        assert_eq!(Place::of_time(time).position(), Ulid::from_time(time).into());
    }

    #[test]
    fn a_position_above_every_place_is_refused() {
        let error = Place::of(&Position::from_bytes(&[0xff; 16]).expect("16 bytes"));
        assert!(error.expect_err("beyond").to_string().contains("beyond the head"));
    }
}
