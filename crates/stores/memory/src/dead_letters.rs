//! Dead letters: the shelf of each consumer and partition.
//!
//! What lives here: the letters, their lines by key, and the seam over them. What does not: the
//! decision to park.
//! Invariant: a key's line holds exactly its letters that are not skipped, oldest first, so that
//! asking what blocks or may go costs nothing for letters that can't move.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use async_trait::async_trait;
use postrider_core::{
    BatchLimit, Checkpoint, ConsumerName, DeadLetter, DeadLetterFilter, DeadLetterId,
    DeadLetterState, DeadLetters, Entry, Error, HeldLease, Key, NewDeadLetter, PartitionId,
    Position, Result, Successor, Timestamp, key_hash,
};

use crate::MemoryStore;
use crate::checkpoints::Standing;

/// The letters of one consumer in one partition.
#[derive(Default)]
struct Shelf {
    places: HashMap<Position, DeadLetterId>,
    lines: BTreeMap<Key, BTreeSet<DeadLetterId>>,
}

/// All letters, by number, and the shelves that index them.
#[derive(Default)]
pub(crate) struct Letters {
    last_id: u64,
    by_id: BTreeMap<DeadLetterId, DeadLetter>,
    shelves: BTreeMap<ConsumerName, BTreeMap<PartitionId, Shelf>>,
    /// Letters that came from a finished partition: their places were passed there.
    followed: BTreeSet<DeadLetterId>,
}

impl Letters {
    fn shelf(&self, consumer: &ConsumerName, partition: &PartitionId) -> Option<&Shelf> {
        self.shelves.get(consumer)?.get(partition)
    }

    fn index(&mut self, letter: &DeadLetter) {
        let shelves = self.shelves.entry(letter.consumer.clone()).or_default();
        let shelf = shelves.entry(letter.partition.clone()).or_default();
        shelf.places.insert(letter.entry.position().clone(), letter.id);
        if let Some(key) = letter.entry.key()
            && letter.state != DeadLetterState::Skipped
        {
            shelf.lines.entry(key.clone()).or_default().insert(letter.id);
        }
    }

    fn unindex(&mut self, letter: &DeadLetter) {
        let shelf = self
            .shelves
            .get_mut(&letter.consumer)
            .and_then(|shelves| shelves.get_mut(&letter.partition))
            .expect("a letter that is kept stands on its shelf");
        shelf.places.remove(letter.entry.position());
        if let Some(key) = letter.entry.key()
            && let Some(line) = shelf.lines.get_mut(key)
        {
            line.remove(&letter.id);
            if line.is_empty() {
                shelf.lines.remove(key);
            }
        }
    }

    fn add(
        &mut self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        new: &NewDeadLetter,
        now: Timestamp,
    ) -> bool {
        let shelf = self.shelf(consumer, partition);
        if shelf.is_some_and(|shelf| shelf.places.contains_key(new.entry.position())) {
            return false;
        }
        self.last_id += 1;
        let letter = DeadLetter {
            id: DeadLetterId::new(self.last_id),
            consumer: consumer.clone(),
            partition: partition.clone(),
            entry: new.entry.clone(),
            state: new.state,
            reason: new.reason.clone(),
            attempts: new.attempts,
            parked_at: now,
            updated_at: now,
        };
        self.index(&letter);
        self.by_id.insert(letter.id, letter);
        true
    }

    fn take(&mut self, id: DeadLetterId) -> Option<DeadLetter> {
        let letter = self.by_id.remove(&id)?;
        self.unindex(&letter);
        Some(letter)
    }

    fn change(&mut self, id: DeadLetterId, change: impl FnOnce(&mut DeadLetter)) {
        if let Some(mut letter) = self.take(id) {
            change(&mut letter);
            self.index(&letter);
            self.by_id.insert(id, letter);
        }
    }

    fn matching<'a>(
        &'a self,
        filter: &'a DeadLetterFilter,
    ) -> impl Iterator<Item = &'a DeadLetter> + 'a {
        self.by_id.values().filter(move |letter| matches(filter, letter))
    }

    /// Moves letters that match and stand in one of `from` to another state.
    fn transit(
        &mut self,
        filter: &DeadLetterFilter,
        from: [DeadLetterState; 2],
        to: DeadLetterState,
        now: Timestamp,
    ) -> u64 {
        let movable = self.matching(filter).filter(|letter| from.contains(&letter.state));
        let ids: Vec<DeadLetterId> = movable.map(|letter| letter.id).collect();
        for id in &ids {
            self.change(*id, |letter| {
                letter.state = to;
                letter.updated_at = now;
            });
        }
        ids.len() as u64
    }

    /// Of each key, the letters before its first parked one; by number.
    fn released(&self, consumer: &ConsumerName, partition: &PartitionId) -> Vec<&DeadLetter> {
        let lines = self.shelf(consumer, partition).into_iter().flat_map(|shelf| &shelf.lines);
        let free = lines.flat_map(|(_, line)| {
            let letters = line.iter().map(|id| &self.by_id[id]);
            letters.take_while(|letter| letter.state != DeadLetterState::Parked)
        });
        let mut free: Vec<&DeadLetter> =
            free.filter(|letter| matches!(letter.entry, Entry::Record(_))).collect();
        free.sort_unstable_by_key(|letter| letter.id);
        free
    }

    /// How many letters a consumer has in a partition.
    pub(crate) fn kept(&self, consumer: &ConsumerName, partition: &PartitionId) -> u64 {
        self.shelf(consumer, partition).map_or(0, |shelf| shelf.places.len() as u64)
    }

    /// Letters of a finished partition go to the successor that has their key now: nobody leases
    /// the old partition any more, and the key's later events must find them. A letter without a
    /// readable key goes to the first.
    pub(crate) fn follow(
        &mut self,
        consumer: &ConsumerName,
        finished: &PartitionId,
        successors: &[Successor],
    ) {
        let shelf = self.shelf(consumer, finished);
        let ids: Vec<DeadLetterId> =
            shelf.into_iter().flat_map(|shelf| shelf.places.values().copied()).collect();
        self.followed.extend(&ids);
        for id in ids {
            self.change(id, |letter| {
                let heir = successors.iter().find(|successor| {
                    let numbers = successor.partition.to_numbers();
                    numbers.is_some_and(|(index, count)| {
                        letter.entry.key().is_none_or(|key| key_hash(key) % count == index)
                    })
                });
                if let Some(heir) = heir {
                    letter.partition = heir.partition.clone();
                }
            });
        }
    }

    /// Forgets a consumer's letters; returns whether there were any.
    pub(crate) fn remove(&mut self, consumer: &ConsumerName) -> bool {
        let before = self.by_id.len();
        self.by_id.retain(|_, letter| letter.consumer != *consumer);
        self.shelves.remove(consumer);
        self.by_id.len() < before
    }
}

fn matches(filter: &DeadLetterFilter, letter: &DeadLetter) -> bool {
    (filter.ids.is_empty() || filter.ids.contains(&letter.id))
        && filter.consumer.as_ref().is_none_or(|consumer| letter.consumer == *consumer)
        && filter.key.as_ref().is_none_or(|key| letter.entry.key() == Some(key))
        && filter.state.is_none_or(|state| letter.state == state)
}

#[async_trait]
impl DeadLetters for MemoryStore {
    async fn park(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        letters: &[NewDeadLetter],
    ) -> Result<u64> {
        let now = self.inner.clock.now();
        let mut ledger = self.inner.ledger();
        ledger.fence(lease)?;
        // From its first letter on, the consumer is known and pins retention.
        ledger.standing_mut(consumer, lease.partition());
        let mut added = 0;
        for letter in letters {
            added += u64::from(ledger.letters.add(consumer, lease.partition(), letter, now));
        }
        Ok(added)
    }

    async fn blocked(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        keys: &[Key],
    ) -> Result<Vec<Key>> {
        let ledger = self.inner.ledger();
        let Some(shelf) = ledger.letters.shelf(consumer, partition) else { return Ok(Vec::new()) };
        Ok(keys.iter().filter(|key| shelf.lines.contains_key(*key)).cloned().collect())
    }

    async fn blocking(&self, consumer: &ConsumerName, partition: &PartitionId) -> Result<u64> {
        let ledger = self.inner.ledger();
        let lines = ledger.letters.shelf(consumer, partition).into_iter().flat_map(|s| &s.lines);
        Ok(lines.map(|(_, line)| line.len() as u64).sum())
    }

    async fn released(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        limit: BatchLimit,
    ) -> Result<Vec<DeadLetter>> {
        let ledger = self.inner.ledger();
        let mut bytes = 0usize;
        let mut page: Vec<DeadLetter> = Vec::new();
        let standing = ledger.standing(consumer, partition).and_then(Standing::checkpoint);
        let passed = |letter: &&DeadLetter| {
            let place = letter.entry.position().as_bytes();
            let covers = |checkpoint: &Checkpoint| place <= checkpoint.position.as_bytes();
            ledger.letters.followed.contains(&letter.id) || standing.as_ref().is_some_and(covers)
        };
        for letter in ledger.letters.released(consumer, partition).into_iter().filter(passed) {
            bytes = bytes.saturating_add(letter.entry.cost_bytes());
            let full = page.len() >= limit.records.max(1) || bytes > limit.bytes;
            if full && !page.is_empty() {
                break;
            }
            page.push(letter.clone());
        }
        Ok(page)
    }

    async fn resolve(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        ids: &[DeadLetterId],
    ) -> Result<()> {
        let mut ledger = self.inner.ledger();
        ledger.fence(lease)?;
        for id in ids {
            let ours = ledger.letters.by_id.get(id).is_some_and(|letter| {
                letter.consumer == *consumer && letter.partition == *lease.partition()
            });
            if ours {
                ledger.letters.take(*id);
                ledger.standing_mut(consumer, lease.partition()).published += 1;
            }
        }
        Ok(())
    }

    async fn refuse(
        &self,
        lease: &HeldLease,
        id: DeadLetterId,
        state: DeadLetterState,
        reason: &str,
        attempts: u32,
    ) -> Result<()> {
        if !matches!(state, DeadLetterState::Parked | DeadLetterState::Skipped) {
            return Err(Error::permanent("a refused dead letter is parked again or skipped"));
        }
        let now = self.inner.clock.now();
        let mut ledger = self.inner.ledger();
        ledger.fence(lease)?;
        let letter = ledger.letters.by_id.get(&id);
        if letter.is_none_or(|letter| letter.partition != *lease.partition()) {
            return Ok(());
        }
        ledger.letters.change(id, |letter| {
            // A person who gave it up meanwhile has the last word.
            if letter.state != DeadLetterState::Skipped {
                letter.state = state;
            }
            letter.reason = reason.to_owned();
            letter.attempts = letter.attempts.saturating_add(attempts);
            letter.updated_at = now;
        });
        Ok(())
    }

    async fn list(
        &self,
        filter: &DeadLetterFilter,
        after: Option<DeadLetterId>,
        limit: usize,
    ) -> Result<Vec<DeadLetter>> {
        let ledger = self.inner.ledger();
        let later = |letter: &&DeadLetter| after.is_none_or(|after| letter.id > after);
        Ok(ledger.letters.matching(filter).filter(later).take(limit).cloned().collect())
    }

    async fn requeue(&self, filter: &DeadLetterFilter) -> Result<u64> {
        let from = [DeadLetterState::Parked, DeadLetterState::Skipped];
        let now = self.inner.clock.now();
        Ok(self.inner.ledger().letters.transit(filter, from, DeadLetterState::Requeued, now))
    }

    async fn skip(&self, filter: &DeadLetterFilter) -> Result<u64> {
        let from = [DeadLetterState::Parked, DeadLetterState::Requeued];
        let now = self.inner.clock.now();
        Ok(self.inner.ledger().letters.transit(filter, from, DeadLetterState::Skipped, now))
    }

    async fn discard(&self, filter: &DeadLetterFilter) -> Result<u64> {
        let mut ledger = self.inner.ledger();
        let ids: Vec<DeadLetterId> = ledger.letters.matching(filter).map(|l| l.id).collect();
        for id in &ids {
            if let Some(letter) = ledger.letters.take(*id) {
                ledger.standing_mut(&letter.consumer, &letter.partition).dropped += 1;
            }
        }
        Ok(ids.len() as u64)
    }

    async fn at(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        position: &Position,
    ) -> Result<Option<DeadLetter>> {
        let ledger = self.inner.ledger();
        let shelf = ledger.letters.shelf(consumer, partition);
        let id = shelf.and_then(|shelf| shelf.places.get(position));
        Ok(id.map(|id| ledger.letters.by_id[id].clone()))
    }
}
