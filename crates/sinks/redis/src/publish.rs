//! The sink itself.
//!
//! What lives here: `Redis`, its connection from call to call, and the way of a key's events. What
//! does not: the mapping of answers to kinds (`error.rs`).
//! Invariant: of one key at most one call of the script is under way at a time, and the script
//! stops at a key's first event that fails, so that no later one is appended before it. Different
//! keys don't wait for each other's failures; those with few events share a call.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use postrider_core::{Capabilities, Chain, Error, Outcome, Publish, Record, Result, Sink, by_key};
use postrider_encoding::{Encoder, Escape, EventSource, Template};
use tokio::sync::{Mutex, Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout, timeout_at};

use crate::append::{Answer, Append, Call};
use crate::bundle::{bundles, dealt, piece};
use crate::config::{RedisConfig, Unroutable};
use crate::connect::{Link, UNDER_WAY};
use crate::encode::fields;
use crate::error::{
    answer_tells_to_leave, call_error, error_tells_to_leave, is_forbidden, is_too_large, no_place,
    redis_error, refused, too_large, unroutable,
};
use crate::login::Login;
use crate::look;

/// Events in one call of the relay: enough to hide a round trip at full rate.
const BATCH_RECORDS: usize = 512;
/// Bytes in one call of the relay, and in one of the script unless a single event has more: while a
/// script runs the server does nothing else.
pub(crate) const BATCH_BYTES: usize = 4 << 20;
/// Calls of the relay at a time from one partition.
const IN_FLIGHT: usize = 4;

/// Appends each event to a Redis stream and waits for the server's reply.
///
/// # Ordering
/// It takes any number of a key's events in a call ([`Chain::Many`]) and appends them in one step
/// of the server, in order, up to the first that fails.
/// # Cancellation
/// A dropped `publish`, like a time-out, leaves it unknown whether the stream has the events: they
/// are sent again, and the server drops those that it has within the duplicate window.
pub struct Redis {
    login: Login,
    stream: Template,
    encoder: Encoder,
    append: Append,
    unroutable: Unroutable,
    creates: bool,
    seen_for: Duration,
    timeout: Duration,
    link: Mutex<Connection>,
    under_way: Semaphore,
    /// The server's limit of one text, once it was connected to; 0 before, or if it does not tell.
    max_text_bytes: AtomicUsize,
    closed: AtomicBool,
}

impl Redis {
    /// The sink of a configuration. Nothing is connected to yet.
    ///
    /// # Errors
    /// [`ErrorKind::Permanent`](postrider_core::ErrorKind::Permanent) for impossible settings,
    /// naming the key.
    pub fn new(config: &RedisConfig) -> Result<Self> {
        let stream = Template::parse(&config.stream)
            .map_err(|error| Error::permanent(format!("stream: {error}")))?;
        let source = match &config.source {
            Some(text) => EventSource::new(text.as_str())?,
            None => EventSource::default(),
        };
        Ok(Self {
            login: Login::new(config)?,
            stream,
            encoder: Encoder::new(config.encoding, source),
            append: Append::new(config.seen_for_ms, config.create_streams),
            unroutable: config.unroutable,
            creates: config.create_streams,
            seen_for: Duration::from_millis(config.seen_for_ms),
            timeout: Duration::from_millis(config.timeout_ms),
            link: Mutex::new(Connection::None),
            under_way: Semaphore::new(UNDER_WAY),
            max_text_bytes: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
        })
    }

    /// The connection, made anew if there is none that is up. Who waits here while another fails
    /// to make one is told the same, and doesn't try in turn.
    async fn link(&self) -> Result<Arc<Link>> {
        let asked = Instant::now();
        let mut connection = self.link.lock().await;
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::transient("the Redis sink is closed"));
        }
        match &*connection {
            Connection::Made(link) if link.is_up() => return Ok(Arc::clone(link)),
            Connection::Failed { at, error } if *at >= asked => return Err(again(error)),
            _ => {}
        }
        match Link::open(&self.login, &self.append).await {
            Ok(link) => {
                let link = Arc::new(link);
                let limit = link.max_text_bytes().unwrap_or(0);
                self.max_text_bytes.store(limit, Ordering::Relaxed);
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

    /// Sends a key's events of one call, in order, up to the first that fails, for as long as the
    /// call may send.
    async fn chain(
        &self,
        mut link: Arc<Link>,
        records: Vec<&Record>,
        until: Instant,
    ) -> Vec<Outcome> {
        let mut outcomes = Vec::with_capacity(records.len());
        let mut most = BATCH_RECORDS;
        while let Some(rest) = records.get(outcomes.len()..).filter(|rest| !rest.is_empty()) {
            if !outcomes.is_empty() && Instant::now() >= until {
                break;
            }
            let Some(_place) = self.place(until).await else {
                if outcomes.is_empty() {
                    outcomes.push(Outcome::Failed(no_place()));
                }
                break;
            };
            if !link.is_up() {
                match self.link().await {
                    Ok(other) => link = other,
                    Err(error) => {
                        outcomes.push(Outcome::Failed(error));
                        break;
                    }
                }
            }
            let piece = rest.get(..piece(rest, most)).unwrap_or(rest);
            self.learn_limit(&link, piece).await;
            match self.step(&link, piece).await {
                Step::Settled(settled) => {
                    let failed = settled.iter().any(is_failure);
                    outcomes.extend(settled);
                    if failed {
                        break;
                    }
                }
                // It is for one of them; the server does not say which.
                Step::Refused(_) if piece.len() > 1 => most = 1,
                Step::Refused(error) => {
                    outcomes.push(Outcome::Failed(error));
                    break;
                }
            }
        }
        outcomes.resize_with(records.len(), || Outcome::HeldBack);
        outcomes
    }

    /// Asks for the server's limit again before an event is refused by it: it may have been raised.
    async fn learn_limit(&self, link: &Link, records: &[&Record]) {
        let is_beyond = |limit: usize| records.iter().any(|one| one.event.payload().len() > limit);
        if link.max_text_bytes().is_some_and(is_beyond) {
            let limit = link.learn_max_text_bytes(self.timeout).await;
            self.max_text_bytes.store(limit.unwrap_or(0), Ordering::Relaxed);
        }
    }

    /// Sends the events of several keys in one call of the script; key by key if the server refuses
    /// that as a whole.
    async fn bundle(
        &self,
        link: Arc<Link>,
        chains: Vec<Vec<&Record>>,
        until: Instant,
    ) -> Vec<Vec<Outcome>> {
        if chains.len() > 1
            && let Some(place) = self.place(until).await
        {
            let (call, streams, unfit) = self.call(&link, &chains);
            if unfit.is_none() && link.is_up() {
                match self.answers(&link, &call, &streams).await {
                    Ok(answers) => {
                        let outcomes = self.outcomes(&link, answers, &streams);
                        return dealt(outcomes, &chains);
                    }
                    Err(Step::Settled(mut failed)) => {
                        if let Some(Outcome::Failed(error)) = failed.pop() {
                            return chains
                                .iter()
                                .map(|chain| first_failed(chain, &error))
                                .collect();
                        }
                    }
                    Err(Step::Refused(_)) => {}
                }
            }
            drop(place);
        }
        join_all(chains.into_iter().map(|chain| self.chain(Arc::clone(&link), chain, until))).await
    }

    /// A place among the calls under way, if one is free now or in time.
    async fn place(&self, until: Instant) -> Option<SemaphorePermit<'_>> {
        // A time that is over leaves none to a waiting that begins.
        if let Ok(place) = self.under_way.try_acquire() {
            return Some(place);
        }
        let place = timeout_at(until, self.under_way.acquire()).await.ok()?;
        Some(place.expect("the semaphore is never closed"))
    }

    /// Sends some of a key's events in one call of the script.
    async fn step(&self, link: &Link, records: &[&Record]) -> Step {
        let (call, streams, unfit) = self.call(link, &[records]);
        let mut settled = Vec::with_capacity(records.len());
        if !streams.is_empty() {
            match self.answers(link, &call, &streams).await {
                Ok(answers) => settled = self.outcomes(link, answers, &streams),
                Err(step) => return step,
            }
        }
        if let Some(error) = unfit.filter(|_| !settled.iter().any(is_failure)) {
            settled.push(Outcome::Failed(error));
        }
        Step::Settled(settled)
    }

    /// The call of some keys' events with their streams, up to one that the sink itself refuses.
    fn call<'a>(
        &self,
        link: &Link,
        chains: &[impl AsRef<[&'a Record]>],
    ) -> (Call<'_>, Vec<String>, Option<Error>) {
        let mut call = self.append.call();
        let mut streams = Vec::new();
        let chains = chains.iter().map(AsRef::as_ref);
        for (at, record) in chains.flat_map(|chain| chain.iter().enumerate()) {
            let stream = match self.stream.render(&record.event, Escape::None) {
                Ok(stream) => stream,
                Err(error) => return (call, streams, Some(error)),
            };
            let fields = fields(record, self.encoder.encode(record));
            let longest = fields.iter().map(bytes::Bytes::len).max().unwrap_or(0);
            if let Some(limit) = link.max_text_bytes().filter(|limit| longest > *limit) {
                return (call, streams, Some(too_large(longest, limit)));
            }
            call.add(&stream, record.event.id(), &fields, at == 0);
            streams.push(stream);
        }
        (call, streams, None)
    }

    /// Sends a call and waits for its answer: as long as one may take, and as long as the call may
    /// be on its way to the server.
    async fn answers(
        &self,
        link: &Link,
        call: &Call<'_>,
        streams: &[String],
    ) -> Result<Vec<Answer>, Step> {
        let lost = || {
            Error::transient(
                "the connection to Redis was lost; whether the stream has \
                                        the event is unknown",
            )
        };
        let mut connection = link.connection();
        let under_way = link.sends(call.bytes());
        let patience = self.timeout.saturating_add(under_way.on_the_way());
        let answer = tokio::select! {
            biased;
            answer = timeout(patience, call.send(&mut connection)) => answer,
            () = link.down() => return Err(Step::failed(lost())),
        };
        match answer {
            Ok(Ok(answers)) => {
                link.answered();
                Ok(answers)
            }
            Ok(Err(error)) if is_too_large(&error) => {
                // The server ends the connection after it.
                link.retire();
                Err(Step::Refused(Error::permanent(
                    "the event is larger than the server's proto-max-bulk-len",
                )))
            }
            Ok(Err(error)) if error.code().is_some() => {
                link.answered();
                if error_tells_to_leave(&error) {
                    link.retire();
                }
                let stream = match streams {
                    [stream] => Some(stream.as_str()),
                    _ => None,
                };
                let told = call_error(&error, stream);
                Err(if is_forbidden(&error) { Step::Refused(told) } else { Step::failed(told) })
            }
            Ok(Err(error)) => {
                link.retire();
                Err(Step::failed(lost().with_source(error.to_string())))
            }
            Err(_) => {
                // A connection on which nothing at all was answered is not trusted again.
                if link.is_silent_for(patience) {
                    link.retire();
                }
                Err(Step::failed(Error::transient(format!(
                    "there was no answer within {} ms; whether the stream has the event is unknown",
                    patience.as_millis()
                ))))
            }
        }
    }

    /// What the answers mean, one for each event.
    fn outcomes(&self, link: &Link, answers: Vec<Answer>, streams: &[String]) -> Vec<Outcome> {
        let mut outcomes = Vec::with_capacity(streams.len());
        for (answer, stream) in answers.into_iter().zip(streams) {
            outcomes.push(match answer {
                Answer::New => Outcome::Confirmed,
                Answer::Duplicate => Outcome::Duplicate,
                Answer::HeldBack => Outcome::HeldBack,
                Answer::NoStream => Outcome::Failed(unroutable(self.unroutable, stream)),
                Answer::Refused(text) => {
                    if answer_tells_to_leave(&text) {
                        link.retire();
                    }
                    Outcome::Failed(refused(&text, stream))
                }
            });
        }
        outcomes.resize_with(streams.len(), || {
            let text = "the server answered for fewer events than it was sent";
            Outcome::Failed(Error::transient(text))
        });
        outcomes
    }

    /// Looks at the server, and at the stream if it is the same for all events.
    async fn look(&self, link: &Link) -> Result<()> {
        let mut connection = link.connection();
        let looked = look::Look::at(&mut connection).await;
        looked.takes_events().inspect_err(|_| link.retire())?;
        // Whether the script may be called.
        let called = self.append.call().send(&mut connection).await;
        called.map_err(|error| redis_error("call the script that appends", &error))?;
        link.answered();
        for text in looked.advice(!self.seen_for.is_zero()) {
            tracing::warn!("Redis: {text}");
        }
        if let Some(stream) = self.stream.constant() {
            let exists = look::has_stream(&mut connection, stream).await?;
            if !exists && !self.creates {
                return Err(unroutable(Unroutable::Retry, stream));
            }
        }
        Ok(())
    }
}

/// The outcomes of a key none of whose events were sent, as far as is known.
fn first_failed(chain: &[&Record], error: &Error) -> Vec<Outcome> {
    let mut outcomes = vec![Outcome::Failed(again(error))];
    outcomes.resize_with(chain.len(), || Outcome::HeldBack);
    outcomes
}

/// What the last attempt to connect came to.
enum Connection {
    None,
    Made(Arc<Link>),
    Failed { at: Instant, error: Error },
}

/// What one call of the script came to.
enum Step {
    /// One outcome for each of the first events, up to one that failed.
    Settled(Vec<Outcome>),
    /// The server refused the whole call, for its size or for want of a permission, and ran
    /// nothing. The error is that of an event which is refused alone.
    Refused(Error),
}

impl Step {
    fn failed(error: Error) -> Self {
        Self::Settled(vec![Outcome::Failed(error)])
    }
}

fn is_failure(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Failed(_))
}

/// The same error for somebody else.
fn again(error: &Error) -> Error {
    Error::new(error.kind(), error.chain())
}

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

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Redis({:?}, seen for {:?})", self.stream, self.seen_for)
    }
}

#[async_trait]
impl Sink for Redis {
    fn capabilities(&self) -> Capabilities {
        let limit = self.max_text_bytes.load(Ordering::Relaxed);
        Capabilities {
            max_event_bytes: (limit > 0).then_some(limit),
            max_batch_records: BATCH_RECORDS,
            max_batch_bytes: BATCH_BYTES,
            max_in_flight: IN_FLIGHT,
            chain: Chain::Many,
            dedup_window: (!self.seen_for.is_zero()).then_some(self.seen_for),
        }
    }

    async fn publish(&self, batch: Publish<'_>) -> Vec<Outcome> {
        let records = batch.records();
        if records.is_empty() {
            return Vec::new();
        }
        let until = Instant::now() + batch.sending_time();
        // Once for all keys: a server that can't be reached is waited for only so long.
        let link = match self.link().await {
            Ok(link) => link,
            Err(error) => return none_sent(records, &error),
        };
        let chains = by_key(records);
        let bundles = bundles(
            chains
                .iter()
                .map(|places| places.iter().filter_map(|place| records.get(*place)).collect()),
        );
        let sent = bundles.into_iter().map(|own| self.bundle(Arc::clone(&link), own, until));
        let settled = join_all(sent).await;
        let places = chains.iter().flatten().copied();
        let mut settled: Vec<(usize, Outcome)> =
            places.zip(settled.into_iter().flatten().flatten()).collect();
        settled.sort_unstable_by_key(|(place, _)| *place);
        settled.into_iter().map(|(_, outcome)| outcome).collect()
    }

    /// Connects, and looks at the server and the stream. Appends nothing. What the server may lose
    /// or repeat by its settings is logged.
    async fn check(&self) -> Result<()> {
        let link = self.link().await?;
        let looked = timeout(self.timeout, self.look(&link)).await;
        looked.unwrap_or_else(|_| Err(Error::transient("the Redis server does not answer")))
    }

    /// Sends nothing more. There is nothing to flush: each event was answered on its own.
    async fn close(&self) -> Result<()> {
        self.closed.store(true, Ordering::Release);
        let mut connection = self.link.lock().await;
        if let Connection::Made(link) = std::mem::replace(&mut *connection, Connection::None) {
            link.retire();
        }
        Ok(())
    }
}
