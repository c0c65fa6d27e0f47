//! The sink itself.
//!
//! What lives here: `RabbitMq`, its connection from call to call, and the life of one event. What
//! does not: the mapping of answers to kinds (`error.rs`).
//! Invariant: of one key at most one event is under way at a time, so that no later one is queued
//! before an earlier one that failed. Different keys don't wait for each other.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use lapin::Confirmation;
use lapin::types::ShortString;
use postrider_core::{Capabilities, Chain, Error, Outcome, Publish, Record, Result, Sink, by_key};
use postrider_encoding::{Encoder, Escape, EventSource, Template};
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout, timeout_at};

use crate::config::{RabbitMqConfig, Unroutable};
use crate::connect::Link;
use crate::encode::{properties, short};
use crate::error::{
    blocked, connection_lost, no_channel, publish_error, refused_by_a_queue, returned, throttled,
};
use crate::login::Login;
use crate::topology::Topology;
use crate::under_way::{Outgoing, Room};

/// Events in one call: enough to hide a round trip at full rate.
const BATCH_RECORDS: usize = 512;
/// Bytes in one call. The client library holds a call's messages once more.
const BATCH_BYTES: usize = 4 << 20;
/// Calls at a time from one partition.
const IN_FLIGHT: usize = 4;

/// Publishes each event to an exchange and waits for the broker's confirmation.
///
/// Every message is persistent and `mandatory`: one that no queue takes comes back and does not
/// count as sent. On queues that are durable, a confirmation means that it survives a restart.
///
/// # Ordering
/// It takes any number of a key's events in a call ([`Chain::InTurn`]) and sends them one after the
/// other, each after the confirmation of the one before.
/// # Cancellation
/// A dropped `publish`, like a time-out, leaves it unknown whether a queue has the event: it is
/// sent again under the same message id. RabbitMQ drops no repetitions. What was under way stays so
/// until it is answered or the connection ends, and takes room that long.
pub struct RabbitMq {
    login: Login,
    /// None for the default exchange.
    exchange: Option<Template>,
    routing_key: Template,
    topology: Topology,
    encoder: Encoder,
    unroutable: Unroutable,
    max_message_bytes: usize,
    in_flight: usize,
    timeout: Duration,
    connect_timeout: Duration,
    link: Mutex<Connection>,
    /// The server of the list that is tried next.
    next_server: AtomicUsize,
    closed: AtomicBool,
}

/// Where an event's message goes.
struct Place {
    exchange: ShortString,
    routing_key: ShortString,
}

impl RabbitMq {
    /// The sink of a configuration. Nothing is connected to yet.
    ///
    /// # Errors
    /// [`ErrorKind::Permanent`](postrider_core::ErrorKind::Permanent) for impossible settings,
    /// naming the key.
    pub fn new(config: &RabbitMqConfig) -> Result<Self> {
        let template = |key: &str, text: &str| {
            Template::parse(text).map_err(|error| Error::permanent(format!("{key}: {error}")))
        };
        let exchange = match config.exchange.as_str() {
            "" => None,
            text => Some(template("exchange", text)?),
        };
        let source = match &config.source {
            Some(text) => EventSource::new(text.as_str())?,
            None => EventSource::default(),
        };
        Ok(Self {
            login: Login::new(config)?,
            topology: Topology::new(config, exchange.as_ref())?,
            exchange,
            routing_key: template("routing_key", &config.routing_key)?,
            encoder: Encoder::new(config.encoding, source),
            unroutable: config.unroutable,
            max_message_bytes: config.max_message_bytes,
            in_flight: config.in_flight,
            timeout: Duration::from_millis(config.timeout_ms),
            connect_timeout: Duration::from_millis(config.connect_timeout_ms),
            link: Mutex::new(Connection::None),
            next_server: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
        })
    }

    /// The connection, made anew if there is none that is up. Who waits here while another fails
    /// to make one is told the same, and doesn't try in turn.
    async fn link(&self) -> Result<Arc<Link>> {
        let asked = Instant::now();
        let mut connection = self.link.lock().await;
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::transient("the RabbitMQ sink is closed"));
        }
        match &*connection {
            Connection::Made(link) if link.is_up() => return Ok(Arc::clone(link)),
            Connection::Failed { at, error } if *at >= asked => return Err(again(error)),
            _ => {}
        }
        match self.connect().await {
            Ok(link) => {
                let link = Arc::new(link);
                *connection = Connection::Made(Arc::clone(&link));
                Ok(link)
            }
            Err(error) => {
                let told = again(&error);
                *connection = Connection::Failed { at: Instant::now(), error };
                Err(told)
            }
        }
    }

    async fn connect(&self) -> Result<Link> {
        let (next, within) = (&self.next_server, self.connect_timeout);
        let link = Link::open(&self.login, next, self.in_flight, within).await?;
        if self.topology.declares() {
            self.settle_topology(&link).await?;
        }
        Ok(link)
    }

    async fn settle_topology(&self, link: &Link) -> Result<()> {
        let settled = timeout(self.timeout, self.topology.settle(link)).await;
        settled.unwrap_or_else(|_| {
            Err(Error::transient("the broker does not tell of exchanges and queues in time"))
        })
    }

    /// Sends a key's events of one call, in order, up to the first that fails, for as long as the
    /// call may send.
    async fn chain(
        &self,
        link: &Link,
        records: &[Record],
        places: Vec<usize>,
        until: Instant,
    ) -> Vec<Settled> {
        let mut settled = Vec::with_capacity(places.len());
        let mut goes_on = true;
        for place in places {
            let first = settled.is_empty();
            let outcome = match records.get(place) {
                Some(record) if goes_on && (first || Instant::now() < until) => {
                    self.one(link, record, until, first).await
                }
                _ => Outcome::HeldBack,
            };
            goes_on &= matches!(outcome, Outcome::Confirmed);
            settled.push((place, outcome));
        }
        settled
    }

    /// What becomes of one event; `first` is its key's first in the call.
    async fn one(&self, link: &Link, record: &Record, until: Instant, first: bool) -> Outcome {
        if let Err(error) = usable(link) {
            return Outcome::Failed(error);
        }
        // The time ends this wait as well: the caller forgets a call that lasts.
        let bytes = record.event.payload().len();
        let sent = match link.under_way().room(bytes, until).await {
            Some(room) => self.send(link, record, room).await,
            None if first => Err(throttled(
                "too many events are under way to RabbitMQ; none of them ended in time",
            )),
            None => return Outcome::HeldBack,
        };
        match sent {
            Ok(()) => Outcome::Confirmed,
            Err(error) => Outcome::Failed(error),
        }
    }

    /// Sends one event and waits for its confirmation.
    async fn send(&self, link: &Link, record: &Record, room: Room) -> Result<()> {
        let Place { exchange, routing_key } = self.place(record)?;
        let message = self.encoder.encode(record);
        if message.body.len() > self.max_message_bytes {
            return Err(Error::permanent(format!(
                "the event's message has {} bytes; {} are allowed (max_message_bytes)",
                message.body.len(),
                self.max_message_bytes
            )));
        }
        let properties = properties(record, &message, link.frame_max())?;
        usable(link)?;
        let in_time = Instant::now() + self.timeout;
        let channel = match until_the_end(link, in_time, link.channel()).await? {
            Some(Ok(channel)) => channel,
            Some(Err(failure)) => {
                // Where no channel can be opened, no other will be either.
                link.cut();
                return Err(no_channel(&failure));
            }
            None => return Err(self.unanswered(link)),
        };
        let name = exchange.clone();
        let outgoing = Outgoing { exchange, routing_key, properties, body: message.body };
        let mut waiting = Waiting { link, answered: false };
        let told = link.under_way().send(channel, outgoing, room);
        let answer = until_the_end(link, in_time, told).await?;
        waiting.answered = answer.is_some();
        match answer {
            Some(Ok(Ok(confirmation))) => self.judge(confirmation),
            Some(Ok(Err(failure))) if link.is_connected() => {
                link.under_way().answered();
                Err(publish_error(&failure, name.as_str(), self.unroutable))
            }
            Some(Ok(Err(failure))) => Err(connection_lost().with_source(failure.to_string())),
            Some(Err(_)) => Err(connection_lost()),
            None => Err(self.unanswered(link)),
        }
    }

    /// What an answer means.
    fn judge(&self, confirmation: Confirmation) -> Result<()> {
        match confirmation {
            Confirmation::Ack(None) => Ok(()),
            Confirmation::Ack(Some(message)) | Confirmation::Nack(Some(message)) => {
                Err(returned(&message, self.unroutable))
            }
            Confirmation::Nack(None) => Err(refused_by_a_queue()),
            Confirmation::NotRequested => {
                Err(Error::transient("the broker's channel does not confirm"))
            }
        }
    }

    /// The error of an event of which nothing was heard in time.
    fn unanswered(&self, link: &Link) -> Error {
        if let Some(reason) = link.blocked() {
            // What is under way is taken once the broker reads again, before whatever is sent then:
            // it stands first in the client library too.
            return blocked(&reason);
        }
        // A connection on which nothing at all was answered is not trusted again.
        if link.under_way().is_silent_for(self.timeout) {
            link.cut();
        }
        // One queue alone may be silent.
        throttled(format!(
            "the event was not confirmed within {} ms; whether a queue has it is unknown",
            self.timeout.as_millis()
        ))
    }

    fn place(&self, record: &Record) -> Result<Place> {
        let event = &record.event;
        let exchange = match &self.exchange {
            Some(template) => template.render(event, Escape::None)?,
            None => String::new(),
        };
        let routing_key = self.routing_key.render(event, Escape::Subject)?;
        Ok(Place {
            exchange: short("exchange", &exchange)?,
            routing_key: short("routing key", &routing_key)?,
        })
    }
}

/// Whether an event may be sent on a connection now.
fn usable(link: &Link) -> Result<()> {
    if !link.is_connected() {
        return Err(Error::transient("the connection to RabbitMQ was lost before the event left"));
    }
    if !link.is_up() {
        return Err(throttled("the connection takes no more events; the next call makes another"));
    }
    match link.blocked() {
        Some(reason) => Err(blocked(&reason)),
        None => Ok(()),
    }
}

/// What comes of a wait; None if nothing comes in time.
///
/// # Errors
/// The connection ended.
async fn until_the_end<T>(
    link: &Link,
    in_time: Instant,
    wait: impl Future<Output = T>,
) -> Result<Option<T>> {
    tokio::select! {
        biased;
        came = timeout_at(in_time, wait) => Ok(came.ok()),
        () = link.ended() => Err(connection_lost()),
    }
}

/// A wait for an answer. It tells the connection if it ends without one, also when it is dropped.
struct Waiting<'a> {
    link: &'a Link,
    answered: bool,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if !self.answered {
            self.link.give_up();
        }
    }
}

/// What the last attempt to connect came to.
enum Connection {
    None,
    Made(Arc<Link>),
    Failed { at: Instant, error: Error },
}

/// The same error for somebody else.
fn again(error: &Error) -> Error {
    Error::new(error.kind(), error.chain())
}

/// A record's place in the call and what became of it.
type Settled = (usize, Outcome);

/// The first event of each key failed so, the others wait for it.
fn none_sent(records: &[Record], error: &Error) -> Vec<Outcome> {
    let mut outcomes: Vec<Outcome> = records.iter().map(|_| Outcome::HeldBack).collect();
    for chain in by_key(records) {
        if let Some(outcome) = chain.first().and_then(|place| outcomes.get_mut(*place)) {
            *outcome = Outcome::Failed(again(error));
        }
    }
    outcomes
}

impl fmt::Debug for RabbitMq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RabbitMq({:?}, {:?})", self.exchange, self.routing_key)
    }
}

#[async_trait]
impl Sink for RabbitMq {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            max_event_bytes: Some(self.max_message_bytes),
            max_batch_records: BATCH_RECORDS,
            max_batch_bytes: BATCH_BYTES,
            max_in_flight: IN_FLIGHT,
            chain: Chain::InTurn,
            dedup_window: None,
        }
    }

    async fn publish(&self, batch: Publish<'_>) -> Vec<Outcome> {
        let records = batch.records();
        if records.is_empty() {
            return Vec::new();
        }
        let link = match self.link().await {
            Ok(link) => link,
            Err(error) => return none_sent(records, &error),
        };
        let until = Instant::now() + batch.sending_time();
        let chains = by_key(records).into_iter();
        let chains = chains.map(|places| self.chain(&link, records, places, until));
        let settled = join_all(chains).await;
        let mut settled: Vec<Settled> = settled.into_iter().flatten().collect();
        settled.sort_unstable_by_key(|(place, _)| *place);
        settled.into_iter().map(|(_, outcome)| outcome).collect()
    }

    /// Connects, and looks at the exchange and the queue of the settings. Publishes nothing.
    async fn check(&self) -> Result<()> {
        let link = self.link().await?;
        self.settle_topology(&link).await
    }

    /// Sends nothing more. There is nothing to flush: each event was confirmed on its own.
    async fn close(&self) -> Result<()> {
        self.closed.store(true, Ordering::Release);
        let mut connection = self.link.lock().await;
        if let Connection::Made(link) = std::mem::replace(&mut *connection, Connection::None) {
            link.close(self.timeout).await;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_core::Secret;

    #[test]
    fn templates_are_refused_by_their_key() {
        let servers = || vec![Secret::new("amqp://127.0.0.1")];
        let refused = |config: &RabbitMqConfig| RabbitMq::new(config).expect_err("refused").chain();
        let mut config = RabbitMqConfig::new(servers(), "{nope}");
        assert!(refused(&config).starts_with("exchange: "));
        config.exchange = "e-{topic}".into();
        config.declare = true;
        assert!(refused(&config).starts_with("declare: "));
        config.declare = false;
        config.routing_key = String::new();
        assert!(refused(&config).starts_with("routing_key: "));
        RabbitMq::new(&RabbitMqConfig::new(servers(), "")).expect("the default exchange");
    }
}
