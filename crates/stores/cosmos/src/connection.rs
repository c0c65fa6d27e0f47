//! The clients of both containers, made anew when the account has failed over.
//!
//! What lives here: the clients in use, what is known of their health, and replacing them. What
//! does not: making the first ones (`connect.rs`).
//! Invariant: nothing waits for a replacement but the write that needs it, one at a time, and what
//! can't be replaced stays in use.
//!
//! The SDK learns of another region that takes writes when one refuses a write, and else at its
//! next look at the account, which may be five minutes later. When the region that took writes
//! can't be reached at all there is nobody to refuse: a client that is made anew looks at once.

use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use azure_data_cosmos::clients::ContainerClient;
use postrider_core::Result;

use crate::config::CosmosConfig;
use crate::connect;

/// Writes fail for so long, and so many in a row, before the account is looked at.
const PATIENCE: Duration = Duration::from_secs(2);
const IN_A_ROW: u32 = 2;
/// Between two looks.
const LOOK_AT_MOST_EVERY: Duration = Duration::from_secs(10);
/// Longest time for one look.
const LOOK_WITHIN: Duration = Duration::from_secs(10);

/// The clients.
#[derive(Clone)]
pub(crate) struct Containers {
    pub(crate) documents: ContainerClient,
    pub(crate) leases: ContainerClient,
}

/// What the last writes said of the account.
#[derive(Debug, Default)]
pub(crate) struct Health(Mutex<Writes>);

#[derive(Debug, Default)]
struct Writes {
    failing_since: Option<Instant>,
    failed: u32,
    looked_at: Option<Instant>,
}

impl Health {
    /// Notes how a write ended; without a status nobody answered.
    pub(crate) fn wrote(&self, status: Option<u16>) {
        let mut writes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if is_unreachable(status) {
            writes.failing_since.get_or_insert_with(Instant::now);
            writes.failed = writes.failed.saturating_add(1);
        } else {
            (writes.failing_since, writes.failed) = (None, 0);
        }
    }

    /// Whether to look at the account now; whoever is told so does it.
    fn is_due(&self) -> bool {
        let mut writes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let failing = writes.failing_since.is_some_and(|since| since.elapsed() >= PATIENCE);
        let rested = writes.looked_at.is_none_or(|at| at.elapsed() >= LOOK_AT_MOST_EVERY);
        let due = failing && writes.failed >= IN_A_ROW && rested;
        if due {
            writes.looked_at = Some(Instant::now());
        }
        due
    }
}

/// Whether an answer says nothing but that there is nobody to carry it out.
fn is_unreachable(status: Option<u16>) -> bool {
    matches!(status, None | Some(408 | 500..=599))
}

/// A store's way to its account.
pub(crate) struct Connection {
    config: CosmosConfig,
    health: Arc<Health>,
    current: RwLock<Containers>,
}

impl Connection {
    pub(crate) fn new(config: CosmosConfig, health: Arc<Health>, current: Containers) -> Self {
        Self { config, health, current: RwLock::new(current) }
    }

    /// The clients in use now.
    pub(crate) fn containers(&self) -> Containers {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Makes the clients anew where writes fail for long; to be called before a write.
    pub(crate) async fn mend(&self) {
        if !self.health.is_due() {
            return;
        }
        let made = tokio::time::timeout(LOOK_WITHIN, self.made_anew()).await;
        match made {
            Ok(Ok(containers)) => {
                *self.current.write().unwrap_or_else(PoisonError::into_inner) = containers;
                tracing::info!("writes kept failing: the account was looked at again");
            }
            Ok(Err(error)) => {
                tracing::debug!(error = %error.chain(), "the account can't be looked at for now");
            }
            Err(_) => tracing::debug!("the account can't be looked at for now: no answer"),
        }
    }

    async fn made_anew(&self) -> Result<Containers> {
        connect::containers_anew(&self.config, &self.health).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_of_whatever_kind_is_somebody() {
        for status in [200, 207, 403, 404, 409, 410, 412, 413, 429, 449] {
            assert!(!is_unreachable(Some(status)), "{status}");
        }
        for status in [None, Some(408), Some(500), Some(503)] {
            assert!(is_unreachable(status), "{status:?}");
        }
    }

    #[test]
    fn a_look_is_due_after_failures_alone_and_not_twice() {
        let health = Health::default();
        health.wrote(Some(503));
        health.wrote(None);
        assert!(!health.is_due(), "not for long");
        let long_ago = Instant::now().checked_sub(PATIENCE);
        let set = |at| health.0.lock().expect("no panic").failing_since = at;
        set(long_ago);
        assert!(long_ago.is_none() || health.is_due());
        assert!(!health.is_due(), "just now");
        health.0.lock().expect("no panic").looked_at = None;
        health.wrote(Some(207));
        set(long_ago);
        assert!(!health.is_due(), "one success ends it");
    }
}
