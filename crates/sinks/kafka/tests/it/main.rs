//! The Kafka sink against a real broker.
//!
//! What lives here: what the tests share. What does not: tables of one file, which are tested
//! beside it.
//! Invariant: every test has a broker of its own, and reads what arrived from its topic.

mod access;
mod failures;
mod guard;
mod guide;
mod limits;
mod middle;
mod partitions;
mod stand_in;
mod suite;
mod transactions;

use std::sync::Arc;
use std::time::Duration;

use postrider_conformance::samples::{event_with_id, fresh_id, record};
use postrider_conformance::sink::Delivered;
use postrider_core::{Error, EventId, Outcome, PartitionId, Publish, Record, Sink};
use postrider_servers::kafka::Kafka as Broker;
use postrider_sink_kafka::{Kafka, KafkaConfig};
use rdkafka::ClientConfig;
use rdkafka::admin::{
    AdminClient, AdminOptions, AlterConfig, NewTopic, ResourceSpecifier, TopicReplication,
};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::{Headers, Message, OwnedMessage};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use uuid::Uuid;

/// The topic of all that tests send: their events'.
const TOPIC: &str = "orders";
const PATIENCE: Duration = Duration::from_secs(20);

/// Blocks elsewhere than on the runtime's threads.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.expect("no panic")
}

/// A broker without topics.
async fn empty_broker() -> Broker {
    blocking(|| Broker::start().expect("a broker")).await
}

/// A broker with the topic, in one partition.
async fn broker() -> Broker {
    let broker = empty_broker().await;
    make_topic(&brokers(&broker), TOPIC, 1, &[]).await;
    broker
}

fn brokers(broker: &Broker) -> String {
    broker.address().to_string()
}

fn admin(brokers: &str) -> AdminClient<DefaultClientContext> {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", brokers).create().expect("an address")
}

async fn make_topic(brokers: &str, name: &str, partitions: i32, settings: &[(&str, &str)]) {
    let mut topic = NewTopic::new(name, partitions, TopicReplication::Fixed(1));
    for (key, value) in settings {
        topic = topic.set(key, value);
    }
    let admin = admin(brokers);
    let made = admin.create_topics(&[topic], &AdminOptions::new()).await.expect("an answer");
    assert!(made.iter().all(Result::is_ok), "{made:?}");
    blocking(move || drop(admin)).await;
}

async fn delete_topic(brokers: &str, name: &str) {
    let admin = admin(brokers);
    let gone = admin.delete_topics(&[name], &AdminOptions::new()).await.expect("an answer");
    assert!(gone.iter().all(Result::is_ok), "{gone:?}");
    blocking(move || drop(admin)).await;
}

async fn set_limit(brokers: &str, topic: &str, bytes: usize) {
    let admin = admin(brokers);
    let value = bytes.to_string();
    let settings =
        AlterConfig::new(ResourceSpecifier::Topic(topic)).set("max.message.bytes", &value);
    let done = admin.alter_configs(&[settings], &AdminOptions::new()).await.expect("an answer");
    assert!(done.iter().all(Result::is_ok), "{done:?}");
    blocking(move || drop(admin)).await;
}

fn config(brokers: impl Into<String>) -> KafkaConfig {
    KafkaConfig { timeout_ms: 3_000, ..KafkaConfig::new(brokers) }
}

fn sink(config: &KafkaConfig) -> Arc<Kafka> {
    Arc::new(Kafka::new(config).expect("valid settings"))
}

/// All records of a topic, each partition's in order.
async fn records(brokers: &str, topic: &str) -> Vec<OwnedMessage> {
    let (brokers, topic) = (brokers.to_owned(), topic.to_owned());
    blocking(move || read(&brokers, &topic)).await
}

fn read(brokers: &str, topic: &str) -> Vec<OwnedMessage> {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", brokers).set("group.id", fresh_id().to_string());
    config.set("enable.auto.commit", "false").set("allow.auto.create.topics", "false");
    let consumer: BaseConsumer = config.create().expect("an address");
    let metadata = consumer.fetch_metadata(Some(topic), PATIENCE).expect("an answer");
    let mut missing = Vec::new();
    let mut from = TopicPartitionList::new();
    for partition in metadata.topics()[0].partitions() {
        let marks = consumer.fetch_watermarks(topic, partition.id(), PATIENCE).expect("an answer");
        if marks.1 > marks.0 {
            missing.push((partition.id(), marks.1));
        }
        from.add_partition_offset(topic, partition.id(), Offset::Beginning).expect("an offset");
    }
    consumer.assign(&from).expect("partitions");
    let mut found = Vec::new();
    let until = std::time::Instant::now() + PATIENCE;
    while !missing.is_empty() {
        assert!(std::time::Instant::now() < until, "records are missing: {missing:?}");
        let Some(message) = consumer.poll(Duration::from_millis(100)) else { continue };
        let message = message.expect("a record").detach();
        missing.retain(|(id, end)| *id != message.partition() || message.offset() + 1 < *end);
        found.push(message);
    }
    found.sort_by_key(|message| (message.partition(), message.offset()));
    found
}

fn header<'a>(message: &'a OwnedMessage, name: &str) -> Option<&'a str> {
    let headers = message.headers()?;
    let found = headers.iter().find(|header| header.key == name)?;
    Some(std::str::from_utf8(found.value.expect("a value")).expect("text"))
}

fn delivered(message: &OwnedMessage) -> Delivered {
    let text = |name: &str| header(message, name).expect(name).to_owned();
    let is_own = |name: &str| name.starts_with("postrider-") || name == "content-type";
    let mut headers = Vec::new();
    for one in message.headers().expect("headers").iter() {
        let value = String::from_utf8(one.value.expect("a value").to_vec()).expect("text");
        if !is_own(one.key) {
            headers.push((one.key.to_ascii_lowercase(), value));
        }
    }
    headers.sort();
    let id: Uuid = text("postrider-id").parse().expect("a UUID");
    Delivered {
        id: EventId::from_uuid(id),
        key: String::from_utf8(message.key().expect("a key").to_vec()).expect("text"),
        topic: text("postrider-topic"),
        event_type: text("postrider-type"),
        content_type: text("content-type"),
        headers,
        payload: message.payload().unwrap_or_default().to_vec(),
    }
}

/// All that the topic holds, in its order.
async fn stored(brokers: &str) -> Vec<Delivered> {
    records(brokers, TOPIC).await.iter().map(delivered).collect()
}

async fn stored_ids(brokers: &str) -> Vec<EventId> {
    stored(brokers).await.iter().map(|one| one.id).collect()
}

fn ids(records: &[Record]) -> Vec<EventId> {
    records.iter().map(|one| one.event.id()).collect()
}

fn one(key: &str, n: u64) -> Record {
    record(event_with_id(fresh_id(), key, n), n)
}

async fn publish(sink: &Kafka, records: &[Record]) -> Vec<Outcome> {
    let partition = PartitionId::numbered(0, 1);
    let outcomes = sink.publish(Publish::new(&partition, records)).await;
    assert_eq!(outcomes.len(), records.len());
    outcomes
}

async fn confirm(sink: &Kafka, record: &Record) {
    let outcomes = publish(sink, std::slice::from_ref(record)).await;
    assert!(matches!(outcomes[0], Outcome::Confirmed), "{outcomes:?}");
}

/// It is a failure.
async fn fail(sink: &Kafka, record: &Record) -> Error {
    match publish(sink, std::slice::from_ref(record)).await.remove(0) {
        Outcome::Failed(error) => error,
        other => panic!("{other:?}"),
    }
}

fn all_confirmed(outcomes: &[Outcome]) -> bool {
    outcomes.iter().all(|one| matches!(one, Outcome::Confirmed))
}

/// The first of a key's events fails and nothing else of it is sent.
fn first_failed(outcomes: &[Outcome]) -> &Error {
    assert!(outcomes[1..].iter().all(|one| matches!(one, Outcome::HeldBack)), "{outcomes:?}");
    match &outcomes[0] {
        Outcome::Failed(error) => error,
        other => panic!("{other:?}"),
    }
}
