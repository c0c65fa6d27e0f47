//! The sink of streams itself.
//!
//! What lives here: `RabbitMqStream`, which stream an event goes to, and the way of a call's events
//! through their producers. What does not: a producer (`lane.rs`), answers (`error.rs`).
//! Invariant: a key's events go to one stream, and of a call's events of one stream none is sent
//! before those in front of it are stored, unless it is in the same frame, behind them.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant as Time};

use async_trait::async_trait;
use futures_util::future::join_all;
use postrider_core::{
    Capabilities, Chain, Clock, Error, ErrorKind, Outcome, PartitionId, Publish, Record, Result,
    Sink,
};
use postrider_encoding::{Encoder, EventSource};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::config::{MAX_REFERENCE_BYTES, RabbitMqStreamConfig};
use super::connect::{BEAT, Link};
use super::encode;
use super::error::{self, Doing};
use super::lane::{FEWER, Lane, MAX_CONNECTIONS, Parcel, Shared};
use super::murmur::murmur3;
use super::seen::Seen;
use crate::error::throttled;
use crate::login::Login;

/// Events in one call: enough to hide two round trips at full rate.
const BATCH_RECORDS: usize = 1_024;
/// Bytes in one call: about what one frame takes.
const BATCH_BYTES: usize = 1 << 20;
/// Calls at a time from one partition: its producer has one frame under way.
const IN_FLIGHT: usize = 1;
/// References whose last publishing id the server keeps, for each stream.
const MAX_REFERENCES: usize = 255;
/// As RabbitMQ's own clients begin to hash.
const SEED: u32 = 104_729;
/// A producer that sent nothing for so long is given up when another one is made: its partition may
/// be another relay's now.
const IDLE: Duration = Duration::from_secs(300);

/// Publishes each event to a stream of RabbitMQ over the stream protocol, under a publishing id.
///
/// A stream has each event once, also after crashes and take-overs, as far as
/// `docs/design/rabbitmq-streams.md` says.
///
/// # Ordering
/// It takes any number of a key's events in a call ([`Chain::Many`]) and sends a call's events in
/// order, by one producer for each partition and stream.
/// # Cancellation
/// A dropped `publish`, like a time-out, leaves it unknown whether the stream has the events. They
/// are sent again under the same publishing ids, before anything else, so that none comes twice.
pub struct RabbitMqStream {
    shared: Shared,
    encoder: Encoder,
    stream: String,
    is_super: bool,
    producer: String,
    /// The streams of the super stream, once they are known.
    streams: Mutex<Option<Arc<[String]>>>,
    /// And when each was used last.
    lanes: Arc<Lanes>,
    /// Looks after the connections that no call uses.
    keeper: Mutex<JoinSet<()>>,
    closed: AtomicBool,
    /// Too many producers were told of.
    warned: AtomicBool,
    /// Too few connections were told of.
    warned_of_connections: AtomicBool,
}

type Place = (PartitionId, String);
type SharedLane = Arc<tokio::sync::Mutex<Lane>>;
type Lanes = Mutex<HashMap<Place, (SharedLane, Time)>>;

/// Gives signs of life on connections that no call uses, and drops those that are dead.
async fn keep_up(lanes: Arc<Lanes>) {
    loop {
        tokio::time::sleep(BEAT).await;
        let all: Vec<SharedLane> =
            lock(&lanes).values().map(|(lane, _)| Arc::clone(lane)).collect();
        for lane in all {
            // A call that has it gives them itself.
            if let Ok(mut lane) = lane.try_lock() {
                lane.keep_up();
            }
            tokio::task::yield_now().await;
        }
    }
}

fn lock<T>(of: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl RabbitMqStream {
    /// The sink of a configuration. Nothing is connected to yet. By the clock it ranks producers
    /// that began one after another.
    ///
    /// # Errors
    /// [`ErrorKind::Permanent`](postrider_core::ErrorKind::Permanent) for impossible settings,
    /// naming the key.
    pub fn new(config: &RabbitMqStreamConfig, clock: Arc<dyn Clock>) -> Result<Self> {
        config.check()?;
        let source = match &config.source {
            Some(text) => EventSource::new(text.as_str())?,
            None => EventSource::default(),
        };
        let shared = Shared {
            login: Login::to(&config.access())?,
            next_server: AtomicUsize::new(0),
            seen: Seen::default(),
            clock,
            unroutable: config.unroutable,
            timeout: Duration::from_millis(config.timeout_ms),
            connect_timeout: Duration::from_millis(config.connect_timeout_ms),
            connections: Arc::new(Semaphore::new(MAX_CONNECTIONS)),
        };
        Ok(Self {
            shared,
            encoder: Encoder::new(config.encoding, source),
            stream: config.stream.clone(),
            is_super: config.super_stream,
            producer: config.producer.clone(),
            streams: Mutex::default(),
            lanes: Arc::default(),
            keeper: Mutex::default(),
            closed: AtomicBool::new(false),
            warned: AtomicBool::new(false),
            warned_of_connections: AtomicBool::new(false),
        })
    }

    /// The streams that events go to.
    async fn streams(&self) -> Result<Arc<[String]>> {
        if let Some(known) = lock(&self.streams).as_ref() {
            return Ok(Arc::clone(known));
        }
        let streams: Arc<[String]> = match self.is_super {
            true => self.ask_for_streams().await?.into(),
            false => [self.stream.clone()].into(),
        };
        self.shared.seen.share(&streams);
        *lock(&self.streams) = Some(Arc::clone(&streams));
        Ok(streams)
    }

    /// Ends the connection that was used longest ago, if there is room for no other.
    fn make_room(&self) {
        if self.shared.connections.available_permits() > 0 {
            return;
        }
        if !self.warned_of_connections.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                stream = self.stream,
                "a sink has {MAX_CONNECTIONS} connections at most, and more partitions and streams \
                 want one; each waits for another's: {FEWER}"
            );
        }
        let mut lanes: Vec<(Time, SharedLane)> =
            lock(&self.lanes).values().map(|(lane, used)| (*used, Arc::clone(lane))).collect();
        lanes.sort_by_key(|(used, _)| *used);
        for (_, lane) in lanes {
            if let Ok(mut lane) = lane.try_lock()
                && lane.end().is_some()
            {
                return;
            }
        }
    }

    async fn ask_for_streams(&self) -> Result<Vec<String>> {
        self.make_room();
        let mut link = self.shared.connect().await?;
        let streams = link.partitions(&self.stream).await;
        let how = self.shared.unroutable;
        let streams = streams
            .map_err(|refusal| error::refused(refusal, &self.stream, Doing::Publish, how))?;
        link.close().await;
        if streams.is_empty() {
            let text = format!("the super stream {:?} has no streams", self.stream);
            return Err(throttled(text));
        }
        if streams.len() > MAX_CONNECTIONS {
            return Err(error::too_many_streams(&self.stream, streams.len()));
        }
        Ok(streams)
    }

    fn lane(&self, partition: &PartitionId, stream: &str) -> Result<SharedLane> {
        let reference = format!("{} {partition}", self.producer);
        if reference.len() > MAX_REFERENCE_BYTES {
            return Err(throttled(format!(
                "producer and the partition's name have {} bytes together; the server takes \
                 {MAX_REFERENCE_BYTES}: give a shorter producer",
                reference.len()
            )));
        }
        let mut keeper = lock(&self.keeper);
        if keeper.is_empty() && !self.closed.load(Ordering::Acquire) {
            keeper.spawn(keep_up(Arc::clone(&self.lanes)));
        }
        drop(keeper);
        let mut lanes = lock(&self.lanes);
        let place = (partition.clone(), stream.to_owned());
        if !lanes.contains_key(&place) {
            lanes.retain(|_, (lane, used)| used.elapsed() < IDLE || Arc::strong_count(lane) > 1);
        }
        let (lane, used) = lanes.entry(place).or_insert_with(|| {
            let lane = Lane::new(stream.to_owned(), reference);
            (Arc::new(tokio::sync::Mutex::new(lane)), Time::now())
        });
        *used = Time::now();
        let lane = Arc::clone(lane);
        let references = lanes.keys().filter(|(_, of)| of == stream).count();
        if references > MAX_REFERENCES && !self.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                stream,
                references,
                "RabbitMQ remembers {MAX_REFERENCES} producers of a stream; events of others may \
                 be stored twice after a take-over: use fewer partitions or more streams"
            );
        }
        Ok(lane)
    }

    /// Publishes one stream's events of a call, in order, for as long as the call may send.
    async fn to_stream(
        &self,
        partition: &PartitionId,
        stream: &str,
        mut call: Call<'_>,
        until: Instant,
    ) -> Vec<Settled> {
        match self.lane(partition, stream) {
            Ok(lane) => {
                let mut lane = lane.lock().await;
                if let Err(error) = self.through(&mut lane, stream, &mut call, until).await {
                    if self.is_super && error.kind() != ErrorKind::Transient {
                        // The super stream may have other streams by now.
                        *lock(&self.streams) = None;
                    }
                    call.fail_open(&error);
                }
            }
            Err(error) => call.fail_open(&error),
        }
        call.give_back(&throttled("there was no time to send the event"));
        call.settled()
    }

    async fn through(
        &self,
        lane: &mut Lane,
        stream: &str,
        call: &mut Call<'_>,
        until: Instant,
    ) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::transient("the RabbitMQ sink is closed"));
        }
        if !lane.is_connected() {
            self.make_room();
        }
        let mut link = lane.ready(&self.shared).await?;
        loop {
            call.know(|id| self.shared.seen.has(stream, id));
            call.refuse(|parcel| lane.check_size(&link, parcel));
            let mut round = call.sendable();
            if round.is_empty() || Instant::now() >= until {
                break;
            }
            let parcels = round.iter().map(|place| &call.parcels[*place]);
            round.truncate(lane.together(&link, parcels));
            let parcels = round.iter().map(|place| &call.parcels[*place]);
            lane.send(&mut link, &self.shared, parcels).await?;
            for place in round {
                call.fates[place] = Some(Outcome::Confirmed);
            }
        }
        lane.keep(link);
        Ok(())
    }
}

/// An event's place among the call's and what became of it.
type Settled = (usize, Outcome);

/// One stream's events of a call.
struct Call<'a> {
    /// Their places in the call.
    places: Vec<usize>,
    keys: Vec<&'a str>,
    parcels: Vec<Parcel>,
    /// None while it is open.
    fates: Vec<Option<Outcome>>,
}

impl Call<'_> {
    /// Events that are stored already.
    fn know(&mut self, has: impl Fn(&uuid::Uuid) -> bool) {
        for (parcel, fate) in self.parcels.iter().zip(&mut self.fates) {
            if fate.is_none() && has(&parcel.id) {
                *fate = Some(Outcome::Duplicate);
            }
        }
    }

    /// Events that can't be sent.
    fn refuse(&mut self, check: impl Fn(&Parcel) -> Result<()>) {
        for place in self.sendable() {
            if let Err(error) = check(&self.parcels[place]) {
                self.fates[place] = Some(Outcome::Failed(error));
            }
        }
    }

    /// Places of open events that stand behind no failure of their key.
    fn sendable(&self) -> Vec<usize> {
        let mut failed = HashSet::new();
        let mut places = Vec::new();
        for (place, (key, fate)) in self.keys.iter().zip(&self.fates).enumerate() {
            match fate {
                None if !failed.contains(key) => places.push(place),
                Some(Outcome::Failed(_)) => drop(failed.insert(*key)),
                _ => {}
            }
        }
        places
    }

    /// The first open event of each key failed so; the others wait for it.
    fn fail_open(&mut self, error: &Error) {
        let mut failed = HashSet::new();
        for (key, fate) in self.keys.iter().zip(&mut self.fates) {
            match fate {
                None if failed.insert(*key) => *fate = Some(Outcome::Failed(again(error))),
                None => *fate = Some(Outcome::HeldBack),
                Some(Outcome::Failed(_)) => drop(failed.insert(*key)),
                Some(_) => {}
            }
        }
    }

    /// Time is over: what stands behind a stored event of its key is no failure.
    fn give_back(&mut self, error: &Error) {
        let mut stored = HashSet::new();
        for (key, fate) in self.keys.iter().zip(&mut self.fates) {
            match fate {
                Some(Outcome::Confirmed | Outcome::Duplicate) => drop(stored.insert(*key)),
                None if stored.contains(key) => *fate = Some(Outcome::HeldBack),
                _ => {}
            }
        }
        self.fail_open(error);
    }

    fn settled(self) -> Vec<Settled> {
        let fates = self.fates.into_iter().map(|fate| fate.unwrap_or(Outcome::HeldBack));
        self.places.into_iter().zip(fates).collect()
    }
}

/// The same error for somebody else.
fn again(error: &Error) -> Error {
    Error::new(error.kind(), error.chain())
}

impl fmt::Debug for RabbitMqStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RabbitMqStream({:?} as {:?})", self.stream, self.producer)
    }
}

#[async_trait]
impl Sink for RabbitMqStream {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            // The server tells its limit to each connection, and an event's headers count as well.
            max_event_bytes: None,
            max_batch_records: BATCH_RECORDS,
            max_batch_bytes: BATCH_BYTES,
            max_in_flight: IN_FLIGHT,
            chain: Chain::Many,
            dedup_window: None,
        }
    }

    async fn publish(&self, batch: Publish<'_>) -> Vec<Outcome> {
        let records = batch.records();
        let until = Instant::now() + batch.sending_time();
        let streams = match self.streams().await {
            Ok(streams) => streams,
            Err(error) => {
                let mut call = self.call(records, (0..records.len()).collect());
                call.fail_open(&error);
                return call.settled().into_iter().map(|(_, outcome)| outcome).collect();
            }
        };
        let mut by_stream: Vec<Vec<usize>> = streams.iter().map(|_| Vec::new()).collect();
        for (place, record) in records.iter().enumerate() {
            by_stream[choose(record.event.key().as_str(), streams.len())].push(place);
        }
        let to_each = streams.iter().zip(by_stream).filter(|(_, places)| !places.is_empty());
        let to_each = to_each.map(|(stream, places)| {
            let call = self.call(records, places);
            self.to_stream(batch.partition(), stream, call, until)
        });
        let settled = join_all(to_each).await;
        let mut settled: Vec<Settled> = settled.into_iter().flatten().collect();
        settled.sort_unstable_by_key(|(place, _)| *place);
        settled.into_iter().map(|(_, outcome)| outcome).collect()
    }

    /// Connects, and looks whether the stream is there. Publishes nothing.
    async fn check(&self) -> Result<()> {
        *lock(&self.streams) = None;
        let streams = self.streams().await?;
        let how = self.shared.unroutable;
        for stream in streams.iter() {
            self.make_room();
            let link = self.shared.connect_to_leader(stream).await;
            let mut link =
                link.map_err(|refusal| error::refused(refusal, stream, Doing::Publish, how))?;
            // It asks for a reference that nobody has, and takes over from nobody.
            let asked = link.sequence(CHECK, stream).await;
            asked.map_err(|refusal| error::refused(refusal, stream, Doing::Read, how))?;
            link.close().await;
        }
        Ok(())
    }

    /// Sends nothing more. There is nothing to flush: each call waited for all that it sent.
    async fn close(&self) -> Result<()> {
        self.closed.store(true, Ordering::Release);
        lock(&self.keeper).abort_all();
        let lanes: Vec<SharedLane> = lock(&self.lanes).drain().map(|(_, (lane, _))| lane).collect();
        let links = join_all(lanes.iter().map(|lane| async { lane.lock().await.end() })).await;
        join_all(links.into_iter().flatten().map(Link::close)).await;
        Ok(())
    }
}

/// A producer of this name is never declared.
const CHECK: &str = "postrider check";

impl RabbitMqStream {
    fn call<'a>(&self, records: &'a [Record], places: Vec<usize>) -> Call<'a> {
        let chosen = || places.iter().filter_map(|place| records.get(*place));
        let keys: Vec<&str> = chosen().map(|record| record.event.key().as_str()).collect();
        let parcels: Vec<Parcel> = chosen()
            .map(|record| Parcel {
                id: *record.event.id().as_uuid(),
                message: encode::message(record, &self.encoder.encode(record)),
            })
            .collect();
        let fates = places.iter().map(|_| None).collect();
        Call { places, keys, parcels, fates }
    }
}

/// Which of so many streams a key's events go to, as RabbitMQ's own clients choose by a hash.
fn choose(key: &str, streams: usize) -> usize {
    match streams {
        1 => 0,
        streams => murmur3(key.as_bytes(), SEED) as usize % streams,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    #[test]
    fn what_there_was_no_time_for_is_no_failure_behind_a_stored_event() {
        let stored = [Some(Outcome::Confirmed), Some(Outcome::Duplicate)];
        let failed = Some(Outcome::Failed(Error::permanent("no")));
        let fates: Vec<_> = stored.into_iter().chain([failed, None, None, None, None]).collect();
        let keys = vec!["a", "b", "c", "a", "b", "c", "d"];
        let parcel = Parcel { id: Uuid::nil(), message: bytes::Bytes::new() };
        let parcels = vec![parcel; keys.len()];
        let mut call = Call { places: (0..keys.len()).collect(), keys, parcels, fates };
        call.give_back(&throttled("late"));
        let fates: Vec<Outcome> = call.settled().into_iter().map(|(_, fate)| fate).collect();
        assert!(fates[3..6].iter().all(|fate| matches!(fate, Outcome::HeldBack)), "{fates:?}");
        match &fates[6] {
            Outcome::Failed(error) => assert_eq!(error.to_string(), throttled("late").to_string()),
            other => panic!("{other:?}"),
        }
    }
}
