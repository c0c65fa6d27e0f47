//! One queue: what waits, what is locked, and what leaves.
//!
//! What lives here: a message's states and the ways between them. What does not: sessions' own
//! locks (`sessions.rs`), and where messages go that leave (`mod.rs`).
//!
//! ```text
//!              due                 deliver                 complete
//! Scheduled ────────▶ Ready ───────────────────▶ Locked ─────────────▶ gone
//!                      ▲  │ expiry, or received    │ │ │  dead-letter, or too many deliveries
//!                      │  ▼ and deleted: gone      │ │ └──────────────▶ leaving
//!                      └──── abandon, expiry ──────┘ └─ defer ─▶ Deferred ─ by number ─▶ Locked
//! ```
//!
//! Invariant: a message is in exactly one of these states; `ready` and `locks` say the same as the
//! messages' own states; a lock that has ended can't settle anything.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use uuid::Uuid;

use super::durable::Unsaved;
use super::message::Message;
use super::seen::Seen;
use super::sessions::Session;
pub(crate) use super::states::{
    Changes, Delivery, Kind, Leaving, Lock, Mode, Settlement, State, Stored,
};
use super::timers::{Appointment, Timers};
use super::{Letter, LinkId};
use crate::clock::millis;
use crate::config::Entity;
use crate::refusal::{Refusal, condition};

/// See the module.
#[derive(Debug)]
pub(crate) struct Queue {
    /// As its configuration spells it.
    pub path: String,
    pub kind: Kind,
    pub settings: Entity,
    pub(super) messages: BTreeMap<i64, Stored>,
    pub(super) ready: BTreeSet<i64>,
    pub(super) sessions: BTreeMap<String, Session>,
    pub(super) locks: HashMap<Uuid, Lock>,
    pub(super) timers: Timers,
    pub(super) leaving: Vec<Leaving>,
    pub(super) seen: Seen,
    pub(super) next_sequence_number: i64,
    pub(super) bytes: u64,
    /// None, where nothing is saved.
    pub(super) unsaved: Option<Unsaved>,
}

impl Queue {
    pub(crate) fn new(path: String, kind: Kind, settings: Entity) -> Self {
        Self {
            path,
            kind,
            settings,
            messages: BTreeMap::new(),
            ready: BTreeSet::new(),
            sessions: BTreeMap::new(),
            locks: HashMap::new(),
            timers: Timers::default(),
            leaving: Vec::new(),
            seen: Seen::default(),
            next_sequence_number: 1,
            bytes: 0,
            unsaved: None,
        }
    }

    pub(crate) fn messages(&self) -> impl Iterator<Item = &Stored> {
        self.messages.values()
    }

    pub(crate) fn message(&self, sequence_number: i64) -> Option<&Stored> {
        self.messages.get(&sequence_number)
    }

    pub(crate) fn next_timer_ms(&self) -> Option<i64> {
        self.timers.next_ms()
    }

    /// Whether it can take messages of so many bytes.
    pub(crate) fn has_room_for(&self, bytes: u64, count: usize) -> Result<(), Refusal> {
        if self.bytes.saturating_add(bytes) > self.settings.max_entity_bytes {
            let text = format!("The maximum entity size of {} has been reached.", self.path);
            return Err(Refusal::new(condition::RESOURCE_LIMIT, text));
        }
        let remembers = self.settings.duplicate_detection_window.is_some();
        if remembers && !self.seen.has_room_for(count) {
            let text = "Duplicate detection can remember no more message ids.";
            return Err(Refusal::new(condition::RESOURCE_LIMIT, text));
        }
        Ok(())
    }

    /// Whether a message was not sent before within the window; if so, its id is remembered.
    pub(crate) fn is_new(&mut self, message: &Message, now_ms: i64) -> bool {
        let Some(window) = self.settings.duplicate_detection_window else { return true };
        let Some(id) = message.message_id() else { return true };
        self.seen.forget(now_ms);
        let until_ms = now_ms.saturating_add(millis(window));
        let is_new = self.seen.is_new(id.clone(), until_ms);
        if let Some(unsaved) = self.unsaved.as_mut().filter(|_| is_new) {
            unsaved.seen.push((id, until_ms));
        }
        is_new
    }

    /// Takes a message in, and returns its number.
    pub(crate) fn put(&mut self, message: Arc<Message>, now_ms: i64) -> i64 {
        let sequence_number = self.next_sequence_number;
        self.next_sequence_number += 1;
        self.touch(sequence_number);
        let due = message.scheduled_ms().filter(|due| *due > now_ms);
        self.bytes += message.size as u64;
        self.messages.insert(
            sequence_number,
            Stored {
                sequence_number,
                message,
                enqueued_ms: now_ms,
                expires_ms: None,
                delivery_count: 0,
                state: due.map_or(State::Ready, |due_ms| State::Scheduled { due_ms }),
                letter: None,
            },
        );
        match due {
            Some(due_ms) => self.timers.add(due_ms, Appointment::Scheduled(sequence_number)),
            None => self.appear(sequence_number, now_ms),
        }
        sequence_number
    }

    /// Takes a dead letter in, under the number that it had.
    pub(crate) fn put_letter(&mut self, mut letter: Stored) {
        letter.state = State::Ready;
        letter.delivery_count = 0;
        letter.expires_ms = None;
        self.touch(letter.sequence_number);
        self.bytes += letter.message.size as u64;
        self.ready.insert(letter.sequence_number);
        self.messages.insert(letter.sequence_number, letter);
    }

    /// A message is there for receivers from now on.
    fn appear(&mut self, sequence_number: i64, now_ms: i64) {
        if self.kind == Kind::Topic {
            if let Some(stored) = self.remove(sequence_number) {
                self.leaving.push(Leaving::Publish(stored.message));
            }
            return;
        }
        let time_to_live = self.settings.default_time_to_live.map(millis);
        let Some(stored) = self.messages.get_mut(&sequence_number) else { return };
        stored.enqueued_ms = now_ms;
        let own = stored.message.header.ttl.map(i64::from);
        let shortest = [own, time_to_live].into_iter().flatten().min();
        stored.expires_ms = shortest.map(|ttl| now_ms.saturating_add(ttl));
        if let Some(expires_ms) = stored.expires_ms {
            self.timers.add(expires_ms, Appointment::Expiry(sequence_number));
        }
        self.touch(sequence_number);
        self.make_ready(sequence_number);
    }

    pub(super) fn make_ready(&mut self, sequence_number: i64) {
        let Some(stored) = self.messages.get_mut(&sequence_number) else { return };
        stored.state = State::Ready;
        if !self.settings.requires_session {
            self.ready.insert(sequence_number);
            return;
        }
        match stored.message.session_id().filter(|session| !session.is_empty()) {
            Some(session) => {
                let session = session.to_owned();
                self.sessions.entry(session).or_default().ready.insert(sequence_number);
            }
            // Only a topic can bring it here.
            None => self.bury(sequence_number, "Session id is null.", "The message has none."),
        }
    }

    /// Removes a message whatever its state.
    pub(super) fn remove(&mut self, sequence_number: i64) -> Option<Stored> {
        let stored = self.messages.remove(&sequence_number)?;
        self.touch(sequence_number);
        self.bytes = self.bytes.saturating_sub(stored.message.size as u64);
        self.ready.remove(&sequence_number);
        if let State::Locked { token } = stored.state
            && let Some(lock) = self.locks.remove(&token)
        {
            self.timers.remove(lock.until_ms, Appointment::Lock(token));
        }
        if let Some(expires_ms) = stored.expires_ms {
            self.timers.remove(expires_ms, Appointment::Expiry(sequence_number));
        }
        if let Some(session) = stored.message.session_id() {
            let session = session.to_owned();
            if let Some(waiting) = self.sessions.get_mut(&session) {
                waiting.ready.remove(&sequence_number);
            }
            self.tidy_session(&session);
        }
        Some(stored)
    }

    /// Sends a message to the dead letters.
    fn bury(&mut self, sequence_number: i64, reason: &str, description: &str) {
        let (reason, description) = (Some(reason.to_owned()), Some(description.to_owned()));
        self.bury_for(sequence_number, reason, description);
    }

    fn bury_for(
        &mut self,
        sequence_number: i64,
        reason: Option<String>,
        description: Option<String>,
    ) {
        let Some(mut stored) = self.remove(sequence_number) else { return };
        // A dead letter that is dead-lettered again stays where it is.
        if self.kind == Kind::DeadLetters {
            self.put_letter(stored);
            return;
        }
        stored.letter = Some(Letter { source: self.path.clone(), reason, description });
        self.leaving.push(Leaving::DeadLetter(Box::new(stored)));
    }

    /// The next message for a receiver.
    pub(crate) fn next(
        &mut self,
        link: LinkId,
        session: Option<&str>,
        mode: Mode,
        now_ms: i64,
    ) -> Option<Delivery> {
        let sequence_number = match session {
            Some(id) => {
                let session = self.sessions.get(id).filter(|held| held.is_held_by(link))?;
                session.ready.first().copied()?
            }
            None => self.ready.first().copied()?,
        };
        self.take(sequence_number, session, mode, now_ms)
    }

    /// Gives a message, ready or deferred, to a receiver.
    pub(super) fn take(
        &mut self,
        sequence_number: i64,
        session: Option<&str>,
        mode: Mode,
        now_ms: i64,
    ) -> Option<Delivery> {
        let token = Uuid::new_v4();
        let held_until = session.and_then(|id| self.sessions.get(id)?.held_until_ms());
        let until_ms = held_until
            .unwrap_or_else(|| now_ms.saturating_add(millis(self.settings.lock_duration)));
        let locked = (mode == Mode::PeekLock).then_some(until_ms);
        let stored = self.messages.get(&sequence_number)?;
        if !matches!(stored.state, State::Ready | State::Deferred) {
            return None;
        }
        // What can be decoded can be encoded; a message that can't be is never shown to anybody.
        let bytes = stored.message.encode(&stored.envelope(locked)).ok()?;
        if mode == Mode::Delete {
            self.remove(sequence_number);
            return Some(Delivery { token, bytes });
        }
        self.ready.remove(&sequence_number);
        if let Some(waiting) = session.and_then(|id| self.sessions.get_mut(id)) {
            waiting.ready.remove(&sequence_number);
        }
        let stored = self.messages.get_mut(&sequence_number)?;
        let was_deferred = stored.state == State::Deferred;
        stored.state = State::Locked { token };
        let session = session.map(str::to_owned);
        if session.is_none() {
            self.timers.add(until_ms, Appointment::Lock(token));
        }
        let lock = Lock { sequence_number, until_ms, session, was_deferred };
        self.locks.insert(token, lock);
        Some(Delivery { token, bytes })
    }

    /// Does what a receiver wants with a message that it holds.
    pub(crate) fn settle(
        &mut self,
        token: Uuid,
        settlement: Settlement,
        now_ms: i64,
    ) -> Result<(), Refusal> {
        let lock = self.locks.get(&token).ok_or_else(lock_lost)?;
        let sequence_number = lock.sequence_number;
        match settlement {
            Settlement::Complete => {
                self.remove(sequence_number);
            }
            Settlement::Abandon(changes) => {
                self.change(sequence_number, changes)?;
                self.unlock(token, true, now_ms);
            }
            Settlement::Release => self.unlock(token, false, now_ms),
            Settlement::Defer(changes) => {
                self.change(sequence_number, changes)?;
                self.release_lock(token);
                if let Some(stored) = self.messages.get_mut(&sequence_number) {
                    stored.state = State::Deferred;
                }
                self.touch(sequence_number);
                self.expire(sequence_number, now_ms);
            }
            Settlement::DeadLetter { reason, description, changes } => {
                self.change(sequence_number, changes)?;
                self.bury_for(sequence_number, reason, description);
            }
        }
        Ok(())
    }

    fn change(&mut self, sequence_number: i64, changes: Changes) -> Result<(), Refusal> {
        if changes.is_empty() {
            return Ok(());
        }
        self.touch(sequence_number);
        let Some(stored) = self.messages.get_mut(&sequence_number) else { return Ok(()) };
        let changed = Arc::make_mut(&mut stored.message).change_properties(changes);
        changed.map_err(|error| Refusal::new(condition::DECODE_ERROR, error.to_string()))
    }

    fn release_lock(&mut self, token: Uuid) -> Option<Lock> {
        let lock = self.locks.remove(&token)?;
        self.timers.remove(lock.until_ms, Appointment::Lock(token));
        Some(lock)
    }

    /// A lock ends without success.
    pub(super) fn unlock(&mut self, token: Uuid, counts: bool, now_ms: i64) {
        let Some(lock) = self.release_lock(token) else { return };
        let Some(stored) = self.messages.get_mut(&lock.sequence_number) else { return };
        stored.delivery_count = stored.delivery_count.saturating_add(u32::from(counts));
        let count = stored.delivery_count;
        stored.state = State::Deferred;
        if counts {
            self.touch(lock.sequence_number);
        }
        if count >= self.settings.max_delivery_count && self.kind != Kind::DeadLetters {
            let description =
                format!("Message could not be consumed after {count} delivery attempts.");
            self.bury(lock.sequence_number, "MaxDeliveryCountExceeded", &description);
            return;
        }
        if !lock.was_deferred {
            self.make_ready(lock.sequence_number);
        }
        self.expire(lock.sequence_number, now_ms);
    }

    /// Removes a message that has outlived its time, unless somebody holds it.
    fn expire(&mut self, sequence_number: i64, now_ms: i64) {
        let Some(stored) = self.messages.get(&sequence_number) else { return };
        let over = stored.expires_ms.is_some_and(|expires_ms| expires_ms <= now_ms);
        let free = matches!(stored.state, State::Ready | State::Deferred);
        if !over || !free {
            return;
        }
        if self.settings.dead_letter_on_expiration {
            let description = "The message expired and was dead lettered.";
            self.bury(sequence_number, "TTLExpiredException", description);
        } else {
            self.remove(sequence_number);
        }
    }

    /// Makes a message's lock last from now on again.
    pub(crate) fn renew(&mut self, token: Uuid, now_ms: i64) -> Result<i64, Refusal> {
        let lock = self.locks.get_mut(&token).ok_or_else(lock_lost)?;
        let until_ms = now_ms.saturating_add(millis(self.settings.lock_duration));
        if lock.session.is_none() {
            self.timers.remove(lock.until_ms, Appointment::Lock(token));
            self.timers.add(until_ms, Appointment::Lock(token));
            lock.until_ms = until_ms;
        }
        Ok(until_ms)
    }

    /// Removes messages that were to appear later.
    pub(crate) fn cancel(&mut self, sequence_numbers: &[i64]) -> Result<(), Refusal> {
        let scheduled = |number: &i64| {
            let stored = self.messages.get(number);
            stored.is_some_and(|stored| matches!(stored.state, State::Scheduled { .. }))
        };
        if !sequence_numbers.iter().all(scheduled) {
            let text = "A scheduled message of this sequence number was not found.";
            return Err(Refusal::new(condition::MESSAGE_NOT_FOUND, text));
        }
        for number in sequence_numbers {
            if let Some(Stored { state: State::Scheduled { due_ms }, .. }) = self.remove(*number) {
                self.timers.remove(due_ms, Appointment::Scheduled(*number));
            }
        }
        Ok(())
    }

    /// Does what is due; whether anything was.
    pub(crate) fn advance(&mut self, now_ms: i64) -> bool {
        let mut any = false;
        while let Some(appointment) = self.timers.pop_due(now_ms) {
            any = true;
            match appointment {
                Appointment::Scheduled(number) => self.appear(number, now_ms),
                Appointment::Expiry(number) => self.expire(number, now_ms),
                Appointment::Lock(token) => self.unlock(token, true, now_ms),
                Appointment::Session(id) => self.expire_session(&id, now_ms),
            }
        }
        any
    }
}

pub(super) fn lock_lost() -> Refusal {
    let text = "The lock supplied is invalid. Either the lock expired, or the message has already \
        been removed from the queue.";
    Refusal::new(condition::MESSAGE_LOCK_LOST, text)
}
