//! The sink itself.
//!
//! What lives here: `Kafka`, its producers from call to call, and what a refusal means for an
//! event. What does not: a call's events on their way (`call.rs`), and the mapping of answers to
//! kinds (`error.rs`).
//! Invariant: of one key at most one event is under way, so that none overtakes one that fails,
//! whatever the client tries again by itself. Different keys don't wait for each other. With
//! transactions (`transact.rs`) that is so for each partition's transactions instead.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use postrider_core::{Capabilities, Chain, Error, Outcome, Publish, Record, Result, Sink, by_key};
use postrider_encoding::{Encoder, EventSource, Message, Template};
use rdkafka::error::RDKafkaErrorCode as Code;
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep, timeout};

use crate::call::{self, Call, Refused, Waiting};
use crate::config::{KafkaConfig, RecordTime, Unroutable};
use crate::connect::{Answer, Letter, Link};
use crate::encode::{headers, topic, why_no_topic};
use crate::error::{
    delivery_error, fatal_error, is_missing, is_size, may_be_anothers, throttled, too_large,
    unroutable,
};
use crate::login::{Batches, Login};
use crate::look::{self, Found};
use crate::missing::Missing;
use crate::transact::{Parcel, Transactions};

/// Events in one call of the relay: enough to hide a round trip at full rate.
const BATCH_RECORDS: usize = 512;
/// Bytes in one call of the relay: a few requests of the client's size.
const BATCH_BYTES: usize = 4 << 20;
/// Calls of the relay at a time from one partition.
const IN_FLIGHT: usize = 4;
/// Topics looked for at a time.
const LOOKS: usize = 16;
/// How soon a full queue is tried again.
pub(crate) const QUEUE_POLL: Duration = Duration::from_millis(5);
/// The client looks once a second for events whose time is over; this much later it will not.
pub(crate) const GRACE: Duration = Duration::from_secs(5);

/// Publishes each event to a Kafka topic and waits until every in-sync replica has it.
///
/// # Ordering
/// It takes any number of a key's events in a call ([`Chain::InTurn`]) and sends them one after the
/// other, each after the confirmation of the one before; with transactions all together
/// ([`Chain::Many`]).
/// # Cancellation
/// A dropped `publish`, like a time-out, leaves it unknown whether the topic has the event: it is
/// sent again under the same `postrider-id`. What the client had not sent by then is dropped.
pub struct Kafka {
    login: Arc<Login>,
    topic: Template,
    pub(crate) encoder: Encoder,
    record_time: RecordTime,
    unroutable: Unroutable,
    missing: Missing,
    pub(crate) timeout: Duration,
    full: Mutex<Option<Arc<Link>>>,
    /// For events that were refused together with others.
    alone: Mutex<Option<Arc<Link>>>,
    /// Held while a limit is asked for.
    asking: Mutex<()>,
    transactions: Option<Arc<Transactions>>,
    closed: AtomicBool,
}

impl Kafka {
    /// The sink of a configuration. Nothing is connected to yet.
    ///
    /// # Errors
    /// [`ErrorKind::Permanent`](postrider_core::ErrorKind::Permanent) for impossible or unsafe
    /// settings, naming the key.
    pub fn new(config: &KafkaConfig) -> Result<Self> {
        let refused = |error: String| Error::permanent(format!("topic: {error}"));
        let topic = Template::parse(&config.topic).map_err(|error| refused(error.to_string()))?;
        if let Some(why) = topic.constant().and_then(why_no_topic) {
            return Err(refused(why));
        }
        let source = match &config.source {
            Some(text) => EventSource::new(text.as_str())?,
            None => EventSource::default(),
        };
        let login = Arc::new(Login::new(config)?);
        let timeout = Duration::from_millis(config.timeout_ms);
        let transactions = config.transactions.as_deref().map(|name| {
            let own = (name, config.transactions_topic.as_str());
            let login = Arc::clone(&login);
            Transactions::new(login, own, &config.topic, timeout)
        });
        Ok(Self {
            transactions: transactions.map(Arc::new),
            login,
            topic,
            encoder: Encoder::new(config.encoding, source),
            record_time: config.record_time,
            unroutable: config.unroutable,
            missing: Missing::default(),
            timeout,
            full: Mutex::new(None),
            alone: Mutex::new(None),
            asking: Mutex::new(()),
            closed: AtomicBool::new(false),
        })
    }

    /// The producer, made anew if there is none that is up.
    async fn link(&self, batches: Batches) -> Result<Arc<Link>> {
        let place = match batches {
            Batches::Full => &self.full,
            Batches::Alone => &self.alone,
        };
        let mut place = place.lock().await;
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::transient("the Kafka sink is closed"));
        }
        if let Some(link) = place.as_ref().filter(|link| link.is_up()) {
            return Ok(Arc::clone(link));
        }
        let login = Arc::clone(&self.login);
        let opened = tokio::task::spawn_blocking(move || {
            login.read_files()?;
            Link::open(&login.producer(batches))
        });
        let opened = opened.await;
        let opened =
            opened.map_err(|error| Error::transient("connect to Kafka").with_source(error));
        let link = Arc::new(opened??);
        *place = Some(Arc::clone(&link));
        Ok(link)
    }

    /// What is wrong with each of the topics that are not known to take events.
    ///
    /// # Errors
    /// `Transient` if no broker answers.
    async fn look(&self, link: &Arc<Link>, topics: &[Result<String>]) -> Result<Wrong> {
        let names: HashSet<&String> = topics.iter().flatten().collect();
        let names: Vec<&String> = names.into_iter().filter(|name| !link.knows(name)).collect();
        let mut wrong = HashMap::new();
        for names in names.chunks(LOOKS) {
            let looks = names.iter().map(|name| look::look(link, &self.login, Some(name.as_str())));
            for (name, found) in names.iter().zip(join_all(looks).await) {
                if let Some(error) = self.refusal(link, name, &found?) {
                    wrong.insert((*name).clone(), error);
                }
            }
        }
        Ok(wrong)
    }

    /// The same, with the topic that transactions need.
    async fn wrong(&self, link: &Arc<Link>, topics: &[Result<String>]) -> Result<Wrong> {
        if let Some(transactions) = &self.transactions {
            let own = [Ok(transactions.topic.clone())];
            if let Some(error) = self.look(link, &own).await?.remove(&transactions.topic) {
                return Err(throttled(error.chain()));
            }
        }
        self.look(link, topics).await
    }

    /// What a look at a topic means for its events.
    fn refusal(&self, link: &Link, topic: &str, found: &Found) -> Option<Error> {
        match found {
            Found::There => {
                self.missing.is_there(topic);
                None
            }
            Found::Missing => {
                let is_settled = self.missing.is_settled(topic, Instant::now().into_std());
                let how = if is_settled { self.unroutable } else { Unroutable::Retry };
                Some(unroutable(how, topic))
            }
            Found::Refused(code) => Some(delivery_error(*code, topic, link.trouble())),
        }
    }

    /// The producer for events that may go together with others.
    pub(crate) async fn link_for_many(&self) -> Result<Arc<Link>> {
        self.link(Batches::Full).await
    }

    /// What becomes of an event that was not confirmed: one for which others may be to blame is
    /// sent once more, alone.
    pub(crate) async fn refused(&self, call: &Call<'_>, refused: Refused) -> (usize, Result<()>) {
        (refused.place, self.alone(call, refused).await)
    }

    async fn alone(&self, call: &Call<'_>, refused: Refused) -> Result<()> {
        let Refused { place, link, code } = refused;
        let (Some(record), Some(topic)) = (call.records.get(place), call.topics.get(place)) else {
            return Err(Error::transient("the call has no such event"));
        };
        let topic = topic.as_deref().map_err(again)?;
        if !may_be_anothers(code) {
            return Err(self.failure(&link, topic, code));
        }
        let message = self.encoder.encode(record);
        let link = self.link(Batches::Alone).await?;
        let answer = self.answer(&link, record, topic, &message, call.until).await;
        let Err(code) = answer else { return Ok(()) };
        if !is_size(code) {
            return Err(self.failure(&link, topic, code));
        }
        let _one_at_a_time = self.asking.lock().await;
        let limit = look::limit(self.login.admin(), topic, self.login.patience()).await;
        Err(too_large(topic, bytes(record, &message), limit.as_deref()))
    }

    /// An event as the client takes it.
    pub(crate) fn letter<'l>(
        &self,
        record: &'l Record,
        topic: &'l str,
        message: &'l Message,
    ) -> Letter<'l> {
        Letter {
            topic,
            partition: None,
            key: record.event.key().as_str(),
            value: &message.body,
            headers: headers(record, message),
            time_ms: self.time_ms(record),
        }
    }

    /// Hands an event to the client and waits for what becomes of it.
    async fn answer(
        &self,
        link: &Arc<Link>,
        record: &Record,
        topic: &str,
        message: &Message,
        until: Instant,
    ) -> Answer {
        let answer = loop {
            match link.send(self.letter(record, topic, message)) {
                Ok(answer) => break answer,
                Err(Code::QueueFull) if Instant::now() < until => sleep(QUEUE_POLL).await,
                Err(code) => return Err(code),
            }
        };
        let mut waiting = Waiting { link: Arc::clone(link), answered: false };
        let answer = timeout(self.timeout + GRACE, answer).await;
        waiting.answered = answer.is_ok();
        match answer {
            Ok(Ok(answer)) => answer,
            // The producer has ended.
            Ok(Err(_)) => Err(Code::PurgeInflight),
            Err(_) => Err(Code::MessageTimedOut),
        }
    }

    /// The time that an event's record is to carry, unless that of sending it.
    fn time_ms(&self, record: &Record) -> Option<i64> {
        match self.record_time {
            RecordTime::Sent => None,
            RecordTime::Appended => i64::try_from(record.appended_at.as_millis()).ok(),
        }
    }

    fn parcel(&self, record: &Record, topic: &Result<String>, call: &Wrong) -> Parcel {
        let message = self.encoder.encode(record);
        let topic = match topic {
            Ok(topic) => call.get(topic).map_or_else(|| Ok(topic.clone()), |no| Err(again(no))),
            Err(error) => Err(again(error)),
        };
        Parcel {
            id: record.event.id(),
            key: record.event.key().as_str().to_owned(),
            topic,
            headers: headers(record, &message),
            time_ms: self.time_ms(record),
            bytes: bytes(record, &message),
            body: message.body,
        }
    }

    /// What an event's answer means that is no confirmation.
    fn failure(&self, link: &Link, topic: &str, code: Code) -> Error {
        if is_missing(code) || code == Code::MessageTimedOut {
            // The next call looks what is wrong with it.
            link.forget(topic);
        }
        match link.fatal() {
            Some(why) => fatal_error(why),
            None => delivery_error(code, topic, link.trouble()),
        }
    }
}

/// What is wrong with some topics.
pub(crate) type Wrong = HashMap<String, Error>;

/// About how many bytes an event's record has.
fn bytes(record: &Record, message: &Message) -> usize {
    let own = record.event.headers().iter().map(|(name, value)| name.len() + value.len());
    let attributes = message.attributes.iter().map(|(name, value)| name.len() + value.len());
    record.event.key().as_str().len()
        + message.body.len()
        + own.chain(attributes).sum::<usize>()
        + record.event.topic().as_str().len()
        + record.event.event_type().as_str().len()
}

/// The next call looks what is wrong with the topics of failed events, and with that of notes.
fn forget_failed(link: &Link, notes: &str, topics: &[Result<String>], outcomes: &[Outcome]) {
    for (topic, outcome) in topics.iter().zip(outcomes) {
        if let (Ok(topic), Outcome::Failed(_)) = (topic, outcome) {
            link.forget(topic);
            link.forget(notes);
        }
    }
}

/// The same error for somebody else.
pub(crate) fn again(error: &Error) -> Error {
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

impl fmt::Debug for Kafka {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kafka({:?})", self.topic)
    }
}

#[async_trait]
impl Sink for Kafka {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            // Each topic has its own.
            max_event_bytes: None,
            max_batch_records: BATCH_RECORDS,
            max_batch_bytes: BATCH_BYTES,
            // Of one partition one transaction is under way.
            max_in_flight: if self.transactions.is_some() { 1 } else { IN_FLIGHT },
            chain: if self.transactions.is_some() { Chain::Many } else { Chain::InTurn },
            dedup_window: None,
        }
    }

    async fn publish(&self, batch: Publish<'_>) -> Vec<Outcome> {
        let records = batch.records();
        if records.is_empty() {
            return Vec::new();
        }
        let until = Instant::now() + batch.sending_time();
        let link = match self.link(Batches::Full).await {
            Ok(link) => link,
            Err(error) => return none_sent(records, &error),
        };
        let topics: Vec<_> = records.iter().map(|record| topic(&self.topic, record)).collect();
        let wrong = match self.wrong(&link, &topics).await {
            Ok(wrong) => wrong,
            Err(error) => return none_sent(records, &error),
        };
        if let Some(transactions) = &self.transactions {
            let parcels = records.iter().zip(&topics);
            let parcels = parcels.map(|(record, topic)| self.parcel(record, topic, &wrong));
            let sent = transactions.publish(batch.partition(), parcels.collect(), until).await;
            forget_failed(&link, &transactions.topic, &topics, &sent);
            return sent;
        }
        let call = Call { link, records, topics, wrong, until };
        call::send(self, &call).await
    }

    /// Looks at the brokers, and at the topic if it is the same for all events. Publishes nothing.
    async fn check(&self) -> Result<()> {
        let link = self.link(Batches::Full).await?;
        if let Some(transactions) = &self.transactions {
            let name = &transactions.topic;
            let found = look::look(&link, &self.login, Some(name.as_str())).await?;
            if let Some(error) = self.refusal(&link, name, &found) {
                return Err(Error::transient(error.chain()));
            }
            look::keeps_all(self.login.admin(), name, self.login.patience()).await?;
        }
        let topic = self.topic.constant();
        let found = look::look(&link, &self.login, topic).await?;
        match self.refusal(&link, topic.unwrap_or_default(), &found) {
            Some(error) => Err(Error::transient(error.chain())),
            None => Ok(()),
        }
    }

    /// Sends nothing more. There is nothing to flush: each event was confirmed on its own.
    async fn close(&self) -> Result<()> {
        self.closed.store(true, Ordering::Release);
        if let Some(transactions) = &self.transactions {
            transactions.close();
        }
        for place in [&self.full, &self.alone] {
            if let Some(link) = place.lock().await.take() {
                let ended = tokio::task::spawn_blocking(move || link.end()).await;
                ended.map_err(|error| Error::transient("close Kafka").with_source(error))?;
            }
        }
        Ok(())
    }
}
