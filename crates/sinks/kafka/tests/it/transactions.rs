//! Events in transactions, as a reader of what is committed sees them.
//!
//! What lives here: crashes, relays beside each other, answers that nobody heard, a database of an
//! earlier day. What does not: sizes of the memory (`seen.rs`).
//! Invariant: whoever sends whatever how often, each event stands once among what is committed, in
//! its key's order, and none that is new is left out.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use postrider_conformance::samples::{record, sized_event};
use postrider_core::{ErrorKind, EventId, Outcome, PartitionId, Publish, Record, Sink};
use postrider_servers::kafka::Kafka as Broker;
use postrider_sink_kafka::{Kafka, KafkaConfig};
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::{Message, OwnedMessage};
use rdkafka::producer::{BaseRecord, DefaultProducerContext, Producer, ThreadedProducer};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use tokio::time::Instant;

use crate::middle::Middle;
use crate::{
    PATIENCE, TOPIC, all_confirmed, blocking, brokers, config, delivered, empty_broker, fail, ids,
    make_topic, one, publish, sink,
};

pub(crate) const NOTES: &str = "postrider-transactions";
const END: &[u8] = b"end";

async fn broker() -> Broker {
    let broker = empty_broker().await;
    for topic in [TOPIC, NOTES] {
        make_topic(&brokers(&broker), topic, 1, &[]).await;
    }
    broker
}

fn settings(brokers: impl Into<String>) -> KafkaConfig {
    KafkaConfig { transactions: Some("orders".into()), ..config(brokers) }
}

/// All that is committed, in order.
pub(crate) async fn committed(brokers: &str, topic: &str) -> Vec<OwnedMessage> {
    let (brokers, topic) = (brokers.to_owned(), topic.to_owned());
    blocking(move || read(&brokers, &topic)).await
}

/// Writes a record behind everything and reads up to it: nothing before it is open then.
fn read(brokers: &str, topic: &str) -> Vec<OwnedMessage> {
    let mut client = ClientConfig::new();
    client.set("bootstrap.servers", brokers);
    let producer: ThreadedProducer<_> = client.create().expect("an address");
    producer.send(BaseRecord::to(topic).partition(0).key(END).payload(END)).expect("queued");
    producer.flush(PATIENCE).expect("confirmed");
    client.set("group.id", "reader").set("enable.auto.commit", "false");
    client.set("isolation.level", "read_committed");
    let consumer: BaseConsumer = client.create().expect("an address");
    let mut from = TopicPartitionList::new();
    from.add_partition_offset(topic, 0, Offset::Beginning).expect("an offset");
    consumer.assign(&from).expect("a partition");
    let (mut found, until) = (Vec::new(), std::time::Instant::now() + PATIENCE);
    let (_, end) = consumer.fetch_watermarks(topic, 0, PATIENCE).expect("an answer");
    loop {
        assert!(std::time::Instant::now() < until, "a transaction is open, or the end is missing");
        let Some(message) = consumer.poll(Duration::from_millis(100)) else { continue };
        let message = message.expect("a record").detach();
        let (is_end, offset) = (message.key() == Some(END), message.offset());
        if !is_end {
            found.push(message);
        }
        if offset + 1 >= end {
            return found;
        }
    }
}

async fn committed_ids(brokers: &str) -> Vec<EventId> {
    committed(brokers, TOPIC).await.iter().map(|one| delivered(one).id).collect()
}

fn all_duplicates(outcomes: &[Outcome]) -> bool {
    outcomes.iter().all(|one| matches!(one, Outcome::Duplicate))
}

fn of_keys(count: u64, keys: u64) -> Vec<Record> {
    (0..count).map(|n| one(&format!("k{}", n % keys), n)).collect()
}

/// Kafka has the events and the database does not know it: nothing heard of the commit.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_committed_before_a_crash_is_not_sent_again() {
    let broker = broker().await;
    let brokers = brokers(&broker);
    let events = of_keys(60, 5);
    let before = sink(&settings(&*brokers));
    assert!(all_confirmed(&publish(&before, &events[..40]).await));
    assert!(all_duplicates(&publish(&before, &events[..40]).await));
    drop(before);
    let after = sink(&settings(&*brokers));
    let outcomes = publish(&after, &events[10..]).await;
    assert!(all_duplicates(&outcomes[..30]) && all_confirmed(&outcomes[30..]), "{outcomes:?}");
    assert_eq!(committed_ids(&brokers).await, ids(&events));
}

/// A relay is stopped in the middle of a transaction, and goes on when another has the partition.
#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_comes_back_adds_nothing_to_what_another_sent() {
    let broker = broker().await;
    let brokers = brokers(&broker);
    let middle = Middle::before(broker.address()).await;
    let events = of_keys(30, 3);
    let zombie = sink(&settings(middle.brokers()));
    assert!(all_confirmed(&publish(&zombie, &events[..10]).await));
    middle.hold(true);
    middle.orders().waiting = false;
    let other = sink(&settings(&*brokers));
    let (late, ()) = tokio::join!(publish(&zombie, &events[10..20]), async {
        while !middle.orders().waiting {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let outcomes = publish(&other, &events[..25]).await;
        assert!(all_duplicates(&outcomes[..10]) && all_confirmed(&outcomes[10..]), "{outcomes:?}");
        middle.hold(false);
    });
    // It was kept from ending its transaction, looked again, and found what the other had sent.
    assert!(all_duplicates(&late), "{late:?}");
    assert_eq!(committed_ids(&brokers).await, ids(&events[..25]));
    // Whoever had the partition last: each event stands once, in order.
    let outcomes = publish(&other, &events[20..]).await;
    assert!(all_duplicates(&outcomes[..5]) && all_confirmed(&outcomes[5..]), "{outcomes:?}");
    assert_eq!(committed_ids(&brokers).await, ids(&events));
}

/// Two relays take the partition from each other as fast as they can.
#[tokio::test(flavor = "multi_thread")]
async fn two_relays_at_once_commit_each_event_once() {
    let broker = broker().await;
    let brokers = brokers(&broker);
    let events = of_keys(60, 4);
    let relays = [sink(&settings(&*brokers)), sink(&settings(&*brokers))];
    let until = Instant::now() + PATIENCE * 2;
    let work = async |relay: Arc<Kafka>| {
        for batch in events.chunks(10) {
            loop {
                let outcomes = publish(&relay, batch).await;
                let is_there =
                    |one: &Outcome| matches!(one, Outcome::Confirmed | Outcome::Duplicate);
                if outcomes.iter().all(is_there) {
                    break;
                }
                assert!(Instant::now() < until, "{outcomes:?}");
            }
        }
    };
    let [first, second] = relays;
    tokio::join!(work(first), work(second));
    assert_eq!(committed_ids(&brokers).await, ids(&events));
}

/// The brokers committed, and nobody heard it within the time that there was.
#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_nobody_heard_of_is_found_out() {
    let broker = broker().await;
    let brokers = brokers(&broker);
    let middle = Middle::before(broker.address()).await;
    let sink = sink(&KafkaConfig { timeout_ms: 1_500, ..settings(middle.brokers()) });
    let events = of_keys(6, 2);
    assert!(all_confirmed(&publish(&sink, &events[..2]).await));
    middle.orders().loses_ends = true;
    let outcomes = publish(&sink, &events[2..]).await;
    assert!(matches!(&outcomes[0], Outcome::Failed(error) if error.kind() == ErrorKind::Transient));
    assert!(!outcomes.iter().any(|one| matches!(one, Outcome::Confirmed)), "{outcomes:?}");
    middle.orders().loses_ends = false;
    let until = Instant::now() + PATIENCE;
    loop {
        let outcomes = publish(&sink, &events[2..]).await;
        if all_duplicates(&outcomes) || all_confirmed(&outcomes) {
            break;
        }
        assert!(Instant::now() < until, "{outcomes:?}");
    }
    assert_eq!(committed_ids(&brokers).await, ids(&events));
}

/// A backup took the database's place: it has older events that were sent, and new ones.
#[tokio::test(flavor = "multi_thread")]
async fn a_database_of_an_earlier_day_loses_nothing_and_repeats_nothing() {
    let broker = broker().await;
    let brokers = brokers(&broker);
    let (old, new) = (of_keys(20, 3), of_keys(20, 3));
    assert!(all_confirmed(&publish(&sink(&settings(&*brokers)), &old).await));
    // At the places of those that were lost stand others.
    let again = [&old[..12], &new[12..]].concat();
    let outcomes = publish(&sink(&settings(&*brokers)), &again).await;
    assert!(all_duplicates(&outcomes[..12]) && all_confirmed(&outcomes[12..]), "{outcomes:?}");
    let expected = [ids(&old), ids(&new[12..])].concat();
    assert_eq!(committed_ids(&brokers).await, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_event_that_is_refused_holds_up_its_key_alone() {
    let broker = empty_broker().await;
    let brokers = brokers(&broker);
    make_topic(&brokers, NOTES, 1, &[]).await;
    make_topic(&brokers, TOPIC, 1, &[("max.message.bytes", "20000")]).await;
    let sized = |key: &str, n: u64, bytes: usize| record(sized_event(key, n, bytes), n);
    let sink = sink(&settings(&*brokers));
    let mut events = vec![one("a", 1), sized("a", 2, 30_000), one("a", 3), one("b", 4)];
    // Together they are too large for the topic; each of them is not.
    events.extend((5..10).map(|n| sized(&format!("c{n}"), n, 9_000)));
    let outcomes = publish(&sink, &events).await;
    let Outcome::Failed(error) = &outcomes[1] else { panic!("{outcomes:?}") };
    assert_eq!(error.kind(), ErrorKind::Permanent);
    assert!(error.chain().contains("20000"), "{error:?}");
    assert!(matches!(outcomes[2], Outcome::HeldBack), "{outcomes:?}");
    assert!(all_confirmed(&outcomes[3..]) && all_confirmed(&outcomes[..1]), "{outcomes:?}");
    let mut found = committed_ids(&brokers).await;
    found.sort();
    let mut expected = [ids(&events[..1]), ids(&events[3..])].concat();
    expected.sort();
    assert_eq!(found, expected);
    crate::set_limit(&brokers, TOPIC, 50_000).await;
    assert!(all_confirmed(&publish(&sink, &events[1..3]).await));
}

/// A relay that sends event by event what was refused together, when another takes its place.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_sent_alone_was_not_sent_by_another_meanwhile() {
    let broker = empty_broker().await;
    let brokers = brokers(&broker);
    make_topic(&brokers, NOTES, 1, &[]).await;
    make_topic(&brokers, TOPIC, 1, &[("max.message.bytes", "20000")]).await;
    let middle = Middle::before(broker.address()).await;
    let (zombie, other) = (sink(&settings(middle.brokers())), sink(&settings(&*brokers)));
    let sized = |n| record(sized_event(&format!("k{n}"), n, 9_000), n);
    let events: Vec<_> = (0..6).map(sized).collect();
    middle.hold(true);
    middle.orders().unheld = 1;
    let (late, ()) = tokio::join!(publish(&zombie, &events), async {
        while !middle.orders().waiting {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert!(all_confirmed(&publish(&other, &events).await));
        middle.hold(false);
    });
    assert!(all_duplicates(&late), "{late:?}");
    assert_eq!(committed_ids(&brokers).await, ids(&events));
}

/// All partitions begin at once: one of them reads past the marks of the others.
#[tokio::test(flavor = "multi_thread")]
async fn partitions_that_begin_together_do_not_wait_for_each_others_notes() {
    let broker = broker().await;
    let brokers = brokers(&broker);
    let sink = sink(&KafkaConfig { timeout_ms: 6_000, ..settings(&*brokers) });
    let events = of_keys(8, 8);
    for number in 0..8 {
        let event = std::slice::from_ref(&events[0]);
        let partition = PartitionId::numbered(number, 8);
        let call = Publish::new(&partition, event).within(Duration::ZERO);
        let outcomes = sink.publish(call).await;
        let Outcome::Failed(error) = &outcomes[0] else { panic!("{outcomes:?}") };
        assert!(matches!(error.kind(), ErrorKind::Throttled { .. }), "{error:?}");
    }
    let calls = (0..8).zip(&events).map(async |(number, event)| {
        let partition = PartitionId::numbered(number, 8);
        sink.publish(Publish::new(&partition, std::slice::from_ref(event))).await
    });
    for outcomes in join_all(calls).await {
        assert!(all_confirmed(&outcomes), "{outcomes:?}");
    }
    assert_eq!(committed(&brokers, TOPIC).await.len(), 8);
}

/// What was read once ends where a transaction was open, and all that follows is aborted.
#[tokio::test(flavor = "multi_thread")]
async fn who_read_the_notes_before_gets_beyond_what_was_aborted() {
    let broker = empty_broker().await;
    let brokers = brokers(&broker);
    make_topic(&brokers, NOTES, 1, &[]).await;
    make_topic(&brokers, TOPIC, 1, &[("max.message.bytes", "20000")]).await;
    let (first, other) = (sink(&settings(&*brokers)), sink(&settings(&*brokers)));
    assert!(all_confirmed(&publish(&first, &[one("a", 1)]).await));
    for n in 0..4 {
        fail(&first, &record(sized_event("large", n, 30_000), n)).await;
    }
    let event = [one("a", 2)];
    assert!(all_confirmed(&publish(&other, &event).await));
    assert!(all_duplicates(&publish(&first, &event).await));
}

/// One that reads for the first time stands before an open transaction, and its mark behind it: the
/// broker tells it again that its producer's transaction of before was aborted.
#[tokio::test(flavor = "multi_thread")]
async fn who_reads_the_notes_first_finds_its_mark_behind_what_was_open() {
    let broker = broker().await;
    let brokers = brokers(&broker);
    let events = of_keys(4, 2);
    assert!(all_confirmed(&publish(&sink(&settings(&*brokers)), &events[..2]).await));
    let (own, other) = (brokers.clone(), brokers.clone());
    let id = format!("orders {}", PartitionId::numbered(0, 1));
    blocking(move || begun(&own, &id).abort_transaction(PATIENCE).expect("aborted")).await;
    let open = blocking(move || begun(&other, "another")).await;
    let new = sink(&settings(&*brokers));
    let own = brokers.clone();
    let ends = blocking(move || {
        let mut client = ClientConfig::new();
        client.set("bootstrap.servers", own).set("group.id", "end");
        client.set("isolation.level", "read_uncommitted");
        let reader: BaseConsumer = client.create().expect("an address");
        let end = || reader.fetch_watermarks(NOTES, 0, PATIENCE).expect("an answer").1;
        // Behind it come the mark and the end of its transaction.
        let (before, until) = (end(), std::time::Instant::now() + PATIENCE);
        while end() < before + 2 && std::time::Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        // It has read to the open one by then.
        std::thread::sleep(Duration::from_millis(300));
        open.commit_transaction(PATIENCE).expect("committed");
    });
    let (outcomes, ()) = tokio::join!(publish(&new, &events), ends);
    assert!(all_duplicates(&outcomes[..2]) && all_confirmed(&outcomes[2..]), "{outcomes:?}");
}

/// A producer with a transaction that has a record in the topic of notes.
fn begun(brokers: &str, id: &str) -> ThreadedProducer<DefaultProducerContext> {
    let mut client = ClientConfig::new();
    client.set("bootstrap.servers", brokers).set("transactional.id", id);
    let producer: ThreadedProducer<_> = client.create().expect("an address");
    producer.init_transactions(PATIENCE).expect("a number");
    producer.begin_transaction().expect("begun");
    producer.send(BaseRecord::to(NOTES).partition(0).key("none").payload("")).expect("queued");
    producer.flush(PATIENCE).expect("confirmed");
    producer
}

/// Nobody waits for two calls any more, of which one is under way and one behind it.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_was_given_up_takes_the_partition_from_nobody() {
    let broker = broker().await;
    let brokers = brokers(&broker);
    let middle = Middle::before(broker.address()).await;
    let (zombie, other) = (sink(&settings(middle.brokers())), sink(&settings(&*brokers)));
    let events = of_keys(9, 3);
    assert!(all_confirmed(&publish(&zombie, &events[..3]).await));
    middle.hold(true);
    middle.orders().waiting = false;
    tokio::select! {
        outcomes = publish(&zombie, &events[3..6]) => panic!("{outcomes:?}"),
        () = async {
            while !middle.orders().waiting {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        } => {}
    }
    let behind = publish(&zombie, &events[6..]);
    tokio::time::timeout(Duration::from_millis(200), behind).await.expect_err("its turn is later");
    assert!(all_confirmed(&publish(&other, &events[3..6]).await));
    middle.hold(false);
    assert!(all_duplicates(&publish(&zombie, &events[..6]).await));
    assert_eq!(committed_ids(&brokers).await, ids(&events[..6]));
    let notes = committed(&brokers, NOTES).await;
    let marks = notes.iter().filter(|note| note.payload().is_some_and(|it| it[0] == 2));
    let of_events = notes.iter().filter(|note| note.payload().is_some_and(|it| it[0] == 1));
    assert_eq!((marks.count(), of_events.count()), (3, 2));
}

/// What one sink sent is nothing to another: not by its name, nor by its topic.
#[tokio::test(flavor = "multi_thread")]
async fn notes_of_other_sinks_do_not_count() {
    let broker = broker().await;
    let brokers = brokers(&broker);
    make_topic(&brokers, "copies", 1, &[]).await;
    let events = of_keys(5, 2);
    assert!(all_confirmed(&publish(&sink(&settings(&*brokers)), &events).await));
    let copies = KafkaConfig { topic: "copies".into(), ..settings(&*brokers) };
    assert!(all_confirmed(&publish(&sink(&copies), &events).await));
    let named = KafkaConfig { transactions: Some("others".into()), ..settings(&*brokers) };
    assert!(all_confirmed(&publish(&sink(&named), &events).await));
    assert_eq!(committed(&brokers, "copies").await.len(), 5);
}

/// The broker is stopped and started between transactions, and in the middle of one.
#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_comes_back_is_found_again() {
    let mut broker = broker().await;
    let brokers = brokers(&broker);
    let sink = sink(&settings(&*brokers));
    let events = of_keys(40, 3);
    assert!(all_confirmed(&publish(&sink, &events[..20]).await));
    let _running = blocking(move || {
        broker.stop().expect("it ends");
        broker.start_again().expect("it starts");
        broker
    })
    .await;
    let until = Instant::now() + PATIENCE * 3;
    let mut pending = events.clone();
    while !pending.is_empty() {
        assert!(Instant::now() < until, "all arrive");
        let outcomes = publish(&sink, &pending).await;
        let open = pending.into_iter().zip(outcomes);
        let open = open.filter(|(_, one)| matches!(one, Outcome::Failed(_) | Outcome::HeldBack));
        pending = open.map(|(event, _)| event).collect();
    }
    assert_eq!(committed_ids(&brokers).await, ids(&events));
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_topic_of_notes_nothing_is_sent_and_the_error_names_it() {
    let broker = empty_broker().await;
    let brokers = brokers(&broker);
    make_topic(&brokers, TOPIC, 1, &[]).await;
    let sink = sink(&settings(&*brokers));
    assert!(sink.check().await.expect_err("it is missing").chain().contains(NOTES));
    let event = one("a", 1);
    let error = fail(&sink, &event).await;
    assert!(matches!(error.kind(), ErrorKind::Throttled { .. }), "{error:?}");
    assert!(error.chain().contains(NOTES), "{error:?}");
    make_topic(&brokers, NOTES, 1, &[]).await;
    sink.check().await.expect("it is there");
    assert!(all_confirmed(&publish(&sink, &[event]).await));
}

/// Compaction keeps the last note alone, since all notes of a sink have one key.
#[tokio::test(flavor = "multi_thread")]
async fn a_topic_of_notes_that_is_compacted_is_told() {
    let broker = empty_broker().await;
    let brokers = brokers(&broker);
    make_topic(&brokers, TOPIC, 1, &[]).await;
    for (name, policy, is_fine) in [
        ("kept", "delete", true),
        ("compacted", "compact", false),
        ("both", "compact,delete", false),
    ] {
        make_topic(&brokers, name, 1, &[("cleanup.policy", policy)]).await;
        let settings = KafkaConfig { transactions_topic: name.into(), ..settings(&*brokers) };
        let checked = sink(&settings).check().await.map_err(|error| error.chain());
        assert_eq!(checked.is_ok(), is_fine, "{name}: {checked:?}");
        assert!(checked.err().is_none_or(|text| text.contains("cleanup.policy=delete")), "{name}");
    }
}
