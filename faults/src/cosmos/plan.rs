//! What one schedule from Azure Cosmos DB does, derived from its seed and number alone.
//!
//! What lives here: the plan and its derivation. What does not: carrying it out (`mod.rs`).
//! Invariant: the same seed and number give the same plan; every kind of trouble comes up within a
//! round of themes, because each has its turn to be the theme.

use std::time::Duration;

use rand::RngExt;
use rand::rngs::StdRng;

use crate::schedule::{Outage, generator};

/// Schedules in a row after which every theme has come up.
pub(crate) const THEMES: u64 = 13;
/// The regions of an account that loses one; the first takes writes.
pub(crate) const REGIONS: [&str; 2] = ["East US", "West US"];
/// How many ranges a container begins with. The first one alone has no neighbours to merge.
const RANGES: [u32; 4] = [1, 3, 4, 12];
/// The relays of the widest theme.
const MOST_RELAYS: usize = 3;

/// One thing that goes wrong.
#[derive(Debug, Clone)]
pub(crate) enum Trouble {
    /// A relay dies by SIGKILL and is started again.
    Kill { slot: usize },
    /// A relay is stopped by SIGSTOP for longer than its lease lasts, then goes on.
    Freeze { slot: usize, length: Duration },
    /// A relay leaves in order, and joins again.
    Leave { slot: usize, away: Duration },
    /// The account answers otherwise: a fault of the emulator's, as JSON.
    Account(String),
    /// A range is split: the one that stands there among those that there are then. For so long its
    /// documents are out of reach.
    Split { at: usize, locked: Duration },
    /// Two neighbouring ranges are merged, in the same way.
    Merge { at: usize, locked: Duration },
    /// The region that takes writes can't be reached for a while; the other takes them from then
    /// on.
    Region { length: Duration },
    /// The sink's end has an outage.
    Outage { kind: Outage, length: Duration },
}

/// The plan of one schedule.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) ranges: u32,
    pub(crate) relays: usize,
    /// Keys of each writer: each key has one writer.
    pub(crate) keys: usize,
    pub(crate) writers: usize,
    pub(crate) writing: Duration,
    /// Which relays die at which named place, at their first start.
    pub(crate) failpoints: Vec<(usize, &'static str, u32)>,
    pub(crate) troubles: Vec<(Duration, Trouble)>,
}

/// Named places of the relay at which it dies when told to.
const FAILPOINTS: [&str; 4] = [
    "relay::before_publish",
    "relay::after_publish",
    "relay::before_checkpoint",
    "relay::after_checkpoint",
];

fn millis(rng: &mut StdRng, from: u64, to: u64) -> Duration {
    Duration::from_millis(rng.random_range(from..to))
}

fn throttled(rng: &mut StdRng) -> String {
    let operation = ["batch", "changeFeed", "readItem", "query"][rng.random_range(0..4)];
    let count = rng.random_range(1..25);
    let wait = rng.random_range(1..80);
    format!(
        r#"{{"operation": "{operation}", "count": {count},
             "answer": {{"status": 429, "retryAfterMs": {wait}}}}}"#
    )
}

/// The request is carried out, and its answer lost.
fn lost(rng: &mut StdRng) -> String {
    let skip = rng.random_range(0..6);
    let count = rng.random_range(1..4);
    format!(r#"{{"operation": "batch", "skip": {skip}, "count": {count}, "carriedOut": true}}"#)
}

/// Nothing is carried out: the connection ends, or the service says so.
fn refused(rng: &mut StdRng) -> String {
    let operation = ["batch", "changeFeed", "readItem"][rng.random_range(0..3)];
    let count = rng.random_range(1..8);
    let answer = match rng.random_range(0..4) {
        0 => String::new(),
        1 => r#", "answer": {"status": 503}"#.to_owned(),
        2 => r#", "answer": {"status": 449}"#.to_owned(),
        _ => r#", "answer": {"status": 408}"#.to_owned(),
    };
    format!(r#"{{"operation": "{operation}", "count": {count}{answer}}}"#)
}

fn slow(rng: &mut StdRng) -> String {
    let (count, delay) = (rng.random_range(1..20), rng.random_range(20..700));
    format!(r#"{{"count": {count}, "delayMs": {delay}, "carriedOut": true}}"#)
}

fn outage(rng: &mut StdRng) -> Trouble {
    let kinds = [Outage::ServerError, Outage::Throttled, Outage::Silent, Outage::Refused];
    let kind = kinds[rng.random_range(0..kinds.len())];
    Trouble::Outage { kind, length: millis(rng, 100, 900) }
}

fn split(rng: &mut StdRng) -> Trouble {
    Trouble::Split { at: rng.random_range(0..100), locked: millis(rng, 0, 250) }
}

fn merge(rng: &mut StdRng) -> Trouble {
    Trouble::Merge { at: rng.random_range(0..100), locked: millis(rng, 0, 250) }
}

/// Longer or shorter than it takes to learn that others take the writes.
fn gone(rng: &mut StdRng) -> Trouble {
    Trouble::Region { length: millis(rng, 300, 15_000) }
}

impl Plan {
    /// The plan of schedule `index` of the run with `seed`.
    pub(crate) fn derive(seed: u64, index: u64) -> Self {
        let mut rng = generator(seed, index, "cosmos");
        let theme = index % THEMES;
        let merges = matches!(theme, 4 | 11 | 12);
        let relays = if theme < 3 { MOST_RELAYS } else { rng.random_range(1..=MOST_RELAYS) };
        let mut plan = Self {
            ranges: RANGES[rng.random_range(usize::from(merges)..RANGES.len())],
            relays,
            keys: rng.random_range(3..25),
            writers: 2,
            writing: millis(&mut rng, 1_500, 2_800),
            failpoints: Vec::new(),
            troubles: Vec::new(),
        };
        plan.theme(&mut rng, theme);
        for _ in 0..rng.random_range(2..=5) {
            let trouble = plan.any(&mut rng);
            plan.add(&mut rng, trouble);
        }
        plan.troubles.sort_by_key(|(at, _)| *at);
        plan
    }

    fn add(&mut self, rng: &mut StdRng, trouble: Trouble) {
        let last = u64::try_from(self.writing.as_millis()).unwrap_or(u64::MAX);
        self.troubles.push((millis(rng, 100, last), trouble));
    }

    fn theme(&mut self, rng: &mut StdRng, theme: u64) {
        let slot = rng.random_range(0..self.relays);
        let troubles = match theme {
            0 => vec![Trouble::Kill { slot }, Trouble::Kill { slot: 0 }],
            1 => vec![Trouble::Leave { slot, away: millis(rng, 0, 600) }],
            2 => vec![Trouble::Freeze { slot, length: millis(rng, 750, 1_300) }],
            3 => vec![split(rng)],
            4 => vec![split(rng), merge(rng)],
            11 => vec![merge(rng)],
            12 => vec![merge(rng), merge(rng), split(rng), Trouble::Kill { slot }],
            5 => vec![Trouble::Account(throttled(rng)), Trouble::Account(throttled(rng))],
            6 => vec![Trouble::Account(lost(rng)), Trouble::Account(lost(rng))],
            7 => vec![Trouble::Account(refused(rng)), Trouble::Account(slow(rng))],
            8 => vec![outage(rng)],
            10 => vec![gone(rng)],
            _ => {
                let place = FAILPOINTS[rng.random_range(0..FAILPOINTS.len())];
                self.failpoints.push((slot, place, rng.random_range(1..12)));
                vec![Trouble::Kill { slot }]
            }
        };
        for trouble in troubles {
            self.add(rng, trouble);
        }
    }

    fn loses_region(&self) -> bool {
        self.troubles.iter().any(|(_, one)| matches!(one, Trouble::Region { .. }))
    }

    /// The account's regions.
    pub(crate) fn regions(&self) -> &'static [&'static str] {
        if self.loses_region() { &REGIONS } else { &[] }
    }

    fn any(&self, rng: &mut StdRng) -> Trouble {
        let slot = rng.random_range(0..self.relays);
        match rng.random_range(0..12) {
            0 | 1 => Trouble::Kill { slot },
            2 => Trouble::Freeze { slot, length: millis(rng, 750, 1_300) },
            3 => Trouble::Leave { slot, away: millis(rng, 0, 600) },
            4 => Trouble::Account(throttled(rng)),
            5 => Trouble::Account(lost(rng)),
            6 => Trouble::Account(refused(rng)),
            9 if !self.loses_region() => gone(rng),
            7 => split(rng),
            10 => merge(rng),
            _ => outage(rng),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_round_of_themes_has_every_trouble() {
        let plans: Vec<Plan> = (0..THEMES).map(|index| Plan::derive(7, index)).collect();
        let again: Vec<Plan> = (0..THEMES).map(|index| Plan::derive(7, index)).collect();
        assert_eq!(format!("{plans:?}"), format!("{again:?}"));
        let kinds: HashSet<_> = plans
            .iter()
            .flat_map(|plan| &plan.troubles)
            .map(|(_, trouble)| std::mem::discriminant(trouble))
            .collect();
        assert_eq!(kinds.len(), 8);
        assert!(plans.iter().any(|plan| !plan.failpoints.is_empty()));
        let slots = plans.iter().flat_map(|plan| {
            let most = plan.relays;
            plan.troubles.iter().map(move |(_, trouble)| (trouble, most))
        });
        for (trouble, most) in slots {
            match trouble {
                Trouble::Kill { slot }
                | Trouble::Freeze { slot, .. }
                | Trouble::Leave { slot, .. } => assert!(*slot < most),
                Trouble::Account(json) => {
                    let read: serde_json::Value = serde_json::from_str(json).expect("JSON");
                    assert!(read.is_object());
                }
                Trouble::Split { .. }
                | Trouble::Merge { .. }
                | Trouble::Region { .. }
                | Trouble::Outage { .. } => {}
            }
        }
    }
}
