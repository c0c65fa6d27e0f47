//! What can be set about a relay and its sinks.
//!
//! What lives here: options, their defaults and their check. What does not: configuration files.
//! Invariant: options that passed `check` can be run.

use std::time::Duration;

use postrider_core::limits::{BUDGET_BYTES, LEASE_TTL_MS};
use postrider_core::{
    ConsumerName, Error, GroupName, RelayId, Result, RetentionPolicy, RetryPolicy, StartFrom,
};

/// Shortest lease that can be renewed in time over a network.
const MIN_LEASE_TTL: Duration = Duration::from_millis(100);
/// Smallest budget of a sink: one page of small events.
const MIN_BUDGET_BYTES: usize = 64 * 1024;

/// Where leases are renewed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Keeper {
    /// On a thread of its own, which a stalled sink or a starved runtime cannot delay.
    #[default]
    OwnThread,
    /// On the caller's runtime: for simulations, whose time is virtual.
    SameRuntime,
}

/// When the group's leader prunes, and what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retain {
    /// Time between two looks.
    pub every: Duration,
    /// What may be forgotten.
    pub policy: RetentionPolicy,
}

/// What holds for a whole relay.
#[derive(Debug, Clone)]
pub struct RelayOptions {
    /// Relays of one group share the partitions between them.
    pub group: GroupName,
    /// This process; must be unique for each start.
    pub relay: RelayId,
    /// How long a lease lasts without renewal (5 s): a killed relay's partitions are taken over
    /// within this plus one second.
    pub lease_ttl: Duration,
    /// Longest wait for confirmations still under way when stopping (10 s).
    pub drain_timeout: Duration,
    /// Shortest time between two checkpoints of one sink in one partition (100 ms).
    pub checkpoint_every: Duration,
    /// Pruning by the group's leader; none by default.
    pub retention: Option<Retain>,
    /// Where leases are renewed.
    pub keeper: Keeper,
    /// Seed of the jitter; by default from the system.
    pub seed: Option<u64>,
}

impl RelayOptions {
    /// All defaults.
    pub fn new(group: GroupName, relay: RelayId) -> Self {
        Self {
            group,
            relay,
            lease_ttl: Duration::from_millis(LEASE_TTL_MS),
            drain_timeout: Duration::from_secs(10),
            checkpoint_every: Duration::from_millis(100),
            retention: None,
            keeper: Keeper::default(),
            seed: None,
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.lease_ttl < MIN_LEASE_TTL {
            return Err(Error::permanent(format!(
                "lease_ttl is {:?}; give it at least {MIN_LEASE_TTL:?}",
                self.lease_ttl
            )));
        }
        if self.checkpoint_every.is_zero() {
            return Err(Error::permanent("checkpoint_every is zero; give it at least 1 ms"));
        }
        Ok(())
    }

    /// Renewals start this long after the last: three fit one time to live.
    pub(crate) fn renew_every(&self) -> Duration {
        self.lease_ttl.mul_f64(0.3)
    }

    /// Without a renewal for this long a worker stops by itself: the rest of the time to live is
    /// for calls that were under way then.
    pub(crate) fn trust_window(&self) -> Duration {
        self.lease_ttl.mul_f64(0.8)
    }
}

/// What holds for one sink.
#[derive(Debug, Clone)]
pub struct SinkOptions {
    /// Names the sink and its checkpoints; unique in the relay, and kept over restarts.
    pub name: ConsumerName,
    /// Where it begins when it has no checkpoint yet (the oldest record).
    pub from: StartFrom,
    /// How failures are met.
    pub retry: RetryPolicy,
    /// Longest wait for the confirmation of one call (30 s).
    pub publish_timeout: Duration,
    /// Bytes read and not yet confirmed, over all partitions (32 MiB). A partition gets an equal
    /// share, at least 1 MiB.
    pub budget_bytes: usize,
}

impl SinkOptions {
    /// All defaults.
    pub fn new(name: ConsumerName) -> Self {
        Self {
            name,
            from: StartFrom::Oldest,
            retry: RetryPolicy::default(),
            publish_timeout: Duration::from_secs(30),
            budget_bytes: BUDGET_BYTES,
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        let name = &self.name;
        if self.budget_bytes < MIN_BUDGET_BYTES {
            return Err(Error::permanent(format!(
                "budget of sink {name} is {} bytes; give it at least {MIN_BUDGET_BYTES}",
                self.budget_bytes
            )));
        }
        if self.publish_timeout.is_zero() {
            return Err(Error::permanent(format!("publish_timeout of sink {name} is zero")));
        }
        if self.retry.max_attempts == 0 {
            return Err(Error::permanent(format!(
                "max_attempts of sink {name} is zero; give it at least 1"
            )));
        }
        Ok(())
    }
}
