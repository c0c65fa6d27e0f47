//! From a batch or a released letter to the lanes.
//!
//! What lives here: the look-up of parked keys, and what waits instead of being queued. What does
//! not: sending.
//! Invariant: a record whose key has letters never enters a lane ahead of them.

use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::time::Duration;

use postrider_core::{
    Batch, BatchLimit, DeadLetter, DeadLetterState, Entry, Error, ErrorKind, Key, NewDeadLetter,
    Result,
};

use super::{Exit, LOOK_AT_MOST_ONE_IN, Phase, Pipeline, RELEASE_EVERY, RELEASE_PAGE};
use crate::lanes::{LaneId, NewItem, Origin};
use crate::store_ops::{Patience, StoreOp};
use crate::window::Fate;

impl Pipeline {
    /// Takes a batch in, at once or after a look-up of its keys among the dead letters.
    pub(super) fn receive(&mut self, batch: Batch) {
        if let Some(Entry::Record(last)) = batch.entries.last() {
            let up_to = last.appended_at.as_millis();
            self.set.status.read_up_to_ms.store(up_to, Ordering::Relaxed);
        }
        if self.blocking == 0 && self.parking.is_empty() {
            self.enqueue(batch, &HashSet::new());
            return;
        }
        let keys: HashSet<Key> = batch.entries.iter().filter_map(Entry::key).cloned().collect();
        let keys: Vec<Key> = keys.into_iter().collect();
        let desk = self.set.desk.clone();
        let look_up = async move {
            let partition = desk.lease.partition();
            let mut patience = Patience::new();
            loop {
                match desk.store.blocked(&desk.consumer, partition, &keys).await {
                    Ok(blocked) => return Ok(blocked.into_iter().collect()),
                    Err(error) => {
                        let Some(wait) = patience.after(&error) else { return Err(error) };
                        desk.clock.sleep(wait).await;
                    }
                }
            }
        };
        self.lookup = Some((batch, Box::pin(look_up)));
    }

    pub(super) fn looked_up(&mut self, blocked: Result<HashSet<Key>>) {
        let (batch, _) = self.lookup.take().expect("a look-up ended");
        match blocked {
            Ok(mut blocked) => {
                blocked.extend(self.parked_meanwhile.drain());
                self.enqueue(batch, &blocked);
            }
            Err(error) => self.begin_drain(Some(error)),
        }
    }

    fn enqueue(&mut self, batch: Batch, blocked: &HashSet<Key>) {
        for entry in batch.entries {
            let seq = self.window.push(entry.position().clone());
            let Some(key) = entry.key() else {
                self.park_keyless(entry, seq);
                continue;
            };
            let held = blocked.contains(key) || self.parking.contains_key(key);
            if held && !self.lanes.has_feed_items(key) {
                let key = key.clone();
                let reason = "waits behind an earlier event of its key".to_owned();
                let state = DeadLetterState::Waiting;
                let letter = NewDeadLetter { entry, state, reason, attempts: 0 };
                self.park(vec![letter], vec![seq], Some(key));
                continue;
            }
            let sendable = self.is_sendable(&entry);
            let origin = Origin::Feed(seq);
            self.lanes.push(NewItem { entry, origin, earlier_attempts: 0, sendable });
        }
        self.window.pass(batch.position);
    }

    /// An unreadable entry without a key holds nothing back.
    fn park_keyless(&mut self, entry: Entry, seq: u64) {
        let reason = match &entry {
            Entry::Malformed(malformed) => malformed.reason.clone(),
            Entry::Record(_) => unreachable!("a record has a key"),
        };
        let state = DeadLetterState::Skipped;
        self.park(vec![NewDeadLetter { entry, state, reason, attempts: 0 }], vec![seq], None);
    }

    /// Queues the writing of letters. Their records are settled once it is done.
    pub(super) fn park(&mut self, letters: Vec<NewDeadLetter>, seqs: Vec<u64>, key: Option<Key>) {
        self.parkings += 1;
        self.at_rest = false;
        let blocks = |letter: &&NewDeadLetter| letter.state != DeadLetterState::Skipped;
        self.blocking += letters.iter().filter(blocks).count() as u64;
        if let Some(key) = &key {
            *self.parking.entry(key.clone()).or_default() += 1;
        }
        self.ops.push(StoreOp::Park { letters, seqs, keys: key.into_iter().collect() });
    }

    fn is_sendable(&self, entry: &Entry) -> bool {
        match entry {
            Entry::Record(record) => {
                let size = record.event.payload().len();
                self.limits.max_event_bytes.is_none_or(|most| size <= most)
            }
            Entry::Malformed(_) => false,
        }
    }

    pub(super) fn why_unsendable(&self, lane: LaneId) -> Error {
        match &self.lanes.head(lane).entry {
            Entry::Malformed(malformed) => Error::permanent(malformed.reason.clone()),
            Entry::Record(record) => Error::permanent(format!(
                "the payload has {} bytes; the sink takes {} at most",
                record.event.payload().len(),
                self.limits.max_event_bytes.unwrap_or_default()
            )),
        }
    }

    /// When to ask for released letters; nothing while they are being asked for or written, or as
    /// many as may be are in memory.
    pub(super) fn release_due_at(&self) -> Option<Duration> {
        let in_memory = self.lanes.dead_letters();
        let may_look = matches!(self.phase, Phase::Running)
            && self.release.is_none()
            && self.ops.is_idle()
            && in_memory < RELEASE_PAGE.records;
        // Letters in memory may be between attempts for long: others' are looked for beside them.
        may_look.then_some(if in_memory == 0 { self.release_at } else { self.look_again_at })
    }

    fn look_at(&mut self, next: Duration) {
        self.release_at = next;
        self.look_again_at = next;
    }

    pub(super) fn look_for_released(&mut self, now: Duration) {
        if self.release_due_at().is_none_or(|at| now < at) {
            return;
        }
        self.look_at(now + RELEASE_EVERY);
        if self.at_rest && self.set.news.get(now).is_some_and(|news| !news.requeued) {
            return;
        }
        self.looked_at = now;
        let desk = self.set.desk.clone();
        self.parkings_at_release = self.parkings;
        self.ended_at_release = self.letters_ended;
        let (in_memory, bytes) = self.lanes.letters();
        self.release = Some(Box::pin(async move {
            let partition = desk.lease.partition();
            // Those in memory come again, and must not crowd out the new ones.
            let limit = BatchLimit {
                records: RELEASE_PAGE.records + in_memory.len(),
                bytes: RELEASE_PAGE.bytes + bytes,
            };
            let mut letters = desk.store.released(&desk.consumer, partition, limit).await?;
            letters.retain(|letter| !in_memory.contains(&letter.id));
            let blocking = desk.store.blocking(&desk.consumer, partition).await?;
            Ok((letters, blocking))
        }));
    }

    pub(super) fn released(&mut self, letters: Result<(Vec<DeadLetter>, u64)>) {
        self.release = None;
        let now = self.set.desk.clock.elapsed();
        // Behind a long backlog a look is dear: it reads all that waits.
        let took = now.saturating_sub(self.looked_at);
        self.look_at(now + RELEASE_EVERY.max(took * LOOK_AT_MOST_ONE_IN));
        let (letters, blocking) = match letters {
            Ok(found) => found,
            Err(error) => {
                let text = error.chain();
                if self.told.is_news(&text, now) {
                    tracing::warn!(
                        partition = %self.partition(), sink = %self.set.desk.consumer,
                        error = text, "dead letters can't be read for now"
                    );
                }
                return;
            }
        };
        if self.told.is_over() {
            tracing::info!(
                partition = %self.partition(), sink = %self.set.desk.consumer,
                "dead letters can be read again"
            );
        }
        let unchanged = self.parkings == self.parkings_at_release;
        if unchanged {
            self.blocking = blocking;
        }
        self.at_rest = unchanged && blocking == 0 && letters.is_empty();
        if !letters.is_empty() {
            // The next page follows as soon as this one is settled.
            self.release_at = Duration::ZERO;
        }
        if self.letters_ended != self.ended_at_release {
            // A letter that left meanwhile may be in this page, or before one of its key in it.
            self.look_again_at = Duration::ZERO;
            return;
        }
        for letter in letters {
            if letter.entry.key().is_none() {
                continue;
            }
            // Somebody asks for it again: the limit that the sink told of may have been raised,
            // which a sink learns when it sends.
            let sendable = matches!(letter.entry, Entry::Record(_));
            let origin = Origin::DeadLetter(letter.id);
            let earlier_attempts = letter.attempts;
            let new = NewItem { entry: letter.entry, origin, earlier_attempts, sendable };
            self.lanes.push(new);
        }
    }

    /// A write was done, or can't be.
    pub(super) fn written(&mut self, op: StoreOp, result: Result<()>) {
        if let Err(error) = result {
            self.write_failed(error);
            return;
        }
        match op {
            StoreOp::Park { letters, seqs, keys } => {
                for seq in seqs {
                    self.window.finish(seq, Fate::Parked);
                }
                let parked = letters.len() as u64;
                self.set.status.parked.fetch_add(parked, Ordering::Relaxed);
                self.set.status.moved(self.set.desk.clock.elapsed());
                for key in keys {
                    self.parked_one(key);
                }
            }
            // How many still hold keys back is told by the next look: among these may be some that
            // were never counted, because a person released them.
            StoreOp::Resolve { .. } | StoreOp::Refuse { .. } => {}
            StoreOp::Advance { to, .. } => {
                if let Some(reading) = &self.reading {
                    reading.confirm(to);
                }
            }
            StoreOp::Finish { .. } => self.exit = Some(Exit::Finished),
        }
    }

    fn parked_one(&mut self, key: Key) {
        if self.lookup.is_some() {
            self.parked_meanwhile.insert(key.clone());
        }
        if let Some(count) = self.parking.get_mut(&key) {
            *count -= 1;
            if *count == 0 {
                self.parking.remove(&key);
            }
        }
    }

    fn write_failed(&mut self, error: Error) {
        let exit = match error.kind() {
            ErrorKind::Fenced => {
                tracing::warn!(
                    partition = %self.partition(), sink = %self.set.desk.consumer,
                    epoch = self.set.desk.lease.epoch().get(), error = %error.chain(),
                    "another relay has the partition; this worker stops"
                );
                self.set.trust.lose();
                Exit::LeaseLost
            }
            ErrorKind::Transient
            | ErrorKind::Throttled { .. }
            | ErrorKind::Permanent
            | ErrorKind::Unsupported
            | ErrorKind::Corrupt => Exit::Halted(error),
        };
        self.exit = Some(exit);
    }

    pub(super) fn stop_reading(&mut self) {
        self.reading = None;
        self.lookup = None;
        self.release = None;
        self.reader.abort_all();
    }
}
