//! Keeps leases alive.
//!
//! What lives here: the book of held leases, the task that renews them, and the news that its
//! heartbeat brings. What does not: taking and giving up leases (`coordinator.rs`).
//! Invariant: a lease's trust ends before the lease does, because it counts from before the renewal
//! was sent; so does the age of news.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use postrider_core::{
    Clock, Error, ErrorKind, GroupName, Heartbeat, HeldLease, News, PartitionId, RelayStore,
    Renewal, Result,
};
use tokio_util::sync::CancellationToken;

use crate::options::{Keeper, RelayOptions};
use crate::told::Told;
use crate::trust::Trust;

/// A lease, how long it may be believed in, and what its renewals bring along.
#[derive(Clone)]
pub(crate) struct Held {
    pub(crate) lease: Arc<HeldLease>,
    pub(crate) trust: Arc<Trust>,
    pub(crate) news: Arc<LatestNews>,
}

/// What the last heartbeat told. A store that tells nothing leaves it empty, and whoever wants to
/// know asks the store.
pub(crate) struct LatestNews {
    told: Mutex<Option<(Duration, News)>>,
    /// Older than this it is nothing to go by.
    fresh_for: Duration,
}

impl LatestNews {
    pub(crate) fn new(options: &RelayOptions) -> Self {
        // The next one is on its way when one is `renew_every` old, and may take as long.
        Self { told: Mutex::default(), fresh_for: options.renew_every() * 2 }
    }

    fn note(&self, asked_at: Duration, news: Option<News>) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        *told = news.map(|news| (asked_at, news));
    }

    /// What was told, if it is fresh.
    pub(crate) fn get(&self, now: Duration) -> Option<News> {
        let told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = |(at, _): &&(Duration, News)| now.saturating_sub(*at) <= self.fresh_for;
        told.as_ref().filter(fresh).map(|(_, news)| news.clone())
    }
}

/// The leases that are to be renewed.
#[derive(Default)]
pub(crate) struct Book(Mutex<Vec<Held>>);

impl Book {
    pub(crate) fn add(&self, held: Held) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(held);
    }

    pub(crate) fn remove(&self, partition: &PartitionId) {
        let mut book = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        book.retain(|held| held.lease.partition() != partition);
    }

    fn all(&self) -> Vec<Held> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// What the keeper works with.
#[derive(Clone)]
pub(crate) struct Keeping {
    pub(crate) store: Arc<dyn RelayStore>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) group: GroupName,
    pub(crate) book: Arc<Book>,
    pub(crate) news: Arc<LatestNews>,
    pub(crate) ttl: Duration,
    pub(crate) renew_every: Duration,
    pub(crate) trust_window: Duration,
}

/// Renews until `stop`; the returned future ends when the keeper has.
pub(crate) fn start(
    keeping: Keeping,
    options: &RelayOptions,
    stop: CancellationToken,
) -> Result<std::pin::Pin<Box<dyn Future<Output = ()> + Send>>> {
    match options.keeper {
        Keeper::SameRuntime => {
            let mut tasks = tokio::task::JoinSet::new();
            tasks.spawn(keep(keeping, stop));
            Ok(Box::pin(async move { while tasks.join_next().await.is_some() {} }))
        }
        Keeper::OwnThread => {
            let (done, ended) = tokio::sync::oneshot::channel::<()>();
            std::thread::Builder::new()
                .name("postrider-leases".into())
                .spawn(move || {
                    let runtime =
                        tokio::runtime::Builder::new_current_thread().enable_all().build();
                    match runtime {
                        Ok(runtime) => runtime.block_on(keep(keeping, stop)),
                        // Without renewals every worker stops by itself when its trust ends.
                        Err(error) => tracing::error!(%error, "leases can't be renewed"),
                    }
                    drop(done);
                })
                .map_err(|error| Error::transient("start the lease thread").with_source(error))?;
            Ok(Box::pin(async move {
                // The sender is dropped when the thread ends.
                let _ = ended.await;
            }))
        }
    }
}

async fn keep(keeping: Keeping, stop: CancellationToken) {
    let mut wait = keeping.renew_every;
    let mut told = Told::default();
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            () = keeping.clock.sleep(wait) => {}
        }
        wait = match renew(&keeping).await {
            Ok(renewed) => {
                if renewed && told.is_over() {
                    tracing::info!("leases can be renewed again");
                }
                keeping.renew_every
            }
            Err(error) => {
                let text = error.chain();
                if told.is_news(&text, keeping.clock.elapsed()) {
                    tracing::warn!(error = text, "leases were not renewed; trying again");
                }
                keeping.renew_every / 6
            }
        };
    }
}

/// Whether there was a lease to renew: without one nothing was asked.
async fn renew(keeping: &Keeping) -> Result<bool> {
    let held = keeping.book.all();
    if held.is_empty() {
        return Ok(false);
    }
    let asked_at = keeping.clock.elapsed();
    let leases: Vec<&HeldLease> = held.iter().map(|held| &*held.lease).collect();
    let answers = match keeping.store.heartbeat(&keeping.group, &leases, keeping.ttl).await {
        Ok(Heartbeat { renewals, news }) => {
            keeping.news.note(asked_at, news);
            renewals
        }
        Err(error) if error.kind() == ErrorKind::Fenced => vec![Renewal::Lost; held.len()],
        Err(error) => return Err(error),
    };
    for (held, answer) in held.iter().zip(answers) {
        match answer {
            Renewal::Renewed => held.trust.extend(asked_at + keeping.trust_window),
            Renewal::Lost => {
                tracing::warn!(
                    partition = %held.lease.partition(), epoch = held.lease.epoch().get(),
                    "another relay took the lease over"
                );
                held.trust.lose();
            }
        }
    }
    Ok(true)
}
