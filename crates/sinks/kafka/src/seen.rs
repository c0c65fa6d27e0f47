//! Which events were committed before: ids that stand in a topic beside the events.
//!
//! What lives here: notes, reading them, and the memory of their ids. What does not: writing them,
//! which is done in the transaction of their events (`transact.rs`).
//! Invariant: an id is remembered only if its event was committed, and a note counts only for the
//! sink that wrote it. After a reading to a mark, all that was committed before the mark is known,
//! as far as the memory reaches (`REMEMBERED`).

use std::collections::{HashSet, VecDeque};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::{Duration, Instant};

use postrider_core::{Error, EventId, Result};
use rdkafka::ClientConfig;
use rdkafka::config::FromClientConfigAndContext;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::message::Message as _;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use crate::connect::Ear;
use crate::error::question_error;

/// Ids that are remembered: eight times what a partition may have confirmed beyond its checkpoint.
/// About 30 MiB when all are taken.
pub(crate) const REMEMBERED: usize = 8 << 16;
/// Places of the topic that may hold so many: one id in each, and the end of a transaction.
const PLACES: i64 = 2 * REMEMBERED as i64;
/// Notes stand in this partition of their topic.
pub(crate) const NOTES_PARTITION: i32 = 0;
const POLL: Duration = Duration::from_millis(50);
const IDS: u8 = 1;
const MARK: u8 = 2;

/// A note that its writer finds again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mark([u8; 16]);

impl Mark {
    /// One that nobody else has.
    pub(crate) fn new() -> Self {
        let half = || RandomState::new().build_hasher().finish().to_be_bytes();
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&half());
        bytes[8..].copy_from_slice(&half());
        Self(bytes)
    }

    /// As it stands in the topic.
    pub(crate) fn note(self) -> Vec<u8> {
        [&[MARK], &self.0[..]].concat()
    }
}

/// The ids of a transaction's events, as they stand in the topic.
pub(crate) fn note(ids: impl Iterator<Item = EventId>) -> Vec<u8> {
    let mut note = vec![IDS];
    ids.for_each(|id| note.extend(id.as_uuid().as_bytes()));
    note
}

/// The ids of events that were committed last.
#[derive(Default)]
pub(crate) struct Seen {
    ids: HashSet<u128>,
    order: VecDeque<u128>,
    reader: Option<BaseConsumer<Ear>>,
}

impl Seen {
    /// Whether the event was committed.
    pub(crate) fn has(&self, id: EventId) -> bool {
        self.ids.contains(&id.as_uuid().as_u128())
    }

    /// The event was committed. The oldest is forgotten when there are too many.
    pub(crate) fn add(&mut self, id: EventId) {
        self.insert(id.as_uuid().as_u128());
    }

    fn insert(&mut self, id: u128) {
        if !self.ids.insert(id) {
            return;
        }
        self.order.push_back(id);
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.ids.remove(&oldest);
        }
    }

    /// Reads what `scope` noted, up to its mark. Blocks.
    ///
    /// # Errors
    /// `Transient` if the mark does not come in time, or a note is of a later version.
    pub(crate) fn read_to(
        &mut self,
        mark: Mark,
        (topic, scope): (&str, &str),
        client: &ClientConfig,
        patience: Duration,
    ) -> Result<()> {
        let reader = match self.reader.take() {
            Some(reader) => reader,
            None => reader(client, topic, patience)?,
        };
        let until = Instant::now() + patience;
        while Instant::now() < until {
            // Errors are about connections, which the client makes anew.
            let Some(Ok(record)) = reader.poll(POLL) else { continue };
            if record.key() != Some(scope.as_bytes()) {
                continue;
            }
            match record.payload().unwrap_or_default().split_first() {
                Some((&IDS, ids)) => {
                    let (ids, _) = ids.as_chunks();
                    ids.iter().for_each(|id| self.insert(u128::from_be_bytes(*id)));
                }
                Some((&MARK, found)) if *found == mark.0 => {
                    drop(record);
                    self.reader = Some(reader);
                    return Ok(());
                }
                Some((&MARK, _)) => {}
                _ => {
                    return Err(Error::transient(format!(
                        "the topic {topic} has a note that a later version wrote; take that one"
                    )));
                }
            }
        }
        Err(Error::transient(format!("the topic {topic} was not read to its end in time")))
    }
}

/// One that reads what is committed, from as far back as the memory reaches.
fn reader(client: &ClientConfig, topic: &str, patience: Duration) -> Result<BaseConsumer<Ear>> {
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
        let mut seen = Seen::default();
        let all = REMEMBERED as u128;
        (0..all).for_each(|n| seen.add(id(n)));
        seen.add(id(5));
        assert!(seen.has(id(0)) && seen.ids.len() == REMEMBERED);
        seen.add(id(all));
        assert!(!seen.has(id(0)) && seen.has(id(1)) && seen.has(id(all)));
        assert_eq!((seen.ids.len(), seen.order.len()), (REMEMBERED, REMEMBERED));
    }

    #[test]
    fn a_note_has_a_byte_and_sixteen_for_each_id() {
        assert_eq!(note([id(1), id(2)].into_iter()).len(), 33);
        assert_eq!(Mark::new().note().len(), 17);
        assert_ne!(Mark::new(), Mark::new());
    }
}
