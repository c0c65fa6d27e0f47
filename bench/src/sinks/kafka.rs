//! A broker that speaks Kafka's protocol.
//!
//! What lives here: the topic, and `rdkafka` by itself. What does not: the pairs (`mod.rs`).
//! Invariant: the baseline is an idempotent producer as the sink's is, its records have the headers
//! that the sink gives them, and each one's confirmation by all replicas is counted.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, ensure};
use async_trait::async_trait;
use postrider_core::{Event, Sink};
use postrider_servers::kafka::{Kafka, Way};
use postrider_sink_kafka::KafkaConfig;
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::{ClientContext, DefaultClientContext};
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{DeliveryResult, Header, OwnedHeaders};
use rdkafka::producer::{BaseRecord, Producer, ProducerContext, ThreadedProducer};

use super::{Broker, Cost, Setting, timed};

const PARTITIONS: i32 = 4;
const PATIENCE: Duration = Duration::from_secs(60);
/// How soon a full queue is tried again.
const QUEUE_POLL: Duration = Duration::from_millis(1);

struct Topics {
    server: Kafka,
    /// Clients of a proxy before it stay behind the proxy.
    way: Way,
}

/// It keeps records in memory until it stops, whatever it is told.
pub(super) fn start(_: Setting) -> Result<Box<dyn Broker>> {
    let server = Kafka::start()?;
    let way = Way::start(server.address())?;
    Ok(Box::new(Topics { server, way }))
}

impl Topics {
    fn client(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", self.server.address().to_string());
        config
    }

    fn admin(&self) -> Result<AdminClient<DefaultClientContext>> {
        Ok(self.client().create()?)
    }
}

/// Counts confirmations.
#[derive(Default)]
struct Counter {
    confirmed: AtomicU64,
}

impl ClientContext for Counter {}

impl ProducerContext for Counter {
    type DeliveryOpaque = ();

    fn delivery(&self, result: &DeliveryResult<'_>, (): ()) {
        if result.is_ok() {
            self.confirmed.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[async_trait]
impl Broker for Topics {
    fn address(&self) -> SocketAddr {
        self.way.address()
    }

    async fn make(&self, name: &str) -> Result<()> {
        let topic = NewTopic::new(name, PARTITIONS, TopicReplication::Fixed(1));
        let made = self.admin()?.create_topics(&[topic], &AdminOptions::new()).await?;
        ensure!(made.iter().all(Result::is_ok), "the topic was not made: {made:?}");
        Ok(())
    }

    fn sink(&self, name: &str, port: u16) -> Result<Arc<dyn Sink>> {
        // What measures goes to the broker itself; what counts goes by a proxy before the way.
        let port = match port == self.way.address().port() {
            true => self.server.address().port(),
            false => {
                self.way.tell(port);
                port
            }
        };
        let brokers = format!("127.0.0.1:{port}");
        let config = KafkaConfig { topic: name.to_owned(), ..KafkaConfig::new(brokers) };
        Ok(Arc::new(postrider_sink_kafka::Kafka::new(&config)?))
    }

    async fn send(&self, name: &str, events: &[Event]) -> Result<Cost> {
        let mut config = self.client();
        config.set("enable.idempotence", "true").set("partitioner", "murmur2_random");
        let producer: ThreadedProducer<Counter> = config.create_with_context(Counter::default())?;
        // Connected before the time begins.
        producer.client().fetch_metadata(Some(name), PATIENCE)?;
        let headers: Vec<OwnedHeaders> = events.iter().map(headers).collect();
        let events = events.to_vec();
        let name = name.to_owned();
        let work = move || {
            for (event, headers) in events.iter().zip(headers) {
                let record = BaseRecord::to(&name).headers(headers);
                let mut record =
                    record.key(event.key().as_str().as_bytes()).payload(event.payload().as_ref());
                while let Err((error, back)) = producer.send(record) {
                    let full = KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull);
                    ensure!(error == full, "a record was not taken: {error}");
                    std::thread::sleep(QUEUE_POLL);
                    record = back;
                }
            }
            producer.flush(PATIENCE)?;
            let confirmed = producer.context().confirmed.load(Ordering::Relaxed);
            ensure!(confirmed == events.len() as u64, "{confirmed} records were confirmed");
            Ok(())
        };
        timed(async { tokio::task::spawn_blocking(work).await.context("send")? }).await
    }

    async fn end(&self, name: &str) -> Result<u64> {
        let mut config = self.client();
        let (topic, config) = (name.to_owned(), config.set("group.id", "count").clone());
        let counted = tokio::task::spawn_blocking(move || {
            let reader: BaseConsumer = config.create()?;
            (0..PARTITIONS).try_fold(0, |sum, partition| {
                let (first, end) = reader.fetch_watermarks(&topic, partition, PATIENCE)?;
                let held = u64::try_from(end - first)?;
                anyhow::Ok(sum + held)
            })
        });
        let held = counted.await.context("count")??;
        let gone = self.admin()?.delete_topics(&[name], &AdminOptions::new()).await?;
        match gone.into_iter().all(|one| one.is_ok()) {
            true => Ok(held),
            false => Err(anyhow!("the topic {name} was not deleted")),
        }
    }
}

fn headers(event: &Event) -> OwnedHeaders {
    let id = event.id().to_string();
    let mut headers = OwnedHeaders::new();
    for (key, value) in [
        ("postrider-id", id.as_str()),
        ("postrider-topic", event.topic().as_str()),
        ("postrider-type", event.event_type().as_str()),
        ("postrider-time", "2026-11-27T22:00:00.000Z"),
        ("content-type", event.content_type().as_str()),
    ] {
        headers = headers.insert(Header { key, value: Some(value) });
    }
    headers
}
