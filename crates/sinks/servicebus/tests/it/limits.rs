//! Sizes and counts at the limits of the link.
//!
//! What lives here: batches that are filled and split, events that no transfer can carry, long
//! keys. What does not: the counting itself (`src/batch.rs`).
//! Invariant: the bytes of a transfer are those that went over the wire.

use postrider_core::{ErrorKind, Outcome, Record, Sink};
use postrider_servicebus_emulator::{Entity, MESSAGE_BYTES_STANDARD};
use postrider_sink_servicebus::{LongKeys, ServiceBusConfig};

use crate::{Bus, QUEUE, confirm, fail, ids, publish, record, sink};

const LIMIT: usize = MESSAGE_BYTES_STANDARD as usize;

async fn bus_of(max_message_bytes: u64) -> Bus {
    Bus::with(Entity { requires_session: true, max_message_bytes, ..Entity::default() }).await
}

#[tokio::test]
async fn a_batch_is_filled_up_to_the_link_s_limit_and_split_there() {
    for limit in [MESSAGE_BYTES_STANDARD, 1024 * 1024] {
        let bus = bus_of(limit).await;
        let records: Vec<Record> = (0..100).map(|n| record(n, "k", &[b' '; 30_000])).collect();
        confirm(&bus.sink(), &records).await;
        let transfers = bus.tap.transfers();
        let limit = usize::try_from(limit).expect("small");
        let each = 30_000 + 600;
        let (last, full) = transfers.split_last().expect("some");
        assert!(full.iter().all(|bytes| (limit - each..=limit).contains(bytes)), "{transfers:?}");
        assert!(*last <= limit, "{transfers:?}");
        assert_eq!(bus.session("k"), ids(&records));
        assert_eq!(bus.emulator.entity(QUEUE).counts().rejected, 0);
    }
}

#[tokio::test]
async fn on_an_entity_for_large_messages_a_batch_stays_at_one_mebibyte() {
    let bus = bus_of(100 * 1024 * 1024).await;
    let large = record(1, "k", &vec![b' '; 3 * 1024 * 1024]);
    let mut records = vec![large];
    records.extend((2..10).map(|n| record(n, "k", &vec![b' '; 200 * 1024])));
    confirm(&bus.sink(), &records).await;
    let transfers = bus.tap.transfers();
    let [first, batches @ ..] = &transfers[..] else { panic!("{transfers:?}") };
    assert!(*first > 3 * 1024 * 1024);
    assert_eq!(batches.len(), 2, "{transfers:?}");
    assert!(batches.iter().all(|bytes| *bytes <= 1024 * 1024), "{transfers:?}");
    assert_eq!(bus.session("k"), ids(&records));
}

#[tokio::test]
async fn a_batch_has_4500_messages_at_most() {
    let bus = bus_of(100 * 1024 * 1024).await;
    // Without headers a message takes some 220 bytes: 4,500 of them fit in a mebibyte.
    let records: Vec<Record> = (0..4_600).map(|n| bare(n, "k")).collect();
    confirm(&bus.sink(), &records).await;
    let counts = bus.emulator.entity(QUEUE).counts();
    assert_eq!((counts.transfers, counts.messages), (2, 4_600));
    assert_eq!(bus.session("k"), ids(&records));
}

fn bare(number: u128, key: &str) -> Record {
    use postrider_core::{EventId, EventType, Key, NewEvent, Position, Timestamp, Topic};
    let event = NewEvent::builder(
        Key::new(key).expect("valid"),
        Topic::new("t").expect("valid"),
        EventType::new("T").expect("valid"),
    )
    .build()
    .expect("valid")
    .identified(|| EventId::from_uuid(uuid::Uuid::from_u128(number)));
    Record { position: Position::START, appended_at: Timestamp::from_millis(0), event }
}

#[tokio::test]
async fn an_oversize_event_among_a_thousand_keys_is_refused_alone() {
    let bus = Bus::start().await;
    let sink = bus.sink();
    let mut records = Vec::new();
    for n in 0..1_000 {
        records.push(record(n * 2, &format!("k{n}"), b"{\"before\": true}"));
    }
    records.push(record(5_000, "k500", &vec![b' '; 300 * 1024]));
    for n in 0..1_000 {
        records.push(record(n * 2 + 1, &format!("k{n}"), b"{\"after\": true}"));
    }
    let outcomes = publish(&sink, &records).await;
    let Outcome::Failed(error) = &outcomes[1_000] else { panic!("{:?}", outcomes[1_000]) };
    assert_eq!(error.kind(), ErrorKind::Permanent);
    assert!(error.to_string().contains(&format!("messages of {LIMIT}")), "{error}");
    let held: Vec<usize> =
        (0..outcomes.len()).filter(|at| matches!(outcomes[*at], Outcome::HeldBack)).collect();
    assert_eq!(held, [1_501], "the one event behind it, and no other");
    let confirmed = outcomes.iter().filter(|one| matches!(one, Outcome::Confirmed)).count();
    assert_eq!(confirmed, 1_999);
    assert_eq!(bus.stored().len(), 1_999);
    // What comes later flows, of its key and of all others, once the event is out of the way.
    confirm(&sink, &[record(6_000, "k500", b"{}"), record(6_001, "k1", b"{}")]).await;
}

#[tokio::test]
async fn the_limit_is_told_once_it_is_known_and_is_kept_to_the_byte() {
    let bus = Bus::start().await;
    let sink = bus.sink();
    assert_eq!(sink.capabilities().max_event_bytes, None);
    sink.check().await.expect("reachable");
    let told = sink.capabilities().max_event_bytes.expect("known");
    assert_eq!(told, LIMIT - 512);
    confirm(&sink, &[record(1, "k", &vec![b' '; told])]).await;
    let error = fail(&sink, record(2, "k", &vec![b' '; told + 1])).await;
    assert_eq!(error.kind(), ErrorKind::Permanent);
    assert!(error.to_string().contains(&format!("messages of {LIMIT}")), "{error}");
    // Beside a key of this length stands more than is kept for it, and the exact size decides.
    let overhead = bus.tap.transfers()[0] - told + 2 * 127;
    let key = "x".repeat(128);
    confirm(&sink, &[record(3, &key, &vec![b' '; LIMIT - overhead])]).await;
    assert_eq!(bus.tap.transfers()[1], LIMIT);
    let error = fail(&sink, record(4, &key, &vec![b' '; LIMIT - overhead + 1])).await;
    assert_eq!(error.kind(), ErrorKind::Permanent);
    assert!(error.to_string().contains(&format!("has {} bytes", LIMIT + 1)), "{error}");
    assert_eq!(bus.tap.transfers().len(), 2, "what is too large was not even sent");
}

#[tokio::test]
async fn a_batch_that_is_refused_as_a_whole_is_split_until_one_is_to_blame() {
    let bus = Bus::start().await;
    let sink = bus.sink();
    let records: Vec<Record> = (0..16).map(|n| record(n, "k", b"{}")).collect();
    for condition in ["amqp:link:message-size-exceeded", "amqp:not-allowed"] {
        // The batch, and its first eighth.
        bus.emulator.faults().reject_next(QUEUE, 2, condition);
        let before = bus.stored().len();
        confirm(&sink, &records).await;
        assert_eq!(bus.stored().len() - before, 16);
        assert_eq!(bus.session("k")[before..], ids(&records));
    }
    // The batch, its first eighth, and at last the first event alone.
    bus.emulator.faults().reject_next(QUEUE, 3, "amqp:not-allowed");
    let outcomes = publish(&sink, &records).await;
    let Outcome::Failed(error) = &outcomes[0] else { panic!("{outcomes:?}") };
    assert_eq!(error.kind(), ErrorKind::Permanent);
    assert!(outcomes[1..].iter().all(|one| matches!(one, Outcome::HeldBack)), "{outcomes:?}");
}

#[tokio::test]
async fn long_keys_are_refused_or_hashed() {
    let bus = Bus::start().await;
    let long = "x".repeat(129);
    let refusing = bus.sink();
    confirm(&refusing, &[record(1, &"x".repeat(128), b"{}")]).await;
    let error = fail(&refusing, record(2, &long, b"{}")).await;
    assert_eq!(error.kind(), ErrorKind::Permanent);
    assert!(error.to_string().contains("129 characters") && error.to_string().contains("128"));
    assert_eq!(bus.stored().len(), 1);
    let config = ServiceBusConfig { long_keys: LongKeys::Hash, ..bus.config() };
    let hashing = sink(&config);
    confirm(&hashing, &[record(3, &long, b"{}"), record(4, &long, b"{}")]).await;
    let other = "y".repeat(129);
    confirm(&hashing, &[record(5, &other, b"{}")]).await;
    let stored = bus.stored();
    let sessions: Vec<&str> =
        stored[1..].iter().map(|one| one.session_id.as_deref().expect("a session")).collect();
    assert!(sessions[0].starts_with("sha256:") && sessions[0] == sessions[1]);
    assert_ne!(sessions[0], sessions[2]);
    let key = postrider_servicebus_emulator::PropertyValue::Text(long);
    assert_eq!(stored[1].application_properties.get("postrider-key"), Some(&key));
}
