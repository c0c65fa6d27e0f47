//! What a consumer has had, row by row, and what a checkpoint must write so that this stays known.
//!
//! What lives here: the rule by which a row counts as delivered, and the books on what was handed
//! out since. What does not: the tables (`checkpoints.rs`), and reading.
//! Invariant: nothing counts as delivered that lies above the checkpoint; and with the slot gone,
//! what does not count is handed out again, all of it and nothing else.
//!
//! The base is a snapshot: what it sees is delivered. It is taken now and then, the place in the
//! log read after it, and is adopted once the checkpoint has passed that place: whatever the
//! snapshot sees had its commit record below it. Transactions delivered since are kept by their
//! ids, the one in which the checkpoint stands by how far it was delivered.

use std::collections::{BTreeSet, VecDeque};

use postrider_core::{Error, Result};

use super::lsn::Lsn;
use super::position::WalPlace;
use super::snapshot::Snapshot;
use super::xids::{Xids, block_of};

/// So many bases wait for the checkpoint to pass them.
const MAX_CANDIDATES: usize = 4;
/// So many interrupted catch-ups are told apart. It takes as many in a row, each of which came less
/// far than the one before.
pub(super) const MAX_RECOVERIES: usize = 64;
/// A base is not adopted that would leave more ids than these to be listed which the one before saw
/// beyond its end.
const MAX_BEHIND: u64 = 65_536;

/// A moment before which everything is delivered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Base {
    pub(crate) snapshot: Snapshot,
    /// Read after the snapshot: every transaction that it sees has its commit record below. For a
    /// catch-up, where the stream goes on.
    pub(crate) lsn: Lsn,
    /// What had been drawn from the outbox's sequence, read after the snapshot, too.
    pub(crate) seq: i64,
    /// Up to this number all rows are settled, whatever their ids say: they came with a dump of
    /// another cluster, and the newest tick that the snapshot sees tells so.
    pub(crate) floor: i64,
    /// The cluster whose transactions the snapshot speaks of.
    pub(crate) system: u64,
    pub(crate) timeline: u32,
    /// What was published at that moment, as one text.
    pub(crate) publication: String,
}

impl Base {
    /// Whether the row was there at that moment, to a reader of cluster `system`.
    ///
    /// In another cluster than the base's (a dump was restored there) ids are drawn anew: there
    /// only what was numbered before the base's moment came with the dump.
    fn has(&self, system: u64, xid: u64, seq: i64) -> bool {
        (seq <= self.floor || self.snapshot.sees(xid)) && (self.system == system || seq <= self.seq)
    }

    /// Ids that this base sees and that the other one, taken of the same transactions, does not;
    /// `None` when they are too many to be listed.
    ///
    /// A slot's snapshot goes by the log, any other by what has ended in memory: between the two a
    /// transaction is committed and still open. And two connections may ask in one order and be
    /// answered in another.
    fn beyond(&self, other: &Snapshot) -> Option<Vec<u64>> {
        let (own, end) = (&self.snapshot, self.snapshot.xmax());
        let above = other.xmax()..end.max(other.xmax());
        (above.end - above.start <= MAX_BEHIND).then(|| {
            let open = other.open().iter().copied().chain(above);
            open.filter(|xid| own.sees(*xid)).collect()
        })
    }
}

/// How far a transaction is delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Partial {
    pub(crate) xid: u64,
    pub(crate) seq: i64,
}

/// How far a catch-up has come: of what its snapshot sees, it hands out what is missing, by `seq`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Recovery {
    pub(crate) snapshot: Snapshot,
    pub(crate) floor: i64,
    pub(crate) seq: i64,
}

impl Recovery {
    fn has(&self, xid: u64, seq: i64) -> bool {
        seq <= self.seq && (seq <= self.floor || self.snapshot.sees(xid))
    }

    /// Whether `other` says as much and more.
    fn is_within(&self, other: &Self) -> bool {
        self.seq <= other.seq
            && self.floor <= other.floor
            && self.snapshot.is_within(&other.snapshot)
    }
}

/// What is durable.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Delivered {
    /// Where the checkpoint stands.
    pub(crate) place: Option<WalPlace>,
    pub(crate) base: Option<Base>,
    /// Transactions delivered whole that the base does not see.
    pub(crate) after: Xids,
    /// The transaction in which the checkpoint stands.
    pub(crate) partial: Option<Partial>,
    /// Catch-ups that have not come to their end. While there is one, the stream must not be read
    /// but after another catch-up: the checkpoint's place says nothing then.
    pub(crate) recoveries: Vec<Recovery>,
}

impl Delivered {
    /// Whether the row counts as delivered to a reader of cluster `system`. Without a transaction
    /// id none does.
    pub(crate) fn has(&self, system: u64, xid: Option<u64>, seq: i64) -> bool {
        let Some(xid) = xid else { return false };
        let based = |base: &Base| {
            let partly = |part: Partial| part.xid == xid && seq <= part.seq;
            base.has(system, xid, seq)
                || base.system == system
                    && (self.after.contains(xid) || self.partial.is_some_and(partly))
        };
        self.base.as_ref().is_some_and(based) || self.recoveries.iter().any(|one| one.has(xid, seq))
    }
}

/// An event that was handed out and is not durably delivered.
#[derive(Debug, Clone, Copy)]
struct Handed {
    lsn: Lsn,
    ordinal: u32,
    /// 0 for none: no transaction has that id.
    xid: u64,
    seq: i64,
}

impl Handed {
    fn key(&self) -> (Lsn, u32) {
        (self.lsn, self.ordinal)
    }
}

/// What becomes of the transactions beyond the base.
#[derive(Debug, Clone)]
enum After {
    /// These come to them.
    Gains(Vec<u64>),
    /// A new base leaves these.
    Becomes(Xids),
}

/// What has to be written for a checkpoint, in one piece.
#[derive(Debug, Clone)]
pub(crate) struct Step {
    pub(super) to: WalPlace,
    /// A new base; what was kept beyond the old one is replaced.
    pub(super) base: Option<Base>,
    after: After,
    /// The blocks to write, whole, each with its number. With a new base all others go.
    pub(super) blocks: Vec<(u64, Vec<u8>)>,
    pub(super) partial: Option<Partial>,
    /// Whether `partial` is another one than before.
    pub(super) moves_partial: bool,
    /// How many of the recoveries stay as they are; those behind them go.
    pub(super) recoveries_kept: usize,
    /// The one that comes behind those.
    pub(super) recovery: Option<Recovery>,
}

/// The books on one consumer: what is durable, and what was handed out since.
#[derive(Debug)]
pub(crate) struct Ledger {
    delivered: Delivered,
    /// In the order of their places.
    handed: VecDeque<Handed>,
    /// In the order of their places in the log.
    candidates: Vec<Base>,
    catch_up: Option<CatchUp>,
    /// What counts as delivered comes from a copy, and is not in the database yet.
    adopting: bool,
}

#[derive(Debug)]
struct CatchUp {
    base: Base,
    /// So many of the recoveries are those of others before it.
    before: usize,
}

impl CatchUp {
    fn is_under_way(&self, at: &WalPlace) -> bool {
        at.key() < (self.base.lsn, 0)
    }
}

impl Ledger {
    pub(crate) fn new(delivered: Delivered) -> Self {
        Self {
            delivered,
            handed: VecDeque::new(),
            candidates: Vec::new(),
            catch_up: None,
            adopting: false,
        }
    }

    /// What is durable.
    pub(crate) fn delivered(&self) -> &Delivered {
        &self.delivered
    }

    /// Takes note of an event that a reader gets; `place` is the one behind it. Each one in order.
    pub(crate) fn handed_out(&mut self, place: WalPlace, xid: Option<u64>, seq: i64) {
        let WalPlace { lsn, ordinal, .. } = place;
        self.handed.push_back(Handed { lsn, ordinal, xid: xid.unwrap_or(0), seq });
    }

    /// What is handed out from here on comes from the table, by `seq`, until it is done at the
    /// place `(base.lsn, 0)`: all that the base's snapshot sees and that does not count as
    /// delivered. What was handed out before and is not durable is forgotten; the catch-up hands it
    /// out again. Where the checkpoint stands at that seam already, places go on from there.
    pub(crate) fn begin_catch_up(&mut self, base: Base) {
        self.handed.clear();
        self.candidates.clear();
        let before = self.delivered.recoveries.len();
        self.catch_up = Some(CatchUp { base, before });
    }

    /// Offers a base. It is adopted by the checkpoint that passes its place. One taken in a
    /// catch-up, or while another publication was in force than when reading began, is not: the
    /// stream may lack what it sees.
    pub(crate) fn candidate(&mut self, base: Base) {
        let fits = |own: &Base| {
            (own.system, &own.publication) == (base.system, &base.publication)
                && own.timeline <= base.timeline
                && own.lsn <= base.lsn
                && own.floor <= base.floor
        };
        let known = self.candidates.last().or(self.delivered.base.as_ref());
        if self.catch_up.is_some() || !known.is_none_or(fits) {
            return;
        }
        if self.candidates.len() == MAX_CANDIDATES {
            // Never the first: it is the next one to be passed, however far ahead the others are.
            self.candidates.pop();
        }
        self.candidates.push(base);
    }

    /// What a checkpoint at `to` has to write. Changes nothing: a write that failed, or whose
    /// outcome is unknown, can be planned again, for this place or a later one.
    ///
    /// # Errors
    /// `Permanent` for a place behind the checkpoint, and for one in the stream that this ledger
    /// can't vouch for: without a base, in another cluster than the base's, or after a catch-up
    /// that was interrupted.
    pub(crate) fn plan(&self, to: WalPlace) -> Result<Step> {
        let here = self.delivered.place.filter(|place| place.system == to.system);
        if here.is_some_and(|place| to.key() < place.key()) {
            return Err(Error::permanent(format!(
                "the checkpoint would move back to {} in the log",
                to.lsn
            )));
        }
        match &self.catch_up {
            Some(catch_up) if catch_up.is_under_way(&to) => Ok(self.plan_catch_up(to, catch_up)),
            _ => self.plan_stream(to),
        }
    }

    /// The last event at or below a place.
    fn last_at(&self, to: &WalPlace) -> Option<&Handed> {
        let count = self.handed.partition_point(|event| event.key() <= to.key());
        count.checked_sub(1).and_then(|last| self.handed.get(last))
    }

    fn plan_catch_up(&self, to: WalPlace, catch_up: &CatchUp) -> Step {
        let recoveries = &self.delivered.recoveries;
        let so_far = recoveries.get(catch_up.before).map(|own| own.seq);
        // Before its first event there is one, too: it tells that the catch-up has not ended.
        let seq = self.last_at(&to).map(|event| event.seq).or(so_far).unwrap_or(i64::MIN);
        let base = &catch_up.base;
        let own = Recovery { snapshot: base.snapshot.clone(), floor: base.floor, seq };
        let earlier = &recoveries[..catch_up.before];
        let implied = earlier.iter().rev().take_while(|one| one.is_within(&own)).count();
        let kept = catch_up.before - implied;
        Step {
            to,
            base: None,
            after: After::Gains(Vec::new()),
            blocks: Vec::new(),
            partial: self.delivered.partial,
            moves_partial: false,
            recoveries_kept: kept,
            // With all full, nothing of this one counts until it makes another superfluous.
            recovery: (kept < MAX_RECOVERIES).then_some(own),
        }
    }

    fn plan_stream(&self, to: WalPlace) -> Result<Step> {
        let old = &self.delivered;
        let caught_up = self.catch_up.as_ref().map(|catch_up| &catch_up.base);
        if caught_up.is_none() && !old.recoveries.is_empty() {
            return Err(Error::permanent(
                "the stream was read although a catch-up had not come to its end",
            ));
        }
        let from = caught_up.or(old.base.as_ref());
        let passed = self.passed(&to, from);
        let Some(base) = passed.or(from).filter(|base| base.system == to.system) else {
            return Err(Error::permanent(
                "the stream was read without a snapshot of this cluster from before it",
            ));
        };
        let new_base = (passed.is_some() || caught_up.is_some()).then(|| base.clone());
        let mut whole = self.whole(&to, from);
        whole.retain(|xid| !base.snapshot.sees(*xid));
        let (after, blocks) = if new_base.is_some() {
            let mut left = match caught_up {
                Some(_) => Xids::default(),
                None => old.after.unseen(&base.snapshot),
            };
            let behind = from.filter(|_| passed.is_some()).and_then(|f| f.beyond(&base.snapshot));
            behind.into_iter().flatten().chain(whole).for_each(|xid| left.insert(xid));
            (After::Becomes(left.clone()), stored(&left))
        } else {
            let numbers: BTreeSet<u64> = whole.iter().map(|xid| block_of(*xid)).collect();
            let mut touched = old.after.copy_of(&numbers);
            whole.iter().for_each(|xid| touched.insert(*xid));
            (After::Gains(whole), stored(&touched))
        };
        let partial = self.partial(&to);
        Ok(Step {
            to,
            moves_partial: partial != old.partial || new_base.is_some(),
            base: new_base,
            after,
            blocks,
            partial,
            recoveries_kept: 0,
            recovery: None,
        })
    }

    /// The newest base that a checkpoint at `to` has passed.
    fn passed(&self, to: &WalPlace, from: Option<&Base>) -> Option<&Base> {
        let fits = |base: &&Base| {
            base.lsn <= to.lsn
                && base.timeline == to.timeline
                && base.system == to.system
                && from.is_none_or(|own| own.beyond(&base.snapshot).is_some())
        };
        self.candidates.iter().rev().find(fits)
    }

    /// Transactions that a checkpoint at `to` has behind it as a whole, with events not durably
    /// delivered, and the one in which it stood before.
    fn whole(&self, to: &WalPlace, from: Option<&Base>) -> Vec<u64> {
        // The end of a catch-up has its snapshot for all before. What it read may bear the ids of
        // another cluster, which mean nothing here; so may the transaction of before.
        let seam = self.catch_up.as_ref().map(|catch_up| catch_up.base.lsn);
        let stood = self.stood_before(to).filter(|_| seam.is_none());
        let events = self.handed.iter().take_while(|event| event.lsn < to.lsn);
        let events = events.filter(|event| seam.is_none_or(|seam| event.lsn >= seam));
        let ids = events.map(|event| event.xid).filter(|xid| *xid != 0);
        let mut whole: Vec<u64> = stood.map(|part| part.xid).into_iter().chain(ids).collect();
        whole.dedup();
        whole.retain(|xid| from.is_none_or(|base| !base.snapshot.sees(*xid)));
        whole
    }

    /// The transaction in which the checkpoint stands now, if `to` lies beyond it.
    fn stood_before(&self, to: &WalPlace) -> Option<Partial> {
        let place = self.delivered.place?;
        self.delivered.partial.filter(|_| place.lsn < to.lsn)
    }

    /// The transaction in which `to` lies.
    fn partial(&self, to: &WalPlace) -> Option<Partial> {
        let stays = || {
            let place = self.delivered.place.filter(|place| place.lsn == to.lsn)?;
            self.delivered.partial.filter(|_| self.catch_up.is_none() && place.system == to.system)
        };
        let last = self.last_at(to).filter(|event| event.lsn == to.lsn);
        match last {
            Some(event) => (event.xid != 0).then_some(Partial { xid: event.xid, seq: event.seq }),
            None => stays(),
        }
    }

    /// Takes note that a step is durable.
    pub(crate) fn done(&mut self, step: Step) {
        let delivered = &mut self.delivered;
        let key = step.to.key();
        delivered.place = Some(step.to);
        delivered.partial = step.partial;
        delivered.recoveries.truncate(step.recoveries_kept);
        delivered.recoveries.extend(step.recovery);
        match step.after {
            After::Becomes(left) => delivered.after = left,
            After::Gains(whole) => whole.into_iter().for_each(|xid| delivered.after.insert(xid)),
        }
        if let Some(base) = step.base {
            self.candidates.retain(|other| other.lsn > base.lsn);
            delivered.base = Some(base);
        }
        match &mut self.catch_up {
            Some(catch_up) if catch_up.is_under_way(&step.to) => {
                catch_up.before = step.recoveries_kept;
            }
            catch_up => *catch_up = None,
        }
        let behind = self.handed.partition_point(|event| event.key() <= key);
        self.handed.drain(..behind);
    }
}

/// All blocks of a set, as they are stored.
fn stored(set: &Xids) -> Vec<(u64, Vec<u8>)> {
    let block = |number: u64| set.block(number).map(|bytes| (number, bytes));
    set.numbers().into_iter().filter_map(block).collect()
}

mod adoption;
#[cfg(test)]
mod by_created_at;
#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
