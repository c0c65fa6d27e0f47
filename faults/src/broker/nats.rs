//! NATS JetStream: a stream that drops repetitions by their ids.
//!
//! What lives here: the stream, and reading it. What does not: outages (`mod.rs`), the server.
//! Invariant: the stream's duplicate window is longer than any schedule.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result};
use async_nats::HeaderMap;
use async_nats::jetstream::{self, stream};
use postrider_conformance::sink::Delivered;
use postrider_core::EventId;
use postrider_encoding::decode_header_value;
use postrider_servers::nats::{Nats, Version};
use tokio::runtime::{Builder, Runtime};
use uuid::Uuid;

use super::{Nature, PATIENCE, Server, Takes};

const STREAM: &str = "EVENTS";
const SUBJECTS: &str = "events.>";
/// What the stream takes while it is to take nothing that relays send.
const OTHER_SUBJECTS: &str = "elsewhere.>";
/// Longer than any schedule.
const FOR_EVER: Duration = Duration::from_secs(3_600);
/// The largest message that the stream takes while it refuses: about one event in a hundred is
/// larger.
const SMALL_BYTES: i32 = 40_000;
/// What the proxy waits before each piece while the broker is slow.
const SLOW: Duration = Duration::from_millis(100);
/// Before the names of an event's own headers.
const EVENT_HEADER: &str = "postrider-header-";

/// A running server with its stream.
pub(super) struct Stream {
    server: Nats,
    runtime: Runtime,
}

impl Stream {
    pub(super) fn start() -> Result<Self> {
        let server = Nats::start(Version::New, "").context("start NATS")?;
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let stream = Self { server, runtime: runtime.context("start a runtime")? };
        stream.within_patience(async {
            let made = stream.context().await?.create_stream(config(SUBJECTS, -1)).await;
            made.context("make the stream").map(drop)
        })?;
        Ok(stream)
    }

    async fn context(&self) -> Result<jetstream::Context> {
        let connected = async_nats::connect(self.server.url()).await;
        Ok(jetstream::new(connected.context("connect to NATS")?))
    }

    fn within_patience<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let timed = async { tokio::time::timeout(PATIENCE, work).await };
        self.runtime.block_on(timed).context("wait for NATS")?
    }
}

impl Server for Stream {
    fn address(&self) -> SocketAddr {
        self.server.address()
    }

    fn nature(&self) -> Nature {
        // Nothing is in doubt where repetitions are dropped.
        Nature { drops_repetitions: true, under_way: 0, slow: SLOW, forgets_at_its_end: false }
    }

    fn settings(&self, port: u16) -> String {
        format!(
            "kind = \"nats\"\nservers = [\"nats://127.0.0.1:{port}\"]\n\
             subject = \"events.{{topic}}\"\nstream = \"{STREAM}\"\n"
        )
    }

    fn hurry(&self) -> &'static str {
        "timeout_ms = 1500\nconnect_timeout_ms = 1500\n"
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
        let config = match what {
            Takes::All => config(SUBJECTS, -1),
            Takes::Small => config(SUBJECTS, SMALL_BYTES),
            Takes::Nothing => config(OTHER_SUBJECTS, -1),
        };
        self.within_patience(async {
            let updated = self.context().await?.update_stream(config).await;
            updated.context("change the stream").map(drop)
        })
    }

    fn count(&mut self) -> Result<u64> {
        self.within_patience(async {
            let stream = self.context().await?.get_stream(STREAM).await;
            Ok(stream.context("look at the stream")?.cached_info().state.last_sequence)
        })
    }

    fn held(&mut self) -> Result<Vec<Result<Delivered>>> {
        let last = self.count()?;
        self.runtime.block_on(async {
            let stream = self.context().await?.get_stream(STREAM).await;
            let stream = stream.context("look at the stream")?;
            let mut held = Vec::new();
            for place in 1..=last {
                let stored = stream.get_raw_message(place).await.context("read a message")?;
                held.push(message(&stored.headers, stored.payload.to_vec()));
            }
            Ok(held)
        })
    }
}

/// The stream's settings, with the largest message that it takes; -1 for any.
fn config(subjects: &str, max_message_size: i32) -> stream::Config {
    stream::Config {
        name: STREAM.to_owned(),
        subjects: vec![subjects.to_owned()],
        duplicate_window: FOR_EVER,
        discard: stream::DiscardPolicy::New,
        max_message_size,
        ..stream::Config::default()
    }
}

/// The event, as it arrived.
fn message(map: &HeaderMap, payload: Vec<u8>) -> Result<Delivered> {
    let raw = |name: &str| map.get(name).with_context(|| format!("a message has no {name}"));
    let text = |name: &str| anyhow::Ok(decode_header_value(raw(name)?.as_str().as_bytes())?);
    let id: Uuid = raw("Nats-Msg-Id")?.as_str().parse().context("read the id of a message")?;
    let mut headers = Vec::new();
    for (name, values) in map.iter() {
        let name: &str = name.as_ref();
        if let (Some(own), Some(value)) = (name.strip_prefix(EVENT_HEADER), values.first()) {
            let value = decode_header_value(value.as_str().as_bytes())?;
            headers.push((own.to_ascii_lowercase(), value));
        }
    }
    headers.sort();
    Ok(Delivered {
        id: EventId::from_uuid(id),
        key: text("postrider-key")?,
        topic: text("postrider-topic")?,
        event_type: text("postrider-type")?,
        content_type: raw("content-type")?.to_string(),
        headers,
        payload,
    })
}
