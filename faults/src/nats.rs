//! The sink's end of `nats`: a real server behind a proxy, and its stream.
//!
//! What lives here: the stream that relays send to, its outages, and what it holds. What does not:
//! the server and the proxy, which `servers/` has.
//! Invariant: an event counts as delivered once the stream holds it, whatever its sender heard; the
//! stream drops repetitions by their ids, so none may stand in it twice. The server syncs each
//! message, so it may be killed as well as stopped.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use async_nats::HeaderMap;
use async_nats::jetstream::{self, stream};
use postrider_conformance::sink::Delivered;
use postrider_core::EventId;
use postrider_encoding::decode_header_value;
use postrider_servers::nats::{Nats, Version};
use postrider_servers::proxy::{Direction, Proxy};
use tokio::runtime::{Builder, Runtime};
use uuid::Uuid;

use crate::deliveries::{Arrived, Delivery, Mark, Place};
use crate::schedule::Outage;

/// The stream.
pub const STREAM: &str = "EVENTS";
/// Longer than any schedule.
const FOR_EVER: Duration = Duration::from_secs(3_600);
/// Until the end, a connection is cut after so many bytes: more than the largest event has.
const CUT_AFTER_BYTES: u64 = 400_000;
/// A stream that refuses takes no larger messages until the end: about one event in a hundred is.
const REFUSED_ABOVE_BYTES: i32 = 40_000;
/// The longest that the server may take to answer this runner itself.
const PATIENCE: Duration = Duration::from_secs(20);
/// What the proxy waits before each piece while the broker is slow.
const SLOW: Duration = Duration::from_millis(100);
/// Nobody listens there.
const NOWHERE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 1);
/// Before the names of an event's own headers.
const EVENT_HEADER: &str = "postrider-header-";

/// A running server with its stream.
pub struct Stream {
    server: Mutex<Nats>,
    proxy: Proxy,
    runtime: Runtime,
    /// How often the server was ended: in order and by a kill, in turn.
    ends: AtomicU32,
    /// The last place that was seen; the server may be away when a mark is asked for.
    last: Mutex<u64>,
}

impl Stream {
    /// Starts it on free ports of the loopback interface. With `refuses` the stream takes no large
    /// messages until the healing.
    ///
    /// # Errors
    /// When the server is not installed or does not start.
    pub fn start(refuses: bool) -> Result<Self> {
        let server = Nats::start(Version::New, "").context("start NATS")?;
        let proxy = Proxy::start(server.address()).context("start a proxy")?;
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.context("start a runtime")?;
        let (ends, last) = (AtomicU32::new(0), Mutex::default());
        let stream = Self { server: Mutex::new(server), proxy, runtime, ends, last };
        let most = if refuses { REFUSED_ABOVE_BYTES } else { -1 };
        stream.within_patience(async {
            let context = stream.context().await?;
            context.create_stream(config(most)).await.context("make the stream")?;
            Ok(())
        })?;
        stream.proxy.cut_after(Some((Direction::ToServer, CUT_AFTER_BYTES)));
        Ok(stream)
    }

    fn server(&self) -> MutexGuard<'_, Nats> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn context(&self) -> Result<jetstream::Context> {
        let url = self.server().url();
        Ok(jetstream::new(async_nats::connect(url).await.context("connect to NATS")?))
    }

    fn within_patience<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let timed = async { tokio::time::timeout(PATIENCE, work).await };
        self.runtime.block_on(timed).context("wait for NATS")?
    }

    /// What relays connect to.
    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.proxy.port())
    }

    /// Begins or ends an outage.
    ///
    /// # Errors
    /// When the server does not start again.
    pub fn set_outage(&self, outage: Option<Outage>) -> Result<()> {
        match outage {
            None => return self.mend(),
            Some(Outage::ServerError) => match self.ends.fetch_add(1, Ordering::Relaxed) % 2 {
                0 => self.server().stop().context("stop NATS")?,
                _ => self.server().kill().context("kill NATS")?,
            },
            Some(Outage::Throttled) => self.proxy.delay(SLOW),
            Some(Outage::Silent) => self.proxy.lose_all(Direction::ToClient),
            Some(Outage::Refused) => {
                self.proxy.switch_upstream(NOWHERE);
                self.proxy.reset_all();
            }
        }
        Ok(())
    }

    fn mend(&self) -> Result<()> {
        let mut server = self.server();
        server.start_again().context("start NATS again")?;
        self.proxy.delay(Duration::ZERO);
        self.proxy.switch_upstream(server.address());
        Ok(())
    }

    /// From now on everything is taken and confirmed.
    ///
    /// # Errors
    /// As [`set_outage`](Self::set_outage).
    pub fn heal(&self) -> Result<()> {
        self.proxy.cut_after(None);
        self.mend()?;
        self.within_patience(async {
            let context = self.context().await?;
            context.update_stream(config(-1)).await.context("let the stream take everything")?;
            Ok(())
        })
    }

    /// This moment.
    pub fn mark(&self) -> Mark {
        let seen = self.within_patience(async {
            let stream = self.context().await?.get_stream(STREAM).await?;
            Ok(stream.cached_info().state.last_sequence)
        });
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        *last = seen.unwrap_or(*last);
        Mark::Count(*last + 1)
    }

    /// Everything that the stream holds.
    ///
    /// # Errors
    /// When the server does not answer.
    pub fn arrived(&self) -> Result<Arrived> {
        self.runtime.block_on(async {
            let stream = self.context().await?.get_stream(STREAM).await;
            let stream = stream.context("look at the stream")?;
            let mut arrived = Arrived { drops_repetitions: true, ..Arrived::default() };
            for begun in 1..=stream.cached_info().state.last_sequence {
                let stored = stream.get_raw_message(begun).await.context("read a message")?;
                match message(&stored.headers, stored.payload.to_vec()) {
                    // A message does not tell which relay sent it; none can come twice.
                    Ok(message) => {
                        let place = Place::Request { begun, relay: usize::MAX };
                        arrived.deliveries.push(Delivery { message, place });
                    }
                    Err(error) => arrived.unreadable.push(format!("{error:#}")),
                }
            }
            Ok(arrived)
        })
    }
}

/// The stream's settings, with the largest message that it takes; -1 for any.
fn config(max_message_size: i32) -> stream::Config {
    stream::Config {
        name: STREAM.to_owned(),
        subjects: vec!["events.>".to_owned()],
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
