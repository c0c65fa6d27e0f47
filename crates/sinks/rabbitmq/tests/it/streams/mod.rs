//! The sink of streams against a real server.
//!
//! What lives here: what its tests share. What does not: queues, whose tests stand beside it.
//! Invariant: every test has a stream of its own and reads it over AMQP 0-9-1, by another client
//! than the one that is tested.

mod failures;
mod guide;
mod idle;
mod middle;
mod once;
mod suite;
mod trouble;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::StreamExt;
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions,
    ConfirmSelectOptions, ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions,
    QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties, ExchangeKind};
use postrider_conformance::sink::Delivered;
use postrider_core::{
    Clock, Error, EventId, Outcome, PartitionId, Publish, Record, Secret, Sink, Timestamp,
};
use postrider_servers::rabbitmq;
use postrider_sink_rabbitmq::{RabbitMqStream, RabbitMqStreamConfig};
use uuid::Uuid;

/// A stream under a name of its own, and a look into it.
struct Broker {
    /// For the stream protocol.
    url: String,
    stream: String,
    amqp: String,
    connection: Connection,
}

impl Broker {
    /// On the server that tests share.
    async fn shared() -> Self {
        let urls = tokio::task::spawn_blocking(|| {
            Ok::<_, postrider_servers::Error>((rabbitmq::shared()?, rabbitmq::shared_stream()?))
        });
        let (amqp, url) = urls.await.expect("no panic").expect("a server");
        Self::on(amqp, url).await
    }

    async fn on(amqp: String, url: String) -> Self {
        let broker = Self::without_stream(amqp, url).await;
        broker.make().await;
        broker
    }

    async fn without_stream(amqp: String, url: String) -> Self {
        let connection = connect(&amqp).await;
        Self { url, stream: format!("stream-{}", Uuid::new_v4()), amqp, connection }
    }

    async fn make(&self) {
        make(&self.channel().await, &self.stream).await;
    }

    async fn delete(&self) {
        let options = QueueDeleteOptions::default();
        let deleted = self.channel().await.queue_delete(self.stream.as_str().into(), options).await;
        deleted.expect("deleted");
    }

    async fn channel(&self) -> Channel {
        self.connection.create_channel().await.expect("a channel")
    }

    fn config(&self) -> RabbitMqStreamConfig {
        let servers = vec![Secret::new(self.url.clone())];
        RabbitMqStreamConfig::new(servers, self.stream.as_str(), "test")
    }

    /// Its address, without a login.
    fn address(&self) -> &str {
        self.url.rsplit_once('@').expect("a login").1
    }

    /// All that the stream holds, in its order.
    async fn stored(&self) -> Vec<Delivered> {
        self.deliveries().await.iter().map(delivered).collect()
    }

    async fn ids(&self) -> Vec<EventId> {
        self.stored().await.iter().map(|one| one.id).collect()
    }

    async fn deliveries(&self) -> Vec<Delivery> {
        // The server may have been started anew.
        let connection = connect(&self.amqp).await;
        let channel = connection.create_channel().await.expect("a channel");
        read(&channel, &self.stream).await
    }
}

async fn connect(amqp: &str) -> Connection {
    let limited = format!("{amqp}/%2f?frame_max=131072");
    let connection = Connection::connect(&limited, ConnectionProperties::default()).await;
    connection.expect("the server answers")
}

async fn make(channel: &Channel, stream: &str) {
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), AMQPValue::LongString("stream".into()));
    let durable = QueueDeclareOptions { durable: true, ..Default::default() };
    channel.queue_declare(stream.into(), durable, arguments).await.expect("made");
}

/// A super stream of so many, made as RabbitMQ's own tools make one; its name.
async fn make_super(broker: &Broker, streams: i64) -> String {
    let channel = broker.channel().await;
    let super_stream = format!("super-{}", broker.stream);
    let mut arguments = FieldTable::default();
    arguments.insert("x-super-stream".into(), AMQPValue::Boolean(true));
    let durable = ExchangeDeclareOptions { durable: true, ..Default::default() };
    let name = || super_stream.as_str().into();
    let made = channel.exchange_declare(name(), ExchangeKind::Direct, durable, arguments).await;
    made.expect("made");
    for n in 0..streams {
        let stream = format!("{super_stream}-{n}");
        make(&channel, &stream).await;
        let mut order = FieldTable::default();
        order.insert("x-stream-partition-order".into(), AMQPValue::LongLongInt(n));
        let (key, options) = (n.to_string(), QueueBindOptions::default());
        let bound =
            channel.queue_bind(stream.as_str().into(), name(), key.as_str().into(), options, order);
        bound.await.expect("bound");
    }
    super_stream
}

/// Puts a message behind all others and reads up to it. Such messages of others stay there.
async fn read(channel: &Channel, stream: &str) -> Vec<Delivery> {
    let end = Uuid::new_v4();
    channel.confirm_select(ConfirmSelectOptions::default()).await.expect("confirms");
    let options = BasicPublishOptions::default();
    let sent = channel.basic_publish(
        "".into(),
        stream.into(),
        options,
        end.as_bytes(),
        BasicProperties::default(),
    );
    sent.await.expect("sent").await.expect("confirmed");
    channel.basic_qos(100, BasicQosOptions::default()).await.expect("a limit");
    let mut from = FieldTable::default();
    from.insert("x-stream-offset".into(), AMQPValue::LongString("first".into()));
    let tag = Uuid::new_v4().to_string();
    let options = BasicConsumeOptions::default();
    let mut consumer = channel
        .basic_consume(stream.into(), tag.as_str().into(), options, from)
        .await
        .expect("a consumer");
    let mut found = Vec::new();
    loop {
        let delivery = consumer.next().await.expect("a message").expect("it goes on");
        delivery.acker.ack(BasicAckOptions::default()).await.expect("acknowledged");
        if delivery.data == end.as_bytes() {
            return found;
        }
        if delivery.properties.message_id().is_some() {
            found.push(delivery);
        }
    }
}

fn delivered(message: &Delivery) -> Delivered {
    let properties = &message.properties;
    let mut headers: Vec<(String, String)> = Vec::new();
    let mut own = HashMap::new();
    for (name, value) in properties.headers().as_ref().expect("headers").inner() {
        let AMQPValue::LongString(value) = value else { continue };
        match name.as_str() {
            "postrider-key" | "postrider-topic" | "postrider-type" => {
                drop(own.insert(name.as_str(), value.to_string()));
            }
            name => headers.push((name.to_ascii_lowercase(), value.to_string())),
        }
    }
    headers.sort();
    let id = properties.message_id().as_ref().expect("an id").to_string();
    let content_type = properties.content_type().as_ref().expect("a content type");
    let mut own = |name: &str| own.remove(name).unwrap_or_else(|| panic!("no {name}"));
    Delivered {
        id: EventId::from_uuid(id.parse().expect("a UUID")),
        key: own("postrider-key"),
        topic: own("postrider-topic"),
        event_type: own("postrider-type"),
        content_type: content_type.to_string(),
        headers,
        payload: message.data.clone(),
    }
}

/// As processes have it: producers are ranked by it.
struct Wall;

#[async_trait::async_trait]
impl Clock for Wall {
    #[expect(clippy::disallowed_methods, reason = "sinks of one test are told apart by real time")]
    fn now(&self) -> Timestamp {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Timestamp::default().plus(since)
    }
    fn elapsed(&self) -> Duration {
        Duration::ZERO
    }
    async fn sleep(&self, _: Duration) {}
}

fn sink(config: &RabbitMqStreamConfig) -> Arc<RabbitMqStream> {
    Arc::new(RabbitMqStream::new(config, Arc::new(Wall)).expect("valid settings"))
}

async fn publish(sink: &RabbitMqStream, records: &[Record]) -> Vec<Outcome> {
    let partition = PartitionId::numbered(0, 1);
    let outcomes = sink.publish(Publish::new(&partition, records)).await;
    assert_eq!(outcomes.len(), records.len());
    outcomes
}

/// Publishes some, and expects that all are confirmed as new.
async fn confirm(sink: &RabbitMqStream, records: &[Record]) {
    let outcomes = publish(sink, records).await;
    let all = outcomes.iter().all(|one| matches!(one, Outcome::Confirmed));
    assert!(all, "{outcomes:?}");
}

/// Publishes some, and expects that all are known to be stored.
async fn known(sink: &RabbitMqStream, records: &[Record]) {
    let outcomes = publish(sink, records).await;
    let all = outcomes.iter().all(|one| matches!(one, Outcome::Duplicate));
    assert!(all, "{outcomes:?}");
}

async fn fail(sink: &RabbitMqStream, record: &Record) -> Error {
    match publish(sink, std::slice::from_ref(record)).await.remove(0) {
        Outcome::Failed(error) => error,
        other => panic!("{other:?}"),
    }
}

/// Publishes until each is confirmed or known, as a relay does.
async fn publish_all(sink: &RabbitMqStream, records: &[Record]) {
    let deadline = tokio::time::Instant::now() + std::time::Duration::from_secs(60);
    loop {
        let outcomes = publish(sink, records).await;
        let done = |one: &Outcome| matches!(one, Outcome::Confirmed | Outcome::Duplicate);
        if outcomes.iter().all(done) {
            return;
        }
        assert!(tokio::time::Instant::now() < deadline, "{outcomes:?}");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}

fn ids_of(records: &[Record]) -> Vec<EventId> {
    records.iter().map(|record| record.event.id()).collect()
}
