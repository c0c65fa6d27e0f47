//! Which copy of the database answers, and which leases were acquired in it.
//!
//! What lives here: noticing that another copy answers (a promoted standby, a restored backup, an
//! older state of the same files), and refusing what a relay does under a lease of the copy before.
//! What does not: asking (`server.rs`), and leases themselves.
//! Invariant: a world has a number that only grows. A copy may lack what the one before had
//! acknowledged (a checkpoint, a parked event), so nobody goes on from memory: under a lease of an
//! earlier world every write is `Fenced`, and the relay acquires anew and reads its checkpoint
//! again.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use postrider_core::{Epoch, Error, ErrorKind, GroupName, HeldLease, PartitionId, Result};

use crate::error::{BEYOND_HEAD, NAMES_NOTHING, code_of};

/// How many copies have answered before this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct WorldNumber(u64);

/// What a copy says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sighting {
    /// Of the cluster; physical copies share it.
    pub(crate) system: i64,
    /// Each promotion and each recovery to a point in time begins a new one.
    pub(crate) timeline: i32,
    /// How far its log was written. On one timeline it goes back only by a loss.
    pub(crate) written: i64,
}

impl Sighting {
    fn change_to(self, now: Self) -> Option<Change> {
        if self.system != now.system {
            Some(Change::System)
        } else if self.timeline != now.timeline {
            Some(Change::Timeline(self.timeline, now.timeline))
        } else {
            None
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Change {
    System,
    Timeline(i32, i32),
    OlderState,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::System => f.write_str("another cluster"),
            Self::Timeline(old, new) => write!(f, "timeline {old} → {new}"),
            Self::OlderState => f.write_str("an earlier state of the same timeline"),
        }
    }
}

#[derive(Default)]
struct Seen {
    now: Option<Sighting>,
    change: Option<Change>,
    /// By whom each lease that this process acquired is held, and in which world. Bounded by the
    /// groups and partitions that it works on.
    leases: HashMap<(GroupName, PartitionId), (Epoch, WorldNumber)>,
}

/// The copies that this store has seen.
#[derive(Default)]
pub(crate) struct World {
    number: AtomicU64,
    seen: Mutex<Seen>,
    /// The greatest stamp handed out, and the same when the present world began.
    handed_out: AtomicI64,
    handed_out_before: AtomicI64,
}

/// How far the log was known to be written before a question was sent: the answer may not lie
/// before it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Before(Option<Sighting>);

impl World {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The world that answers now. Take it before a lease is asked for, and give it to
    /// [`Self::acquired`].
    pub(crate) fn number(&self) -> WorldNumber {
        WorldNumber(self.number.load(Ordering::Acquire))
    }

    pub(crate) fn before(&self) -> Before {
        Before(self.seen().now)
    }

    /// Takes note of an answer and returns the number of its world.
    pub(crate) fn met(&self, before: Before, now: Sighting) -> WorldNumber {
        let mut seen = self.seen();
        let Some(known) = seen.now else {
            seen.now = Some(now);
            return self.number();
        };
        let older =
            |before: Sighting| before.change_to(now).is_none() && now.written < before.written;
        let change = known
            .change_to(now)
            .or_else(|| before.0.is_some_and(older).then_some(Change::OlderState));
        match change {
            None => {
                let written = known.written.max(now.written);
                seen.now = Some(Sighting { written, ..now });
            }
            Some(change) => {
                tracing::warn!(
                    %change,
                    "the database was replaced by another copy; whoever reads it begins again \
                     from its checkpoint"
                );
                seen.now = Some(now);
                seen.change = Some(change);
                let last = self.handed_out.load(Ordering::Acquire);
                self.handed_out_before.store(last, Ordering::Release);
                self.number.fetch_add(1, Ordering::AcqRel);
            }
        }
        self.number()
    }

    /// Remembers a lease that was granted; `since` is the world before it was asked for, so that
    /// one granted while the copy changed counts as the old one's.
    pub(crate) fn acquired(&self, lease: &HeldLease, since: WorldNumber) {
        let key = (lease.group().clone(), lease.partition().clone());
        self.seen().leases.insert(key, (lease.epoch(), since));
    }

    /// Whether the lease was acquired in an earlier world than this one. A lease of another process
    /// is not known here, and its epoch alone decides.
    pub(crate) fn is_stale(&self, lease: &HeldLease) -> bool {
        let key = (lease.group().clone(), lease.partition().clone());
        let number = self.number();
        self.seen()
            .leases
            .get(&key)
            .is_some_and(|(epoch, since)| *epoch == lease.epoch() && *since < number)
    }

    /// Refuses what is done under a lease of an earlier world.
    ///
    /// # Errors
    /// `Fenced`.
    pub(crate) fn check(&self, place: &str, lease: &HeldLease) -> Result<()> {
        match self.is_stale(lease) {
            true => Err(self.replaced(place)),
            false => Ok(()),
        }
    }

    fn replaced(&self, place: &str) -> Error {
        let change = self.seen().change.map(|change| format!(" ({change})")).unwrap_or_default();
        Error::fenced(format!(
            "{place}: the database was replaced by another copy{change}; reading again from its \
             checkpoint"
        ))
    }

    /// Says that a reader was given a position with this stamp.
    pub(crate) fn handed_out(&self, stamp: i64) {
        self.handed_out.fetch_max(stamp, Ordering::AcqRel);
    }

    /// Whether a position that is refused may be one of an earlier world.
    fn is_lost(&self, stamp: i64) -> bool {
        stamp <= self.handed_out_before.load(Ordering::Acquire)
    }

    /// What a refused position means: `Fenced` where the copy before knew it, for the copy that
    /// answers now does not, and its own checkpoint does not name it either.
    pub(crate) fn judged(&self, place: &str, stamp: i64, error: Error) -> Error {
        let refused = error.kind() == ErrorKind::Permanent
            && code_of(&error).is_some_and(|code| [BEYOND_HEAD, NAMES_NOTHING].contains(&code));
        match refused && self.is_lost(stamp) {
            true => self.replaced(place).with_source(error),
            false => error,
        }
    }
}

#[cfg(test)]
mod tests {
    use postrider_core::RelayId;

    use super::*;

    fn sighting(system: i64, timeline: i32, written: i64) -> Sighting {
        Sighting { system, timeline, written }
    }

    fn lease(epoch: u64) -> HeldLease {
        HeldLease::granted(
            GroupName::new("g").unwrap(),
            PartitionId::new("0").unwrap(),
            RelayId::new("r").unwrap(),
            Epoch::new(epoch),
        )
    }

    #[test]
    fn another_copy_is_another_world() {
        let world = World::default();
        let meet = |sighting| world.met(world.before(), sighting).0;
        assert_eq!(meet(sighting(7, 1, 100)), 0);
        assert_eq!(meet(sighting(7, 1, 100)), 0);
        assert_eq!(meet(sighting(7, 1, 200)), 0);
        assert_eq!(meet(sighting(7, 2, 150)), 1, "a promotion");
        assert_eq!(meet(sighting(7, 2, 149)), 2, "an older state of the same files");
        assert_eq!(meet(sighting(7, 2, 149)), 2);
        assert_eq!(meet(sighting(8, 2, 500)), 3, "another cluster");
        assert_eq!(meet(sighting(7, 2, 500)), 4, "and back");
    }

    #[test]
    fn answers_that_overtake_each_other_are_no_older_state() {
        let world = World::default();
        world.met(world.before(), sighting(7, 1, 100));
        let (slow, fast) = (world.before(), world.before());
        world.met(fast, sighting(7, 1, 120));
        assert_eq!(world.met(slow, sighting(7, 1, 110)).0, 0);
        assert_eq!(world.met(world.before(), sighting(7, 1, 119)).0, 1);
    }

    #[test]
    fn a_lease_of_an_earlier_world_is_fenced_and_one_acquired_anew_is_not() {
        let world = World::default();
        world.met(world.before(), sighting(7, 3, 100));
        world.acquired(&lease(5), world.number());
        assert!(world.check("advance", &lease(5)).is_ok());
        // Asked for in the old world, granted while it ended.
        let since = world.number();
        world.met(world.before(), sighting(7, 4, 90));
        let error = world.check("advance", &lease(5)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Fenced);
        assert_eq!(
            error.to_string(),
            "advance: the database was replaced by another copy (timeline 3 → 4); reading again \
             from its checkpoint"
        );
        world.acquired(&lease(6), since);
        assert!(world.is_stale(&lease(6)));
        world.acquired(&lease(6), world.number());
        assert!(world.check("advance", &lease(6)).is_ok());
        assert!(!world.is_stale(&lease(9)), "a lease of another process");
    }

    #[test]
    fn only_a_position_that_the_copy_before_gave_is_taken_for_lost() {
        let world = World::default();
        world.met(world.before(), sighting(7, 1, 100));
        world.handed_out(50);
        assert!(!world.is_lost(50), "still the same world");
        world.met(world.before(), sighting(7, 2, 100));
        assert!(world.is_lost(50));
        assert!(!world.is_lost(51), "nobody was given this one");
        world.handed_out(60);
        assert!(!world.is_lost(60), "given in this world");
        let other = world.judged("read", 50, Error::permanent("not the server's"));
        assert_eq!(other.kind(), ErrorKind::Permanent);
    }
}
