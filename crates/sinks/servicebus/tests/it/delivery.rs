//! Messages and batches as the service has them.
//!
//! What lives here: the mapping, the encodings, batches by session, order, what is sent at a time.
//! What does not: limits (`limits.rs`) and failures.
//! Invariant: what arrived is read from the queue, and what was sent from the wire.

use std::time::{Duration, Instant};

use postrider_core::{Outcome, Record, Sink};
use postrider_encoding::{CloudEvent, Encoding};
use postrider_servicebus_emulator::PropertyValue;
use postrider_sink_servicebus::ServiceBusConfig;

use crate::tap::Seen;
use crate::{Bus, QUEUE, confirm, ids, record, sink};

fn text(value: &str) -> PropertyValue {
    PropertyValue::Text(value.into())
}

#[tokio::test]
async fn a_message_carries_body_and_attributes_unchanged() {
    let bus = Bus::start().await;
    let payload = [b"{\"a\": 1.0}\n".as_slice(), &[0xff, 0]].concat();
    confirm(&bus.sink(), &[record(1, "Zoë 42", &payload)]).await;
    let stored = bus.stored();
    let [message] = &stored[..] else { panic!("{stored:?}") };
    assert_eq!(message.body, payload);
    assert_eq!(message.message_id.as_deref(), Some("00000000-0000-0000-0000-000000000001"));
    assert_eq!(message.session_id.as_deref(), Some("Zoë 42"));
    assert_eq!(message.subject.as_deref(), Some("OrderPlaced"));
    assert_eq!(message.content_type.as_deref(), Some("application/json"));
    assert_eq!(message.annotations.get("x-opt-partition-key"), Some(&text("Zoë 42")));
    let span = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let properties: Vec<(&str, &PropertyValue)> =
        message.application_properties.iter().map(|(name, value)| (&name[..], value)).collect();
    assert_eq!(
        properties,
        [
            ("Diagnostic-Id", &text(span)),
            ("Tenant", &text("50 % \"é\"")),
            ("postrider-topic", &text("orders")),
            ("traceparent", &text(span)),
            ("tracestate", &text("vendor=1")),
        ]
    );
}

#[tokio::test]
async fn cloud_events_arrive_in_both_modes() {
    let bus = Bus::start().await;
    for encoding in [Encoding::CloudEventsBinary, Encoding::CloudEventsStructured] {
        let config = ServiceBusConfig { encoding, source: Some("/shop".into()), ..bus.config() };
        confirm(&sink(&config), &[record(1, "k", b"{\"a\": 1.0}")]).await;
    }
    let stored = bus.stored();
    let [binary, structured] = &stored[..] else { panic!("{stored:?}") };
    for (name, value) in [
        ("cloudEvents:specversion", "1.0"),
        ("cloudEvents:id", "00000000-0000-0000-0000-000000000001"),
        ("cloudEvents:source", "/shop"),
        ("cloudEvents:type", "OrderPlaced"),
        ("cloudEvents:subject", "k"),
        ("cloudEvents:time", "2023-01-02T15:04:05.678Z"),
        ("cloudEvents:partitionkey", "k"),
    ] {
        assert_eq!(binary.application_properties.get(name), Some(&text(value)), "{name}");
    }
    assert_eq!(binary.body, b"{\"a\": 1.0}");
    assert_eq!(structured.content_type.as_deref(), Some("application/cloudevents+json"));
    let event = CloudEvent::from_structured(&structured.body).expect("a CloudEvent");
    assert_eq!((&event.data[..], event.source.as_str()), (&b"{\"a\": 1.0}"[..], "/shop"));
}

#[tokio::test]
async fn a_call_sends_one_batch_for_each_key() {
    let bus = Bus::start().await;
    let records: Vec<Record> =
        (0..200).map(|n| record(n, &format!("k{}", n % 20), b"{}")).collect();
    confirm(&bus.sink(), &records).await;
    let counts = bus.emulator.entity(QUEUE).counts();
    assert_eq!((counts.transfers, counts.batches, counts.messages), (20, 20, 200));
    for key in 0..20 {
        let sent: Vec<Record> = records
            .iter()
            .filter(|one| one.event.key().as_str() == format!("k{key}"))
            .cloned()
            .collect();
        assert_eq!(bus.session(&format!("k{key}")), ids(&sent));
    }
    // A key with one event is sent as a plain message.
    confirm(&bus.sink(), &[record(900, "alone", b"{}")]).await;
    let counts = bus.emulator.entity(QUEUE).counts();
    assert_eq!((counts.transfers, counts.batches), (21, 20));
}

#[tokio::test]
async fn keys_travel_together_and_a_key_s_batches_one_after_another() {
    let bus = Bus::start().await;
    let sink = bus.sink();
    sink.check().await.expect("reachable");
    let latency = Duration::from_millis(100);
    bus.emulator.faults().set_latency(latency);
    let records: Vec<Record> = (0..100).map(|n| record(n, &format!("k{n}"), b"{}")).collect();
    let begin = Instant::now();
    confirm(&sink, &records).await;
    // One after another they would take a hundred times the latency.
    assert!(begin.elapsed() < latency * 20, "{:?}", begin.elapsed());
    bus.emulator.faults().set_latency(Duration::ZERO);
    // Sixty events of 20,000 bytes are five batches of at most 262,144 bytes.
    let before = bus.tap.log().len();
    let records: Vec<Record> = (200..260).map(|n| record(n, "one", &[b' '; 20_000])).collect();
    confirm(&sink, &records).await;
    let log = bus.tap.log().split_off(before);
    let transfers = log.iter().filter(|seen| matches!(seen, Seen::Transfer { .. })).count();
    assert_eq!(transfers, 5, "{log:?}");
    for pair in log.chunks(2) {
        assert!(matches!(pair, [Seen::Transfer { .. }, Seen::Settled]), "{log:?}");
    }
    assert_eq!(bus.session("one"), ids(&records));
}

#[tokio::test]
async fn a_key_that_takes_too_long_gives_back_what_it_has_not_begun() {
    let bus = Bus::start().await;
    let sink = bus.sink();
    sink.check().await.expect("reachable");
    bus.emulator.faults().set_latency(Duration::from_millis(200));
    // Five batches, each of which waits for the one before.
    let records: Vec<Record> = (0..60).map(|n| record(n, "k", &[b' '; 20_000])).collect();
    let partition = postrider_core::PartitionId::numbered(0, 1);
    let call =
        postrider_core::Publish::new(&partition, &records).within(Duration::from_millis(300));
    let outcomes = sink.publish(call).await;
    let confirmed = outcomes.iter().take_while(|one| matches!(one, Outcome::Confirmed)).count();
    assert!((12..60).contains(&confirmed), "{confirmed}");
    assert!(outcomes[confirmed..].iter().all(|one| matches!(one, Outcome::HeldBack)));
    assert_eq!(bus.stored().len(), confirmed);
}

#[tokio::test]
async fn in_flight_bounds_what_is_on_its_way() {
    let bus = Bus::start().await;
    let config = ServiceBusConfig { in_flight: 3, ..bus.config() };
    let sink = sink(&config);
    sink.check().await.expect("reachable");
    bus.emulator.faults().set_latency(Duration::from_millis(30));
    let records: Vec<Record> = (0..12).map(|n| record(n, &format!("k{n}"), b"{}")).collect();
    confirm(&sink, &records).await;
    let (mut open, mut most) = (0, 0);
    for seen in bus.tap.log() {
        match seen {
            Seen::Transfer { .. } => open += 1,
            // One disposition may settle several.
            Seen::Settled => open = 0,
        }
        most = most.max(open);
    }
    assert_eq!(most, 3);
}

#[tokio::test]
async fn a_redelivery_has_the_same_id_and_is_dropped_by_duplicate_detection() {
    let bus = Bus::with(postrider_servicebus_emulator::Entity {
        requires_session: true,
        duplicate_detection_window: Some(Duration::from_secs(600)),
        ..Default::default()
    })
    .await;
    let records: Vec<Record> = (1..=5).map(|n| record(n, "k", b"{}")).collect();
    for _ in 0..2 {
        // Each sink is a new one, as after a restart; the second batch begins elsewhere.
        confirm(&bus.sink(), &records).await;
        confirm(&bus.sink(), &records[2..]).await;
    }
    assert_eq!(bus.session("k"), ids(&records));
    assert_eq!(bus.emulator.entity(QUEUE).counts().duplicates, 11);
}

#[tokio::test]
async fn a_link_that_is_taken_away_while_it_is_idle_costs_no_attempt() {
    let bus = Bus::start().await;
    let sink = bus.sink();
    confirm(&sink, &[record(1, "k", b"{}")]).await;
    for number in 2..5 {
        match number {
            2 => bus.emulator.faults().detach_links(QUEUE, "amqp:link:detach-forced"),
            3 => bus.emulator.faults().close_connections("amqp:connection:forced"),
            _ => bus.emulator.faults().drop_connections(),
        }
        crate::until("the sink gives the connection up", || bus.tap.live() == 0).await;
        confirm(&sink, &[record(number, "k", b"{}")]).await;
    }
    assert_eq!((bus.stored().len(), bus.tap.connections()), (4, 4));
}

#[tokio::test]
async fn closing_waits_for_what_is_on_its_way() {
    let bus = Bus::start().await;
    let sink = bus.sink();
    sink.check().await.expect("reachable");
    bus.tap.hold();
    let records = [record(1, "k", b"{}")];
    let mut call = std::pin::pin!(crate::publish(&sink, &records));
    tokio::select! {
        outcomes = &mut call => panic!("{outcomes:?}"),
        () = bus.tap.until_waiting() => {}
    }
    let closing = async {
        let mut close = std::pin::pin!(sink.close());
        let early = tokio::time::timeout(Duration::from_millis(50), &mut close).await;
        assert!(early.is_err(), "it closed before the transfer was settled");
        bus.tap.release();
        close.await.expect("closed");
    };
    let (outcomes, ()) = tokio::join!(call, closing);
    assert!(matches!(outcomes[..], [postrider_core::Outcome::Confirmed]), "{outcomes:?}");
    assert_eq!(bus.stored().len(), 1);
}
