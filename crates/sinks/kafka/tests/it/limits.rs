//! Sizes and times.
//!
//! What lives here: events that are larger than a topic takes, the client's queue, the time that a
//! call may send. What does not: trouble (`failures.rs`).
//! Invariant: what is too large is refused alone, with the limit in the reason.

use std::time::Duration;

use postrider_conformance::samples::sized_event;
use postrider_core::{ErrorKind, Outcome, PartitionId, Publish, Record, Secret, Sink};
use postrider_sink_kafka::KafkaConfig;
use tokio::time::Instant;

use crate::middle::Middle;
use crate::{
    PATIENCE, TOPIC, all_confirmed, broker, brokers, config, empty_broker, ids, make_topic, one,
    publish, sink, stored_ids,
};

const MIB: usize = 1 << 20;

fn sized(key: &str, n: u64, bytes: usize) -> Record {
    postrider_conformance::samples::record(sized_event(key, n, bytes), n)
}

fn permanent(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Failed(error) if error.kind() == ErrorKind::Permanent => error.chain(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_above_the_topics_limit_parks_with_the_limit_named() {
    let broker = empty_broker().await;
    let brokers = brokers(&broker);
    make_topic(&brokers, TOPIC, 1, &[("max.message.bytes", "20000")]).await;
    let sink = sink(&config(&*brokers));
    let events = [one("a", 1), sized("a", 2, 30_000), one("a", 3), one("b", 4)];
    let outcomes = publish(&sink, &events).await;
    let reason = permanent(&outcomes[1]);
    assert!(reason.contains("20000") && reason.contains("max.message.bytes"), "{reason}");
    assert!(matches!(outcomes[2], Outcome::HeldBack), "{outcomes:?}");
    let mut found = stored_ids(&brokers).await;
    found.sort();
    let mut expected = [events[0].event.id(), events[3].event.id()];
    expected.sort();
    assert_eq!(found, expected);
    // A larger limit counts from the next attempt on.
    crate::set_limit(&brokers, TOPIC, 50_000).await;
    assert!(all_confirmed(&publish(&sink, &events[1..3]).await));
}

/// Many keys' events go in one request, which as a whole is larger than the topic takes.
#[tokio::test(flavor = "multi_thread")]
async fn events_that_are_too_large_only_together_all_arrive() {
    let broker = empty_broker().await;
    let brokers = brokers(&broker);
    make_topic(&brokers, TOPIC, 1, &[("max.message.bytes", "20000")]).await;
    let mut settings = KafkaConfig { timeout_ms: 20_000, ..config(&*brokers) };
    settings.librdkafka.insert("linger.ms".into(), Secret::new("200"));
    let sink = sink(&settings);
    let mut events: Vec<Record> = (0..20).map(|n| sized(&format!("k{n}"), n, 9_000)).collect();
    events.push(sized("large", 20, 30_000));
    let outcomes = publish(&sink, &events).await;
    assert!(permanent(&outcomes[20]).contains("20000"));
    assert!(all_confirmed(&outcomes[..20]), "{outcomes:?}");
    let mut found = stored_ids(&brokers).await;
    found.sort();
    let mut expected = ids(&events[..20]);
    expected.sort();
    assert_eq!(found, expected);
}

/// The largest payload that an event may have, over a topic that takes it.
#[tokio::test(flavor = "multi_thread")]
async fn the_clients_own_limit_is_above_every_event() {
    let broker = empty_broker().await;
    let brokers = brokers(&broker);
    make_topic(&brokers, TOPIC, 1, &[("max.message.bytes", "33000000")]).await;
    let sink = sink(&KafkaConfig { timeout_ms: 30_000, ..config(&*brokers) });
    let event = sized("a", 1, postrider_core::limits::MAX_PAYLOAD_BYTES);
    assert!(all_confirmed(&publish(&sink, std::slice::from_ref(&event)).await));
}

/// Each event of a key is a round trip; the first is always sent.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_ends_in_time_and_gives_back_the_rest() {
    let broker = broker().await;
    let brokers = brokers(&broker);
    let sink = sink(&config(&*brokers));
    let events: Vec<Record> = (0..4).map(|n| sized("hot", n, MIB / 2)).collect();
    let partition = PartitionId::numbered(0, 1);
    for first in 0..events.len() {
        let call = Publish::new(&partition, &events[first..]).within(Duration::ZERO);
        let outcomes = sink.publish(call).await;
        assert!(matches!(outcomes[0], Outcome::Confirmed), "each call gets on: {outcomes:?}");
        let rest = &outcomes[1..];
        assert!(rest.iter().all(|one| matches!(one, Outcome::HeldBack)), "{outcomes:?}");
        assert_eq!(stored_ids(&brokers).await, ids(&events[..=first]));
    }
}

/// More keys than the client's queue has places: they wait, or come again, and none fails for good.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_asks_for_patience() {
    let broker = broker().await;
    let middle = Middle::before(broker.address()).await;
    let mut settings = config(middle.brokers());
    settings.librdkafka.insert("queue.buffering.max.messages".into(), Secret::new("10"));
    let sink = sink(&settings);
    let events: Vec<Record> = (0..100).map(|n| one(&format!("k{n}"), n)).collect();
    assert!(all_confirmed(&publish(&sink, &events[..50]).await), "they wait for places");
    middle.hold(true);
    let partition = PartitionId::numbered(0, 1);
    let call = Publish::new(&partition, &events[50..]).within(Duration::from_millis(100));
    let outcomes = sink.publish(call).await;
    let throttled = outcomes.iter().filter(|outcome| match outcome {
        Outcome::Failed(error) => error.chain().contains("queue is full"),
        _ => false,
    });
    assert_eq!(throttled.count(), 40, "{outcomes:?}");
    middle.hold(false);
    let until = Instant::now() + PATIENCE;
    while !all_confirmed(&publish(&sink, &events[50..]).await) {
        assert!(Instant::now() < until, "all arrive");
    }
}
