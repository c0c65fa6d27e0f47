//! RabbitMQ: a stream, which drops repetitions by publishing ids.
//!
//! What lives here: the stream, and reading it. What does not: outages (`mod.rs`), the server,
//! queues (`rabbitmq.rs`).
//! Invariant: it is read by another client over another protocol than the one that is judged.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures_util::StreamExt;
use lapin::options::{
    BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions,
    ConfirmSelectOptions, QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection};
use postrider_conformance::sink::Delivered;
use postrider_servers::rabbitmq::RabbitMq;
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;
use uuid::Uuid;

use super::rabbitmq::{connect, message};
use super::{Nature, PATIENCE, Server, Takes};
use crate::writer::LARGEST;

const STREAM: &str = "events";
/// The largest frame that the server takes: one event, and not much more than the proxy lets pass
/// before it cuts.
const USUAL_FRAME: usize = LARGEST + (24 << 10);
/// The same while it refuses: about one event in a hundred is larger.
const SMALL_FRAME: usize = 40_000;
/// What the proxy waits before each piece while the broker is slow.
const SLOW: Duration = Duration::from_millis(20);
/// How soon a server that has just started is asked again for its stream.
const AGAIN_AFTER: Duration = Duration::from_millis(100);
/// Messages that the reader has not acknowledged, at most.
const AHEAD: u16 = 500;

/// A running server with its stream.
pub(super) struct Stream {
    server: RabbitMq,
    runtime: Runtime,
    open: Option<(Connection, Channel)>,
    /// Whether it takes small frames only.
    limited: bool,
    /// Whether it was told that its disk is full.
    is_full: bool,
}

fn settings(limited: bool) -> String {
    let frame = if limited { SMALL_FRAME } else { USUAL_FRAME };
    format!("stream.frame_max = {frame}")
}

impl Stream {
    pub(super) fn start(takes: Takes) -> Result<Self> {
        let limited = takes == Takes::Small;
        let server = RabbitMq::start(&settings(limited)).context("start RabbitMQ")?;
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.context("start a runtime")?;
        let mut stream = Self { server, runtime, open: None, limited, is_full: false };
        stream.ask(async |channel| {
            let durable = QueueDeclareOptions { durable: true, ..Default::default() };
            let mut arguments = FieldTable::default();
            arguments.insert("x-queue-type".into(), AMQPValue::LongString("stream".into()));
            channel.queue_declare(STREAM.into(), durable, arguments).await.map(drop)
        })?;
        stream.server.wait_until_streams_last().context("keep the stream")?;
        Ok(stream)
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

    fn fill(&mut self, full: bool) -> Result<()> {
        if std::mem::replace(&mut self.is_full, full) != full {
            self.server.is_short_of_disk(full)?;
        }
        Ok(())
    }
}

impl Server for Stream {
    fn address(&self) -> SocketAddr {
        self.server.stream_address()
    }

    fn nature(&self) -> Nature {
        // Nothing is in doubt where repetitions are dropped.
        Nature { drops_repetitions: true, under_way: 0, slow: SLOW, forgets_at_its_end: false }
    }

    fn settings(&self, port: u16) -> String {
        format!(
            "kind = \"rabbitmq-stream\"\n\
             servers = [\"rabbitmq-stream://guest:guest@127.0.0.1:{port}\"]\n\
             stream = \"{STREAM}\"\nproducer = \"faults\"\n"
        )
    }

    fn hurry(&self) -> &'static str {
        "timeout_ms = 3000\nconnect_timeout_ms = 3000\n"
    }

    fn stop(&mut self) -> Result<()> {
        // What it is told of its disk it forgets.
        (self.is_full, self.open) = (false, None);
        Ok(self.server.stop()?)
    }

    fn kill(&mut self) -> Result<()> {
        (self.is_full, self.open) = (false, None);
        Ok(self.server.kill()?)
    }

    /// The stream is there a while after the server is.
    fn start_again(&mut self) -> Result<()> {
        self.server.start_again()?;
        let deadline = Instant::now() + PATIENCE;
        while let Err(error) = self.count() {
            ensure!(Instant::now() < deadline, "the stream does not come back: {error:#}");
            std::thread::sleep(AGAIN_AFTER);
        }
        Ok(())
    }

    fn take(&mut self, what: Takes) -> Result<()> {
        if what == Takes::All && std::mem::take(&mut self.limited) {
            // It hears of another limit only when it starts.
            self.stop()?;
            self.server.configure(&settings(false))?;
            self.start_again()?;
        }
        self.fill(what == Takes::Nothing)
    }

    fn count(&mut self) -> Result<u64> {
        self.ask(async |channel| {
            let passive =
                QueueDeclareOptions { passive: true, durable: true, ..Default::default() };
            let none = FieldTable::default();
            let queue = channel.queue_declare(STREAM.into(), passive, none).await?;
            Ok(u64::from(queue.message_count()))
        })
    }

    /// Up to a message of this runner's own, which it puts at the end.
    fn held(&mut self) -> Result<Vec<Result<Delivered>>> {
        self.ask(async |channel| {
            let end = Uuid::new_v4();
            channel.confirm_select(ConfirmSelectOptions::default()).await?;
            let (none, options) = (BasicProperties::default(), BasicPublishOptions::default());
            let put =
                channel.basic_publish("".into(), STREAM.into(), options, end.as_bytes(), none);
            put.await?.await?;
            channel.basic_qos(AHEAD, BasicQosOptions::default()).await?;
            let mut from = FieldTable::default();
            from.insert("x-stream-offset".into(), AMQPValue::LongString("first".into()));
            let tag = end.to_string();
            let options = BasicConsumeOptions::default();
            let consumer = channel.basic_consume(STREAM.into(), tag.as_str().into(), options, from);
            let mut consumer = consumer.await?;
            let mut held = Vec::new();
            while let Some(delivery) = consumer.next().await {
                let delivery = delivery?;
                delivery.acker.ack(BasicAckOptions::default()).await?;
                if delivery.data == end.as_bytes() {
                    let cancelled = BasicCancelOptions::default();
                    channel.basic_cancel(tag.as_str().into(), cancelled).await?;
                    return Ok(held);
                }
                if delivery.properties.message_id().is_some() {
                    held.push(message(delivery));
                }
            }
            held.push(Err(anyhow::anyhow!("the reader ended before the stream did")));
            Ok(held)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_stream_outlives_the_kill_of_its_server() {
        let mut stream = Stream::start(Takes::All).expect("a server with its stream");
        stream.kill().expect("killed");
        stream.start_again().expect("the stream");
        assert_eq!(stream.count().expect("a count"), 0);
    }
}
