//! Sessions: who holds which, until when, and what they keep between receivers.
//!
//! What lives here: locks of sessions, the next available one, a session's state. What does not:
//! the messages in them (`queue.rs`).
//! Invariant: a session has one holder at most; when the holder goes, so do its claims on messages.

use std::collections::BTreeSet;

use bytes::Bytes;
use uuid::Uuid;

use super::LinkId;
use super::queue::Queue;
use super::timers::Appointment;
use crate::clock::millis;
use crate::refusal::{Refusal, condition};

/// What is kept of one session.
#[derive(Debug, Default)]
pub(crate) struct Session {
    pub ready: BTreeSet<i64>,
    holder: Option<Holder>,
    pub(super) state: Option<Bytes>,
}

#[derive(Debug)]
struct Holder {
    link: LinkId,
    until_ms: i64,
}

impl Session {
    pub(super) fn is_held_by(&self, link: LinkId) -> bool {
        self.holder.as_ref().is_some_and(|holder| holder.link == link)
    }

    pub(super) fn held_until_ms(&self) -> Option<i64> {
        self.holder.as_ref().map(|holder| holder.until_ms)
    }
}

/// A session that a receiver was given.
#[derive(Debug)]
pub(crate) struct Granted {
    pub id: String,
    pub until_ms: i64,
}

impl Queue {
    /// Gives a named session to a receiver.
    pub(crate) fn accept_session(
        &mut self,
        id: &str,
        link: LinkId,
        now_ms: i64,
    ) -> Result<Granted, Refusal> {
        let until_ms = now_ms.saturating_add(millis(self.settings.lock_duration));
        let session = self.sessions.entry(id.to_owned()).or_default();
        if session.holder.is_some() {
            let text = format!("The requested session '{id}' cannot be accepted: it is locked.");
            return Err(Refusal::new(condition::SESSION_CANNOT_BE_LOCKED, text));
        }
        session.holder = Some(Holder { link, until_ms });
        self.timers.add(until_ms, Appointment::Session(id.to_owned()));
        Ok(Granted { id: id.to_owned(), until_ms })
    }

    /// Gives the free session whose message has waited longest, if there is one.
    pub(crate) fn accept_next_session(&mut self, link: LinkId, now_ms: i64) -> Option<Granted> {
        let free = self.sessions.iter().filter(|(_, session)| session.holder.is_none());
        let waiting = free.filter_map(|(id, session)| Some((*session.ready.first()?, id)));
        let id = waiting.min().map(|(_, id)| id.clone())?;
        self.accept_session(&id, link, now_ms).ok()
    }

    /// Whether the receiver holds the session.
    pub(crate) fn holds_session(&self, id: &str, link: LinkId) -> bool {
        self.sessions.get(id).is_some_and(|session| session.is_held_by(link))
    }

    /// Makes a session's lock last from now on again.
    pub(crate) fn renew_session(&mut self, id: &str, now_ms: i64) -> Result<i64, Refusal> {
        let until_ms = now_ms.saturating_add(millis(self.settings.lock_duration));
        let holder = self.sessions.get_mut(id).and_then(|session| session.holder.as_mut());
        let holder = holder.ok_or_else(|| session_lost(id))?;
        self.timers.remove(holder.until_ms, Appointment::Session(id.to_owned()));
        holder.until_ms = until_ms;
        self.timers.add(until_ms, Appointment::Session(id.to_owned()));
        Ok(until_ms)
    }

    /// Takes a session from its holder.
    pub(crate) fn release_session(&mut self, id: &str, link: LinkId, now_ms: i64) {
        if self.holds_session(id, link) {
            // Whoever gives a session back has not failed with its messages.
            self.free_session(id, false, now_ms);
        }
    }

    pub(super) fn expire_session(&mut self, id: &str, now_ms: i64) {
        let over = |session: &Session| session.held_until_ms().is_some_and(|until| until <= now_ms);
        if self.sessions.get(id).is_some_and(over) {
            self.free_session(id, true, now_ms);
        }
    }

    fn free_session(&mut self, id: &str, counts: bool, now_ms: i64) {
        let Some(session) = self.sessions.get_mut(id) else { return };
        if let Some(holder) = session.holder.take() {
            self.timers.remove(holder.until_ms, Appointment::Session(id.to_owned()));
        }
        let held = self.locks.iter().filter(|(_, lock)| lock.session.as_deref() == Some(id));
        let held: Vec<Uuid> = held.map(|(token, _)| *token).collect();
        for token in held {
            self.unlock(token, counts, now_ms);
        }
        self.tidy_session(id);
    }

    /// Forgets a session of which nothing is left.
    pub(super) fn tidy_session(&mut self, id: &str) {
        let empty = |session: &Session| {
            session.ready.is_empty() && session.holder.is_none() && session.state.is_none()
        };
        if self.sessions.get(id).is_some_and(empty) {
            self.sessions.remove(id);
        }
    }

    /// What the last holder has left for the next.
    pub(crate) fn session_state(&self, id: &str) -> Option<Bytes> {
        self.sessions.get(id)?.state.clone()
    }

    /// Leaves something for the next holder, or nothing.
    pub(crate) fn set_session_state(
        &mut self,
        id: &str,
        state: Option<Bytes>,
    ) -> Result<(), Refusal> {
        let bytes = state.as_ref().map_or(0, Bytes::len) as u64;
        if bytes > self.settings.max_message_bytes {
            let text = format!("The session state has {bytes} bytes.");
            return Err(Refusal::new(condition::RESOURCE_LIMIT, text));
        }
        let session = self.sessions.get_mut(id).filter(|session| session.holder.is_some());
        session.ok_or_else(|| session_lost(id))?.state = state;
        self.touch_session(id);
        Ok(())
    }
}

pub(crate) fn session_lost(id: &str) -> Refusal {
    let text = format!("The lock of the session '{id}' has expired. Accept it again.");
    Refusal::new(condition::SESSION_LOCK_LOST, text)
}
