//! How many duplicates a schedule's faults account for, event by event.
//!
//! What lives here: the rule. What does not: counting what really came twice (`verdict.rs`).
//! Invariant: an event may come once more for each of these, and for nothing else:
//!
//! 1. a lease that was *not* handed over in order, if the sink had the event by then and the
//!    checkpoint did not cover it (or the event was still among the dead letters);
//! 2. a confirmation that the sink itself withheld;
//! 3. a relay that was stopped (SIGSTOP) past its lease and sends, once it goes on, what it had in
//!    flight: only events committed before it was stopped. The webhook receiver knows the sender,
//!    so there only what really came so late counts; a file does not tell, so every event that may
//!    have been in flight counts.
//!
//! A hand-over in order (SIGTERM, rebalancing) allows none.

use std::collections::HashMap;

use postrider_core::EventId;

use crate::deliveries::{Arrived, Delivery, Mark, Place};
use crate::world::{Committed, Takeover};

/// A relay that was stopped for a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pause {
    /// Its start's number.
    pub relay: usize,
    /// Its process.
    pub process_id: u32,
    /// The newest event that was committed when it was stopped.
    pub newest_seq: i64,
}

/// Everything that happened to leases.
#[derive(Debug, Clone, Default)]
pub struct Incidents {
    /// Take-overs, each with the moment at which it was noticed.
    pub takeovers: Vec<(Takeover, Mark)>,
    /// Relays that were stopped.
    pub pauses: Vec<Pause>,
}

/// How often each event may come once more. Events that are not in it may come once.
pub fn allowed(
    committed: &[Committed],
    arrived: &Arrived,
    incidents: &Incidents,
) -> HashMap<EventId, u64> {
    let mut by_id: HashMap<EventId, Vec<&Delivery>> = HashMap::new();
    for delivery in &arrived.deliveries {
        by_id.entry(delivery.id()).or_default().push(delivery);
    }
    let mut allowed: HashMap<EventId, u64> = HashMap::new();
    for (takeover, mark) in &incidents.takeovers {
        if takeover.released {
            continue;
        }
        let holder = |pause: &&Pause| {
            takeover.old_holder.split('-').any(|part| part == pause.process_id.to_string())
        };
        let pause = incidents.pauses.iter().rfind(holder);
        for event in committed.iter().filter(|event| event.partition == takeover.partition) {
            let uncovered =
                event.seq > takeover.after_seq || takeover.letters.contains(&event.message.id);
            let deliveries = by_id.get(&event.message.id).map_or(&[][..], Vec::as_slice);
            if !uncovered || deliveries.is_empty() {
                continue;
            }
            let before = deliveries.iter().any(|delivery| delivery.is_before(mark));
            let late = pause.is_some_and(|pause| {
                event.seq <= pause.newest_seq && may_come_late(deliveries, mark, pause.relay)
            });
            if before || late {
                *allowed.entry(event.message.id).or_default() += 1;
            }
        }
    }
    for id in &arrived.withheld {
        *allowed.entry(*id).or_default() += 1;
    }
    allowed
}

/// Whether a stopped relay sent one of these after its lease was gone, as far as the sink can tell.
fn may_come_late(deliveries: &[&Delivery], mark: &Mark, relay: usize) -> bool {
    deliveries.iter().any(|delivery| match delivery.place {
        Place::Request { relay: sender, .. } => sender == relay && !delivery.is_before(mark),
        Place::Line { .. } => true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verdict::tests::message;

    fn event(id: u128, seq: i64) -> Committed {
        Committed { message: message(id), partition: "0/1".into(), seq }
    }

    fn delivery(id: u128, begun: u64, relay: usize) -> Delivery {
        Delivery { message: message(id), place: Place::Request { begun, relay } }
    }

    fn takeover(after_seq: i64, at: u64) -> (Takeover, Mark) {
        let takeover = Takeover {
            partition: "0/1".into(),
            old_holder: "host-77-abcdef".into(),
            released: false,
            after_seq,
            letters: [].into(),
        };
        (takeover, Mark::Count(at))
    }

    fn count(deliveries: &[Delivery], incidents: &Incidents) -> Vec<(u128, u64)> {
        let committed: Vec<_> = (1..=4).map(|id| event(id, i64::try_from(id).unwrap())).collect();
        let arrived = Arrived { deliveries: deliveries.to_vec(), ..Arrived::default() };
        let allowed = allowed(&committed, &arrived, incidents);
        let mut counted: Vec<_> =
            allowed.iter().map(|(id, n)| (id.as_uuid().as_u128(), *n)).collect();
        counted.sort_unstable();
        counted
    }

    #[test]
    fn what_was_delivered_above_the_checkpoint_may_come_again_and_nothing_else() {
        // The third began when the first take-over had just been noticed.
        let deliveries = [delivery(1, 0, 1), delivery(2, 1, 1), delivery(3, 3, 2)];
        let mut incidents = Incidents { takeovers: vec![takeover(1, 3)], pauses: vec![] };
        assert_eq!(count(&deliveries, &incidents), [(2, 1)]);
        incidents.takeovers.push(takeover(1, 6));
        assert_eq!(count(&deliveries, &incidents), [(2, 2), (3, 1)]);
        incidents.takeovers[0].0.letters.insert(message(1).id);
        assert_eq!(count(&deliveries, &incidents), [(1, 1), (2, 2), (3, 1)]);
        for (takeover, _) in &mut incidents.takeovers {
            takeover.released = true;
        }
        assert_eq!(count(&deliveries, &incidents), []);
    }

    #[test]
    fn a_stopped_relay_may_send_what_it_had_in_flight() {
        let stopped = Pause { relay: 1, process_id: 77, newest_seq: 2 };
        let incidents = Incidents { takeovers: vec![takeover(0, 3)], pauses: vec![stopped] };
        let late = [delivery(2, 4, 2), delivery(2, 5, 1), delivery(3, 6, 2), delivery(3, 7, 1)];
        assert_eq!(count(&late, &incidents), [(2, 1)]);
        let other = Incidents {
            pauses: vec![Pause { process_id: 7, ..stopped }],
            takeovers: vec![takeover(0, 3)],
        };
        assert_eq!(count(&late, &other), []);
    }
}
