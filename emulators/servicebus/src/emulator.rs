//! The emulator as a whole: starting, stopping, looking, moving its clock.
//!
//! What lives here: the listener, and the task that does what is due. What does not: connections.
//! Invariant: when it was stopped or dropped, its port is free and no task of it runs.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::connection;
use crate::error::{Error, Result};
use crate::faults::Faults;
use crate::inspect::EntityView;
use crate::shared::Shared;

/// How many clients may be connected at once.
const CONNECTIONS_MAX: usize = 1_000;
/// How long connections have to say goodbye.
const STOP_WITHIN: Duration = Duration::from_secs(3);
/// After a connection could not be taken, until the next try.
const ACCEPT_AGAIN: Duration = Duration::from_millis(50);
/// The longest sleep of whoever does what is due.
const NAP: Duration = Duration::from_secs(3_600);

/// A running emulator. Dropping it ends it at once; [`Emulator::stop`] lets clients know.
#[derive(Debug)]
pub struct Emulator {
    address: SocketAddr,
    shared: Arc<Shared>,
    stop: CancellationToken,
    tasks: JoinSet<()>,
}

impl Emulator {
    /// Starts it; clients can connect from now on.
    ///
    /// # Errors
    /// When the configuration can't be, its address can't be bound, or its file can't be had.
    pub async fn start(config: Config) -> Result<Self> {
        config.check()?;
        let listen = config.listen;
        let failed = |source| Error::Listen { address: listen, source };
        let listener = TcpListener::bind(listen).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let shared = Arc::new(Shared::open(config)?);
        let stop = CancellationToken::new();
        let mut tasks = JoinSet::new();
        tasks.spawn(accept(listener, Arc::clone(&shared), stop.clone()));
        tasks.spawn(keep_time(Arc::clone(&shared), stop.clone()));
        Ok(Self { address, shared, stop, tasks })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What clients connect with.
    #[must_use]
    pub fn connection_string(&self) -> String {
        let config = &self.shared.config;
        format!(
            "Endpoint=sb://{};SharedAccessKeyName={};SharedAccessKey={};\
             UseDevelopmentEmulator=true",
            self.address, config.shared_access_key_name, config.shared_access_key
        )
    }

    /// Looks at an entity: `orders`, `topic/Subscriptions/name`, or either's `$DeadLetterQueue`.
    #[must_use]
    pub fn entity(&self, path: &str) -> EntityView<'_> {
        EntityView { shared: &self.shared, path: path.to_owned() }
    }

    /// Makes things go wrong.
    #[must_use]
    pub fn faults(&self) -> Faults<'_> {
        Faults { shared: &self.shared }
    }

    /// How many put-token requests came.
    #[must_use]
    pub fn put_tokens(&self) -> u64 {
        self.shared.put_tokens.load(Ordering::Relaxed)
    }

    /// How many connections came.
    #[must_use]
    pub fn connections(&self) -> u64 {
        self.shared.connections.load(Ordering::Relaxed)
    }

    /// Moves its clock forward and does what has become due: locks and windows end, messages expire
    /// or appear, as if the time had passed. Clients' own clocks stay as they are.
    pub fn advance(&self, by: Duration) {
        self.shared.broker.clock.advance(by);
        self.shared.broker.advance();
        self.shared.broker.wake();
    }

    /// Ends it: connections are closed with `amqp:connection:forced`, and what does not leave
    /// within three seconds is cut off.
    pub async fn stop(mut self) {
        self.stop.cancel();
        let ended = async { while self.tasks.join_next().await.is_some() {} };
        // Whoever is still there is ended by dropping the set.
        let _ = timeout(STOP_WITHIN, ended).await;
        self.tasks.shutdown().await;
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>, stop: CancellationToken) {
    let mut clients = JoinSet::new();
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(ended) = clients.join_next() => {
                if let Err(error) = ended {
                    tracing::error!(%error, "a connection's task failed");
                }
                continue;
            }
            () = stop.cancelled() => break,
        };
        let Ok((socket, _)) = accepted else {
            // No file descriptors, most likely: some will be free soon.
            sleep(ACCEPT_AGAIN).await;
            continue;
        };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else { continue };
        shared.connections.fetch_add(1, Ordering::Relaxed);
        let (shared, stop) = (Arc::clone(&shared), stop.clone());
        clients.spawn(async move {
            connection::serve(socket, shared, stop).await;
            drop(place);
        });
    }
    drop(listener);
    while clients.join_next().await.is_some() {}
}

/// Does what is due, when it is due.
async fn keep_time(shared: Arc<Shared>, stop: CancellationToken) {
    let mut changes = shared.broker.changes();
    loop {
        // First: a change that comes while the clock is read must not be slept through.
        changes.mark_unchanged();
        let next_ms = shared.broker.advance();
        let left_ms = next_ms.map(|at| at.saturating_sub(shared.broker.clock.now_ms()).max(1));
        let nap = left_ms.map_or(NAP, |ms| Duration::from_millis(ms.unsigned_abs()).min(NAP));
        tokio::select! {
            () = sleep_until(Instant::now() + nap) => {}
            changed = changes.changed() => {
                if changed.is_err() {
                    return;
                }
            }
            () = stop.cancelled() => return,
        }
    }
}
