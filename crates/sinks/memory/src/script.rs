//! Scripted failures of the memory sink.
//!
//! What lives here: which fault an event meets. What does not: storing or answering.
//! Invariant: an outage comes before a fault of one event, that before its key's, that before one
//! for whatever comes next; a counted fault is used up by the event that meets it.

use std::collections::HashMap;
use std::time::Duration;

use postrider_core::{ErrorKind, EventId, Key};

/// What happens instead of a confirmation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Nothing is stored and the outcome fails with this kind.
    Refuse(ErrorKind),
    /// The event is stored, and the confirmation lost: the outcome fails as `Transient`.
    LoseConfirm,
}

#[derive(Default)]
pub(crate) struct Script {
    pub(crate) latency: Duration,
    outage: Option<Fault>,
    next: Option<(u32, Fault)>,
    keys: HashMap<Key, Fault>,
    events: HashMap<EventId, (u32, Fault)>,
}

impl Script {
    pub(crate) fn fail_next(&mut self, times: u32, fault: Fault) {
        self.next = (times > 0).then_some((times, fault));
    }

    pub(crate) fn fail_key(&mut self, key: Key, fault: Fault) {
        self.keys.insert(key, fault);
    }

    pub(crate) fn mend_key(&mut self, key: &Key) {
        self.keys.remove(key);
    }

    pub(crate) fn fail_event(&mut self, id: EventId, times: u32, fault: Fault) {
        if times > 0 {
            self.events.insert(id, (times, fault));
        }
    }

    pub(crate) fn set_outage(&mut self, fault: Option<Fault>) {
        self.outage = fault;
    }

    pub(crate) fn outage(&self) -> Option<Fault> {
        self.outage
    }

    /// The fault that an event meets now, which uses it up where it is counted.
    pub(crate) fn fault_for(&mut self, id: EventId, key: &Key) -> Option<Fault> {
        if self.outage.is_some() {
            return self.outage;
        }
        if let Some((left, fault)) = self.events.get(&id).copied() {
            if left > 1 {
                self.events.insert(id, (left - 1, fault));
            } else {
                self.events.remove(&id);
            }
            return Some(fault);
        }
        if let Some(fault) = self.keys.get(key) {
            return Some(*fault);
        }
        let (left, fault) = self.next?;
        self.next = (left > 1).then_some((left - 1, fault));
        Some(fault)
    }
}
