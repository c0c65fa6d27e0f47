//! Retention: forgetting events that every consumer is done with.
//!
//! What lives here: the seam. What does not: when to prune.
//! Invariant: nothing beyond the slowest consumer's checkpoint is ever deleted, however old.

use std::time::Duration;

use async_trait::async_trait;

use crate::{HeldLease, Position, Result};

/// What may be forgotten.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetentionPolicy {
    /// Events younger than this stay, for replays.
    pub keep: Duration,
    /// Most events deleted in one transaction, so that writers wait only shortly.
    pub batch: u32,
    /// Count only.
    pub dry_run: bool,
}

/// What was forgotten.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Pruned {
    /// How many events.
    pub events: u64,
    /// The retention horizon after it: positions below it are refused.
    pub horizon: Option<Position>,
    /// Whether there may be more to prune now.
    pub more: bool,
}

/// Pruning, in the database's own time.
#[async_trait]
pub trait Retention: Send + Sync {
    /// Deletes up to one batch of events that are older than `keep` and that every consumer has
    /// passed. Without any consumer nothing is deleted. `lease`, when a relay prunes, fences it.
    ///
    /// # Errors
    /// `Fenced` when the lease was taken over.
    async fn prune(&self, lease: Option<&HeldLease>, policy: &RetentionPolicy) -> Result<Pruned>;
}
