//! Which transactions a moment of the database had behind it: PostgreSQL's `pg_snapshot`.
//!
//! What lives here: its text, and what it sees. What does not: who has been given what of it
//! (`ledger.rs`).
//! Invariant: the transactions that were open are in order, and all lie below the snapshot's end.

use std::fmt;

use postrider_core::{Error, Result};

/// More transactions are never open: a slot's snapshot has room for 65 of each session's.
const MAX_OPEN: usize = 1 << 20;
/// The longest id, a comma behind it.
const MAX_ID_BYTES: usize = 21;

/// What was committed, or had failed, at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Snapshot {
    /// The lowest id that was open; all below had ended.
    xmin: u64,
    /// Nothing from here on is seen.
    xmax: u64,
    /// What was open between the two.
    open: Vec<u64>,
}

impl Snapshot {
    /// Reads `xmin:xmax:xip,xip`. The snapshot of a new slot may begin beyond its end, for its end
    /// only moves with commits: then everything below its beginning had ended.
    ///
    /// # Errors
    /// `Corrupt` for another text, and beyond a million open transactions.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let corrupt = || {
            let shown: String = text.chars().take(64).collect();
            Error::corrupt(format!("{shown:?} is no snapshot of transactions, as 10:20:10,14"))
        };
        if text.len() > MAX_OPEN * MAX_ID_BYTES {
            return Err(corrupt());
        }
        let mut parts = text.split(':');
        let mut part = || parts.next().ok_or_else(corrupt);
        let (xmin, xmax, list) = (part()?, part()?, part()?);
        let id = |text: &str| {
            let plain = text.bytes().all(|byte| byte.is_ascii_digit());
            text.parse::<u64>().ok().filter(|_| plain).ok_or_else(corrupt)
        };
        let (xmin, xmax) = (id(xmin)?, id(xmax)?);
        let xmax = xmax.max(xmin);
        let open = match list {
            "" => Vec::new(),
            list => list.split(',').map(id).collect::<Result<Vec<u64>>>()?,
        };
        let within = open.first().is_none_or(|first| *first >= xmin)
            && open.last().is_none_or(|last| *last < xmax);
        let rises = open.windows(2).all(|pair| pair[0] < pair[1]);
        if parts.next().is_some() || !within || !rises || open.len() > MAX_OPEN {
            return Err(corrupt());
        }
        Ok(Self { xmin, xmax, open })
    }

    /// Whether the transaction had ended.
    pub(crate) fn sees(&self, xid: u64) -> bool {
        xid < self.xmin || xid < self.xmax && self.open.binary_search(&xid).is_err()
    }

    /// Where what is seen ends.
    pub(crate) fn xmax(&self) -> u64 {
        self.xmax
    }

    /// Below this, what was open. Sorted.
    pub(crate) fn open(&self) -> &[u64] {
        &self.open
    }

    /// Whether `other` sees everything that this one does.
    pub(crate) fn is_within(&self, other: &Self) -> bool {
        self.xmax <= other.xmax && other.open.iter().all(|xid| !self.sees(*xid))
    }
}

impl fmt::Display for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:", self.xmin, self.xmax)?;
        for (at, xid) in self.open.iter().enumerate() {
            let comma = if at == 0 { "" } else { "," };
            write!(f, "{comma}{xid}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_reads_back_and_says_who_had_ended() {
        for text in ["10:10:", "10:20:10,14,19", "1:18446744073709551615:7"] {
            assert_eq!(Snapshot::parse(text).expect(text).to_string(), text);
        }
        let snapshot = Snapshot::parse("10:20:10,14").expect("a snapshot");
        let seen: Vec<u64> = (8..22).filter(|xid| snapshot.sees(*xid)).collect();
        assert_eq!(seen, [8, 9, 11, 12, 13, 15, 16, 17, 18, 19]);
    }

    #[test]
    fn a_slots_snapshot_may_begin_beyond_its_end() {
        // As PostgreSQL 18 said of one that was imported; as `pg_snapshot` it is refused.
        let snapshot = Snapshot::parse("941:939:").expect("a snapshot");
        assert_eq!(snapshot.to_string(), "941:941:");
        assert!(snapshot.sees(940) && !snapshot.sees(941));
    }

    #[test]
    fn nonsense_is_refused() {
        let texts = [
            "",
            "10",
            "10:20",
            "10:20:10:",
            "10:20:9",
            "10:20:20",
            "10:20:14,12",
            "10:20:12,12",
            "10:20:,",
            "a:20:",
            "+1:20:",
            "-1:20:",
            "1:18446744073709551616:",
        ];
        for text in texts {
            assert!(Snapshot::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_later_snapshot_sees_what_an_earlier_one_did() {
        let snapshot = |text| Snapshot::parse(text).expect("a snapshot");
        let earlier = snapshot("10:20:10,14");
        assert!(earlier.is_within(&snapshot("14:21:14")));
        assert!(earlier.is_within(&earlier));
        assert!(!snapshot("14:21:14").is_within(&earlier));
        // An id that the earlier one saw is open in the other: no later moment of one database.
        assert!(!earlier.is_within(&snapshot("10:21:12")));
    }
}
