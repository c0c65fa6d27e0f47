//! The RabbitMQ sink against a real server.
//!
//! What lives here: what the tests share. What does not: tables of one file, which are tested
//! beside it.
//! Invariant: every test has an exchange and a queue of its own, and reads what arrived from the
//! queue. Only a test that disturbs the server has a server of its own.

mod failures;
mod guide;
mod middle;
mod routing;
mod streams;
mod suite;
mod tls;
mod trouble;

use std::sync::Arc;

use lapin::options::{
    BasicGetOptions, BasicNackOptions, ExchangeDeclareOptions, QueueBindOptions,
    QueueDeclareOptions, QueuePurgeOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, Connection, ConnectionProperties, ExchangeKind};
use postrider_conformance::samples::{event_with_id, fresh_id, record};
use postrider_conformance::sink::Delivered;
use postrider_core::{Error, EventId, Outcome, PartitionId, Publish, Record, Secret, Sink};
use postrider_servers::rabbitmq::{self, RabbitMq as Server, Tls};
use postrider_sink_rabbitmq::{RabbitMq, RabbitMqConfig};
use uuid::Uuid;

/// An exchange with a queue, under names of their own, and a look into the queue.
struct Broker {
    url: String,
    exchange: String,
    queue: String,
    channel: Channel,
    _connection: Connection,
}

impl Broker {
    /// On the server that tests share.
    async fn shared() -> Self {
        let url = tokio::task::spawn_blocking(rabbitmq::shared).await.expect("no panic");
        Self::on(url.expect("a server"), FieldTable::default()).await
    }

    /// With a direct exchange and an empty queue, to which nothing is routed yet.
    async fn on(url: String, arguments: FieldTable) -> Self {
        // Without a limit of its own the client takes the server's, also where that is none.
        let limited = format!("{url}/%2f?frame_max=131072");
        let connection = Connection::connect(&limited, ConnectionProperties::default()).await;
        let connection = connection.expect("the server answers");
        let channel = connection.create_channel().await.expect("a channel");
        let name = Uuid::new_v4();
        let (exchange, queue) = (format!("events-{name}"), format!("queue-{name}"));
        let durable = ExchangeDeclareOptions { durable: true, ..Default::default() };
        let (kind, none) = (ExchangeKind::Direct, FieldTable::default());
        channel
            .exchange_declare(exchange.as_str().into(), kind, durable, none)
            .await
            .expect("made");
        let durable = QueueDeclareOptions { durable: true, ..Default::default() };
        channel.queue_declare(queue.as_str().into(), durable, arguments).await.expect("made");
        Self { url, exchange, queue, channel, _connection: connection }
    }

    /// Routes a key to the queue.
    async fn bind(&self, routing_key: &str) {
        let (queue, exchange) = (self.queue.as_str().into(), self.exchange.as_str().into());
        let options = QueueBindOptions::default();
        let bound = self.channel.queue_bind(
            queue,
            exchange,
            routing_key.into(),
            options,
            FieldTable::default(),
        );
        bound.await.expect("bound");
    }

    /// A broker whose queue takes the samples' topic.
    async fn bound() -> Self {
        let broker = Self::shared().await;
        broker.bind("orders").await;
        broker
    }

    fn config(&self) -> RabbitMqConfig {
        config(&self.url, &self.exchange)
    }

    async fn purge(&self) {
        let queue = self.queue.as_str().into();
        self.channel.queue_purge(queue, QueuePurgeOptions::default()).await.expect("purged");
    }

    /// All that the queue holds, in its order; it stays there.
    async fn stored(&self) -> Vec<Delivered> {
        stored(&self.channel, &self.queue).await
    }

    async fn ids(&self) -> Vec<EventId> {
        self.stored().await.iter().map(|one| one.id).collect()
    }
}

async fn stored(channel: &Channel, queue: &str) -> Vec<Delivered> {
    let mut found = Vec::new();
    while let Some(message) =
        channel.basic_get(queue.into(), BasicGetOptions::default()).await.expect("read")
    {
        let properties = &message.delivery.properties;
        let text = |value: &Option<lapin::types::ShortString>| {
            value.as_ref().expect("a property").to_string()
        };
        assert_eq!(*properties.delivery_mode(), Some(2), "persistent");
        let mut headers: Vec<(String, String)> = Vec::new();
        let mut own = std::collections::HashMap::new();
        for (name, value) in properties.headers().as_ref().expect("headers").inner() {
            // A quorum queue's own.
            if name.as_str() == "x-delivery-count" {
                continue;
            }
            let AMQPValue::LongString(value) = value else { panic!("{name}: {value:?}") };
            match name.as_str() {
                "postrider-key" | "postrider-topic" => own.insert(name.as_str(), value.to_string()),
                _ => {
                    headers.push((name.as_str().to_ascii_lowercase(), value.to_string()));
                    None
                }
            };
        }
        headers.sort();
        let id: Uuid = text(properties.message_id()).parse().expect("a UUID");
        found.push(Delivered {
            id: EventId::from_uuid(id),
            key: own.remove("postrider-key").expect("a key"),
            topic: own.remove("postrider-topic").expect("a topic"),
            event_type: text(properties.kind()),
            content_type: text(properties.content_type()),
            headers,
            payload: message.delivery.data,
        });
    }
    // All of them go back to their places.
    let back = BasicNackOptions { multiple: true, requeue: true };
    if !found.is_empty() {
        channel.basic_nack(0, back).await.expect("given back");
    }
    found
}

/// A server of its own, started off the runtime's threads.
async fn server(settings: &'static str, tls: Tls) -> Server {
    let started = tokio::task::spawn_blocking(move || Server::start_with(settings, tls)).await;
    started.expect("no panic").expect("a server")
}

fn config(url: &str, exchange: &str) -> RabbitMqConfig {
    RabbitMqConfig { timeout_ms: 5_000, ..RabbitMqConfig::new(vec![Secret::new(url)], exchange) }
}

fn sink(config: &RabbitMqConfig) -> Arc<RabbitMq> {
    Arc::new(RabbitMq::new(config).expect("valid settings"))
}

fn one(key: &str, n: u64) -> Record {
    record(event_with_id(fresh_id(), key, n), n)
}

async fn publish(sink: &RabbitMq, records: &[Record]) -> Vec<Outcome> {
    let partition = PartitionId::numbered(0, 1);
    let outcomes = sink.publish(Publish::new(&partition, records)).await;
    assert_eq!(outcomes.len(), records.len());
    outcomes
}

async fn confirm(sink: &RabbitMq, record: &Record) {
    let outcomes = publish(sink, std::slice::from_ref(record)).await;
    assert!(matches!(outcomes[0], Outcome::Confirmed), "{outcomes:?}");
}

async fn fail(sink: &RabbitMq, record: &Record) -> Error {
    match publish(sink, std::slice::from_ref(record)).await.remove(0) {
        Outcome::Failed(error) => error,
        other => panic!("{other:?}"),
    }
}
