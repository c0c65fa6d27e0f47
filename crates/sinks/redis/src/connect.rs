//! One connection to the server, and its end.
//!
//! What lives here: making it, noticing that it is gone or silent. What does not: the login
//! (`login.rs`) and what is sent (`publish.rs`).
//! Invariant: a link that is no longer up never is again, and no new event is sent on it; another
//! one is made for the next call. When its last user lets go of it, what it still holds is dropped.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use postrider_core::{Error, Result};
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, PushInfo, PushKind};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use crate::append::Append;
use crate::error::{connect_error, redis_error};
use crate::login::Login;
use crate::look;

/// Calls under way at a time. The client library queues as many, so that a call waits nowhere
/// that its time is not reckoned for.
pub(crate) const UNDER_WAY: usize = 256;
/// The slowest way to the server on which events still get there, in bytes a second.
const SLOWEST_BYTES_PER_S: u64 = 256 << 10;

/// A connection.
pub(crate) struct Link {
    connection: MultiplexedConnection,
    standing: Arc<watch::Sender<Standing>>,
    /// When something was answered last.
    answered: Mutex<Instant>,
    /// Bytes of the calls that were not answered yet.
    bytes_under_way: AtomicU64,
    /// Largest text that the server takes, in bytes; 0 if it does not tell.
    max_text_bytes: AtomicUsize,
}

/// Whether events can be sent on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Standing {
    Up,
    /// What is under way is still answered; new events go elsewhere.
    Retired,
    Down,
}

fn worsen(standing: &watch::Sender<Standing>, to: Standing) {
    standing.send_if_modified(|now| {
        let worse = to > *now;
        *now = to.max(*now);
        worse
    });
}

impl Link {
    /// Connects, logs in, refuses a replica, gives the script to the server and asks for its limit.
    ///
    /// # Errors
    /// Of every kind in `error.rs`; nothing was sent.
    pub(crate) async fn open(login: &Login, append: &Append) -> Result<Self> {
        let client = login.client()?;
        let opened = timeout(login.patience(), Self::opened(client, append)).await;
        opened.unwrap_or_else(|_| {
            Err(Error::transient("connect to Redis: there was no answer in time"))
        })
    }

    async fn opened(client: redis::Client, append: &Append) -> Result<Self> {
        let standing = Arc::new(watch::Sender::new(Standing::Up));
        let heard = Arc::clone(&standing);
        let config = AsyncConnectionConfig::new()
            // Both times are kept by those who wait.
            .set_connection_timeout(None)
            .set_response_timeout(None)
            .set_pipeline_buffer_size(UNDER_WAY)
            .set_push_sender(move |push: PushInfo| {
                if push.kind == PushKind::Disconnection {
                    worsen(&heard, Standing::Down);
                }
                Ok::<(), redis::aio::SendError>(())
            });
        let connection = client.get_multiplexed_async_connection_with_config(&config).await;
        let mut connection = connection.map_err(connect_error)?;
        // One that can be written to would confirm what its primary never gets.
        if look::is_replica(&mut connection).await {
            return Err(look::replica());
        }
        append.load(&mut connection).await.map_err(|error| {
            redis_error("connect to Redis: the script that appends can't be loaded", &error)
        })?;
        let max_text_bytes = look::max_text_bytes(&mut connection).await.unwrap_or(0);
        Ok(Self {
            connection,
            standing,
            answered: Mutex::new(Instant::now()),
            bytes_under_way: AtomicU64::new(0),
            max_text_bytes: AtomicUsize::new(max_text_bytes),
        })
    }

    pub(crate) fn connection(&self) -> MultiplexedConnection {
        self.connection.clone()
    }

    /// Largest text that the server takes, in bytes, if it has told.
    pub(crate) fn max_text_bytes(&self) -> Option<usize> {
        Some(self.max_text_bytes.load(Ordering::Relaxed)).filter(|bytes| *bytes > 0)
    }

    /// Asks for it again; what was known stays if there is no answer in time.
    pub(crate) async fn learn_max_text_bytes(&self, within: Duration) -> Option<usize> {
        let mut connection = self.connection();
        let asked = timeout(within, look::max_text_bytes(&mut connection)).await;
        if let Ok(Some(bytes)) = asked {
            self.max_text_bytes.store(bytes, Ordering::Relaxed);
        }
        self.max_text_bytes()
    }

    pub(crate) fn is_up(&self) -> bool {
        *self.standing.borrow() == Standing::Up
    }

    /// Notes that a call of so many bytes is sent behind those that are under way.
    pub(crate) fn sends(&self, bytes: usize) -> UnderWay<'_> {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        let ahead = self.bytes_under_way.fetch_add(bytes, Ordering::Relaxed);
        let on_the_way = Duration::from_secs(ahead.saturating_add(bytes) / SLOWEST_BYTES_PER_S);
        UnderWay { link: self, bytes, on_the_way }
    }

    /// Notes that the server answered.
    pub(crate) fn answered(&self) {
        *self.answered.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// Whether nothing was answered for so long.
    pub(crate) fn is_silent_for(&self, time: Duration) -> bool {
        self.answered.lock().unwrap_or_else(PoisonError::into_inner).elapsed() >= time
    }

    /// Takes no new events; who sent what is under way may wait for its answer.
    pub(crate) fn retire(&self) {
        worsen(&self.standing, Standing::Retired);
    }

    /// Ends when the connection is gone.
    pub(crate) async fn down(&self) {
        let mut standing = self.standing.subscribe();
        // It cannot fail: this link holds the sender.
        let _ = standing.wait_for(|standing| *standing == Standing::Down).await;
    }
}

/// A call that was not answered yet.
pub(crate) struct UnderWay<'a> {
    link: &'a Link,
    bytes: u64,
    on_the_way: Duration,
}

impl UnderWay<'_> {
    /// How long it may take until it has reached the server with all that was sent before it, in
    /// whole seconds.
    pub(crate) fn on_the_way(&self) -> Duration {
        self.on_the_way
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.link.bytes_under_way.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
