//! Leases: which relay may work on a partition, and the epoch that fences all others.
//!
//! What lives here: the seam, kept in the source's own database and in its own time. What does not:
//! the trust window and when to renew, which are the relay's policy.
//! Invariant: each acquisition by another holder has a higher epoch, and every write under a lease
//! carries its epoch and is refused when a higher one exists.

use std::time::Duration;

use async_trait::async_trait;

use crate::{GroupName, PartitionId, RelayId, Result};

/// A fencing number; grows with each new holder of one lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(u64);

impl Epoch {
    /// From a store's number.
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The number.
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// Proof that a lease was acquired. Every fenced write asks for one.
#[derive(Debug, PartialEq, Eq)]
pub struct HeldLease {
    group: GroupName,
    partition: PartitionId,
    holder: RelayId,
    epoch: Epoch,
}

impl HeldLease {
    /// For implementors of [`Leases`] alone: made where the database granted it.
    pub fn granted(
        group: GroupName,
        partition: PartitionId,
        holder: RelayId,
        epoch: Epoch,
    ) -> Self {
        Self { group, partition, holder, epoch }
    }

    /// The group it was acquired in.
    pub fn group(&self) -> &GroupName {
        &self.group
    }

    /// The partition it is for.
    pub fn partition(&self) -> &PartitionId {
        &self.partition
    }

    /// Who holds it.
    pub fn holder(&self) -> &RelayId {
        &self.holder
    }

    /// Its fencing number.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }
}

/// The answer to an acquisition.
#[derive(Debug)]
pub enum Acquired {
    /// It is ours until the time to live has passed without a renewal.
    Held(HeldLease),
    /// Another relay holds it.
    Busy {
        /// Who.
        holder: RelayId,
        /// How long it would still last without a renewal.
        remaining: Duration,
    },
}

/// The answer to a renewal, for each lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Renewal {
    /// The full time to live runs again.
    Renewed,
    /// Another relay has it, or it was released.
    Lost,
}

/// What a relay at rest has to know, besides its leases.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct News {
    /// The group's live relays, as [`Leases::join`] lists them.
    pub relays: Vec<RelayId>,
    /// Whether there is any `Requeued` dead letter, of whatever consumer.
    pub requeued: bool,
}

/// The answer to a heartbeat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heartbeat {
    /// One for each lease, in order.
    pub renewals: Vec<Renewal>,
    /// Nothing where the store can't tell in the same round trip: then ask for each.
    pub news: Option<News>,
}

/// One lease as `status` shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseInfo {
    /// The partition.
    pub partition: PartitionId,
    /// The last holder.
    pub holder: RelayId,
    /// The last epoch.
    pub epoch: Epoch,
    /// Time left; zero when free or expired.
    pub remaining: Duration,
}

/// Leases of a group, in database time.
#[async_trait]
pub trait Leases: Send + Sync {
    /// Says that `relay` is alive for another `ttl`, and returns all live relays of the group, in
    /// a stable order, itself included. Relays share partitions evenly by this list.
    async fn join(&self, group: &GroupName, relay: &RelayId, ttl: Duration)
    -> Result<Vec<RelayId>>;

    /// Takes `relay` off the list of live ones. Idempotent.
    async fn leave(&self, group: &GroupName, relay: &RelayId) -> Result<()>;

    /// Takes the lease if it is free or expired. A holder that asks again (after losing track of
    /// its own lease) gets it back under a higher epoch.
    async fn acquire(
        &self,
        group: &GroupName,
        partition: &PartitionId,
        relay: &RelayId,
        ttl: Duration,
    ) -> Result<Acquired>;

    /// Renews several leases in one round trip; one answer for each, in order. An expired lease
    /// that nobody took is renewed: its epoch is still the highest.
    async fn renew(&self, leases: &[&HeldLease], ttl: Duration) -> Result<Vec<Renewal>>;

    /// Renews as [`renew`](Self::renew) does, and tells in the same round trip what else a relay at
    /// rest would have to ask for, so that waiting costs one statement for each renewal. With news,
    /// the leases' holders stay on the list of live relays for another `ttl`; one that has left is
    /// not put back.
    async fn heartbeat(
        &self,
        _group: &GroupName,
        leases: &[&HeldLease],
        ttl: Duration,
    ) -> Result<Heartbeat> {
        Ok(Heartbeat { renewals: self.renew(leases, ttl).await?, news: None })
    }

    /// Frees the lease at once. Releasing a lost one does nothing.
    async fn release(&self, lease: &HeldLease) -> Result<()>;

    /// How long a relay that shares partitions with others waits between two looks at their leases:
    /// so much later it notices what it may take. A store that charges for each look waits longer.
    fn standby(&self) -> Duration {
        Duration::from_millis(50)
    }

    /// Every lease of the group, by partition.
    async fn leases(&self, group: &GroupName) -> Result<Vec<LeaseInfo>>;
}
