//! NATS JetStream.
//!
//! What lives here: the stream, and `async-nats` by itself. What does not: the pairs (`mod.rs`).
//! Invariant: the baseline's messages have the headers that the sink gives them, and each one's
//! acknowledgement is awaited.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use async_nats::HeaderMap;
use async_nats::jetstream::{self, stream};
use async_trait::async_trait;
use bytes::Bytes;
use postrider_core::{Event, Secret, Sink};
use postrider_servers::nats::{Nats, Version};
use postrider_sink_nats::NatsConfig;

use super::{Broker, Cost, PIPELINED, Setting, timed};

struct JetStream {
    server: Nats,
    storage: stream::StorageType,
}

pub(super) fn start(setting: Setting) -> Result<Box<dyn Broker>> {
    let storage = match setting {
        Setting::Durable => stream::StorageType::File,
        Setting::Memory => stream::StorageType::Memory,
    };
    let server = Nats::start(Version::New, "")?;
    Ok(Box::new(JetStream { server, storage }))
}

impl JetStream {
    async fn context(&self) -> Result<jetstream::Context> {
        Ok(jetstream::new(async_nats::connect(self.server.url()).await?))
    }
}

#[async_trait]
impl Broker for JetStream {
    fn address(&self) -> SocketAddr {
        self.server.address()
    }

    async fn make(&self, name: &str) -> Result<()> {
        let config = stream::Config {
            name: name.to_owned(),
            subjects: vec![format!("{name}.>")],
            storage: self.storage,
            ..stream::Config::default()
        };
        self.context().await?.create_stream(config).await.context("make a stream").map(drop)
    }

    fn sink(&self, name: &str, port: u16) -> Result<Arc<dyn Sink>> {
        let server = Secret::new(format!("nats://127.0.0.1:{port}"));
        let config = NatsConfig {
            subject: format!("{name}.{{topic}}"),
            stream: Some(name.to_owned()),
            ..NatsConfig::new(vec![server])
        };
        Ok(Arc::new(postrider_sink_nats::Nats::new(&config)?))
    }

    async fn send(&self, name: &str, events: &[Event]) -> Result<Cost> {
        let context = self.context().await?;
        let messages: Vec<(HeaderMap, Bytes)> =
            events.iter().map(|event| (headers(event, name), event.payload().clone())).collect();
        let subject = format!("{name}.orders");
        timed(async {
            let mut waiting = VecDeque::with_capacity(PIPELINED);
            for (headers, payload) in messages {
                if waiting.len() == PIPELINED
                    && let Some(first) = waiting.pop_front()
                {
                    first.await?;
                }
                let sent = context.publish_with_headers(subject.clone(), headers, payload);
                waiting.push_back(sent.await?);
            }
            for rest in waiting {
                rest.await?;
            }
            Ok(())
        })
        .await
    }

    async fn end(&self, name: &str) -> Result<u64> {
        let context = self.context().await?;
        let held = context.get_stream(name).await?.cached_info().state.messages;
        context.delete_stream(name).await?;
        Ok(held)
    }
}

fn headers(event: &Event, stream: &str) -> HeaderMap {
    let mut map = HeaderMap::new();
    let id = event.id().to_string();
    for (name, value) in [
        ("Nats-Msg-Id", id.as_str()),
        ("Nats-Expected-Stream", stream),
        ("content-type", event.content_type().as_str()),
        ("postrider-topic", event.topic().as_str()),
        ("postrider-key", event.key().as_str()),
        ("postrider-type", event.event_type().as_str()),
    ] {
        map.insert(name, value);
    }
    map
}
