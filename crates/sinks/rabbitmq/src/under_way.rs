//! What is under way on a connection: channels, the room for events, and waiting for answers.
//!
//! What lives here: the channels that are free, how much may be under way, and one task for each
//! event that ends with its answer or with the connection. What does not: making channels
//! (`connect.rs`) and what an answer means (`publish.rs`).
//! Invariant: a channel with an event under way is closed by nobody on this side. The client
//! library writes the close before messages that have not left, and the broker ends the whole
//! connection for a message on a channel that is closed.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use lapin::options::BasicPublishOptions;
use lapin::types::ShortString;
use lapin::{BasicProperties, Channel, Confirmation};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::Dispatch;
use tracing::instrument::WithSubscriber;

/// Payload under way at a time. A line of 2 MB/s carries so much in the time that one confirmation
/// may take; beyond it, events would only wait in the client library until that time is over.
const KIB_UNDER_WAY: u32 = 8 << 10;

/// A message and where it goes.
pub(crate) struct Outgoing {
    pub(crate) exchange: ShortString,
    pub(crate) routing_key: ShortString,
    pub(crate) properties: BasicProperties,
    pub(crate) body: Bytes,
}

/// One event's share of what may be under way.
pub(crate) struct Room {
    _slot: OwnedSemaphorePermit,
    _kib: OwnedSemaphorePermit,
}

/// A connection's channels and events.
pub(crate) struct UnderWay {
    slots: Arc<Semaphore>,
    kib: Arc<Semaphore>,
    shared: Arc<Shared>,
    tasks: Mutex<JoinSet<()>>,
    ended: CancellationToken,
}

struct Shared {
    idle: Mutex<Vec<Channel>>,
    /// When an event was answered last.
    answered: Mutex<Instant>,
}

pub(crate) fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl UnderWay {
    /// For so many events at a time, on a connection that `ended` tells the end of.
    pub(crate) fn new(events: usize, ended: CancellationToken) -> Self {
        let shared = Shared { idle: Mutex::default(), answered: Mutex::new(Instant::now()) };
        Self {
            slots: Arc::new(Semaphore::new(events)),
            kib: Arc::new(Semaphore::new(KIB_UNDER_WAY as usize)),
            shared: Arc::new(shared),
            tasks: Mutex::default(),
            ended,
        }
    }

    /// Room for an event of so many bytes. None if there was none until then.
    pub(crate) async fn room(&self, bytes: usize, until: Instant) -> Option<Room> {
        // One that is larger than all of it goes alone.
        let kib = u32::try_from(bytes.div_ceil(1_024)).unwrap_or(u32::MAX).clamp(1, KIB_UNDER_WAY);
        let (slots, all) = (Arc::clone(&self.slots), Arc::clone(&self.kib));
        let room = async {
            let _slot = slots.acquire_owned().await.ok()?;
            let _kib = all.acquire_many_owned(kib).await.ok()?;
            Some(Room { _slot, _kib })
        };
        timeout_at(until, room).await.ok().flatten()
    }

    /// A channel whose last event was answered.
    pub(crate) fn idle_channel(&self) -> Option<Channel> {
        let mut idle = lock(&self.shared.idle);
        std::iter::from_fn(|| idle.pop()).find(|channel| channel.status().connected())
    }

    /// Sends a message on a channel that has no other. The answer is waited for until it comes or
    /// the connection ends, whether or not anybody still listens; the room is taken until then.
    pub(crate) fn send(
        &self,
        channel: Channel,
        message: Outgoing,
        room: Room,
    ) -> oneshot::Receiver<lapin::Result<Confirmation>> {
        let (tell, told) = oneshot::channel();
        let (shared, ended) = (Arc::clone(&self.shared), self.ended.clone());
        let task = async move {
            let answer = tokio::select! {
                biased;
                answer = publish(&channel, message) => answer,
                () = ended.cancelled() => return,
            };
            if answer.is_ok() {
                shared.answered_now();
                lock(&shared.idle).push(channel);
            }
            drop(room);
            // Who gave up waiting is told nothing.
            let _ = tell.send(answer);
        };
        let mut tasks = lock(&self.tasks);
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task.with_subscriber(Dispatch::none()));
        told
    }

    /// Notes that the broker answered.
    pub(crate) fn answered(&self) {
        self.shared.answered_now();
    }

    /// Whether nothing was answered for so long.
    pub(crate) fn is_silent_for(&self, time: Duration) -> bool {
        lock(&self.shared.answered).elapsed() >= time
    }
}

impl Shared {
    fn answered_now(&self) {
        *lock(&self.answered) = Instant::now();
    }
}

async fn publish(channel: &Channel, message: Outgoing) -> lapin::Result<Confirmation> {
    let Outgoing { exchange, routing_key, properties, body } = message;
    let options = BasicPublishOptions { mandatory: true, immediate: false };
    channel.basic_publish(exchange, routing_key, options, &body, properties).await?.await
}
