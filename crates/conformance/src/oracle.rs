//! The oracle: appended rows against delivered messages.
//!
//! What lives here: one checker for every fault test, and its line of JSON. What does not: reading
//! a database or a sink's log, which the caller does.
//! Invariant: each count is judged by ids and by the first delivery of each, so that a repetition
//! is a duplicate and never an inversion.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;

use postrider_core::{EventId, Record};
use serde::Serialize;
use serde_json::Value;

use crate::sink::Delivered;

/// A committed event, as the oracle needs it. Rows of one key come in commit order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Appended {
    /// What must be delivered under its id.
    pub message: Delivered,
}

impl From<&Record> for Appended {
    fn from(record: &Record) -> Self {
        Self { message: Delivered::of(&record.event) }
    }
}

/// Where a run came from, and how many repetitions its faults explain.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Run {
    /// The source's kind.
    pub source: String,
    /// The sink's kind.
    pub sink: String,
    /// The seed that repeats it.
    pub seed: u64,
    /// How many schedules were run.
    pub schedules: u64,
    /// What was published above the last durable checkpoint at each fault, summed.
    pub duplicates_allowed: u64,
}

/// The counts of one comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Verdict {
    /// Committed events.
    pub appended: u64,
    /// Deliveries, repetitions included.
    pub delivered: u64,
    /// Committed events that no delivery carries.
    pub missing: u64,
    /// Deliveries of an id beyond its first.
    pub duplicates: u64,
    /// First deliveries that came after a later event of their key.
    pub inversions: u64,
    /// Deliveries of an id that was never committed, as of a rolled-back transaction.
    pub phantom: u64,
    /// Deliveries that differ from what was appended under their id, in any attribute or byte.
    pub altered: u64,
}

impl Verdict {
    /// Compares. `appended` holds each key's events in commit order, `delivered` the sink's log in
    /// the order of arrival; events among the dead letters must be left out of `appended`.
    pub fn judge(appended: &[Appended], delivered: &[Delivered]) -> Self {
        let rows: HashMap<EventId, (usize, &Delivered)> = appended
            .iter()
            .enumerate()
            .map(|(place, row)| (row.message.id, (place, &row.message)))
            .collect();
        let mut verdict = Self {
            appended: appended.len() as u64,
            delivered: delivered.len() as u64,
            ..Self::default()
        };
        let mut seen: HashSet<EventId> = HashSet::with_capacity(rows.len());
        let mut furthest: HashMap<&str, usize> = HashMap::new();
        for message in delivered {
            let first = seen.insert(message.id);
            verdict.duplicates += u64::from(!first);
            let Some((place, row)) = rows.get(&message.id) else {
                verdict.phantom += 1;
                continue;
            };
            verdict.altered += u64::from(message != *row);
            if first {
                verdict.inversions += u64::from(overtaken(&mut furthest, &row.key, *place));
            }
        }
        verdict.missing = rows.keys().filter(|id| !seen.contains(id)).count() as u64;
        verdict
    }

    /// Adds another schedule's counts.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            appended: self.appended + other.appended,
            delivered: self.delivered + other.delivered,
            missing: self.missing + other.missing,
            duplicates: self.duplicates + other.duplicates,
            inversions: self.inversions + other.inversions,
            phantom: self.phantom + other.phantom,
            altered: self.altered + other.altered,
        }
    }

    /// Whether every promise was kept: nothing missing, inverted, phantom or altered, and no more
    /// repetitions than the faults explain.
    pub fn holds(&self, run: &Run) -> bool {
        self.missing == 0
            && self.inversions == 0
            && self.phantom == 0
            && self.altered == 0
            && self.duplicates <= run.duplicates_allowed
    }

    /// One line of JSON, in the form that every fault run ends with.
    pub fn to_json_line(&self, run: &Run) -> String {
        let line = Line {
            source: &run.source,
            sink: &run.sink,
            seed: run.seed,
            schedules: run.schedules,
            appended: self.appended,
            delivered: self.delivered,
            missing: self.missing,
            duplicates: self.duplicates,
            duplicates_allowed: run.duplicates_allowed,
            inversions: self.inversions,
            phantom: self.phantom,
            altered: self.altered,
        };
        serde_json::to_string(&line).expect("numbers and texts always serialise")
    }
}

/// Whether an event comes after a later one of its key; remembers the latest of each key.
fn overtaken<K: Hash + Eq>(furthest: &mut HashMap<K, usize>, key: K, place: usize) -> bool {
    let latest = furthest.entry(key).or_insert(place);
    let overtaken = place < *latest;
    *latest = place.max(*latest);
    overtaken
}

/// The names and their order are an interface: other tools read them.
#[derive(Serialize)]
struct Line<'a> {
    source: &'a str,
    sink: &'a str,
    seed: u64,
    schedules: u64,
    appended: u64,
    delivered: u64,
    missing: u64,
    duplicates: u64,
    duplicates_allowed: u64,
    inversions: u64,
    phantom: u64,
    altered: u64,
}

/// The last line of a run's output that is a verdict, as a value; for whoever runs it as a child.
pub fn last_verdict_line(output: &str) -> Option<Value> {
    let values = output.lines().rev().filter_map(|line| serde_json::from_str(line).ok());
    values.into_iter().find(|value: &Value| value.get("duplicates_allowed").is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::{event, fresh_id};

    /// Events `k0`, `k1`, `k0`, `k1`, … numbered from 0.
    fn rows(count: u64) -> Vec<Appended> {
        let events = (0..count).map(|n| event(&format!("k{}", n % 2), n).identified(fresh_id));
        events.map(|event| Appended { message: Delivered::of(&event) }).collect()
    }

    fn log(rows: &[Appended], order: &[usize]) -> Vec<Delivered> {
        order.iter().map(|place| rows[*place].message.clone()).collect()
    }

    fn judge(rows: &[Appended], order: &[usize]) -> Verdict {
        Verdict::judge(rows, &log(rows, order))
    }

    const CLEAN: Verdict = Verdict {
        appended: 4,
        delivered: 4,
        missing: 0,
        duplicates: 0,
        inversions: 0,
        phantom: 0,
        altered: 0,
    };

    #[test]
    fn a_faithful_log_is_clean_in_any_order_across_keys() {
        let rows = rows(4);
        assert_eq!(judge(&rows, &[0, 1, 2, 3]), CLEAN);
        assert_eq!(judge(&rows, &[1, 3, 0, 2]), CLEAN);
        assert!(CLEAN.holds(&Run::default()));
    }

    #[test]
    fn an_event_that_never_arrived_is_missing() {
        let verdict = judge(&rows(4), &[0, 1, 3]);
        assert_eq!(verdict, Verdict { delivered: 3, missing: 1, ..CLEAN });
        assert!(!verdict.holds(&Run::default()));
    }

    #[test]
    fn a_repetition_is_a_duplicate_and_no_inversion() {
        let verdict = judge(&rows(4), &[0, 1, 2, 0, 3, 1, 0]);
        assert_eq!(verdict, Verdict { delivered: 7, duplicates: 3, ..CLEAN });
        assert!(verdict.holds(&Run { duplicates_allowed: 3, ..Run::default() }));
        assert!(!verdict.holds(&Run { duplicates_allowed: 2, ..Run::default() }));
    }

    #[test]
    fn a_first_delivery_behind_a_later_one_of_its_key_is_an_inversion() {
        let verdict = judge(&rows(4), &[2, 0, 1, 3]);
        assert_eq!(verdict, Verdict { inversions: 1, ..CLEAN });
        assert!(!verdict.holds(&Run::default()));
        let verdict = judge(&rows(6), &[4, 2, 0, 1, 3, 5]);
        assert_eq!(verdict.inversions, 2, "each overtaken event counts");
    }

    #[test]
    fn a_late_event_after_a_repetition_is_still_an_inversion() {
        let verdict = judge(&rows(4), &[2, 2, 0, 2, 1, 3]);
        assert_eq!((verdict.inversions, verdict.duplicates), (1, 2));
    }

    #[test]
    fn an_id_that_was_never_committed_is_phantom() {
        let rows = rows(4);
        let mut delivered = log(&rows, &[0, 1, 2, 3]);
        delivered.push(Delivered::of(&event("k0", 9).identified(fresh_id)));
        let verdict = Verdict::judge(&rows, &delivered);
        assert_eq!(verdict, Verdict { delivered: 5, phantom: 1, ..CLEAN });
        assert!(!verdict.holds(&Run::default()));
    }

    #[test]
    fn a_difference_in_any_part_is_altered() {
        type Change = fn(&mut Delivered);
        let changes: [Change; 6] = [
            |one| one.payload.push(b' '),
            |one| one.key.push('x'),
            |one| one.topic.push('x'),
            |one| one.event_type.push('x'),
            |one| one.content_type.push('x'),
            |one| one.headers.push(("x".to_owned(), "y".to_owned())),
        ];
        let rows = rows(4);
        for change in changes {
            let mut delivered = log(&rows, &[0, 1, 2, 3]);
            change(&mut delivered[1]);
            let verdict = Verdict::judge(&rows, &delivered);
            assert_eq!(verdict, Verdict { altered: 1, ..CLEAN });
            assert!(!verdict.holds(&Run::default()));
        }
    }

    #[test]
    fn schedules_add_up_and_the_line_has_its_form() {
        let rows = rows(4);
        let sum = judge(&rows, &[0, 1, 2, 3]).plus(judge(&rows, &[0, 0, 1]));
        let run = Run {
            source: "sqlite".to_owned(),
            sink: "webhook".to_owned(),
            seed: 7,
            schedules: 2,
            duplicates_allowed: 1,
        };
        let line = sum.to_json_line(&run);
        assert_eq!(
            line,
            "{\"source\":\"sqlite\",\"sink\":\"webhook\",\"seed\":7,\"schedules\":2,\
             \"appended\":8,\"delivered\":7,\"missing\":2,\"duplicates\":1,\
             \"duplicates_allowed\":1,\"inversions\":0,\"phantom\":0,\"altered\":0}"
        );
        let output = format!("schedule 1\n{{\"seed\":7}}\n{line}\nbye\n");
        let found = last_verdict_line(&output).expect("the line is found");
        assert_eq!(found["missing"], 2);
        assert_eq!(last_verdict_line("nothing here"), None);
    }
}
