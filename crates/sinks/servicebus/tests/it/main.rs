//! The Service Bus sink against the emulator, over real sockets.
//!
//! What lives here: what arrives, batches and their limits, conditions as a relay sees them, what
//! is given up, what may arrive twice, tokens, TLS, and the guide. What does not: tables of one
//! file, which are tested beside it.
//! Invariant: every server listens on a port of its own that the system chose.

mod delivery;
#[cfg(feature = "entra")]
mod entra;
mod failures;
mod giving_up;
mod guide;
mod limits;
mod mid_stream;
mod suite;
mod tap;
mod tls;
mod tokens;
mod window;

use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use postrider_core::{
    Clock, ContentType, Error, EventId, EventType, Headers, Key, NewEvent, Outcome, PartitionId,
    Position, Publish, Record, Secret, Sink, Timestamp, Topic, TraceContext,
};
use postrider_servicebus_emulator::{Config, Emulator, Entity, StoredMessage};
use postrider_sink_servicebus::{ServiceBus, ServiceBusConfig};
use uuid::Uuid;

use crate::tap::Tap;

/// The queue of every test.
const QUEUE: &str = "orders";
const DEADLINE: Duration = Duration::from_secs(30);

struct Wall;

#[async_trait::async_trait]
impl Clock for Wall {
    #[expect(clippy::disallowed_methods, reason = "the emulator compares it with its own clock")]
    fn now(&self) -> Timestamp {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Timestamp::default().plus(since)
    }
    fn elapsed(&self) -> Duration {
        Duration::ZERO
    }
    async fn sleep(&self, _: Duration) {}
}

/// A clock that is moved by hand, beside the emulator's.
#[derive(Default)]
struct Moved(Mutex<Duration>);

impl Moved {
    fn pass(&self, time: Duration) {
        *self.0.lock().expect("not poisoned") += time;
    }
}

#[async_trait::async_trait]
impl Clock for Moved {
    fn now(&self) -> Timestamp {
        Wall.now().plus(self.elapsed())
    }
    fn elapsed(&self) -> Duration {
        *self.0.lock().expect("not poisoned")
    }
    async fn sleep(&self, _: Duration) {}
}

/// An emulator with one queue, and a tap before it.
struct Bus {
    emulator: Arc<Emulator>,
    tap: Tap,
}

impl Bus {
    /// Sessions are required, and duplicates are kept: each delivery counts.
    async fn start() -> Self {
        Self::with(Entity { requires_session: true, ..Entity::default() }).await
    }

    async fn with(entity: Entity) -> Self {
        let config = Config::default().with_queue(QUEUE, entity);
        let emulator = Emulator::start(config).await.expect("started");
        let tap = Tap::on(emulator.address()).await;
        Self { emulator: Arc::new(emulator), tap }
    }

    /// Settings that lead through the tap.
    fn config(&self) -> ServiceBusConfig {
        let address = self.emulator.address().to_string();
        let tapped = format!("127.0.0.1:{}", self.tap.port());
        let text = self.emulator.connection_string().replace(&address, &tapped);
        let mut config = ServiceBusConfig::new(Secret::new(text));
        config.entity = Some(QUEUE.into());
        config
    }

    fn sink(&self) -> ServiceBus {
        sink(&self.config())
    }

    fn stored(&self) -> Vec<StoredMessage> {
        self.emulator.entity(QUEUE).messages()
    }

    /// The ids that are stored, by the order of their arrival, of one session.
    fn session(&self, session: &str) -> Vec<String> {
        let mine = |message: &StoredMessage| message.session_id.as_deref() == Some(session);
        let stored = self.stored();
        stored.into_iter().filter(mine).filter_map(|message| message.message_id).collect()
    }
}

fn sink(config: &ServiceBusConfig) -> ServiceBus {
    ServiceBus::new(config, Arc::new(Wall)).expect("valid settings")
}

fn record(number: u128, key: &str, payload: &[u8]) -> Record {
    let mut headers = Headers::new();
    headers.insert("Tenant", "50 % \"é\"").expect("valid");
    let trace = TraceContext::new(
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        Some("vendor=1".into()),
    )
    .expect("valid");
    let event = NewEvent::builder(
        Key::new(key).expect("valid"),
        Topic::new("orders").expect("valid"),
        EventType::new("OrderPlaced").expect("valid"),
    )
    .id(EventId::from_uuid(Uuid::from_u128(number)))
    .headers(headers)
    .trace(&trace)
    .expect("valid")
    .payload(ContentType::new("application/json").expect("valid"), payload.to_vec())
    .build()
    .expect("valid")
    .identified(|| EventId::from_uuid(Uuid::nil()));
    let appended_at = Timestamp::from_millis(1_672_671_845_678);
    Record { position: Position::START, appended_at, event }
}

fn ids(records: &[Record]) -> Vec<String> {
    records.iter().map(|record| record.event.id().to_string()).collect()
}

async fn publish(sink: &ServiceBus, records: &[Record]) -> Vec<Outcome> {
    let partition = PartitionId::numbered(0, 1);
    let outcomes = sink.publish(Publish::new(&partition, records)).await;
    assert_eq!(outcomes.len(), records.len());
    outcomes
}

async fn confirm(sink: &ServiceBus, records: &[Record]) {
    let outcomes = publish(sink, records).await;
    let all = outcomes.iter().all(|outcome| matches!(outcome, Outcome::Confirmed));
    assert!(all, "{outcomes:?}");
}

async fn fail(sink: &ServiceBus, record: Record) -> Error {
    match publish(sink, &[record]).await.remove(0) {
        Outcome::Failed(error) => error,
        other => panic!("{other:?}"),
    }
}

/// Publishes again and again, as a relay does, until it is confirmed.
async fn confirm_in_the_end(sink: &ServiceBus, record: Record) {
    let trying = async {
        loop {
            match publish(sink, std::slice::from_ref(&record)).await.remove(0) {
                Outcome::Confirmed => return,
                Outcome::Failed(error) => {
                    assert_ne!(error.kind(), postrider_core::ErrorKind::Permanent, "{error:?}");
                }
                other => panic!("{other:?}"),
            }
        }
    };
    tokio::time::timeout(DEADLINE, trying).await.expect("it flows again");
}

/// Polls until it is so.
async fn until(what: &str, so: impl Fn() -> bool) {
    let waiting = async {
        while !so() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(DEADLINE, waiting).await.expect(what);
}
