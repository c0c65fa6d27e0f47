//! How far a consumer has come in the log, and the 22 bytes of it that a relay keeps.
//!
//! What lives here: the place and its bytes. What does not: which transactions lie behind it for
//! good when the slot is gone (`ledger.rs`).
//! Invariant: within one system the order of places is the order in which events are handed out.
//!
//! A transaction is named by the place where its commit record begins, and not by its end: the
//! server tells it with the transaction's first message, the end only with the last one, and a
//! transaction of any size would have to be kept until then.

use postrider_core::{Error, Position, Result};

use super::lsn::Lsn;

const BYTES: usize = 22;
/// Highest log position that fits: 64 PiB of log.
const MAX_LSN: u64 = (1 << 56) - 1;
/// Highest timeline that fits.
const MAX_TIMELINE: u32 = (1 << 24) - 1;

/// Everything whose commit record begins below `lsn` is done, and of the transaction whose commit
/// record begins there, the first `ordinal` events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WalPlace {
    /// The cluster's identifier: places of two clusters have no order.
    pub(crate) system: u64,
    /// The history of the cluster; grows with each promotion.
    pub(crate) timeline: u32,
    pub(crate) lsn: Lsn,
    pub(crate) ordinal: u32,
}

impl WalPlace {
    /// Reads the bytes.
    ///
    /// # Errors
    /// `Permanent` for a position of another kind of source.
    pub(crate) fn of(position: &Position) -> Result<Self> {
        let bytes: &[u8; BYTES] = position.as_bytes().try_into().map_err(|_| {
            Error::permanent(format!(
                "position {position} has {} bytes, one of PostgreSQL's log has {BYTES}; it comes \
                 from another kind of source",
                position.as_bytes().len()
            ))
        })?;
        let number = |from: usize, to: usize| {
            bytes[from..to].iter().fold(0u64, |number, byte| number << 8 | u64::from(*byte))
        };
        let small = |from, to| u32::try_from(number(from, to)).expect("at most four bytes");
        Ok(Self {
            system: number(0, 8),
            timeline: small(8, 11),
            lsn: Lsn(number(11, 18)),
            ordinal: small(18, 22),
        })
    }

    /// The bytes.
    ///
    /// # Errors
    /// `Unsupported` beyond 64 PiB of log or 16 million timelines.
    pub(crate) fn position(&self) -> Result<Position> {
        if self.lsn.0 > MAX_LSN || self.timeline > MAX_TIMELINE {
            return Err(Error::new(
                postrider_core::ErrorKind::Unsupported,
                format!("timeline {} or place {} is beyond all bounds", self.timeline, self.lsn),
            ));
        }
        let mut bytes = [0; BYTES];
        bytes[0..8].copy_from_slice(&self.system.to_be_bytes());
        bytes[8..11].copy_from_slice(&self.timeline.to_be_bytes()[1..]);
        bytes[11..18].copy_from_slice(&self.lsn.0.to_be_bytes()[1..]);
        bytes[18..22].copy_from_slice(&self.ordinal.to_be_bytes());
        Position::from_bytes(&bytes)
    }

    /// The order within one system.
    pub(crate) fn key(&self) -> (Lsn, u32) {
        (self.lsn, self.ordinal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_read_back_in_order() {
        let places = [(7, 1, 0, 0), (7, 1, 255, 9), (7, 1, 256, 0), (7, 1, 256, 70_000)];
        let places = places.map(|(system, timeline, lsn, ordinal)| WalPlace {
            system,
            timeline,
            lsn: Lsn(lsn),
            ordinal,
        });
        let positions = places.map(|place| place.position().expect("in bounds"));
        assert_eq!(positions.clone().map(|position| WalPlace::of(&position).unwrap()), places);
        assert!(positions.is_sorted_by_key(|position| position.as_bytes().to_vec()));
        assert!(places.is_sorted_by_key(WalPlace::key));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let place = WalPlace { system: 1, timeline: 1, lsn: Lsn(MAX_LSN + 1), ordinal: 0 };
        assert!(place.position().is_err());
        assert!(WalPlace::of(&Position::START).is_err());
    }
}
