//! One producer, and its end.
//!
//! What lives here: making it, handing records to it, hearing what became of them, what the client
//! says of the connection. What does not: its settings (`login.rs`) and what is sent
//! (`publish.rs`).
//! Invariant: a link that is retired takes no new event, and nothing of what it holds is sent
//! later, when its events may have been sent by others. What is on its way already has as long for
//! its answer as the client waits before it would send it again (`ANSWERED_WITHIN`).

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use postrider_core::Result;
use rdkafka::ClientConfig;
use rdkafka::client::ClientContext;
use rdkafka::config::{FromClientConfigAndContext, RDKafkaLogLevel};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{DeliveryResult, OwnedHeaders};
use rdkafka::producer::{BaseRecord, Producer, ProducerContext, PurgeConfig, ThreadedProducer};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;

use crate::error::create_error;
use crate::login::RETRY_BACKOFF_MS;

/// How long a retired producer's requests may wait for their answers. The client sends none of them
/// again within it: `login::RETRY_BACKOFF_MS`, of which it may take a fifth off.
const ANSWERED_WITHIN: Duration = Duration::from_millis(100);
const _: () = assert!(
    ANSWERED_WITHIN.as_millis() * 5 < RETRY_BACKOFF_MS as u128 * 4,
    "nothing is sent again by then"
);
/// Most topics that a link remembers to exist.
const MAX_KNOWN_TOPICS: usize = 4_096;

/// What the broker, or the client, says of one record: nothing if it is confirmed.
pub(crate) type Answer = std::result::Result<(), RDKafkaErrorCode>;

/// One of many records, and its answer.
pub(crate) type Told = (usize, Answer);

/// By which one of many records is told apart when it is answered. One that is dropped instead,
/// with its producer, is answered by that.
pub(crate) struct Ticket {
    place: usize,
    tell: Option<UnboundedSender<Told>>,
}

impl Ticket {
    pub(crate) fn new(place: usize, tell: UnboundedSender<Told>) -> Self {
        Self { place, tell: Some(tell) }
    }

    fn tell(&mut self, answer: Answer) {
        if let Some(tell) = self.tell.take() {
            // Nobody may wait any more.
            let _ = tell.send((self.place, answer));
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.tell(Err(RDKafkaErrorCode::PurgeInflight));
    }
}

/// Whom a record's answer is told.
pub(crate) enum Teller {
    Alone(oneshot::Sender<Answer>),
    OfMany(Ticket),
}

impl Teller {
    fn tell(self, answer: Answer) {
        match self {
            // Nobody may wait any more.
            Self::Alone(teller) => drop(teller.send(answer)),
            Self::OfMany(mut ticket) => ticket.tell(answer),
        }
    }

    /// Nothing comes of it.
    fn forget(&mut self) {
        if let Self::OfMany(ticket) = self {
            ticket.tell = None;
        }
    }
}

/// A record on its way to the client.
pub(crate) struct Letter<'a> {
    pub(crate) topic: &'a str,
    /// The one that the key says if not given.
    pub(crate) partition: Option<i32>,
    pub(crate) key: &'a str,
    pub(crate) value: &'a [u8],
    pub(crate) headers: OwnedHeaders,
    /// In milliseconds; the time of sending if not given.
    pub(crate) time_ms: Option<i64>,
}

/// What the client tells about its connections and records.
#[derive(Default)]
pub(crate) struct Ear {
    trouble: Mutex<Trouble>,
}

#[derive(Default)]
struct Trouble {
    /// Whether no broker can be reached now.
    all_down: bool,
    /// The client's last complaint since something was confirmed.
    text: Option<String>,
}

impl Ear {
    fn trouble(&self) -> MutexGuard<'_, Trouble> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether no broker can be reached, and what the client complained about last.
    pub(crate) fn told(&self) -> (bool, Option<String>) {
        let trouble = self.trouble();
        (trouble.all_down, trouble.text.clone())
    }

    /// The brokers did what they were asked for.
    pub(crate) fn is_well(&self) {
        *self.trouble() = Trouble::default();
    }
}

impl ClientContext for Ear {
    /// It names brokers and what is wrong with them; no record and no secret.
    fn log(&self, _: RDKafkaLogLevel, facility: &str, message: &str) {
        tracing::debug!("librdkafka {facility}: {message}");
    }

    fn error(&self, error: KafkaError, reason: &str) {
        let code = error.rdkafka_error_code();
        let mut trouble = self.trouble();
        if code == Some(RDKafkaErrorCode::AllBrokersDown) {
            trouble.all_down = true;
            // What was said before tells why.
            if trouble.text.is_some() {
                return;
            }
        }
        trouble.text = Some(reason.to_owned());
    }
}

impl ProducerContext for Ear {
    type DeliveryOpaque = Box<Teller>;

    fn delivery(&self, result: &DeliveryResult<'_>, teller: Self::DeliveryOpaque) {
        let answer = match result {
            Ok(_) => {
                self.is_well();
                Ok(())
            }
            Err((error, _)) => Err(error.rdkafka_error_code().unwrap_or(RDKafkaErrorCode::Unknown)),
        };
        teller.tell(answer);
    }
}

/// A producer.
pub(crate) struct Link {
    /// Only its end takes it.
    producer: Option<Arc<ThreadedProducer<Ear>>>,
    is_retired: AtomicBool,
    topics: Mutex<HashSet<String>>,
}

impl Link {
    /// Makes a producer, which connects by itself. Blocks while files of certificates are read.
    ///
    /// # Errors
    /// `Transient`, as a file may be replaced at this very moment.
    pub(crate) fn open(config: &ClientConfig) -> Result<Self> {
        let made = ThreadedProducer::from_config_and_context(config, Ear::default());
        let producer = Some(Arc::new(made.map_err(|error| create_error(&error))?));
        Ok(Self { producer, is_retired: AtomicBool::new(false), topics: Mutex::default() })
    }

    /// The producer, for questions to the brokers.
    pub(crate) fn producer(&self) -> &ThreadedProducer<Ear> {
        self.producer.as_ref().expect("only its end takes it")
    }

    /// Whether events can be sent on it. A producer that gave up for good is found here.
    pub(crate) fn is_up(&self) -> bool {
        if self.is_retired.load(Ordering::Acquire) {
            return false;
        }
        if self.fatal().is_some() {
            self.retire();
            return false;
        }
        true
    }

    /// Why the producer gave up for good, if it did.
    pub(crate) fn fatal(&self) -> Option<String> {
        let (code, text) = self.producer().client().fatal_error()?;
        Some(format!("{code:?}: {text}"))
    }

    /// By what code it did.
    pub(crate) fn fatal_code(&self) -> Option<RDKafkaErrorCode> {
        self.producer().client().fatal_error().map(|(code, _)| code)
    }

    /// Takes no new events, and drops what was not sent. What was is answered soon, or dropped: its
    /// fate is unknown then. So who shares the producer hears of nearly all that the brokers took.
    pub(crate) fn retire(&self) {
        if self.is_retired.swap(true, Ordering::AcqRel) {
            return;
        }
        self.producer().purge(PurgeConfig::default().queue().non_blocking());
        let all = || PurgeConfig::default().queue().inflight().non_blocking();
        let Some(producer) = self.producer.clone() else { return };
        let later = thread::Builder::new().name("kafka end".to_owned()).spawn(move || {
            thread::sleep(ANSWERED_WITHIN);
            producer.purge(all());
        });
        if later.is_err() {
            self.producer().purge(all());
        }
    }

    /// [`Self::retire`] that ends when nothing more is sent. Blocks for a moment.
    pub(crate) fn end(&self) {
        self.is_retired.store(true, Ordering::Release);
        self.producer().purge(PurgeConfig::default().queue().inflight());
    }

    /// Hands a record to the client; its answer comes later.
    ///
    /// # Errors
    /// The client's own refusal.
    pub(crate) fn send(
        &self,
        letter: Letter<'_>,
    ) -> std::result::Result<oneshot::Receiver<Answer>, RDKafkaErrorCode> {
        let (teller, answer) = oneshot::channel();
        self.hand(letter, Teller::Alone(teller)).map(|()| answer)
    }

    /// [`Self::send`] for one of many, whose answers come to one place.
    ///
    /// # Errors
    /// The client's own refusal; then no answer comes.
    pub(crate) fn send_for(
        &self,
        letter: Letter<'_>,
        ticket: Ticket,
    ) -> std::result::Result<(), RDKafkaErrorCode> {
        self.hand(letter, Teller::OfMany(ticket))
    }

    fn hand(
        &self,
        letter: Letter<'_>,
        teller: Teller,
    ) -> std::result::Result<(), RDKafkaErrorCode> {
        let mut record = BaseRecord::with_opaque_to(letter.topic, Box::new(teller))
            .key(letter.key.as_bytes())
            .payload(letter.value)
            .headers(letter.headers);
        record.timestamp = letter.time_ms;
        record.partition = letter.partition;
        self.producer().send(record).map_err(|(error, mut back)| {
            back.delivery_opaque.forget();
            error.rdkafka_error_code().unwrap_or(RDKafkaErrorCode::Unknown)
        })
    }

    /// Whether no broker can be reached, and what the client complained about last.
    pub(crate) fn trouble(&self) -> (bool, Option<String>) {
        self.producer().client().context().told()
    }

    /// Notes that a broker answered.
    pub(crate) fn answered(&self) {
        self.producer().client().context().trouble().all_down = false;
    }

    /// Whether the topic was there when it was looked for last.
    pub(crate) fn knows(&self, topic: &str) -> bool {
        self.topics().contains(topic)
    }

    /// Remembers that the topic is there.
    pub(crate) fn learn(&self, topic: &str) {
        let mut topics = self.topics();
        if topics.len() >= MAX_KNOWN_TOPICS {
            topics.clear();
        }
        topics.insert(topic.to_owned());
    }

    /// Lets the topic be looked for again.
    pub(crate) fn forget(&self, topic: &str) {
        self.topics().remove(topic);
    }

    fn topics(&self) -> MutexGuard<'_, HashSet<String>> {
        self.topics.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Link {
    /// The producer's end waits for its threads, for which nobody here has the time.
    fn drop(&mut self) {
        self.retire();
        let producer = self.producer.take();
        // If no thread can be started, it ends here.
        let _ = thread::Builder::new().name("kafka end".to_owned()).spawn(move || drop(producer));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::mpsc;

    #[test]
    fn a_record_that_the_client_refuses_is_not_answered_and_one_that_it_drops_is() {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", "127.0.0.1:1").set("queue.buffering.max.messages", "1");
        let link = Link::open(&config).expect("it connects later");
        let (tell, mut told) = mpsc::unbounded_channel();
        let letter = || Letter {
            topic: "orders",
            partition: None,
            key: "k",
            value: b"{}",
            headers: OwnedHeaders::new(),
            time_ms: None,
        };
        link.send_for(letter(), Ticket::new(0, tell.clone())).expect("there is a place");
        let refused = link.send_for(letter(), Ticket::new(1, tell));
        assert_eq!(refused, Err(RDKafkaErrorCode::QueueFull));
        assert!(told.try_recv().is_err(), "who was refused may try again");
        drop(link);
        assert!(matches!(told.blocking_recv(), Some((0, Err(_)))));
        assert_eq!(told.blocking_recv(), None);
    }
}
