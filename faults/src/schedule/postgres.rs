//! What one schedule does to a relay on PostgreSQL.
//!
//! What lives here: the derivation. What does not: the plan's form, and what is the same for every
//! source (`mod.rs`).
//! Invariant: a server only ends suddenly where it is durable; where an older copy takes its place
//! nothing else happens to the server, and no relay is stopped, so that what the copy undid can be
//! told from what was lost.

use std::time::Duration;

use rand::RngExt;
use rand::rngs::StdRng;

use super::{
    Fault, PostgresPlan, Schedule, ServerEnd, Side, SinkKind, SourceKind, WireFault, generator,
    kill, millis, moods, outage,
};

/// Schedules in a row after which every theme has come up.
pub(super) const THEMES: u64 = 19;

const TWO_RELAYS: u64 = 2;
const FAST_RESTARTS: u64 = 5;
const SUDDEN_END: u64 = 6;
const RETENTION: u64 = 14;
const POOLER: u64 = 13;
const REPLACED: u64 = 15;
const SINK: u64 = 16;
const SMALL_DISK: u64 = 18;

/// The plan of schedule `index` of the run with `seed`.
pub(super) fn derive(seed: u64, index: u64, sink: SinkKind) -> Schedule {
    let mut rng = generator(seed, index, format!("postgres-feed {sink}"));
    let theme = index % THEMES;
    let lines = sink == SinkKind::Jsonl;
    let replaced = theme == REPLACED;
    let postgres = PostgresPlan {
        version: if rng.random_bool(0.5) { 15 } else { 18 },
        durable: [SUDDEN_END, RETENTION, SMALL_DISK].contains(&theme) || rng.random_bool(0.2),
        pooler: !replaced && (theme == POOLER || rng.random_bool(0.1)),
        replaced,
        small_disk: theme == SMALL_DISK,
        wal: false,
    };
    let retention = theme == RETENTION || rng.random_bool(0.25);
    let refusing = sink.refuses() && (theme == SINK || rng.random_bool(0.25));
    let rotates = lines && (theme == SINK || rng.random_bool(0.3));
    let mut schedule = Schedule {
        seed,
        index,
        source: SourceKind::PostgresFeed,
        sink,
        partitions: [1, 2, 4, 8][rng.random_range(0..4)],
        relays: if theme == TWO_RELAYS { 2 } else { 1 + usize::from(rng.random_bool(0.6)) },
        writers: rng.random_range(2..=4),
        writing: millis(&mut rng, 1_800, 3_200) + longer(theme),
        retention: retention.then_some(Duration::ZERO),
        rotate_bytes: rotates.then(|| rng.random_range(20_000..200_000)),
        small_disk: None,
        movable_clock: false,
        moods: moods(&mut rng, refusing),
        postgres: Some(postgres),
        beside: false,
        events: None,
        steps: Vec::new(),
    };
    for fault in theme_faults(&schedule, &mut rng, theme) {
        schedule.add(&mut rng, fault);
    }
    for _ in 0..rng.random_range(2..=5) {
        let fault = any_fault(&schedule, &mut rng, postgres);
        schedule.add(&mut rng, fault);
    }
    if replaced {
        // Early: making the copy takes a second or two.
        let at = millis(&mut rng, 100, 800);
        let lag = millis(&mut rng, 50, 700);
        schedule.steps.push(super::Step { at, fault: Fault::Replace { lag } });
    }
    schedule.steps.sort_by_key(|step| step.at);
    schedule
}

/// A server that ends, or is copied, leaves writers little time otherwise.
fn longer(theme: u64) -> Duration {
    Duration::from_millis(match theme {
        SUDDEN_END | RETENTION | SMALL_DISK => 3_000,
        FAST_RESTARTS | REPLACED => 2_000,
        _ => 0,
    })
}

fn theme_faults(schedule: &Schedule, rng: &mut StdRng, theme: u64) -> Vec<Fault> {
    let slot = rng.random_range(0..schedule.relays);
    match theme {
        0 => vec![kill(rng, slot), kill(rng, slot)],
        1 => vec![schedule.failpoint(rng, slot), schedule.failpoint(rng, slot)],
        TWO_RELAYS => vec![kill(rng, slot), terminate(Side::Relays), kill(rng, 1 - slot)],
        3 => vec![Fault::Pause { slot, length: millis(rng, 750, 1_300) }],
        4 => vec![Fault::HandOver { slot }, Fault::HandOver { slot }],
        FAST_RESTARTS => vec![restart(rng, ServerEnd::Fast), restart(rng, ServerEnd::Fast)],
        SUDDEN_END => vec![restart(rng, ServerEnd::Immediate), restart(rng, ServerEnd::Kill)],
        7 => vec![terminate(Side::Relays), terminate(Side::Writers), terminate(Side::All)],
        8 => vec![wire(schedule, rng, 0..3), wire(schedule, rng, 0..3), wire(schedule, rng, 0..3)],
        9 => vec![wire(schedule, rng, 3..6), wire(schedule, rng, 3..6)],
        10 => vec![open(rng, false), open(rng, true), open(rng, true)],
        11 => vec![Fault::ReadOnly { length: millis(rng, 200, 900) }, wire(schedule, rng, 6..7)],
        12 => vec![Fault::RaisePartitions, Fault::RaisePartitions, kill(rng, slot)],
        POOLER => vec![terminate(Side::Relays), wire(schedule, rng, 0..3), kill(rng, slot)],
        RETENTION => vec![kill(rng, slot), restart(rng, ServerEnd::Kill), open(rng, false)],
        REPLACED => vec![kill(rng, slot), open(rng, true)],
        SMALL_DISK => vec![Fault::FillDisk { length: millis(rng, 300, 900) }, kill(rng, slot)],
        SINK if schedule.sink.refuses() => {
            vec![outage(rng), schedule.failpoint(rng, slot), Fault::Requeue]
        }
        SINK if schedule.sink.takes_outages() => vec![outage(rng), outage(rng), kill(rng, slot)],
        SINK => vec![Fault::TearLine, Fault::TearLine, kill(rng, slot)],
        _ => vec![Fault::KillWriter { writer: 0 }, open(rng, false), terminate(Side::Writers)],
    }
}

fn any_fault(schedule: &Schedule, rng: &mut StdRng, plan: PostgresPlan) -> Fault {
    let slot = rng.random_range(0..schedule.relays);
    // A server that can't write can't be restarted either.
    let restarts = !plan.replaced && !plan.small_disk;
    loop {
        return match rng.random_range(0..16) {
            0 | 1 => kill(rng, slot),
            2 => schedule.failpoint(rng, slot),
            3 => Fault::HandOver { slot },
            4 => Fault::KillWriter { writer: rng.random_range(0..schedule.writers) },
            5 if !plan.replaced => Fault::Pause { slot, length: millis(rng, 700, 1_000) },
            6 if restarts && plan.durable => {
                let sudden = rng.random_bool(0.5);
                restart(rng, if sudden { ServerEnd::Kill } else { ServerEnd::Immediate })
            }
            7 if restarts => restart(rng, ServerEnd::Fast),
            8 => terminate(side(schedule, rng)),
            9 | 10 => wire(schedule, rng, 0..7),
            11 => open(rng, false),
            12 => open(rng, true),
            13 if !plan.replaced => Fault::ReadOnly { length: millis(rng, 100, 600) },
            14 if schedule.sink.takes_outages() => outage(rng),
            14 => Fault::TearLine,
            15 if schedule.moods.refused_one_in > 0 => Fault::Requeue,
            15 if schedule.partitions < 8 => Fault::RaisePartitions,
            _ => continue,
        };
    }
}

pub(super) fn restart(rng: &mut StdRng, how: ServerEnd) -> Fault {
    Fault::RestartServer { how, down: millis(rng, 0, 500) }
}

pub(super) fn terminate(whose: Side) -> Fault {
    Fault::Terminate { whose }
}

pub(super) fn open(rng: &mut StdRng, prepared: bool) -> Fault {
    Fault::OpenTransaction { length: millis(rng, 300, 1_500), prepared }
}

pub(super) fn side(schedule: &Schedule, rng: &mut StdRng) -> Side {
    match rng.random_range(0..5) {
        0 | 1 => Side::Relay(rng.random_range(0..schedule.relays)),
        2 => Side::Relays,
        3 => Side::Writers,
        _ => Side::All,
    }
}

/// One of the kinds with the given numbers: short cuts first, then what lasts, then refusals.
pub(super) fn wire(schedule: &Schedule, rng: &mut StdRng, kinds: std::ops::Range<u32>) -> Fault {
    let how = match rng.random_range(kinds) {
        0 => WireFault::Close,
        1 => WireFault::Reset,
        2 => WireFault::CutAfter(rng.random_range(500..40_000)),
        3 => WireFault::BlackHole,
        4 => WireFault::Freeze,
        5 => WireFault::Delay(rng.random_range(1..40)),
        _ => WireFault::Refuse,
    };
    Fault::Wire { whose: side(schedule, rng), how, length: millis(rng, 200, 1_200) }
}

#[cfg(test)]
mod tests {
    use super::super::{LEASE_TTL, Step};
    use super::*;
    use crate::schedule::tests::SINKS;

    #[test]
    fn the_same_seed_and_number_give_the_same_schedule_and_others_another() {
        for index in 0..200 {
            let once = derive(7, index, SinkKind::Webhook);
            assert_eq!(once, derive(7, index, SinkKind::Webhook));
            assert_ne!(once.steps, derive(8, index, SinkKind::Webhook).steps);
        }
    }

    #[test]
    fn every_kind_of_fault_comes_up_within_one_round_of_themes() {
        for sink in SINKS {
            let steps: Vec<Step> = (0..THEMES).flat_map(|at| derive(3, at, sink).steps).collect();
            let has = |wanted: fn(&Fault) -> bool| steps.iter().any(|step| wanted(&step.fault));
            assert!(has(|f| matches!(f, Fault::RestartServer { how: ServerEnd::Fast, .. })));
            assert!(has(|f| matches!(f, Fault::RestartServer { how: ServerEnd::Kill, .. })));
            assert!(has(|f| matches!(f, Fault::RestartServer { how: ServerEnd::Immediate, .. })));
            assert!(has(|f| matches!(f, Fault::Terminate { .. })));
            assert!(has(|f| matches!(f, Fault::Wire { .. })));
            assert!(has(|f| matches!(f, Fault::OpenTransaction { prepared: false, .. })));
            assert!(has(|f| matches!(f, Fault::OpenTransaction { prepared: true, .. })));
            assert!(has(|f| matches!(f, Fault::ReadOnly { .. })));
            assert!(has(|f| matches!(f, Fault::RaisePartitions)));
            assert!(has(|f| matches!(f, Fault::Replace { .. })));
            assert!(has(|f| matches!(f, Fault::FillDisk { .. })));
        }
    }

    #[test]
    fn a_fault_only_comes_where_it_can_be_made_and_judged() {
        for (sink, index) in SINKS.into_iter().flat_map(|sink| (0..500).map(move |at| (sink, at))) {
            let schedule = derive(11, index, sink);
            let plan = schedule.postgres.expect("a plan");
            assert!(!(plan.replaced && plan.pooler));
            for step in &schedule.steps {
                match &step.fault {
                    Fault::Kill { slot, .. }
                    | Fault::Failpoint { slot, .. }
                    | Fault::HandOver { slot }
                    | Fault::Wire { whose: Side::Relay(slot), .. } => {
                        assert!(*slot < schedule.relays);
                    }
                    Fault::Pause { slot, length } => {
                        assert!(*slot < schedule.relays && *length > LEASE_TTL && !plan.replaced);
                    }
                    Fault::KillWriter { writer } => assert!(*writer < schedule.writers),
                    Fault::RestartServer { how, .. } => {
                        assert!(!plan.replaced && !plan.small_disk);
                        assert!(plan.durable || *how == ServerEnd::Fast);
                    }
                    Fault::Replace { .. } => assert!(plan.replaced),
                    Fault::Outage { .. } => assert!(sink.takes_outages()),
                    Fault::Requeue => assert!(sink.refuses()),
                    Fault::TearLine => assert_eq!(sink, SinkKind::Jsonl),
                    Fault::FillDisk { .. } => assert!(plan.small_disk),
                    Fault::Lock { .. } | Fault::MoveClock { .. } => {
                        panic!("a fault of SQLite");
                    }
                    _ => {}
                }
            }
        }
    }
}
