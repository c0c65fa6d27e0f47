//! Which events were committed before: ids that stand in a topic beside the events.
//!
//! What lives here: notes, reading them, and the memory of their ids. What does not: writing them,
//! which is done in the transaction of their events (`transact.rs`).
//! Invariant: an id is remembered only if its event was committed, and a note counts only for the
//! sink that wrote it. After a reading to a mark, all that was committed before the mark is known,
//! as far as the memory reaches (`REMEMBERED`).

use std::collections::{HashSet, VecDeque};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use postrider_core::{Error, EventId, Result};
use rdkafka::ClientConfig;
use rdkafka::config::FromClientConfigAndContext;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use rdkafka::message::Message as _;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use crate::connect::Ear;
use crate::error::{question_error, throttled};

/// Ids that are remembered: eight times what a partition may have confirmed beyond its checkpoint.
/// It has room for so many that were read, and so many that this process committed; about 30 MiB
/// for each when all are taken.
pub(crate) const REMEMBERED: usize = 8 << 16;
/// Places of the topic that may hold so many: one id in each, and the end of a transaction.
const PLACES: i64 = 2 * REMEMBERED as i64;
/// Notes stand in this partition of their topic.
pub(crate) const NOTES_PARTITION: i32 = 0;
const POLL: Duration = Duration::from_millis(50);
/// How soon who waits for the reader looks again.
const TURN: Duration = Duration::from_millis(5);
/// A reader that read before, and gets nothing for so long though there is something, is made anew:
/// not every server tells one that stands behind an aborted transaction what follows it.
const AGAIN: Duration = Duration::from_millis(500);
/// One that has not read to any mark yet has more to read again: it is given this part of the time.
const AGAIN_SHARE: u32 = 4;
/// A reader that got nothing for so long, and is waited for in vain, is made anew.
const STALE: Duration = Duration::from_secs(60);
const IDS: u8 = 1;
const MARK: u8 = 2;

/// A note that its writer finds again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Mark([u8; 16]);

impl Mark {
    /// One that nobody else has.
    fn new() -> Self {
        let half = || RandomState::new().build_hasher().finish().to_be_bytes();
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&half());
        bytes[8..].copy_from_slice(&half());
        Self(bytes)
    }

    /// As it stands in the topic.
    fn note(self) -> Vec<u8> {
        [&[MARK], &self.0[..]].concat()
    }
}

/// The ids of a transaction's events, as they stand in the topic.
pub(crate) fn note(ids: impl Iterator<Item = EventId>) -> Vec<u8> {
    let mut note = vec![IDS];
    ids.for_each(|id| note.extend(id.as_uuid().as_bytes()));
    note
}

/// Ids of events that were committed, the last ones.
#[derive(Default)]
struct Ids {
    all: HashSet<u128>,
    order: VecDeque<u128>,
}

impl Ids {
    /// The oldest is forgotten when there are too many.
    fn add(&mut self, id: u128) {
        if !self.all.insert(id) {
            return;
        }
        self.order.push_back(id);
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.all.remove(&oldest);
        }
    }

    /// Takes over what stands before these, as far as there is room.
    fn put_before(&mut self, earlier: &Self) {
        for id in earlier.order.iter().rev() {
            if self.order.len() >= REMEMBERED {
                break;
            }
            if self.all.insert(*id) {
                self.order.push_front(*id);
            }
        }
    }
}

/// What is known. Those that this process committed and those that it read don't push each other
/// out: it reads its own long after it committed them.
#[derive(Default)]
struct Known {
    own: Ids,
    read: Ids,
    /// Marks that are not found yet.
    marks: HashSet<Mark>,
    /// When the reader got on last.
    moved: Option<Instant>,
}

struct Reader {
    consumer: BaseConsumer<Ear>,
    /// What it read until it found a mark first: till then it knows less than others may have read.
    first: Option<Ids>,
    /// What the brokers refused last.
    refusal: Option<KafkaError>,
    /// When it got something last.
    heard: Instant,
    /// Whether it got anything.
    began: bool,
}

/// The ids of events that were committed last.
#[derive(Default)]
pub(crate) struct Seen {
    /// Held for a moment.
    known: Mutex<Known>,
    /// Held while it is asked once.
    reader: Mutex<Option<Reader>>,
}

/// A mark that is looked for.
pub(crate) struct Expected<'a> {
    seen: &'a Seen,
    mark: Mark,
}

impl Expected<'_> {
    /// The mark as it stands in the topic.
    pub(crate) fn note(&self) -> Vec<u8> {
        self.mark.note()
    }
}

impl Drop for Expected<'_> {
    fn drop(&mut self) {
        self.seen.known().marks.remove(&self.mark);
    }
}

impl Seen {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the event was committed.
    pub(crate) fn has(&self, id: EventId) -> bool {
        let (id, known) = (id.as_uuid().as_u128(), self.known());
        known.own.all.contains(&id) || known.read.all.contains(&id)
    }

    /// The event was committed by this process.
    pub(crate) fn add(&self, id: EventId) {
        self.known().own.add(id.as_uuid().as_u128());
    }

    /// A new mark. It is looked for from now on, whoever reads: it may be found before who sent it
    /// begins to read.
    pub(crate) fn expect(&self) -> Expected<'_> {
        let mark = Mark::new();
        self.known().marks.insert(mark);
        Expected { seen: self, mark }
    }

    /// Reads what `scope` noted, up to a mark that was committed. Blocks; several at a time help
    /// each other. What was read counts for the next one if this one ends early.
    ///
    /// # Errors
    /// `Throttled` if it `is_over` before the mark was found, nothing came for `patience`, or a
    /// note is of a later version; `Transient` if no broker can be reached.
    pub(crate) fn read_to(
        &self,
        expected: &Expected<'_>,
        (topic, scope): (&str, &str),
        client: &ClientConfig,
        patience: Duration,
        is_over: impl Fn() -> bool,
    ) -> Result<()> {
        let (begun, mut again) = (Instant::now(), AGAIN);
        loop {
            let moved = {
                let known = self.known();
                if !known.marks.contains(&expected.mark) {
                    return Ok(());
                }
                known.moved.map_or(begun, |moved| moved.max(begun))
            };
            if is_over() {
                return Err(throttled(format!("the topic {topic} is still being read")));
            }
            let Some(mut place) = self.reader() else {
                if moved.elapsed() > patience * 2 {
                    return Err(stalled(topic, None));
                }
                thread::sleep(TURN);
                continue;
            };
            if place.is_none() {
                *place = Some(Reader::open(client, topic, patience)?);
                self.known().moved = Some(Instant::now());
                continue;
            }
            let Some(reader) = place.as_mut() else { continue };
            if moved.elapsed() > patience {
                let error = stalled(topic, Some(reader));
                if reader.heard.elapsed() > STALE {
                    *place = None;
                }
                return Err(error);
            }
            let wait =
                if reader.first.is_some() { again.max(patience / AGAIN_SHARE) } else { again };
            if reader.began && moved.elapsed() > wait {
                // The mark is committed and does not come: what it stands behind is read anew.
                *reader = Reader::open(client, topic, patience)?;
                again = wait * 2;
            }
            if let Err(error) = self.turn(reader, topic, scope) {
                // It is not to go on behind what it does not know.
                *place = None;
                return Err(error);
            }
        }
    }

    /// The reader, unless another has it now.
    fn reader(&self) -> Option<MutexGuard<'_, Option<Reader>>> {
        match self.reader.try_lock() {
            Ok(reader) => Some(reader),
            Err(TryLockError::Poisoned(reader)) => Some(reader.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Reads one record, if one comes.
    fn turn(&self, reader: &mut Reader, topic: &str, scope: &str) -> Result<()> {
        let record = match reader.consumer.poll(POLL) {
            Some(Ok(record)) => record,
            // The client tries again by itself.
            Some(Err(error)) => {
                reader.refusal = Some(error);
                return Ok(());
            }
            None => return Ok(()),
        };
        reader.refusal = None;
        reader.consumer.context().is_well();
        (reader.heard, reader.began) = (Instant::now(), true);
        let mut known = self.known();
        known.moved = Some(reader.heard);
        if record.key() != Some(scope.as_bytes()) {
            return Ok(());
        }
        match record.payload().unwrap_or_default().split_first() {
            Some((&IDS, ids)) => {
                let read = reader.first.as_mut().unwrap_or(&mut known.read);
                let (ids, _) = ids.as_chunks();
                ids.iter().for_each(|id| read.add(u128::from_be_bytes(*id)));
            }
            Some((&MARK, found)) => known.found(found, &mut reader.first),
            _ => {
                return Err(throttled(format!(
                    "the topic {topic} has a note that a later version wrote; take that one"
                )));
            }
        }
        Ok(())
    }
}

impl Known {
    /// A mark was read. If it was looked for, all before it is known.
    fn found(&mut self, mark: &[u8], first: &mut Option<Ids>) {
        let Ok(mark) = mark.try_into().map(Mark) else { return };
        if !self.marks.contains(&mark) {
            return;
        }
        if let Some(mut ids) = first.take() {
            ids.put_before(&self.read);
            self.read = ids;
        }
        self.marks.remove(&mark);
    }
}

/// Nothing came for too long.
fn stalled(topic: &str, reader: Option<&Reader>) -> Error {
    let (all_down, complaint) = reader.map_or((false, None), |one| one.consumer.context().told());
    let refusal = reader.and_then(|one| one.refusal.as_ref());
    if refusal.and_then(KafkaError::rdkafka_error_code) == Some(Code::TopicAuthorizationFailed) {
        return throttled(format!("the login may not read the topic {topic}; grant it Read"));
    }
    let text = format!("the topic {topic} was not read to its end in time");
    let error = if all_down { Error::transient(text) } else { throttled(text) };
    match refusal.map(ToString::to_string).or(complaint) {
        Some(why) => error.with_source(why),
        None => error,
    }
}

impl Reader {
    fn open(client: &ClientConfig, topic: &str, patience: Duration) -> Result<Self> {
        let consumer = consumer(client, topic, patience)?;
        let (first, heard) = (Some(Ids::default()), Instant::now());
        Ok(Self { consumer, first, refusal: None, heard, began: false })
    }
}

/// One that reads what is committed, from as far back as the memory reaches.
fn consumer(client: &ClientConfig, topic: &str, patience: Duration) -> Result<BaseConsumer<Ear>> {
    let mut client = client.clone();
    for (name, value) in [
        // Never joined: it only has to have a name.
        ("group.id", "postrider"),
        ("isolation.level", "read_committed"),
        ("enable.auto.commit", "false"),
        ("enable.auto.offset.store", "false"),
        ("auto.offset.reset", "earliest"),
        ("fetch.wait.max.ms", "50"),
        ("queued.max.messages.kbytes", "8192"),
    ] {
        client.set(name, value);
    }
    let failed = |error| question_error(&error, (false, None));
    let reader = BaseConsumer::from_config_and_context(&client, Ear::default()).map_err(failed)?;
    let (first, end) = reader.fetch_watermarks(topic, NOTES_PARTITION, patience).map_err(failed)?;
    let from = Offset::Offset(first.max(end - PLACES));
    let mut places = TopicPartitionList::new();
    places.add_partition_offset(topic, NOTES_PARTITION, from).map_err(failed)?;
    reader.assign(&places).map_err(failed)?;
    Ok(reader)
}

impl ConsumerContext for Ear {}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    fn id(n: u128) -> EventId {
        EventId::from_uuid(Uuid::from_u128(n))
    }

    #[test]
    fn the_oldest_is_forgotten_and_nothing_else() {
        let seen = Seen::default();
        let all = REMEMBERED as u128;
        (0..all).for_each(|n| seen.add(id(n)));
        seen.add(id(5));
        assert!(seen.has(id(0)) && seen.known().own.all.len() == REMEMBERED);
        seen.add(id(all));
        assert!(!seen.has(id(0)) && seen.has(id(1)) && seen.has(id(all)));
        let lens = |ids: &Ids| (ids.all.len(), ids.order.len());
        assert_eq!(lens(&seen.known().own), (REMEMBERED, REMEMBERED));
    }

    #[test]
    fn a_reader_that_begins_anew_takes_nothing_from_what_is_known() {
        let seen = Seen::default();
        let all = REMEMBERED as u128;
        let mark = seen.expect();
        let mut known = seen.known();
        (0..all).for_each(|n| known.read.add(n));
        // It reads what had been forgotten, and does not get to what others know.
        let mut first = Some(Ids::default());
        (all..all + 9).for_each(|n| first.as_mut().expect("begun").add(n));
        known.found(&[0; 16], &mut first);
        assert!(first.is_some() && known.read.all.contains(&0));
        known.found(&mark.mark.0, &mut first);
        assert!(first.is_none() && known.marks.is_empty());
        assert_eq!(known.read.order.front(), Some(&9));
        assert_eq!(known.read.order.back(), Some(&(all + 8)));
        assert_eq!((known.read.all.len(), known.read.order.len()), (REMEMBERED, REMEMBERED));
    }

    #[test]
    fn nobody_looks_for_a_mark_that_was_given_up() {
        let seen = Seen::default();
        let (kept, given_up) = (seen.expect(), seen.expect());
        drop(given_up);
        assert_eq!(seen.known().marks, HashSet::from([kept.mark]));
    }

    #[test]
    fn a_note_has_a_byte_and_sixteen_for_each_id() {
        assert_eq!(note([id(1), id(2)].into_iter()).len(), 33);
        assert_eq!(Mark::new().note().len(), 17);
        assert_ne!(Mark::new(), Mark::new());
    }
}
