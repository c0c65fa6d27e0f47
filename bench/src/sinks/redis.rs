//! Redis Streams.
//!
//! What lives here: the stream, and the crate `redis` by itself. What does not: the pairs
//! (`mod.rs`).
//! Invariant: the baseline calls the sink's own script, which drops repetitions as well as it
//! appends, once for each entry. What `XADD` alone does, which drops none, is told beside it.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Result;
use async_trait::async_trait;
use futures_util::stream::{StreamExt, TryStreamExt, iter};
use postrider_core::{Event, Secret, Sink};
use postrider_servers::redis::Redis;
use postrider_sink_redis::RedisConfig;
use redis::aio::MultiplexedConnection;
use redis::{Client, Pipeline, Script, cmd, pipe};

use super::{Broker, Cost, PIPELINED, Setting, timed};

/// The sink's.
const SCRIPT: &str = include_str!("../../../crates/sinks/redis/src/append.lua");
/// The sink's default, in milliseconds.
const SEEN_FOR: &str = "600000";
/// Pipelines at a time, so that the server has one while another's answers are on their way.
const PIPELINES: usize = 4;

struct Streams {
    server: Redis,
    /// Whether the baseline drops no repetitions.
    bare: bool,
}

pub(super) fn start(setting: Setting) -> Result<Box<dyn Broker>> {
    started(setting, false)
}

/// With the baseline that drops no repetitions.
pub(super) fn start_bare(setting: Setting) -> Result<Box<dyn Broker>> {
    started(setting, true)
}

fn started(setting: Setting, bare: bool) -> Result<Box<dyn Broker>> {
    let settings = match setting {
        Setting::Durable => "",
        Setting::Memory => "appendonly no",
    };
    Ok(Box::new(Streams { server: Redis::start(settings)?, bare }))
}

impl Streams {
    async fn connection(&self) -> Result<MultiplexedConnection> {
        let client = Client::open(self.server.url())?;
        Ok(client.get_multiplexed_async_connection().await?)
    }
}

#[async_trait]
impl Broker for Streams {
    fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// The first entry makes it.
    async fn make(&self, _name: &str) -> Result<()> {
        Ok(())
    }

    fn sink(&self, name: &str, port: u16) -> Result<Arc<dyn Sink>> {
        let url = Secret::new(format!("redis://127.0.0.1:{port}"));
        let config = RedisConfig { stream: name.to_owned(), ..RedisConfig::new(url) };
        Ok(Arc::new(postrider_sink_redis::Redis::new(&config)?))
    }

    async fn send(&self, name: &str, events: &[Event]) -> Result<Cost> {
        let mut connection = self.connection().await?;
        let script = Script::new(SCRIPT);
        cmd("SCRIPT").arg("LOAD").arg(SCRIPT).exec_async(&mut connection).await?;
        let add = |pipeline: &mut Pipeline, event: &Event| match self.bare {
            true => entry(pipeline, name, event),
            false => call(pipeline, name, event, script.get_hash()),
        };
        let pipelines: Vec<Pipeline> = events
            .chunks(PIPELINED / PIPELINES)
            .map(|events| {
                let mut pipeline = pipe();
                events.iter().for_each(|event| add(&mut pipeline, event));
                pipeline
            })
            .collect();
        timed(async {
            iter(pipelines)
                .map(|pipeline| {
                    let mut connection = connection.clone();
                    async move { pipeline.query_async::<Vec<redis::Value>>(&mut connection).await }
                })
                .buffer_unordered(PIPELINES)
                .try_for_each(|_| std::future::ready(Ok(())))
                .await?;
            Ok(())
        })
        .await
    }

    async fn end(&self, name: &str) -> Result<u64> {
        let mut connection = self.connection().await?;
        let held = cmd("XLEN").arg(name).query_async(&mut connection).await?;
        // With what the script remembers of it.
        cmd("FLUSHALL").exec_async(&mut connection).await?;
        Ok(held)
    }
}

fn entry(pipeline: &mut Pipeline, name: &str, event: &Event) {
    pipeline.cmd("XADD").arg(name).arg("*");
    fields(pipeline, event);
}

fn call(pipeline: &mut Pipeline, name: &str, event: &Event, script: &str) {
    let seen = format!("postrider:seen:{name}:{}", event.id());
    pipeline.cmd("EVALSHA").arg(script).arg(2).arg(name).arg(seen);
    pipeline.arg(SEEN_FOR).arg(1).arg("+12");
    fields(pipeline, event);
}

fn fields(pipeline: &mut Pipeline, event: &Event) {
    for (field, value) in [
        ("id", event.id().to_string().as_bytes()),
        ("key", event.key().as_str().as_bytes()),
        ("topic", event.topic().as_str().as_bytes()),
        ("type", event.event_type().as_str().as_bytes()),
        ("content-type", event.content_type().as_str().as_bytes()),
        ("payload", event.payload().as_ref()),
    ] {
        pipeline.arg(field).arg(value);
    }
}
