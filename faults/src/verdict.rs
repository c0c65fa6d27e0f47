//! One schedule's verdict, and whether it passes.
//!
//! What lives here: the oracle's counts with what only this runner knows beside them: duplicates
//! that no fault accounts for, transactions torn apart, accounts that do not add up. What does not:
//! the oracle (`postrider-conformance`) and the allowance.
//! Invariant: a schedule passes only if every count does, event by event; nothing evens out.

use std::collections::{HashMap, HashSet};

use postrider_conformance::oracle::{Appended, Run, Verdict};
use postrider_conformance::sink::Delivered;
use postrider_core::EventId;

use crate::allowance::{Incidents, Replaced, allowed};
use crate::deliveries::{Arrived, Delivery};
use crate::world::{Committed, Covered};

/// What the schedule's database says at the end.
#[derive(Debug, Clone, Default)]
pub struct Accounts {
    /// Every committed event, in the order of commits.
    pub committed: Vec<Committed>,
    /// Events in the outbox whose business row is missing.
    pub events_alone: i64,
    /// Business rows whose event is missing.
    pub rows_alone: i64,
    /// Events that the checkpoints count as published.
    pub published: i64,
    /// Events pending or among the dead letters after all has healed.
    pub unsettled: i64,
}

/// The counts of one schedule.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Judgement {
    /// The oracle's counts.
    pub verdict: Verdict,
    /// How many duplicates the faults account for.
    pub duplicates_allowed: u64,
    /// What is wrong, for people; empty if nothing is.
    pub findings: Vec<String>,
}

impl Judgement {
    /// Adds what a sink got. One beside the first is named and told of by its findings, of which
    /// every wrong count is one: the counts are those of the sink that was asked for.
    pub fn add(&mut self, other: Self, name: Option<&str>) {
        if name.is_none() {
            self.verdict = self.verdict.plus(other.verdict);
            self.duplicates_allowed += other.duplicates_allowed;
        }
        let told = other.findings.into_iter().map(|finding| match name {
            Some(name) => format!("{name}: {finding}"),
            None => finding,
        });
        self.findings.extend(told);
    }

    /// Whether every promise was kept.
    pub fn passed(&self) -> bool {
        let run = Run { duplicates_allowed: self.duplicates_allowed, ..Run::default() };
        self.verdict.holds(&run) && self.findings.is_empty()
    }
}

fn rows(committed: &[Committed]) -> Vec<Appended> {
    committed.iter().map(|event| Appended { message: event.message.clone() }).collect()
}

/// What came of a database that was replaced by an older copy.
#[derive(Default)]
struct Before {
    findings: Vec<String>,
    /// Events that never were, as the copy sees it.
    undone: HashSet<EventId>,
    /// Events that were committed once in each of them: what was prepared before the copy was made.
    again: HashSet<EventId>,
}

/// What a database that was replaced by an older copy had promised until then: of the events that
/// are in the copy, too, the rest is judged with all others.
fn judge_past(replaced: &Replaced, arrived: &Arrived, committed: &[Committed]) -> Before {
    let past = &replaced.past;
    let ids = |events: &[Committed]| -> HashSet<EventId> {
        events.iter().map(|event| event.message.id).collect()
    };
    let (known, now) = (ids(&past.committed), ids(committed));
    let (again, undone): (HashSet<EventId>, HashSet<EventId>) =
        known.difference(&past.shared).partition(|id| now.contains(id));
    let told = |delivery: &&Delivery| {
        known.contains(&delivery.id()) && delivery.is_before(&replaced.at)
            || undone.contains(&delivery.id())
    };
    let told = arrived.deliveries.iter().filter(told);
    let log: Vec<Delivered> = told.map(|delivery| delivery.message.clone()).collect();
    let verdict = Verdict::judge(&rows(&past.committed), &log);
    let mut findings = Vec::new();
    if verdict.inversions > 0 {
        let count = verdict.inversions;
        findings.push(format!("{count} events of the replaced database arrived out of order"));
    }
    if verdict.altered > 0 {
        let count = verdict.altered;
        findings.push(format!("{count} events of the replaced database arrived altered"));
    }
    Before { findings, undone, again }
}

/// Events that were durable at a take-over and no longer at the next one: what is delivered stays
/// delivered, also when a slot is lost.
fn forgotten(committed: &[Committed], incidents: &Incidents) -> u64 {
    let pairs = incidents.takeovers.iter().zip(incidents.takeovers.iter().skip(1));
    let lost = pairs.map(|((before, _), (after, _))| {
        if matches!(after.covered, Covered::UpTo(_)) {
            return 0;
        }
        let is_lost = |event: &&Committed| before.covered.has(event) && !after.covered.has(event);
        committed.iter().filter(is_lost).count() as u64
    });
    lost.sum()
}

/// Compares what was committed with what arrived.
pub fn judge(accounts: &Accounts, arrived: &Arrived, incidents: &Incidents) -> Judgement {
    let committed = &accounts.committed;
    let Before { mut findings, undone, again } = match &incidents.replaced {
        Some(replaced) => judge_past(replaced, arrived, committed),
        None => Before::default(),
    };
    let log: Vec<Delivered> = arrived
        .deliveries
        .iter()
        .filter(|delivery| !undone.contains(&delivery.id()))
        .map(|delivery| delivery.message.clone())
        .collect();
    let mut verdict = Verdict::judge(&rows(committed), &log);
    // What can't be read is an altered message at best.
    verdict.altered += arrived.unreadable.len() as u64;
    let mut allowed = allowed(committed, arrived, incidents);
    allowed.retain(|id, _| !undone.contains(id));
    for id in again {
        *allowed.entry(id).or_default() += 1;
    }
    let mut extra: HashMap<_, u64> = HashMap::new();
    for message in &log {
        *extra.entry(message.id).or_default() += 1;
    }
    let unexplained: u64 = extra
        .iter()
        .map(|(id, times)| (times - 1).saturating_sub(allowed.get(id).copied().unwrap_or(0)))
        .sum();
    let mut find = |count: u64, what: &str| {
        if count > 0 {
            findings.push(format!("{count} {what}"));
        }
    };
    find(verdict.missing, "committed events never arrived");
    find(verdict.inversions, "events arrived behind a later one of their key");
    find(verdict.phantom, "events arrived that were never committed");
    find(verdict.altered, "events arrived altered or unreadable");
    find(unexplained, "duplicates that no fault accounts for");
    find(forgotten(committed, incidents), "durable events were open again at a later take-over");
    find(accounts.events_alone.unsigned_abs(), "events without their business row");
    find(accounts.rows_alone.unsigned_abs(), "business rows without their event");
    find(accounts.unsettled.unsigned_abs(), "events still pending or among the dead letters");
    if accounts.published != committed.len() as i64 {
        let (published, committed) = (accounts.published, committed.len());
        findings.push(format!("checkpoints count {published} events as published of {committed}"));
    }
    if committed.is_empty() {
        findings.push("nothing was appended, so nothing is proved".to_owned());
    }
    findings.extend(arrived.unreadable.iter().take(3).cloned());
    Judgement { verdict, duplicates_allowed: allowed.values().sum(), findings }
}

#[cfg(test)]
pub(crate) mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::deliveries::{Mark, Place};
    use crate::world::{Past, Takeover};

    /// An event of key `k` with its number as payload.
    pub(crate) fn message(id: u128) -> Delivered {
        Delivered {
            id: EventId::from_uuid(Uuid::from_u128(id)),
            key: "k".into(),
            topic: "t".into(),
            event_type: "T".into(),
            content_type: "text/plain".into(),
            headers: vec![],
            payload: id.to_string().into_bytes(),
        }
    }

    fn accounts(ids: &[u128]) -> Accounts {
        let committed = ids.iter().enumerate().map(|(at, id)| Committed {
            message: message(*id),
            partition: "0/1".into(),
            place: at as u128 + 1,
        });
        Accounts {
            committed: committed.collect(),
            published: ids.len() as i64,
            ..Accounts::default()
        }
    }

    fn arrived(ids: &[u128]) -> Arrived {
        let deliveries = ids.iter().enumerate().map(|(at, id)| Delivery {
            message: message(*id),
            place: Place::Request { begun: at as u64, relay: 1 },
        });
        Arrived { deliveries: deliveries.collect(), ..Arrived::default() }
    }

    fn judged(accounts: &Accounts, arrived: &Arrived) -> Judgement {
        judge(accounts, arrived, &Incidents::default())
    }

    #[test]
    fn a_faithful_schedule_passes() {
        let judgement = judged(&accounts(&[1, 2, 3]), &arrived(&[1, 2, 3]));
        assert!(judgement.passed(), "{judgement:?}");
        assert_eq!(judgement.verdict.delivered, 3);
    }

    #[test]
    fn a_schedule_without_events_proves_nothing() {
        assert!(!judged(&accounts(&[]), &arrived(&[])).passed());
    }

    #[test]
    fn each_planted_fault_fails_under_its_own_count() {
        let told = |ids: &[u128]| judged(&accounts(&[1, 2, 3]), &arrived(ids));
        let loss = told(&[1, 3]);
        assert_eq!((loss.passed(), loss.verdict.missing), (false, 1));
        let twice = told(&[1, 2, 2, 3]);
        assert_eq!((twice.passed(), twice.verdict.duplicates), (false, 1));
        let overtaken = told(&[1, 3, 2]);
        assert_eq!((overtaken.passed(), overtaken.verdict.inversions), (false, 1));
        let phantom = told(&[1, 2, 3, 9]);
        assert_eq!((phantom.passed(), phantom.verdict.phantom), (false, 1));
        let mut changed = arrived(&[1, 2, 3]);
        changed.deliveries[1].message.payload.push(0);
        let altered = judged(&accounts(&[1, 2, 3]), &changed);
        assert_eq!((altered.passed(), altered.verdict.altered), (false, 1));
    }

    #[test]
    fn a_duplicate_is_forgiven_only_to_the_event_that_a_fault_touched() {
        let mut twice = arrived(&[1, 2, 2, 3]);
        twice.withheld = vec![message(2).id];
        assert!(judged(&accounts(&[1, 2, 3]), &twice).passed());
        twice.withheld = vec![message(3).id];
        let other = judged(&accounts(&[1, 2, 3]), &twice);
        assert_eq!(other.verdict.duplicates, other.duplicates_allowed);
        assert!(!other.passed(), "another event's allowance does not count");
    }

    #[test]
    fn what_was_durable_must_stay_so_and_each_sink_counts() {
        let at = |ids: &[u128]| {
            let takeover = Takeover {
                number: 1,
                partition: "wal".into(),
                old_holder: String::new(),
                released: true,
                covered: Covered::Events(ids.iter().map(|id| message(*id).id).collect()),
                letters: [].into(),
            };
            (takeover, Mark::Count(0))
        };
        let told = |takeovers| {
            let incidents = Incidents { takeovers, ..Incidents::default() };
            judge(&accounts(&[1, 2]), &arrived(&[1, 2]), &incidents)
        };
        assert!(told(vec![at(&[1]), at(&[1, 2])]).passed());
        let lost = told(vec![at(&[1, 2]), at(&[2])]);
        assert_eq!((lost.passed(), lost.findings.len()), (false, 1));
        let mut both = told(vec![]);
        both.add(lost, Some("beside"));
        assert_eq!((both.verdict.appended, both.passed()), (2, false));
        assert!(both.findings[0].starts_with("beside: "));
    }

    #[test]
    fn a_torn_transaction_an_open_event_and_a_wrong_sum_fail() {
        let complete = arrived(&[1, 2, 3]);
        type Change = fn(&mut Accounts);
        let changes: [Change; 4] = [
            |accounts| accounts.events_alone = 1,
            |accounts| accounts.rows_alone = 1,
            |accounts| accounts.unsettled = 1,
            |accounts| accounts.published = 2,
        ];
        for change in changes {
            let mut accounts = accounts(&[1, 2, 3]);
            change(&mut accounts);
            let judgement = judged(&accounts, &complete);
            assert_eq!((judgement.passed(), judgement.findings.len()), (false, 1));
        }
        let mut garbled = complete.clone();
        garbled.unreadable.push("a request without a signature".into());
        assert!(!judged(&accounts(&[1, 2, 3]), &garbled).passed());
    }

    #[test]
    fn what_an_older_copy_undid_is_no_phantom_and_still_has_its_order() {
        // 4 and 5 were committed after the copy was made; 6 after it took over.
        let told = |ids: &[u128]| {
            let past = Past {
                committed: accounts(&[1, 2, 3, 4, 5]).committed,
                shared: [1, 2, 3].map(|id| message(id).id).into(),
                ..Past::default()
            };
            let replaced = Replaced { past, marks: vec![], at: Mark::Count(5) };
            let incidents = Incidents { replaced: Some(replaced), ..Incidents::default() };
            judge(&accounts(&[1, 2, 3, 6]), &arrived(ids), &incidents)
        };
        assert!(told(&[1, 2, 3, 4, 5, 6]).passed());
        assert!(!told(&[1, 2, 3, 4, 5, 6, 6]).passed());
        assert!(told(&[1, 2, 3, 6]).passed(), "what never was may never arrive");
        assert!(!told(&[1, 2, 3, 5, 4, 6]).passed());
        assert_eq!(told(&[1, 2, 3, 4, 7, 6]).verdict.phantom, 1);
        assert_eq!(told(&[1, 2, 4, 5, 6]).verdict.missing, 1);
    }

    #[test]
    fn what_was_committed_in_both_databases_may_come_once_from_each() {
        let told = |ids: &[u128]| {
            let past = Past {
                committed: accounts(&[1, 2]).committed,
                shared: [message(1).id].into(),
                ..Past::default()
            };
            let replaced = Replaced { past, marks: vec![], at: Mark::Count(2) };
            let incidents = Incidents { replaced: Some(replaced), ..Incidents::default() };
            judge(&accounts(&[1, 2]), &arrived(ids), &incidents)
        };
        assert!(told(&[1, 2]).passed() && told(&[1, 2, 2]).passed());
        assert!(!told(&[1, 2, 2, 2]).passed());
        assert_eq!(told(&[1]).verdict.missing, 1);
    }
}
