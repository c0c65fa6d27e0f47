//! How many duplicates a schedule's faults account for, event by event.
//!
//! What lives here: the rule. What does not: counting what really came twice (`verdict.rs`).
//! Invariant: an event may come once more for each of these, and for nothing else:
//!
//! 1. a lease that was *not* handed over in order, if the sink had the event by then and the
//!    checkpoint did not cover it (or the event was still among the dead letters);
//! 2. a confirmation that the sink itself withheld, or that a fault on the way to it may have lost;
//! 3. a relay that was stopped (SIGSTOP) past its lease and sends, once it goes on, what it had in
//!    flight: only events committed before it was stopped. The webhook receiver knows the sender,
//!    so there only what really came so late counts; a file or a broker does not tell, so every
//!    event that may have been in flight counts.
//!
//! A hand-over in order (SIGTERM, rebalancing) allows none. Nor does anything where the sink itself
//! drops repetitions.
//!
//! Where an older copy of the database takes its place, each database has its own take-overs and
//! checkpoints, and the two allowances add up. The copy's leases and checkpoints are those of an
//! earlier moment, so the first take-over of each partition in it is as if its holder had died,
//! also where the copy knows of no holder yet and gives the lease out for the first time.

use std::collections::{HashMap, HashSet};

use postrider_core::EventId;

use crate::deliveries::{Arrived, Delivery, Mark, Place};
use crate::world::{Committed, Past, Place as FeedPlace, Takeover};

/// A relay that was stopped for a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pause {
    /// Its start's number.
    pub relay: usize,
    /// Its process.
    pub process_id: u32,
    /// Up to here the feed went when it was stopped.
    pub newest: FeedPlace,
}

/// A database that another one replaced.
#[derive(Debug, Clone)]
pub struct Replaced {
    /// What it had until then.
    pub past: Past,
    /// The moment of each of its take-overs, in their order.
    pub marks: Vec<Mark>,
    /// The moment at which it was replaced.
    pub at: Mark,
}

/// Everything that happened to leases.
#[derive(Debug, Clone, Default)]
pub struct Incidents {
    /// Take-overs in the database that is there at the end, each with the moment at which it was
    /// noticed.
    pub takeovers: Vec<(Takeover, Mark)>,
    /// Relays that were stopped.
    pub pauses: Vec<Pause>,
    /// The database that was there before.
    pub replaced: Option<Replaced>,
}

/// How often each event may come once more. Events that are not in it may come once.
pub fn allowed(
    committed: &[Committed],
    arrived: &Arrived,
    incidents: &Incidents,
) -> HashMap<EventId, u64> {
    if arrived.drops_repetitions {
        return HashMap::new();
    }
    let mut by_id: HashMap<EventId, Vec<&Delivery>> = HashMap::new();
    for delivery in &arrived.deliveries {
        by_id.entry(delivery.id()).or_default().push(delivery);
    }
    let mut allowed: HashMap<EventId, u64> = HashMap::new();
    let mut begun_anew = HashSet::new();
    for (takeover, mark) in &incidents.takeovers {
        let first = begun_anew.insert(&takeover.partition) && incidents.replaced.is_some();
        let released = takeover.released && !first;
        if !released {
            allow(&mut allowed, committed, (takeover, mark), &by_id, &incidents.pauses);
        }
    }
    if let Some(Replaced { past, marks, .. }) = &incidents.replaced {
        for (takeover, mark) in past.takeovers.iter().zip(marks) {
            if !takeover.released {
                allow(&mut allowed, &past.committed, (takeover, mark), &by_id, &incidents.pauses);
            }
        }
    }
    for id in &arrived.withheld {
        *allowed.entry(*id).or_default() += 1;
    }
    allowed
}

/// What a take-over that was not in order allows.
fn allow(
    allowed: &mut HashMap<EventId, u64>,
    committed: &[Committed],
    (takeover, mark): (&Takeover, &Mark),
    by_id: &HashMap<EventId, Vec<&Delivery>>,
    pauses: &[Pause],
) {
    let holder = |pause: &&Pause| {
        takeover.old_holder.split('-').any(|part| part == pause.process_id.to_string())
    };
    let pause = pauses.iter().rfind(holder);
    for event in committed {
        // Letters of a partition that has ended are with its successor.
        let uncovered = event.partition == takeover.partition && !takeover.covered.has(event)
            || takeover.letters.contains(&event.message.id);
        let deliveries = by_id.get(&event.message.id).map_or(&[][..], Vec::as_slice);
        if !uncovered || deliveries.is_empty() {
            continue;
        }
        let before = deliveries.iter().any(|delivery| delivery.is_before(mark));
        let late = pause.is_some_and(|pause| {
            event.place <= pause.newest && may_come_late(deliveries, mark, pause.relay)
        });
        if before || late {
            *allowed.entry(event.message.id).or_default() += 1;
        }
    }
}

/// Whether a stopped relay sent one of these after its lease was gone, as far as the sink can tell.
fn may_come_late(deliveries: &[&Delivery], mark: &Mark, relay: usize) -> bool {
    deliveries.iter().any(|delivery| match delivery.place {
        Place::Request { relay: sender, .. } => sender == relay && !delivery.is_before(mark),
        Place::Line { .. } | Place::Stored { .. } => true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verdict::tests::message;
    use crate::world::Covered;

    fn event(id: u128, place: FeedPlace) -> Committed {
        Committed { message: message(id), partition: "0/1".into(), place }
    }

    fn delivery(id: u128, begun: u64, relay: usize) -> Delivery {
        Delivery { message: message(id), place: Place::Request { begun, relay } }
    }

    fn takeover(covered: FeedPlace, at: u64) -> (Takeover, Mark) {
        let takeover = Takeover {
            number: 1,
            partition: "0/1".into(),
            old_holder: "host-77-abcdef".into(),
            released: false,
            covered: Covered::UpTo(covered),
            letters: [].into(),
        };
        (takeover, Mark::Count(at))
    }

    fn count(deliveries: &[Delivery], incidents: &Incidents) -> Vec<(u128, u64)> {
        let committed: Vec<_> = (1..=4).map(|id| event(id, id)).collect();
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
        let mut incidents = Incidents { takeovers: vec![takeover(1, 3)], ..Incidents::default() };
        assert_eq!(count(&deliveries, &incidents), [(2, 1)]);
        incidents.takeovers.push(takeover(1, 6));
        assert_eq!(count(&deliveries, &incidents), [(2, 2), (3, 1)]);
        incidents.takeovers[0].0.letters.insert(message(1).id);
        assert_eq!(count(&deliveries, &incidents), [(1, 1), (2, 2), (3, 1)]);
        let committed: Vec<_> = (1..=4).map(|id| event(id, id)).collect();
        let arrived = Arrived {
            deliveries: deliveries.to_vec(),
            drops_repetitions: true,
            ..Arrived::default()
        };
        assert!(allowed(&committed, &arrived, &incidents).is_empty());
        for (takeover, _) in &mut incidents.takeovers {
            takeover.released = true;
        }
        assert_eq!(count(&deliveries, &incidents), []);
    }

    #[test]
    fn a_stopped_relay_may_send_what_it_had_in_flight() {
        let stopped = Pause { relay: 1, process_id: 77, newest: 2 };
        let incidents = Incidents {
            takeovers: vec![takeover(0, 3)],
            pauses: vec![stopped],
            ..Incidents::default()
        };
        let late = [delivery(2, 4, 2), delivery(2, 5, 1), delivery(3, 6, 2), delivery(3, 7, 1)];
        assert_eq!(count(&late, &incidents), [(2, 1)]);
        let other = Incidents {
            pauses: vec![Pause { process_id: 7, ..stopped }],
            takeovers: vec![takeover(0, 3)],
            ..Incidents::default()
        };
        assert_eq!(count(&late, &other), []);
    }

    #[test]
    fn each_of_two_databases_allows_what_its_own_checkpoints_do_not_cover() {
        let deliveries = [delivery(1, 0, 1), delivery(2, 1, 1), delivery(3, 2, 1)];
        let (old, mark) = takeover(2, 3);
        let past = Past { committed: vec![event(3, 7)], takeovers: vec![old], ..Past::default() };
        let replaced = Replaced { past, marks: vec![mark], at: Mark::Count(3) };
        let (mut first, at) = takeover(1, 5);
        first.released = true;
        let incidents = Incidents {
            takeovers: vec![(first.clone(), at.clone()), (first, at)],
            replaced: Some(replaced),
            ..Incidents::default()
        };
        // Only the first take-over in the copy counts although it was in order.
        assert_eq!(count(&deliveries, &incidents), [(2, 1), (3, 2)]);
    }
}
