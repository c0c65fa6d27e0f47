//! Events in transactions: each once for who reads what is committed.
//!
//! What lives here: a partition's transactional producer, and a call's events through it. What does
//! not: which events were committed before (`seen.rs`), and sending without transactions
//! (`publish.rs`).
//! Invariant: an event and the note of its id are committed together or not at all. Who begins on a
//! partition first ends its predecessor's transaction and keeps it from beginning another, and then
//! reads every note before it sends anything. So nothing that was committed is sent again, whoever
//! held the lease and whatever anybody heard; no answer, and no position, has to be trusted.
//!
//! ```text
//! init (fences) ─ mark committed ─ notes read to the mark ─▶ [begin ─ events, note ─ commit] …
//!                                                              └ one fails: abort, again without
//! ```

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant as Time};

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use postrider_core::{Error, ErrorKind, EventId, Outcome, PartitionId, Result};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use rdkafka::message::OwnedHeaders;
use rdkafka::producer::Producer;
use tokio::time::Instant;

use crate::connect::{Answer, Letter, Link};
use crate::error::{delivery_error, is_size, may_be_anothers, throttled, too_large};
use crate::login::Login;
use crate::look;
use crate::seen::{NOTES_PARTITION, Seen, note};
use crate::wait::wait_for;

/// How soon a full queue is tried again.
const QUEUE_POLL: Duration = Duration::from_millis(5);
/// The client looks once a second for events whose time is over; this much later it will not.
const GRACE: Duration = Duration::from_secs(5);
/// How often in a row a transaction is made again that the client dropped without a cause.
const PURGED_AGAIN: u32 = 3;
/// A producer that sent nothing for so long is given up when another one is made: its partition
/// may be another relay's now.
const IDLE: Duration = Duration::from_secs(300);

/// An event on its way.
pub(crate) struct Parcel {
    pub(crate) id: EventId,
    pub(crate) key: String,
    pub(crate) topic: Result<String>,
    pub(crate) body: Bytes,
    pub(crate) headers: OwnedHeaders,
    pub(crate) time_ms: Option<i64>,
    /// What its record has, about.
    pub(crate) bytes: usize,
}

/// What all partitions' transactions have in common.
pub(crate) struct Transactions {
    pub(crate) login: Arc<Login>,
    pub(crate) name: String,
    pub(crate) topic: String,
    /// Whose notes count: another sink's, or those of another topic, don't.
    pub(crate) scope: String,
    pub(crate) timeout: Duration,
    seen: Seen,
    /// And when each was used last.
    lanes: Mutex<HashMap<PartitionId, (SharedLane, Time)>>,
}

/// A partition's producer.
#[derive(Default)]
struct Lane {
    link: Option<Link>,
}

type SharedLane = Arc<Mutex<Lane>>;

/// What became of an event so far.
enum Fate {
    Open,
    /// It may have been refused for others' sake, and is sent in a transaction of its own.
    Alone,
    Done(Outcome),
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Transactions {
    pub(crate) fn new(
        login: Arc<Login>,
        (name, topic): (&str, &str),
        template: &str,
        timeout: Duration,
    ) -> Self {
        let (seen, lanes) = (Seen::default(), Mutex::default());
        let (scope, name, topic) = (format!("{name} {template}"), name.into(), topic.into());
        Self { login, name, topic, scope, timeout, seen, lanes }
    }

    /// Publishes a call's events, of which the topics in `wrong` take none, and which are sent
    /// until a time. Dropped, it ends the transaction that it has begun and begins nothing more: it
    /// takes the partition from nobody.
    pub(crate) async fn publish(
        self: &Arc<Self>,
        partition: &PartitionId,
        parcels: Vec<Parcel>,
        until: Instant,
    ) -> Vec<Outcome> {
        let (own, lane, count) = (Arc::clone(self), self.lane(partition), parcels.len());
        let partition = partition.clone();
        let dropped = Arc::new(AtomicBool::new(false));
        let _waits = Waits(Arc::clone(&dropped));
        let worked = tokio::task::spawn_blocking(move || {
            let (own, partition, parcels) = (&*own, &partition, &parcels[..]);
            let call =
                Call { own, partition, parcels, until, dropped: &dropped, purged: Cell::new(0) };
            let fates = call.run(&mut lock(&lane));
            fates.into_iter().map(outcome).collect()
        });
        worked.await.unwrap_or_else(|_| (0..count).map(|_| Outcome::HeldBack).collect())
    }

    fn lane(&self, partition: &PartitionId) -> SharedLane {
        let mut lanes = lock(&self.lanes);
        if !lanes.contains_key(partition) {
            lanes.retain(|_, (lane, used)| used.elapsed() < IDLE || Arc::strong_count(lane) > 1);
        }
        let (lane, used) =
            lanes.entry(partition.clone()).or_insert_with(|| (Arc::default(), Time::now()));
        *used = Time::now();
        Arc::clone(lane)
    }

    /// Gives up all producers. A transaction that is under way is committed or not, as it comes.
    pub(crate) fn close(&self) {
        lock(&self.lanes).clear();
    }
}

struct Waits(Arc<AtomicBool>);

impl Drop for Waits {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

fn outcome(fate: Fate) -> Outcome {
    match fate {
        Fate::Done(outcome) => outcome,
        Fate::Open | Fate::Alone => Outcome::HeldBack,
    }
}

/// The events of one call.
struct Call<'a> {
    own: &'a Transactions,
    partition: &'a PartitionId,
    parcels: &'a [Parcel],
    until: Instant,
    /// Whether nobody waits for the outcomes any more.
    dropped: &'a AtomicBool,
    /// How many of its transactions failed since the last that did not, without a cause.
    purged: Cell<u32>,
}

impl Call<'_> {
    /// Whether nothing more is to be begun.
    fn is_over(&self) -> bool {
        self.dropped.load(Ordering::Acquire) || Instant::now() >= self.until
    }

    fn run(&self, lane: &mut Lane) -> Vec<Fate> {
        let mut fates: Vec<Fate> = self.parcels.iter().map(|_| Fate::Open).collect();
        for (place, parcel) in self.parcels.iter().enumerate() {
            if let Err(error) = &parcel.topic {
                fates[place] = Fate::Done(Outcome::Failed(again(error)));
            }
        }
        // One that was fenced may have been so long ago, while another had the partition.
        for is_last in [false, true].into_iter().take_while(|_| !self.is_over()) {
            let Err(error) = self.attempt(lane, &mut fates) else { break };
            // Its fate is found out by the next one.
            lane.link = None;
            if is_last || error.kind() != ErrorKind::Fenced {
                self.fail_open(&mut fates, &error);
                return fates;
            }
        }
        self.fail_open(&mut fates, &throttled("there was no time to send the event"));
        fates
    }

    fn attempt(&self, lane: &mut Lane, fates: &mut [Fate]) -> Result<()> {
        let link = self.open(lane)?;
        for (parcel, fate) in self.parcels.iter().zip(fates.iter_mut()) {
            if matches!(fate, Fate::Open | Fate::Alone) && self.own.seen.has(parcel.id) {
                *fate = Fate::Done(Outcome::Duplicate);
            }
        }
        loop {
            let round = self.sendable(fates);
            if round.is_empty() || self.is_over() {
                return Ok(());
            }
            self.transaction(link, &round, fates)?;
        }
    }

    /// The producer, made anew if there is none that is up.
    fn open<'l>(&self, lane: &'l mut Lane) -> Result<&'l Link> {
        let own = self.own;
        if !lane.link.as_ref().is_some_and(Link::is_up) {
            lane.link = None;
            own.login.read_files()?;
            let id = format!("{} {}", own.name, self.partition);
            let link = Link::open(&own.login.transactional(&id))?;
            link.producer()
                .init_transactions(own.timeout)
                .map_err(|error| failed(&error, &link))?;
            let mark = own.seen.expect();
            begin(&link)?;
            let sent = link.send(self.letter(&mark.note()));
            let answer = sent.map_err(|code| self.not_noted(code, &link))?;
            let answered = wait(self.own.timeout + GRACE, answer);
            answered.map_err(|code| self.not_noted(code, &link))?;
            commit(&link, own.timeout)?;
            let (notes, client) = ((&*own.topic, &*own.scope), own.login.admin());
            own.seen.read_to(&mark, notes, &client, own.timeout, || self.is_over())?;
            lane.link = Some(link);
        }
        lane.link.as_ref().ok_or_else(|| Error::transient("there is no producer"))
    }

    fn letter<'n>(&'n self, note: &'n [u8]) -> Letter<'n> {
        Letter {
            topic: &self.own.topic,
            partition: Some(NOTES_PARTITION),
            key: &self.own.scope,
            value: note,
            headers: OwnedHeaders::new(),
            time_ms: None,
        }
    }

    fn not_noted(&self, code: Code, link: &Link) -> Error {
        if is_fenced(code) {
            return fenced();
        }
        let error = delivery_error(code, &self.own.topic, link.trouble());
        match error.kind() {
            // It is no event's fault.
            ErrorKind::Permanent => throttled(error.chain()),
            _ => error,
        }
    }

    /// Places whose events may be sent together now: those behind none that waits or failed. If
    /// there are none, the first that is to be sent alone.
    fn sendable(&self, fates: &[Fate]) -> Vec<usize> {
        let mut blocked: HashMap<&str, ()> = HashMap::new();
        let (mut together, mut alone) = (Vec::new(), None);
        for (place, (parcel, fate)) in self.parcels.iter().zip(fates).enumerate() {
            let is_free = !blocked.contains_key(parcel.key.as_str());
            match fate {
                Fate::Open if is_free => together.push(place),
                Fate::Alone if is_free => {
                    alone = alone.or(Some(place));
                    blocked.insert(&parcel.key, ());
                }
                Fate::Done(Outcome::Failed(_)) => {
                    blocked.insert(&parcel.key, ());
                }
                Fate::Open | Fate::Alone | Fate::Done(_) => {}
            }
        }
        match together.is_empty() {
            true => alone.into_iter().collect(),
            false => together,
        }
    }

    /// Commits these, or none and says which failed.
    ///
    /// # Errors
    /// When the producer is of no use any more; what it had not committed is found out by the next.
    fn transaction(&self, link: &Link, round: &[usize], fates: &mut [Fate]) -> Result<()> {
        begin(link)?;
        let mut waiting = FuturesUnordered::new();
        for place in round {
            match self.send(link, *place) {
                Ok(answer) => waiting.push(answered(Some(*place), answer)),
                Err(code) => {
                    let failure = (Some(*place), not_taken(code));
                    return self.undo(link, round, (failure, waiting), fates);
                }
            }
        }
        let note = note(round.iter().map(|place| self.parcels[*place].id));
        match link.send(self.letter(&note)).map_err(not_taken) {
            Ok(answer) => waiting.push(answered(None, answer)),
            Err(code) => return self.undo(link, round, ((None, code), waiting), fates),
        }
        let limit = self.own.timeout + GRACE;
        match wait_for(limit, first_failure(&mut waiting)) {
            Some(None) => {}
            Some(Some(failure)) => return self.undo(link, round, (failure, waiting), fates),
            None => return Err(Error::transient("the brokers did not answer in time")),
        }
        commit(link, self.own.timeout)?;
        self.purged.set(0);
        for place in round {
            self.own.seen.add(self.parcels[*place].id);
            fates[*place] = Fate::Done(Outcome::Confirmed);
        }
        Ok(())
    }

    fn send(&self, link: &Link, place: usize) -> Result<Receiver, Code> {
        let parcel = &self.parcels[place];
        let Ok(topic) = &parcel.topic else { return Err(Code::InvalidTopic) };
        loop {
            let letter = Letter {
                topic,
                partition: None,
                key: &parcel.key,
                value: &parcel.body,
                headers: parcel.headers.clone(),
                time_ms: parcel.time_ms,
            };
            match link.send(letter) {
                Err(Code::QueueFull) if !self.is_over() => {
                    std::thread::sleep(QUEUE_POLL);
                }
                sent => return sent,
            }
        }
    }

    /// Ends the transaction with nothing of it, and notes whose fault that is: of all that failed
    /// but what failed only because the transaction did.
    fn undo(
        &self,
        link: &Link,
        round: &[usize],
        (first, mut waiting): (Failure, Waiting<impl Future<Output = Answered>>),
        fates: &mut [Fate],
    ) -> Result<()> {
        if is_fenced(first.1) {
            return Err(fenced());
        }
        match link.fatal_code() {
            Some(code) if is_fenced(code) => return Err(fenced()),
            Some(_) => return Err(Error::transient("the producer gave up, another is made")),
            None => {}
        }
        let aborted = link.producer().abort_transaction(self.own.timeout);
        aborted.map_err(|error| failed(&error, link))?;
        let mut failures = vec![first];
        let rest = async {
            while let Some(failure) = first_failure(&mut waiting).await {
                failures.push(failure);
            }
        };
        if wait_for(GRACE, rest).is_none() {
            return Err(Error::transient("the client did not give up what was aborted"));
        }
        failures.retain(|(_, code)| !matches!(code, Code::PurgeQueue | Code::PurgeInflight));
        if failures.is_empty() {
            self.undone(link, round, fates);
        }
        for (place, code) in failures {
            let Some(place) = place else { return Err(self.not_noted(code, link)) };
            fates[place] = match may_be_anothers(code) && round.len() > 1 {
                true => Fate::Alone,
                false => Fate::Done(Outcome::Failed(self.refusal(link, place, code))),
            };
        }
        Ok(())
    }

    /// Nobody says why the transaction failed. The client may drop what it is given right behind
    /// one that was aborted, so it is made again; but not for ever.
    fn undone(&self, link: &Link, round: &[usize], fates: &mut [Fate]) {
        let times = self.purged.get();
        self.purged.set(times + 1);
        if times < PURGED_AGAIN {
            return;
        }
        if let [place] = round {
            let error = throttled("the transaction failed, and with it the event");
            let why = link.trouble().1.unwrap_or_else(|| "the client says no cause".to_owned());
            fates[*place] = Fate::Done(Outcome::Failed(error.with_source(why)));
            return;
        }
        round.iter().for_each(|place| fates[*place] = Fate::Alone);
    }

    fn refusal(&self, link: &Link, place: usize, code: Code) -> Error {
        let (own, parcel) = (self.own, &self.parcels[place]);
        let topic = parcel.topic.as_deref().unwrap_or_default();
        if !is_size(code) {
            return delivery_error(code, topic, link.trouble());
        }
        let (admin, patience) = (own.login.admin(), own.login.patience());
        let limit = wait_for(patience + GRACE, look::limit(admin, topic, patience)).flatten();
        too_large(topic, parcel.bytes, limit.as_deref())
    }

    /// The first open event of each key failed so, unless one of its key was confirmed before.
    fn fail_open(&self, fates: &mut [Fate], error: &Error) {
        let mut keys: HashMap<&str, ()> = HashMap::new();
        for (parcel, fate) in self.parcels.iter().zip(fates) {
            let is_first = keys.insert(&parcel.key, ()).is_none();
            if is_first && matches!(fate, Fate::Open | Fate::Alone) {
                *fate = Fate::Done(Outcome::Failed(again(error)));
            }
        }
    }
}

type Receiver = tokio::sync::oneshot::Receiver<Answer>;
/// Which event, if it is no note, and what became of it.
type Answered = (Option<usize>, Answer);
type Failure = (Option<usize>, Code);
type Waiting<F> = FuturesUnordered<F>;

async fn answered(place: Option<usize>, answer: Receiver) -> Answered {
    // Without an answer the producer has ended.
    (place, answer.await.unwrap_or(Err(Code::PurgeInflight)))
}

/// The next that fails; none once all are answered.
async fn first_failure(waiting: &mut Waiting<impl Future<Output = Answered>>) -> Option<Failure> {
    while let Some((place, answer)) = waiting.next().await {
        if let Err(code) = answer {
            return Some((place, code));
        }
    }
    None
}

fn wait(limit: Duration, answer: Receiver) -> Answer {
    match wait_for(limit, answer) {
        Some(Ok(answer)) => answer,
        Some(Err(_)) => Err(Code::PurgeInflight),
        None => Err(Code::MessageTimedOut),
    }
}

fn begin(link: &Link) -> Result<()> {
    link.producer().begin_transaction().map_err(|error| failed(&error, link))
}

fn commit(link: &Link, patience: Duration) -> Result<()> {
    link.producer().commit_transaction(patience).map_err(|error| failed(&error, link))
}

/// The client takes nothing more once something of the transaction failed: what did is told by its
/// own answer.
fn not_taken(code: Code) -> Code {
    if code == Code::State { Code::PurgeQueue } else { code }
}

fn is_fenced(code: Code) -> bool {
    matches!(code, Code::Fenced | Code::ProducerFenced | Code::InvalidProducerEpoch)
}

fn fenced() -> Error {
    Error::fenced("another relay began to send the partition's events")
}

/// What the failure of a step of a transaction means.
fn failed(error: &KafkaError, link: &Link) -> Error {
    let codes = [error.rdkafka_error_code(), link.fatal_code()];
    if codes.into_iter().flatten().any(is_fenced) {
        return fenced();
    }
    let (_, complaint) = link.trouble();
    let text = "the transaction was not ended; whether it counts is found out by the next one";
    Error::transient(text).with_source(complaint.unwrap_or_else(|| error.to_string()))
}

/// The same error for somebody else.
fn again(error: &Error) -> Error {
    Error::new(error.kind(), error.chain())
}
