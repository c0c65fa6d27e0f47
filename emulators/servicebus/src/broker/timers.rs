//! What happens by itself as time passes.
//!
//! What lives here: a queue's appointments. What does not: what is done when one is due.
//! Invariant: an appointment may be out of date when it comes; whoever keeps it looks again.

use std::collections::BTreeSet;

use uuid::Uuid;

/// What is due.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Appointment {
    /// A scheduled message appears.
    Scheduled(i64),
    /// A message has outlived its time.
    Expiry(i64),
    /// A message's lock ends.
    Lock(Uuid),
    /// A session's lock ends.
    Session(String),
}

/// Appointments by time, in milliseconds since 1970.
#[derive(Debug, Default)]
pub(crate) struct Timers(BTreeSet<(i64, Appointment)>);

impl Timers {
    pub(crate) fn add(&mut self, at_ms: i64, appointment: Appointment) {
        self.0.insert((at_ms, appointment));
    }

    pub(crate) fn remove(&mut self, at_ms: i64, appointment: Appointment) {
        self.0.remove(&(at_ms, appointment));
    }

    /// The next one that is due.
    pub(crate) fn pop_due(&mut self, now_ms: i64) -> Option<Appointment> {
        if self.next_ms()? > now_ms {
            return None;
        }
        self.0.pop_first().map(|(_, appointment)| appointment)
    }

    pub(crate) fn next_ms(&self) -> Option<i64> {
        self.0.first().map(|(at, _)| *at)
    }
}
