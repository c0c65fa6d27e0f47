//! RabbitMQ: a durable queue, which drops no repetitions.
//!
//! What lives here: the queue, and emptying it. What does not: outages (`mod.rs`), the server,
//! streams (`rabbitmq_stream.rs`).
//! Invariant: relays have no more events under way, all together, than is told of the queue's
//! nature: a repetition of anything else is one too many.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures_util::StreamExt;
use lapin::message::Delivery;
use lapin::options::{
    BasicConsumeOptions, ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{Channel, Connection, ConnectionProperties, ExchangeKind};
use postrider_conformance::sink::Delivered;
use postrider_core::EventId;
use postrider_servers::rabbitmq::RabbitMq;
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;
use uuid::Uuid;

use super::{Nature, PATIENCE, Server, Takes};
use crate::schedule::Schedule;

const EXCHANGE: &str = "events";
const QUEUE: &str = "events";
const ANY_KEY: &str = "#";
/// Of one relay's sink (`in_flight`, in a hurry): few, so that little is in doubt.
const UNDER_WAY: u64 = 16;
/// The largest message that the server takes while it refuses: about one event in a hundred is
/// larger.
const SMALL: &str = "max_message_size = 40000";
/// Lets it take larger ones on channels that are opened from now on.
const LET_LARGE: &str = "application:set_env(rabbit, max_message_size, 134217728).";
/// What the proxy waits before each piece while the broker is slow.
const SLOW: Duration = Duration::from_millis(20);
/// What a quorum queue adds.
const COUNT_HEADER: &str = "x-delivery-count";
/// What a stream adds.
const OFFSET_HEADER: &str = "x-stream-offset";

/// A running server with its queue.
pub(super) struct Queue {
    server: RabbitMq,
    runtime: Runtime,
    open: Option<(Connection, Channel)>,
    relays: u64,
    /// Whether it takes small messages only, and starts so again.
    limited: bool,
}

impl Queue {
    /// A classic queue or, in every other schedule that has a queue, a quorum queue.
    pub(super) fn start(schedule: &Schedule, takes: Takes) -> Result<Self> {
        let limited = takes == Takes::Small;
        let server = RabbitMq::start(if limited { SMALL } else { "" }).context("start RabbitMQ")?;
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.context("start a runtime")?;
        let relays = schedule.relays as u64;
        let mut queue = Self { server, runtime, open: None, relays, limited };
        let mut arguments = FieldTable::default();
        if schedule.index % 4 == 2 {
            arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
        }
        queue.ask(async move |channel| {
            let durable = ExchangeDeclareOptions { durable: true, ..Default::default() };
            let (kind, none) = (ExchangeKind::Topic, FieldTable::default());
            channel.exchange_declare(EXCHANGE.into(), kind, durable, none).await?;
            let durable = QueueDeclareOptions { durable: true, ..Default::default() };
            channel.queue_declare(QUEUE.into(), durable, arguments).await.map(drop)
        })?;
        Ok(queue)
    }

    /// Asks on the connection that there is; on a new one if that has ended.
    fn ask<T>(&mut self, ask: impl AsyncFnOnce(Channel) -> lapin::Result<T>) -> Result<T> {
        let Self { open, runtime, server, .. } = self;
        let asked = async {
            let channel = match open.take().filter(|(_, channel)| channel.status().connected()) {
                Some((connection, channel)) => open.insert((connection, channel)).1.clone(),
                None => open.insert(connect(&server.url()).await?).1.clone(),
            };
            ask(channel).await.context("ask RabbitMQ")
        };
        runtime.block_on(async { timeout(PATIENCE, asked).await }).context("wait for RabbitMQ")?
    }
}

pub(super) async fn connect(url: &str) -> Result<(Connection, Channel)> {
    // Without a limit of its own the client takes the server's, also where that is none.
    let limited = format!("{url}/%2f?frame_max=131072");
    let connection = Connection::connect(&limited, ConnectionProperties::default()).await;
    let connection = connection.context("connect to RabbitMQ")?;
    let channel = connection.create_channel().await.context("open a channel")?;
    Ok((connection, channel))
}

impl Server for Queue {
    fn address(&self) -> SocketAddr {
        self.server.address()
    }

    fn nature(&self) -> Nature {
        let under_way = UNDER_WAY * self.relays;
        Nature { drops_repetitions: false, under_way, slow: SLOW, forgets_at_its_end: false }
    }

    fn settings(&self, port: u16) -> String {
        format!(
            "kind = \"rabbitmq\"\nservers = [\"amqp://guest:guest@127.0.0.1:{port}\"]\n\
             exchange = \"{EXCHANGE}\"\n"
        )
    }

    fn hurry(&self) -> &'static str {
        "in_flight = 16\ntimeout_ms = 3000\nconnect_timeout_ms = 3000\n"
    }

    fn stop(&mut self) -> Result<()> {
        Ok(self.server.stop()?)
    }

    fn kill(&mut self) -> Result<()> {
        Ok(self.server.kill()?)
    }

    fn start_again(&mut self) -> Result<()> {
        Ok(self.server.start_again()?)
    }

    fn take(&mut self, what: Takes) -> Result<()> {
        if what == Takes::All && std::mem::take(&mut self.limited) {
            self.server.control(&["eval", LET_LARGE])?;
        }
        self.ask(async move |channel| {
            let (queue, exchange, key) = (QUEUE.into(), EXCHANGE.into(), ANY_KEY.into());
            let none = FieldTable::default();
            match what {
                Takes::All | Takes::Small => {
                    let options = QueueBindOptions::default();
                    channel.queue_bind(queue, exchange, key, options, none).await
                }
                // Whatever is sent is unroutable then.
                Takes::Nothing => channel.queue_unbind(queue, exchange, key, none).await,
            }
        })
    }

    fn count(&mut self) -> Result<u64> {
        self.ask(async |channel| {
            let passive =
                QueueDeclareOptions { passive: true, durable: true, ..Default::default() };
            let queue = channel.queue_declare(QUEUE.into(), passive, FieldTable::default()).await?;
            Ok(u64::from(queue.message_count()))
        })
    }

    /// The queue is empty afterwards.
    fn held(&mut self) -> Result<Vec<Result<Delivered>>> {
        let count = self.count()?;
        let mut held = self.ask(async move |channel| {
            let options = BasicConsumeOptions { no_ack: true, ..Default::default() };
            let (queue, tag, none) = (QUEUE.into(), "judge".into(), FieldTable::default());
            let mut consumer = channel.basic_consume(queue, tag, options, none).await?;
            let mut held = Vec::new();
            for _ in 0..count {
                let Some(delivery) = consumer.next().await else { break };
                held.push(message(delivery?));
            }
            Ok(held)
        })?;
        let left = self.count()?;
        if (held.len() as u64, left) != (count, 0) {
            let got = held.len();
            held.push(Err(anyhow::anyhow!("of {count} messages {got} came, and {left} are left")));
        }
        Ok(held)
    }
}

/// The event, as it arrived.
pub(super) fn message(delivery: Delivery) -> Result<Delivered> {
    let properties = &delivery.properties;
    let text = |value: &Option<ShortString>, what: &str| {
        let value = value.as_ref().with_context(|| format!("a message has no {what}"))?;
        anyhow::Ok(value.to_string())
    };
    let (mut own, mut headers) = (HashMap::new(), Vec::new());
    let table = properties.headers().as_ref().context("a message has no headers")?;
    for (name, value) in table.inner() {
        let name = name.as_str();
        if [COUNT_HEADER, OFFSET_HEADER].contains(&name) {
            continue;
        }
        let AMQPValue::LongString(value) = value else {
            anyhow::bail!("the header {name} of a message is {value:?}")
        };
        match name {
            "postrider-key" | "postrider-topic" | "postrider-type" => {
                drop(own.insert(name, value.to_string()))
            }
            _ => headers.push((name.to_ascii_lowercase(), value.to_string())),
        }
    }
    headers.sort();
    let id: Uuid = text(properties.message_id(), "id")?.parse().context("read an id")?;
    Ok(Delivered {
        id: EventId::from_uuid(id),
        key: own.remove("postrider-key").context("a message has no key")?,
        topic: own.remove("postrider-topic").context("a message has no topic")?,
        event_type: match own.remove("postrider-type") {
            // A stream's messages have it there, and are all persistent.
            Some(name) => name,
            None => {
                let persistent = *properties.delivery_mode() == Some(2);
                ensure!(persistent, "a message is not persistent");
                text(properties.kind(), "type")?
            }
        },
        content_type: text(properties.content_type(), "content type")?,
        headers,
        payload: delivery.data,
    })
}
