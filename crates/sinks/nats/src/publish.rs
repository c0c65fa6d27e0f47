//! The sink itself.
//!
//! What lives here: `Nats`, its connection from call to call, and the life of one event. What does
//! not: the mapping of answers to kinds (`error.rs`).
//! Invariant: of one key at most one event is under way at a time, so that no later one is stored
//! before an earlier one that failed. Different keys don't wait for each other.

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use async_nats::jetstream::context::{PublishError, PublishErrorKind};
use async_nats::jetstream::message::PublishMessage;
use async_trait::async_trait;
use futures_util::future::join_all;
use postrider_core::{
    Capabilities, Chain, Error, ErrorKind, Outcome, Publish, Record, Result, Sink, by_key,
};
use postrider_encoding::{Encoder, Escape, EventSource, Template};
use tokio::sync::{Mutex, Semaphore};
use tokio::time::{Instant, timeout, timeout_at};

use crate::config::{NatsConfig, Unroutable};
use crate::connect::Link;
use crate::encode::headers;
use crate::error::{
    beyond_the_server, beyond_the_stream, is_answer, is_beyond_the_stream, publish_error, throttled,
};
use crate::login::Login;
use crate::look;
use crate::singles::{Answer, End};

/// Events in one call: enough to hide a round trip at full rate.
const BATCH_RECORDS: usize = 512;
/// Bytes in one call. The client library holds a call's messages once more.
const BATCH_BYTES: usize = 4 << 20;
/// Calls at a time from one partition.
const IN_FLIGHT: usize = 4;
/// Events under way over all partitions. Below what the client library queues, so that the time
/// for an acknowledgement begins when the event leaves.
const UNDER_WAY: usize = 2_000;
/// Longest subject that every server takes together with the rest of its line, in bytes: a line
/// may have 4,096 unless the server says otherwise (`max_control_line`).
const MAX_SUBJECT_BYTES: usize = 3_500;

/// Publishes each event to a JetStream subject and waits for the stream's acknowledgement.
///
/// # Ordering
/// It takes any number of a key's events in a call ([`Chain::InTurn`]) and sends them one after the
/// other, each after the acknowledgement of the one before.
/// # Cancellation
/// A dropped `publish`, like a time-out, leaves it unknown whether the stream has the event: it is
/// sent again under the same `Nats-Msg-Id`, which the stream drops within its duplicate window.
pub struct Nats {
    login: Login,
    subject: Template,
    stream: Option<String>,
    encoder: Encoder,
    unroutable: Unroutable,
    pub(crate) timeout: Duration,
    link: Mutex<Connection>,
    pub(crate) under_way: Semaphore,
    /// The stream's duplicate window in milliseconds, once it is known; 0 before.
    duplicate_window_ms: AtomicU64,
    /// How long an event may be tried.
    retries_take: Duration,
    closed: AtomicBool,
}

impl Nats {
    /// The sink of a configuration. Nothing is connected to yet.
    ///
    /// # Errors
    /// [`ErrorKind::Permanent`] for impossible settings, naming the key.
    pub fn new(config: &NatsConfig) -> Result<Self> {
        let subject = subject(&config.subject)?;
        let source = match &config.source {
            Some(text) => EventSource::new(text.as_str())?,
            None => EventSource::default(),
        };
        let timeout = Duration::from_millis(config.timeout_ms);
        Ok(Self {
            login: Login::new(config)?,
            subject,
            stream: config.stream.clone(),
            encoder: Encoder::new(config.encoding, source),
            unroutable: config.unroutable,
            timeout,
            link: Mutex::new(Connection::None),
            under_way: Semaphore::new(UNDER_WAY),
            duplicate_window_ms: AtomicU64::new(0),
            retries_take: look::retries_take(&config.retry, timeout),
            closed: AtomicBool::new(false),
        })
    }

    /// The connection, made anew if there is none that is up. Who waits here while another fails
    /// to make one is told the same, and doesn't try in turn.
    async fn link(&self) -> Result<Arc<Link>> {
        let asked = Instant::now();
        let mut connection = self.link.lock().await;
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::transient("the NATS sink is closed"));
        }
        match &*connection {
            Connection::Made(link) if link.is_up() => return Ok(Arc::clone(link)),
            Connection::Failed { at, error } if *at >= asked => return Err(again(error)),
            _ => {}
        }
        match Link::open(&self.login, self.timeout).await {
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

    /// A connection to a server whose limit was learned just now, in the place of one that knows an
    /// older limit. Who sends by that one goes on with it to the end of the call.
    async fn fresh_link(&self) -> Result<Arc<Link>> {
        let mut connection = self.link.lock().await;
        match &*connection {
            Connection::Made(link) if link.is_up() && link.is_fresh() => Ok(Arc::clone(link)),
            _ if self.closed.load(Ordering::Acquire) => {
                Err(Error::transient("the NATS sink is closed"))
            }
            _ => {
                let link = Arc::new(Link::open(&self.login, self.timeout).await?);
                *connection = Connection::Made(Arc::clone(&link));
                Ok(link)
            }
        }
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
                    // The time ends the wait for a place too: the caller forgets a call that lasts.
                    match timeout_at(until, self.under_way.acquire()).await {
                        Ok(_permit) => self.send(link, record).await,
                        Err(_) if first => Outcome::Failed(crowded()),
                        Err(_) => Outcome::HeldBack,
                    }
                }
                _ => Outcome::HeldBack,
            };
            goes_on &= !matches!(outcome, Outcome::Failed(_) | Outcome::HeldBack);
            settled.push((place, outcome));
        }
        settled
    }

    async fn send(&self, link: &Link, record: &Record) -> Outcome {
        outcome(self.acknowledged(link, record).await)
    }

    /// The subject and the message of one event, which may be sent now.
    pub(crate) fn message(&self, link: &Link, record: &Record) -> Result<(String, PublishMessage)> {
        let subject = self.subject.render(&record.event, Escape::Subject)?;
        if subject.len() > MAX_SUBJECT_BYTES {
            return Err(Error::permanent(format!(
                "the event's subject has {} bytes; {MAX_SUBJECT_BYTES} are allowed: leave the key \
                 out of it",
                subject.len()
            )));
        }
        let message = self.encoder.encode(record);
        let headers = headers(record, &message, self.stream.as_deref())?;
        if !link.is_up() {
            return Err(Error::transient("the connection to NATS was lost before the event left"));
        }
        Ok((subject, PublishMessage::build().payload(message.body).headers(headers)))
    }

    /// Sends one event and waits for its acknowledgement; `true` if the stream had it already.
    async fn acknowledged(&self, link: &Link, record: &Record) -> Result<bool> {
        let (subject, publish) = self.message(link, record)?;
        let acknowledged =
            async { link.context().send_publish(subject.clone(), publish).await?.await };
        let down = pin!(link.down());
        let mut end = End::of(down);
        match end.or(timeout(self.timeout, acknowledged)).await {
            Some(answer) => self.judge(link, answer, &subject).await,
            None => Err(lost(link)),
        }
    }

    /// What an answer, or none in time, means; `true` if the stream had the event already.
    pub(crate) async fn judge(&self, link: &Link, answer: Answer, subject: &str) -> Result<bool> {
        match answer {
            Ok(Ok(ack)) => {
                link.answered();
                Ok(ack.duplicate)
            }
            Ok(Err(error)) => Err(self.failure(link, Some(error), subject).await),
            Err(_) => Err(self.failure(link, None, subject).await),
        }
    }

    /// What an answer that is no acknowledgement means, or none in time.
    pub(crate) async fn failure(
        &self,
        link: &Link,
        answer: Option<PublishError>,
        subject: &str,
    ) -> Error {
        match answer.filter(|error| error.kind() != PublishErrorKind::TimedOut) {
            Some(error) => self.refused(link, error, subject).await,
            None => {
                // A connection on which nothing at all was answered is not trusted again.
                if link.is_silent_for(self.timeout) {
                    link.retire();
                }
                let silent = format!(
                    "the subject {subject} was not acknowledged within {} ms; whether a stream has \
                     the event is unknown",
                    self.timeout.as_millis()
                );
                // One stream alone may be silent.
                link.unknown_fate(throttled(silent))
            }
        }
    }

    /// What a refusal means.
    async fn refused(&self, link: &Link, error: PublishError, subject: &str) -> Error {
        match error.kind() {
            // A stream without a leader does not answer either; it must not park anything.
            PublishErrorKind::StreamNotFound => {
                link.answered();
                let parks = self.unroutable == Unroutable::Park && link.has_no(subject).await;
                let how = if parks { Unroutable::Park } else { Unroutable::Retry };
                publish_error(error, subject, how)
            }
            PublishErrorKind::MaxPayloadExceeded => self.too_large(link, error).await,
            _ if is_beyond_the_stream(&error) => {
                link.answered();
                let limit = link.max_message_bytes(self.stream.as_deref(), subject).await;
                beyond_the_stream(error, limit)
            }
            _ => {
                match is_answer(&error) {
                    true => link.answered(),
                    // The client has ended; nobody would tell about it.
                    false => link.retire(),
                }
                publish_error(error, subject, self.unroutable)
            }
        }
    }

    /// What an event beyond the server's limit meets. That may have been raised since it was
    /// learned, so that the event is given up by a limit of just now alone.
    async fn too_large(&self, link: &Link, error: PublishError) -> Error {
        if link.is_fresh() {
            return beyond_the_server(error);
        }
        let before = link.max_payload();
        match self.fresh_link().await {
            Ok(fresh) if fresh.max_payload() > before => throttled(format!(
                "the server's max_payload was {before} and is {} now; the event is sent again",
                fresh.max_payload()
            )),
            Ok(_) => beyond_the_server(error),
            Err(error) => error,
        }
    }

    /// Looks at the stream of the settings, or at the one that takes a constant subject. What it
    /// may lose or repeat by its settings is logged.
    async fn look(&self, link: &Link) -> Result<()> {
        let named = self.stream.as_deref();
        let found = look::stream(link.context(), named, self.subject.constant()).await?;
        let Some(info) = found else { return Ok(()) };
        let window = u64::try_from(info.config.duplicate_window.as_millis()).unwrap_or(u64::MAX);
        self.duplicate_window_ms.store(window, Ordering::Relaxed);
        look::acknowledges(&info.config)?;
        look::warn(&info, self.retries_take);
        Ok(())
    }
}

/// The template of the subject, whose own text has to make one.
fn subject(text: &str) -> Result<Template> {
    let template =
        Template::parse(text).map_err(|error| Error::permanent(format!("subject: {error}")))?;
    let mut inside = false;
    // Whatever stands for a placeholder is a part of one level, or whole levels.
    let shape: String = text
        .chars()
        .filter_map(|c| match c {
            '{' => {
                inside = true;
                Some('x')
            }
            '}' => {
                inside = false;
                None
            }
            _ if inside => None,
            c => Some(c),
        })
        .collect();
    let illegal = |c: char| c.is_whitespace() || c.is_control() || c == '*' || c == '>';
    if shape.contains(illegal) || shape.split('.').any(str::is_empty) {
        return Err(Error::permanent(
            "subject: its own text has a space, a wildcard or an empty level between dots",
        ));
    }
    Ok(template)
}

pub(crate) fn outcome(judged: Result<bool>) -> Outcome {
    match judged {
        Ok(false) => Outcome::Confirmed,
        Ok(true) => Outcome::Duplicate,
        Err(error) => Outcome::Failed(error),
    }
}

/// The error of an event whose connection ended before its answer came.
pub(crate) fn lost(link: &Link) -> Error {
    let lost = "the connection to NATS was lost; whether the stream has the event is unknown";
    link.unknown_fate(Error::transient(lost))
}

/// The error of an event that got no place among those under way.
pub(crate) fn crowded() -> Error {
    throttled("too many events are under way to NATS; none of them ended in time")
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
pub(crate) type Settled = (usize, Outcome);

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

impl fmt::Debug for Nats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nats({:?}, stream {:?})", self.subject, self.stream)
    }
}

#[async_trait]
impl Sink for Nats {
    fn capabilities(&self) -> Capabilities {
        let window = self.duplicate_window_ms.load(Ordering::Relaxed);
        Capabilities {
            // Only the sink can ask for the limit again before an event is parked by it.
            max_event_bytes: None,
            max_batch_records: BATCH_RECORDS,
            max_batch_bytes: BATCH_BYTES,
            max_in_flight: IN_FLIGHT,
            chain: Chain::InTurn,
            dedup_window: (window > 0).then(|| Duration::from_millis(window)),
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
        let (singles, chains): (Vec<_>, Vec<_>) =
            by_key(records).into_iter().partition(|places| places.len() == 1);
        let singles = singles.into_iter().flatten().collect();
        let chains = chains.into_iter().map(|places| self.chain(&link, records, places, until));
        let (mut settled, chains) =
            tokio::join!(self.singles(&link, records, singles, until), join_all(chains));
        settled.extend(chains.into_iter().flatten());
        settled.sort_unstable_by_key(|(place, _)| *place);
        settled.into_iter().map(|(_, outcome)| outcome).collect()
    }

    /// Connects, and looks at the stream. Publishes nothing. What the stream may lose or repeat by
    /// its settings is logged.
    async fn check(&self) -> Result<()> {
        let link = self.link().await?;
        let looked = timeout(self.timeout, self.look(&link)).await;
        looked.unwrap_or_else(|_| {
            Err(Error::new(ErrorKind::Transient, "JetStream does not answer; is it turned on?"))
        })
    }

    /// Sends nothing more. There is nothing to flush: each event was acknowledged on its own.
    async fn close(&self) -> Result<()> {
        self.closed.store(true, Ordering::Release);
        let mut connection = self.link.lock().await;
        if let Connection::Made(link) = std::mem::replace(&mut *connection, Connection::None) {
            link.retire();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subject_that_no_server_takes_is_refused_at_once() {
        for good in ["events.{topic}", "{topic}.{key}", "a-{type}.b", "x"] {
            subject(good).expect(good);
        }
        for bad in ["a b.{topic}", "a..{key}", ".{key}", "{key}.", "a.*", "a.>", "{nope}", ""] {
            let error = subject(bad).expect_err(bad).chain();
            assert!(error.starts_with("subject: "), "{error}");
        }
    }
}
