//! The brokers, as both sides of a pair see them.
//!
//! What lives here: an empty stream or topic, what it holds, and who is told where it is. What does
//! not: who sends to it.
//! Invariant: a stream of NATS is kept in files, and a topic has four partitions; each is there
//! before anybody sends, and each message counts by the id of its event.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use async_nats::jetstream::{self, consumer, stream};
use async_trait::async_trait;
use futures_util::StreamExt;
use postrider_core::{Secret, Sink};
use postrider_servers::kafka::Kafka;
use postrider_servers::nats::{Nats, Version};
use postrider_sink_kafka::KafkaConfig;
use postrider_sink_nats::NatsConfig;
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::{Headers, Message};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use serde_json::json;
use tokio::sync::OnceCell;

const PARTITIONS: i32 = 4;
/// Longest wait for a broker's answer.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of a written id.
const ID_BYTES: usize = 36;

/// A broker.
#[async_trait]
pub(super) trait Place: Send + Sync {
    /// What [`sink`] takes.
    fn url(&self, name: &str) -> String;

    /// What mq-bridge takes as its output.
    fn output(&self, name: &str) -> serde_json::Value;

    /// Makes an empty stream or topic.
    async fn make(&self, name: &str) -> Result<()>;

    /// How many messages it holds.
    async fn held(&self, name: &str) -> Result<u64>;

    /// The events' ids of all of these messages.
    async fn ids(&self, name: &str, messages: u64) -> Result<Vec<String>>;

    async fn remove(&self, name: &str) -> Result<()>;
}

/// The sink of a place: `nats://127.0.0.1:4222/STREAM` or `kafka://127.0.0.1:9092/TOPIC`.
pub(crate) fn sink(place: &str) -> Result<Arc<dyn Sink>> {
    let parts = place.split_once("://").and_then(|(kind, rest)| {
        let (address, name) = rest.split_once('/')?;
        Some((kind, address, name))
    });
    match parts {
        Some(("nats", address, name)) => {
            let config = NatsConfig {
                subject: format!("{name}.{{topic}}"),
                stream: Some(name.to_owned()),
                ..NatsConfig::new(vec![Secret::new(format!("nats://{address}"))])
            };
            Ok(Arc::new(postrider_sink_nats::Nats::new(&config)?))
        }
        Some(("kafka", address, name)) => {
            let config = KafkaConfig { topic: name.to_owned(), ..KafkaConfig::new(address) };
            Ok(Arc::new(postrider_sink_kafka::Kafka::new(&config)?))
        }
        _ => bail!("{place} is no place: nats://HOST:PORT/STREAM or kafka://HOST:PORT/TOPIC"),
    }
}

/// NATS JetStream of Debian's version, whose streams are written to files at once and synced by its
/// own default, every two minutes.
pub(super) struct JetStream {
    server: Nats,
    client: OnceCell<async_nats::Client>,
}

impl JetStream {
    pub(super) fn start() -> Result<Self> {
        Ok(Self { server: Nats::start(Version::Old, "")?, client: OnceCell::new() })
    }

    pub(super) async fn client(&self) -> Result<&async_nats::Client> {
        let connect = || async { async_nats::connect(self.server.url()).await };
        Ok(self.client.get_or_try_init(connect).await?)
    }

    async fn context(&self) -> Result<jetstream::Context> {
        Ok(jetstream::new(self.client().await?.clone()))
    }
}

#[async_trait]
impl Place for JetStream {
    fn url(&self, name: &str) -> String {
        format!("{}/{name}", self.server.url())
    }

    fn output(&self, name: &str) -> serde_json::Value {
        let subject = format!("{name}.orders");
        json!({"nats": {"url": self.server.url(), "subject": subject, "stream": name}})
    }

    async fn make(&self, name: &str) -> Result<()> {
        let config = stream::Config {
            name: name.to_owned(),
            subjects: vec![format!("{name}.>")],
            storage: stream::StorageType::File,
            ..stream::Config::default()
        };
        self.context().await?.create_stream(config).await.context("make a stream").map(drop)
    }

    async fn held(&self, name: &str) -> Result<u64> {
        Ok(self.context().await?.get_stream(name).await?.cached_info().state.messages)
    }

    async fn ids(&self, name: &str, messages: u64) -> Result<Vec<String>> {
        let stream = self.context().await?.get_stream(name).await?;
        let config = consumer::pull::OrderedConfig::default();
        let mut read = stream.create_consumer(config).await?.messages().await?;
        let mut ids = Vec::new();
        for _ in 0..messages {
            let next = tokio::time::timeout(PATIENCE, read.next()).await?;
            let message = next.context("the stream ended")??;
            let headers = message.headers.as_ref();
            let header = headers.and_then(|all| all.get("Nats-Msg-Id")).map(AsRef::as_ref);
            ids.push(id(header, &message.payload)?);
        }
        Ok(ids)
    }

    async fn remove(&self, name: &str) -> Result<()> {
        self.context().await?.delete_stream(name).await?;
        Ok(())
    }
}

/// A broker that speaks Kafka's protocol.
pub(super) struct Topics {
    server: Kafka,
    counter: Arc<BaseConsumer>,
}

impl Topics {
    pub(super) fn start() -> Result<Self> {
        let server = Kafka::start()?;
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", server.address().to_string()).set("group.id", "count");
        Ok(Self { counter: Arc::new(config.create()?), server })
    }

    fn address(&self) -> SocketAddr {
        self.server.address()
    }

    fn client(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", self.address().to_string()).set("group.id", "read");
        config
    }

    fn admin(&self) -> Result<AdminClient<DefaultClientContext>> {
        Ok(self.client().create()?)
    }
}

#[async_trait]
impl Place for Topics {
    fn url(&self, name: &str) -> String {
        format!("kafka://{}/{name}", self.address())
    }

    fn output(&self, name: &str) -> serde_json::Value {
        json!({"kafka": {"url": self.address().to_string(), "topic": name}})
    }

    async fn make(&self, name: &str) -> Result<()> {
        let topic = NewTopic::new(name, PARTITIONS, TopicReplication::Fixed(1));
        let made = self.admin()?.create_topics(&[topic], &AdminOptions::new()).await?;
        ensure!(made.iter().all(Result::is_ok), "the topic was not made: {made:?}");
        Ok(())
    }

    async fn held(&self, name: &str) -> Result<u64> {
        let (reader, topic) = (Arc::clone(&self.counter), name.to_owned());
        let counted = tokio::task::spawn_blocking(move || {
            (0..PARTITIONS).try_fold(0, |sum, partition| {
                let (first, end) = reader.fetch_watermarks(&topic, partition, PATIENCE)?;
                anyhow::Ok(sum + u64::try_from(end - first)?)
            })
        });
        counted.await.context("count")?
    }

    async fn ids(&self, name: &str, messages: u64) -> Result<Vec<String>> {
        let (config, topic) = (self.client(), name.to_owned());
        let read = tokio::task::spawn_blocking(move || {
            let reader: BaseConsumer = config.create()?;
            let mut all = TopicPartitionList::new();
            for partition in 0..PARTITIONS {
                all.add_partition_offset(&topic, partition, Offset::Beginning)?;
            }
            reader.assign(&all)?;
            let (mut ids, give_up) = (Vec::new(), Instant::now() + PATIENCE);
            while (ids.len() as u64) < messages {
                ensure!(Instant::now() < give_up, "{} of {messages} messages came", ids.len());
                let Some(record) = reader.poll(Duration::from_millis(100)) else { continue };
                let record = record?;
                let mut headers = record.headers().into_iter().flat_map(Headers::iter);
                let own = headers.find(|one| one.key == "postrider-id");
                let header = own.and_then(|one| one.value).map(str::from_utf8).transpose()?;
                ids.push(id(header, record.payload().unwrap_or_default())?);
            }
            anyhow::Ok(ids)
        });
        read.await.context("read")?
    }

    async fn remove(&self, name: &str) -> Result<()> {
        let gone = self.admin()?.delete_topics(&[name], &AdminOptions::new()).await?;
        ensure!(gone.into_iter().all(|one| one.is_ok()), "the topic {name} was not deleted");
        Ok(())
    }
}

/// The id of a message's event: Postrider says it in a header, mq-bridge in the row that is the
/// message.
pub(super) fn id(header: Option<&str>, payload: &[u8]) -> Result<String> {
    if let Some(header) = header.filter(|text| text.len() == ID_BYTES) {
        return Ok(header.to_owned());
    }
    let text = str::from_utf8(payload).context("a message is no text")?;
    let after = text.find("\"id\"").map(|at| &text[at + 4..]);
    let begun = after.map(|rest| rest.trim_start_matches([':', ' ', '"']));
    let id = begun.and_then(|rest| rest.get(..ID_BYTES));
    Ok(id.with_context(|| format!("a message has no id: {text}"))?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_found_on_either_side() {
        let one = "0196f7a2-1c1e-7abc-8def-0123456789ab";
        assert_eq!(id(Some(one), b"{}").expect("a header"), one);
        for text in [format!("{{\"id\":\"{one}\"}}"), format!("{{\"n\": 1, \"id\": \"{one}\"}}")] {
            assert_eq!(id(None, text.as_bytes()).expect("a row"), one);
        }
        assert!(id(None, b"{\"id\":\"7\"}").is_err());
    }
}
