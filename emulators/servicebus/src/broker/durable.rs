//! What of a queue outlives the emulator, where it has a file.
//!
//! What lives here: what has changed since it was last saved, and taking back what was saved. What
//! does not: the file (`store.rs`), and when it is written (`mod.rs`).
//! Invariant: whatever of a message, a session's state, a known id or the next number has changed
//! is named here until it was saved. Locks are no part of it: they end with the emulator, as if
//! their messages had never been delivered.

use std::collections::BTreeSet;

use bytes::Bytes;

use super::queue::{Kind, Queue, State, Stored};
use super::timers::Appointment;

/// What has changed since a queue was last saved.
#[derive(Debug, Default)]
pub(crate) struct Unsaved {
    /// Messages that came, changed or went.
    pub messages: BTreeSet<i64>,
    /// Sessions whose state is another.
    pub sessions: BTreeSet<String>,
    /// Ids that are known since, and until when.
    pub seen: Vec<(String, i64)>,
}

impl Unsaved {
    fn is_empty(&self) -> bool {
        self.messages.is_empty() && self.sessions.is_empty() && self.seen.is_empty()
    }
}

impl Queue {
    /// From now on what changes is kept in mind until it was saved.
    pub(crate) fn make_durable(&mut self) {
        self.unsaved = Some(Unsaved::default());
    }

    /// What is to be saved, if anything is.
    pub(crate) fn unsaved(&self) -> Option<&Unsaved> {
        self.unsaved.as_ref().filter(|unsaved| !unsaved.is_empty())
    }

    /// All of it is saved.
    pub(crate) fn saved(&mut self) {
        if let Some(unsaved) = &mut self.unsaved {
            *unsaved = Unsaved::default();
        }
    }

    pub(super) fn touch(&mut self, sequence_number: i64) {
        if let Some(unsaved) = &mut self.unsaved {
            unsaved.messages.insert(sequence_number);
        }
    }

    pub(super) fn touch_session(&mut self, id: &str) {
        if let Some(unsaved) = &mut self.unsaved {
            unsaved.sessions.insert(id.to_owned());
        }
    }

    /// The state in which a message would be if the emulator ended now.
    pub(crate) fn lasting_state(&self, stored: &Stored) -> State {
        match stored.state {
            State::Locked { token } => match self.locks.get(&token) {
                Some(lock) if lock.was_deferred => State::Deferred,
                _ => State::Ready,
            },
            state => state,
        }
    }

    pub(crate) fn next_sequence_number(&self) -> i64 {
        self.next_sequence_number
    }

    /// Goes on from a number that was saved.
    pub(crate) fn restore_number(&mut self, next: i64) {
        self.next_sequence_number = self.next_sequence_number.max(next);
    }

    /// Takes a message back as it was saved.
    pub(crate) fn restore(&mut self, stored: Stored) {
        let (number, state) = (stored.sequence_number, stored.state);
        // A topic holds only what is to appear later; anything else would wait there for ever.
        if self.kind == Kind::Topic && !matches!(state, State::Scheduled { .. }) {
            return;
        }
        self.bytes += stored.message.size as u64;
        if let Some(expires_ms) = stored.expires_ms {
            self.timers.add(expires_ms, Appointment::Expiry(number));
        }
        self.messages.insert(number, stored);
        self.restore_number(number.saturating_add(1));
        match state {
            State::Scheduled { due_ms } => {
                self.timers.add(due_ms, Appointment::Scheduled(number));
            }
            State::Deferred => {}
            State::Ready | State::Locked { .. } => self.make_ready(number),
        }
    }

    /// Knows an id again.
    pub(crate) fn restore_seen(&mut self, id: String, until_ms: i64) {
        if self.settings.duplicate_detection_window.is_some() {
            self.seen.is_new(id, until_ms);
        }
    }

    /// Takes back what a session's last holder had left.
    pub(crate) fn restore_session(&mut self, id: &str, state: Bytes) {
        self.sessions.entry(id.to_owned()).or_default().state = Some(state);
    }
}
