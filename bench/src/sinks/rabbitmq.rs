//! RabbitMQ.
//!
//! What lives here: the queue, and `lapin` by itself. What does not: the pairs (`mod.rs`).
//! Invariant: the baseline's messages have the properties that the sink gives them, are mandatory
//! and persistent, and each one's confirmation is awaited.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Result, ensure};
use async_trait::async_trait;
use bytes::Bytes;
use lapin::options::{
    BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties};
use postrider_core::{Event, Secret, Sink};
use postrider_servers::rabbitmq::RabbitMq;
use postrider_sink_rabbitmq::RabbitMqConfig;

use super::{Broker, Cost, PIPELINED, Setting, timed};

struct Queues {
    server: RabbitMq,
    durable: bool,
}

pub(super) fn start(setting: Setting) -> Result<Box<dyn Broker>> {
    let server = RabbitMq::start("")?;
    Ok(Box::new(Queues { server, durable: setting == Setting::Durable }))
}

impl Queues {
    async fn channel(&self) -> Result<(Connection, Channel)> {
        let url = format!("{}/%2f?frame_max=131072", self.server.url());
        let connection = Connection::connect(&url, ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        Ok((connection, channel))
    }
}

#[async_trait]
impl Broker for Queues {
    fn address(&self) -> SocketAddr {
        self.server.address()
    }

    async fn make(&self, name: &str) -> Result<()> {
        let (_connection, channel) = self.channel().await?;
        let options = QueueDeclareOptions { durable: self.durable, ..Default::default() };
        channel.queue_declare(name.into(), options, FieldTable::default()).await?;
        Ok(())
    }

    fn sink(&self, name: &str, port: u16) -> Result<Arc<dyn Sink>> {
        let server = Secret::new(format!("amqp://guest:guest@127.0.0.1:{port}"));
        let config = RabbitMqConfig {
            routing_key: name.to_owned(),
            ..RabbitMqConfig::new(vec![server], "")
        };
        Ok(Arc::new(postrider_sink_rabbitmq::RabbitMq::new(&config)?))
    }

    async fn send(&self, name: &str, events: &[Event]) -> Result<Cost> {
        let (_connection, channel) = self.channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        let messages: Vec<(BasicProperties, Bytes)> =
            events.iter().map(|event| (properties(event), event.payload().clone())).collect();
        let options = BasicPublishOptions { mandatory: true, immediate: false };
        timed(async {
            let mut waiting = VecDeque::with_capacity(PIPELINED);
            for (properties, payload) in messages {
                if waiting.len() == PIPELINED
                    && let Some(first) = waiting.pop_front()
                {
                    confirmed(first).await?;
                }
                let sent =
                    channel.basic_publish("".into(), name.into(), options, &payload, properties);
                waiting.push_back(sent.await?);
            }
            for rest in waiting {
                confirmed(rest).await?;
            }
            Ok(())
        })
        .await
    }

    async fn end(&self, name: &str) -> Result<u64> {
        let (_connection, channel) = self.channel().await?;
        let held = channel.queue_delete(name.into(), QueueDeleteOptions::default()).await?;
        Ok(held.into())
    }
}

async fn confirmed(sent: impl Future<Output = lapin::Result<Confirmation>>) -> Result<()> {
    let confirmation = sent.await?;
    ensure!(matches!(confirmation, Confirmation::Ack(None)), "a message was not confirmed");
    Ok(())
}

fn properties(event: &Event) -> BasicProperties {
    let mut headers = FieldTable::default();
    for (name, value) in
        [("postrider-topic", event.topic().as_str()), ("postrider-key", event.key().as_str())]
    {
        headers.insert(name.into(), AMQPValue::LongString(value.into()));
    }
    BasicProperties::default()
        .with_message_id(event.id().to_string().into())
        .with_type(event.event_type().as_str().into())
        .with_content_type(event.content_type().as_str().into())
        .with_delivery_mode(2)
        .with_timestamp(1)
        .with_headers(headers)
}
