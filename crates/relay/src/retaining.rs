//! Retention by the group's leader.
//!
//! What lives here: electing the leader by a lease of its own, and pruning in batches. What does
//! not: what may be deleted, which the store decides.
//! Invariant: at most one relay of the group prunes at a time, fenced by the leader's epoch.

use std::sync::Arc;
use std::time::Duration;

use postrider_core::{Acquired, ErrorKind, HeldLease, PartitionId, Result};
use tokio_util::sync::CancellationToken;

use crate::coordinator::Work;
use crate::keeper::{Held, Keeping};
use crate::options::{RelayOptions, Retain};
use crate::trust::Trust;

/// The leader's lease stands among the partitions' under this name.
const LEADER: &str = "retention";
/// For each second that a batch takes, so many pass before the next one: less than one event in a
/// hundred then meets a batch, and writers' 99th percentile is what it is without.
const PAUSE_FOR_EACH: u32 = 149;
/// A batch that took longer than a fifth of a second waited for something, and was no work.
const MAX_PAUSE: Duration = Duration::from_secs(30);

/// Prunes whenever it is time and this relay is the leader, until `stop`.
pub(crate) async fn run(
    keeping: Keeping,
    options: RelayOptions,
    retain: Retain,
    work: Arc<dyn Work>,
    stop: CancellationToken,
) {
    let leader = PartitionId::new(LEADER).expect("a short name");
    let mut held: Option<Held> = None;
    while !stop.is_cancelled() {
        let pruned = match work.has_begun().await {
            Ok(true) => round(&keeping, &options, &retain, &leader, &mut held, &stop).await,
            Ok(false) => Ok(()),
            Err(error) => Err(error),
        };
        let wait = match pruned {
            Ok(()) => retain.every,
            Err(error) => {
                tracing::warn!(error = %error.chain(), "pruning failed; trying again later");
                retain.every.max(options.lease_ttl)
            }
        };
        tokio::select! {
            biased;
            () = stop.cancelled() => {}
            () = keeping.clock.sleep(wait) => {}
        }
    }
    if let Some(held) = held {
        keeping.book.remove(&leader);
        if let Err(error) = keeping.store.release(&held.lease).await {
            tracing::warn!(error = %error.chain(), "the leader's lease runs out by itself");
        }
    }
}

async fn round(
    keeping: &Keeping,
    options: &RelayOptions,
    retain: &Retain,
    leader: &PartitionId,
    held: &mut Option<Held>,
    stop: &CancellationToken,
) -> Result<()> {
    let now = keeping.clock.elapsed();
    if held.as_ref().is_some_and(|held| held.trust.remaining(now).is_none()) {
        keeping.book.remove(leader);
        *held = None;
    }
    if held.is_none() {
        let (group, relay) = (&options.group, &options.relay);
        let answer = keeping.store.acquire(group, leader, relay, keeping.ttl).await?;
        let Acquired::Held(lease) = answer else { return Ok(()) };
        let trust = Arc::new(Trust::new(now + keeping.trust_window));
        let news = Arc::clone(&keeping.news);
        let fresh = Held { lease: Arc::new(lease), trust, news };
        keeping.book.add(fresh.clone());
        *held = Some(fresh);
    }
    let lease = Arc::clone(&held.as_ref().expect("acquired above").lease);
    let result = prune(keeping, retain, &lease, stop).await;
    if result.as_ref().is_err_and(|error| error.kind() == ErrorKind::Fenced) {
        keeping.book.remove(leader);
        *held = None;
        return Ok(());
    }
    result
}

async fn prune(
    keeping: &Keeping,
    retain: &Retain,
    lease: &HeldLease,
    stop: &CancellationToken,
) -> Result<()> {
    let mut events = 0;
    loop {
        let began = keeping.clock.elapsed();
        let pruned = keeping.store.prune(Some(lease), &retain.policy).await?;
        let took = keeping.clock.elapsed().saturating_sub(began);
        events += pruned.events;
        if pruned.more {
            tokio::select! {
                biased;
                () = stop.cancelled() => {}
                () = keeping.clock.sleep(pause_after(took)) => {}
            }
        }
        if !pruned.more || stop.is_cancelled() {
            if events > 0 {
                tracing::info!(events, "pruned");
            }
            return Ok(());
        }
    }
}

/// Nearly all of the time is the writers'.
fn pause_after(took: Duration) -> Duration {
    took.saturating_mul(PAUSE_FOR_EACH).min(MAX_PAUSE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pruning_takes_less_than_a_hundredth_of_the_time_and_never_pauses_for_long() {
        let ms = Duration::from_millis;
        assert_eq!(pause_after(ms(0)), ms(0));
        assert_eq!(pause_after(ms(10)), ms(1_490));
        assert_eq!(pause_after(ms(60_000)), ms(30_000));
    }
}
