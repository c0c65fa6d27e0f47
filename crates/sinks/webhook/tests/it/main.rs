//! The webhook sink against real local servers.
//!
//! What lives here: requests as a receiver sees them, answers and failures as a relay sees them,
//! signatures against another implementation, and the guide's consumer. What does not: tables of
//! one file, which are tested beside it.
//! Invariant: every server listens on a port of its own that the system chose.

mod delivery;
mod failures;
mod guide;
mod receiver;
mod signatures;
mod suite;

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use postrider_core::{
    Clock, ContentType, Error, EventId, EventType, Headers, Key, NewEvent, Outcome, PartitionId,
    Position, Publish, Record, Secret, Sink, Timestamp, Topic, TraceContext,
};
use postrider_sink_webhook::{Webhook, WebhookConfig};
use uuid::Uuid;

/// 2023-01-02T15:04:05.678Z
const NOW_MS: u64 = 1_672_671_845_678;
/// The specification's example key.
const KEY: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const OTHER_KEY: &str = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYX";

struct Wall;

#[async_trait::async_trait]
impl Clock for Wall {
    #[expect(clippy::disallowed_methods, reason = "receivers compare the time with their own")]
    fn now(&self) -> Timestamp {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Timestamp::default().plus(since)
    }
    fn elapsed(&self) -> Duration {
        Duration::ZERO
    }
    async fn sleep(&self, _: Duration) {}
}

struct Fixed;

#[async_trait::async_trait]
impl Clock for Fixed {
    fn now(&self) -> Timestamp {
        Timestamp::from_millis(NOW_MS)
    }
    fn elapsed(&self) -> Duration {
        Duration::ZERO
    }
    async fn sleep(&self, _: Duration) {}
}

fn config(url: impl Into<String>) -> WebhookConfig {
    WebhookConfig {
        allow_private: true,
        ..WebhookConfig::new(Secret::new(url), vec![Secret::new(KEY)])
    }
}

fn webhook(config: &WebhookConfig) -> Webhook {
    Webhook::new(config, Arc::new(Fixed)).expect("valid settings")
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
    Record { position: Position::START, appended_at: Timestamp::from_millis(NOW_MS), event }
}

async fn publish(sink: &Webhook, record: Record) -> Outcome {
    let partition = PartitionId::numbered(0, 1);
    let mut outcomes = sink.publish(Publish::new(&partition, &[record])).await;
    assert_eq!(outcomes.len(), 1);
    outcomes.remove(0)
}

async fn confirm(sink: &Webhook, record: Record) {
    let outcome = publish(sink, record).await;
    assert!(matches!(outcome, Outcome::Confirmed), "{outcome:?}");
}

async fn fail(sink: &Webhook, record: Record) -> Error {
    match publish(sink, record).await {
        Outcome::Failed(error) => error,
        other => panic!("{other:?}"),
    }
}
