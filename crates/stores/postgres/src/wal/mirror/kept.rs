//! One consumer's standing as a copy has it, in JSON.
//!
//! What lives here: the fields, and the way from and to what the ledger knows. What does not: where
//! it is put (`file.rs`, `database.rs`), and whether it may be taken over (`adopt.rs`).
//! Invariant: what is read back is exactly what was durable when it was written, or an error.

use std::time::Duration;

use postrider_core::{Error, Result};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::wal::history::{Branch, History};
use crate::wal::ledger::{Base, Delivered, Partial, Recovery};
use crate::wal::lsn::Lsn;
use crate::wal::position::WalPlace;
use crate::wal::snapshot::Snapshot;
use crate::wal::xids::Xids;

/// What a copy says of one consumer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Kept {
    /// The outbox's own identity.
    pub(crate) identity: String,
    /// Also in the database, since this was written.
    pub(crate) seal: Uuid,
    /// In milliseconds since 1970, by the source's database: for people.
    pub(crate) written_ms: u64,
    pub(crate) system: u64,
    pub(crate) timeline: u32,
    /// Where the timelines before it ended.
    history: Vec<KeptBranch>,
    lsn: String,
    ordinal: u32,
    /// The dead letters that the checkpoint has passed lie below in the log.
    parked_by: String,
    base: Option<KeptBase>,
    after: Vec<KeptBlock>,
    partial: Option<KeptPartial>,
    recoveries: Vec<KeptRecovery>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeptBranch {
    timeline: u32,
    end: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeptBase {
    snapshot: String,
    lsn: String,
    seq: i64,
    floor: i64,
    system: u64,
    timeline: u32,
    publication: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeptBlock {
    block: u64,
    /// As the database has it, in hexadecimal digits.
    xids: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeptPartial {
    xid: u64,
    seq: i64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeptRecovery {
    snapshot: String,
    floor: i64,
    seq: i64,
}

/// What a copy is written under.
pub(crate) struct Seal<'a> {
    pub(crate) identity: String,
    pub(crate) seal: Uuid,
    pub(crate) written_ms: u64,
    pub(crate) history: &'a [Branch],
    pub(crate) parked_by: Lsn,
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(hex: &str) -> Result<Vec<u8>> {
    let wrong = || Error::corrupt("the copy's transactions are no hexadecimal digits");
    if !hex.is_ascii() || !hex.len().is_multiple_of(2) {
        return Err(wrong());
    }
    let pairs = (0..hex.len()).step_by(2).filter_map(|at| hex.get(at..at + 2));
    pairs.map(|pair| u8::from_str_radix(pair, 16).map_err(|_| wrong())).collect()
}

impl Kept {
    /// What is durable, unless nothing is.
    pub(crate) fn of(delivered: &Delivered, under: Seal<'_>) -> Option<Self> {
        let place = delivered.place?;
        let history = under
            .history
            .iter()
            .map(|branch| KeptBranch { timeline: branch.timeline, end: branch.end.to_string() });
        let block = |number: u64| {
            let xids = hex(&delivered.after.block(number)?);
            Some(KeptBlock { block: number, xids })
        };
        let recovery = |one: &Recovery| KeptRecovery {
            snapshot: one.snapshot.to_string(),
            floor: one.floor,
            seq: one.seq,
        };
        Some(Self {
            identity: under.identity,
            seal: under.seal,
            written_ms: under.written_ms,
            system: place.system,
            timeline: place.timeline,
            history: history.collect(),
            lsn: place.lsn.to_string(),
            ordinal: place.ordinal,
            parked_by: under.parked_by.to_string(),
            base: delivered.base.as_ref().map(KeptBase::of),
            after: delivered.after.numbers().into_iter().filter_map(block).collect(),
            partial: delivered.partial.map(|part| KeptPartial { xid: part.xid, seq: part.seq }),
            recoveries: delivered.recoveries.iter().map(recovery).collect(),
        })
    }

    /// Where it stands.
    ///
    /// # Errors
    /// `Corrupt` for a place that is none.
    pub(crate) fn place(&self) -> Result<WalPlace> {
        let Self { system, timeline, ordinal, .. } = *self;
        Ok(WalPlace { system, timeline, lsn: Lsn::parse(&self.lsn)?, ordinal })
    }

    /// Up to where the log has all dead letters that the checkpoint has passed.
    ///
    /// # Errors
    /// `Corrupt`, as [`Self::place`].
    pub(crate) fn parked_by(&self) -> Result<Lsn> {
        Lsn::parse(&self.parked_by)
    }

    /// Where the timelines before its own ended.
    ///
    /// # Errors
    /// `Corrupt`, as [`Self::place`].
    pub(crate) fn history(&self) -> Result<History> {
        let branch =
            |one: &KeptBranch| Ok(Branch { timeline: one.timeline, end: Lsn::parse(&one.end)? });
        self.history.iter().map(branch).collect()
    }

    /// Whether `other` may take its place: it never moves back on one timeline of one system. A
    /// copy of another outbox's says nothing of this one.
    ///
    /// # Errors
    /// `Corrupt` for a place that is none.
    pub(crate) fn gives_way_to(&self, other: &Self) -> Result<bool> {
        if (&self.identity, self.system) != (&other.identity, other.system) {
            return Ok(true);
        }
        let key = |kept: &Self| kept.place().map(|place| (place.timeline, place.key()));
        Ok(key(self)? <= key(other)?)
    }

    /// How long ago it was written, when the source's database says that it is `now_ms`.
    pub(crate) fn age(&self, now_ms: u64) -> Duration {
        Duration::from_millis(now_ms.saturating_sub(self.written_ms))
    }

    /// What had been delivered.
    ///
    /// # Errors
    /// `Corrupt` for what can't have been written.
    pub(crate) fn delivered(&self) -> Result<Delivered> {
        let mut after = Xids::default();
        for one in &self.after {
            after.take_in(one.block, &bytes(&one.xids)?)?;
        }
        let recovery = |one: &KeptRecovery| {
            Ok(Recovery {
                snapshot: Snapshot::parse(&one.snapshot)?,
                floor: one.floor,
                seq: one.seq,
            })
        };
        Ok(Delivered {
            place: Some(self.place()?),
            base: self.base.as_ref().map(KeptBase::base).transpose()?,
            after,
            partial: self.partial.as_ref().map(|part| Partial { xid: part.xid, seq: part.seq }),
            recoveries: self.recoveries.iter().map(recovery).collect::<Result<_>>()?,
        })
    }
}

impl KeptBase {
    fn of(base: &Base) -> Self {
        Self {
            snapshot: base.snapshot.to_string(),
            lsn: base.lsn.to_string(),
            seq: base.seq,
            floor: base.floor,
            system: base.system,
            timeline: base.timeline,
            publication: base.publication.clone(),
        }
    }

    fn base(&self) -> Result<Base> {
        Ok(Base {
            snapshot: Snapshot::parse(&self.snapshot)?,
            lsn: Lsn::parse(&self.lsn)?,
            seq: self.seq,
            floor: self.floor,
            system: self.system,
            timeline: self.timeline,
            publication: self.publication.clone(),
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::wal::mirror) fn kept(timeline: u32, lsn: u64) -> Kept {
        let mut after = Xids::default();
        [70_001, 70_002, 140_000].into_iter().for_each(|xid| after.insert(xid));
        let snapshot = Snapshot::parse("10:70000:11,12").expect("a snapshot");
        let delivered = Delivered {
            place: Some(WalPlace { system: u64::MAX - 1, timeline, lsn: Lsn(lsn), ordinal: 3 }),
            base: Some(Base {
                snapshot: snapshot.clone(),
                lsn: Lsn(5),
                seq: 9,
                floor: 1,
                system: u64::MAX - 1,
                timeline: 1,
                publication: "16384:9".to_owned(),
            }),
            after,
            partial: Some(Partial { xid: 140_001, seq: 77 }),
            recoveries: vec![Recovery { snapshot, floor: 0, seq: i64::MIN }],
        };
        let history = [Branch { timeline: 1, end: Lsn(3) }];
        let (identity, seal) = ("i".to_owned(), Uuid::new_v4());
        let parked_by = Lsn(4);
        let seal = Seal { identity, seal, written_ms: 1_000, history: &history, parked_by };
        let kept = Kept::of(&delivered, seal).expect("it stands somewhere");
        assert_eq!(kept.delivered().expect("its own"), delivered);
        assert_eq!(kept.history().expect("its own"), history);
        assert_eq!(kept.age(3_000), Duration::from_secs(2));
        kept
    }

    #[test]
    fn a_standing_reads_back_whole() {
        let kept = kept(2, 4_096);
        let text = serde_json::to_string(&kept).expect("JSON");
        assert_eq!(serde_json::from_str::<Kept>(&text).expect("its own"), kept);
    }

    #[test]
    fn what_was_changed_by_hand_is_refused() {
        let mut broken = kept(2, 4_096);
        broken.after[0].xids = "0é".to_owned();
        assert!(broken.delivered().is_err());
        broken.after[0].xids = "0".to_owned();
        assert!(broken.delivered().is_err());
        broken.after.clear();
        broken.lsn = "x".to_owned();
        assert!(broken.delivered().is_err());
    }

    #[test]
    fn a_copy_never_moves_back_on_a_timeline() {
        let gives_way = |from: &Kept, to: &Kept| from.gives_way_to(to).expect("places");
        let (low, high, later) = (kept(1, 8), kept(1, 16), kept(2, 8));
        assert!(gives_way(&low, &high) && !gives_way(&high, &low) && gives_way(&high, &high));
        assert!(gives_way(&high, &later) && !gives_way(&later, &high));
        let mut other = kept(1, 8);
        other.identity = "j".to_owned();
        assert!(gives_way(&later, &other), "the outbox was made anew");
    }
}
