//! What one schedule does to a relay that reads PostgreSQL's write-ahead log.
//!
//! What lives here: the derivation. What does not: the plan's form (`mod.rs`), and faults that are
//! the same for the feed (`postgres.rs`).
//! Invariant: as for the feed; and where an older copy takes the server's place, the slot is left
//! alone, for the copy has none.

use std::time::Duration;

use rand::RngExt;
use rand::rngs::StdRng;

use super::postgres::{open, restart, side, terminate, wire};
use super::{
    Fault, Outage, PostgresPlan, Schedule, ServerEnd, Side, SinkKind, SlotFault, SourceKind, Step,
    generator, kill, millis, moods, outage,
};

/// Schedules in a row after which every theme has come up.
pub(super) const THEMES: u64 = 24;

/// Events a second that the writers of a schedule with many events aim at.
const EVENTS_PER_SECOND: u64 = 900;
const MANY_WRITERS: usize = 16;

// In an order by which every fourth of them is of another kind.
const DROP_DOWN: u64 = 1;
const DROP_IN_RECOVERY: u64 = 4;
const LOSE: u64 = 5;
const ADVANCE: u64 = 8;
const PUBLICATION: u64 = 9;
const BESIDE: u64 = 12;
const DROP_UNDER: u64 = 13;
const TWO_RELAYS: u64 = 14;
const SUDDEN_END: u64 = 16;
const FAST_RESTARTS: u64 = 17;
const REPLACED: u64 = 18;
const SINK: u64 = 19;
const RETENTION: u64 = 20;
const CUT_SHORT: u64 = 22;

/// The plan of schedule `index` of the run with `seed`.
pub(super) fn derive(seed: u64, index: u64, sink: SinkKind, events: Option<u64>) -> Schedule {
    let mut rng = generator(seed, index, format!("postgres-wal {sink}"));
    let theme = index % THEMES;
    let lines = sink == SinkKind::Jsonl;
    let replaced = theme == REPLACED;
    let postgres = PostgresPlan {
        version: if rng.random_bool(0.5) { 15 } else { 18 },
        durable: [SUDDEN_END, RETENTION].contains(&theme) || rng.random_bool(0.2),
        pooler: false,
        replaced,
        small_disk: false,
        wal: true,
    };
    let beside = !replaced && (theme == BESIDE || rng.random_bool(0.2));
    let retention = theme == RETENTION || rng.random_bool(0.25);
    let refusing = (sink.refuses() || beside) && (theme == SINK || rng.random_bool(0.25));
    let rotates = (lines || beside) && (theme == SINK || rng.random_bool(0.3));
    let writing = millis(&mut rng, 2_500, 4_000) + longer(theme);
    let by_events = events.map(|events| Duration::from_millis(events * 1_000 / EVENTS_PER_SECOND));
    let mut schedule = Schedule {
        seed,
        index,
        source: SourceKind::PostgresWal,
        sink,
        partitions: 1,
        relays: if theme == TWO_RELAYS { 2 } else { 1 + usize::from(rng.random_bool(0.4)) },
        writers: if events.is_some() { MANY_WRITERS } else { rng.random_range(2..=4) },
        writing: by_events.map_or(writing, |by_events| by_events.max(writing)),
        retention: retention.then_some(Duration::ZERO),
        rotate_bytes: rotates.then(|| rng.random_range(20_000..200_000)),
        small_disk: None,
        movable_clock: false,
        moods: moods(&mut rng, refusing),
        postgres: Some(postgres),
        beside,
        events,
        steps: Vec::new(),
    };
    theme_steps(&mut schedule, &mut rng, theme);
    // As many faults a second, however long it lasts.
    let rounds = schedule.writing.as_millis().div_ceil(4_000);
    for _ in 0..rounds {
        for _ in 0..rng.random_range(2..=4) {
            let fault = any_fault(&schedule, &mut rng, postgres);
            schedule.add(&mut rng, fault);
        }
    }
    if replaced {
        // Early: making the copy takes a second or two.
        let at = millis(&mut rng, 100, 800);
        let lag = millis(&mut rng, 50, 700);
        schedule.steps.push(Step { at, fault: Fault::Replace { lag } });
    }
    schedule.steps.sort_by_key(|step| step.at);
    schedule
}

/// What takes its time leaves writers little otherwise.
fn longer(theme: u64) -> Duration {
    Duration::from_millis(match theme {
        SUDDEN_END | RETENTION | LOSE | PUBLICATION => 3_000,
        FAST_RESTARTS | REPLACED | DROP_IN_RECOVERY | BESIDE => 2_000,
        _ => 0,
    })
}

fn theme_steps(schedule: &mut Schedule, rng: &mut StdRng, theme: u64) {
    match theme {
        DROP_DOWN => while_down(schedule, rng, SlotFault::Drop),
        CUT_SHORT => cut_short(schedule, rng),
        ADVANCE => {
            while_down(schedule, rng, SlotFault::Advance);
            let under = slot(rng, SlotFault::Advance);
            schedule.add(rng, under);
        }
        LOSE => {
            while_down(schedule, rng, SlotFault::Lose);
            let under = slot(rng, SlotFault::Lose);
            schedule.add(rng, under);
        }
        DROP_IN_RECOVERY => {
            cut_short(schedule, rng);
            let slot = rng.random_range(0..schedule.relays);
            let back = while_away(schedule, rng, SlotFault::Drop);
            // A recovery of what was missed takes a few hundred milliseconds.
            let again = Fault::Slot { how: SlotFault::Drop, times: 2, pause: millis(rng, 0, 80) };
            let at = back + millis(rng, 30, 200);
            schedule.steps.push(Step { at, fault: again });
            let at = back + millis(rng, 150, 500);
            schedule.steps.push(Step { at, fault: kill(rng, slot) });
        }
        _ => {
            for fault in theme_faults(schedule, rng, theme) {
                schedule.add(rng, fault);
            }
        }
    }
}

/// The slot is dropped while no relay runs, and whoever comes back dies in the middle of what it
/// reads from the table. The slot that it made stays.
fn cut_short(schedule: &mut Schedule, rng: &mut StdRng) {
    let back = while_away(schedule, rng, SlotFault::Drop);
    // The first checkpoint says that it has begun.
    for slot in 0..schedule.relays {
        let count = rng.random_range(1..=2);
        let fault = Fault::Failpoint { slot, name: "relay::after_checkpoint", count };
        schedule.steps.push(Step { at: back, fault });
    }
}

/// Something becomes of the slot while no relay runs.
fn while_down(schedule: &mut Schedule, rng: &mut StdRng, how: SlotFault) {
    let _ = while_away(schedule, rng, how);
}

/// The same; returns when the relays come back.
fn while_away(schedule: &mut Schedule, rng: &mut StdRng, how: SlotFault) -> Duration {
    let last = schedule.writing.as_millis().try_into().unwrap_or(u64::MAX);
    let at = millis(rng, 300, last / 2);
    let down = millis(rng, 600, 1_300);
    for slot in 0..schedule.relays {
        schedule.steps.push(Step { at, fault: Fault::Kill { slot, down } });
    }
    let fault = Fault::Slot { how, times: 1, pause: Duration::ZERO };
    schedule.steps.push(Step { at: at + millis(rng, 50, 300), fault });
    at + down
}

fn theme_faults(schedule: &Schedule, rng: &mut StdRng, theme: u64) -> Vec<Fault> {
    let of = rng.random_range(0..schedule.relays);
    match theme {
        0 => vec![kill(rng, of), kill(rng, of), slot(rng, SlotFault::Drop)],
        2 => vec![schedule.failpoint(rng, of), schedule.failpoint(rng, of)],
        3 => vec![Fault::Pause { slot: of, length: millis(rng, 750, 1_300) }],
        6 => vec![Fault::HandOver { slot: of }, Fault::HandOver { slot: of }],
        7 => vec![terminate(Side::Relays), terminate(Side::Writers), terminate(Side::All)],
        PUBLICATION => vec![publication(rng, false), publication(rng, true)],
        10 => vec![wire(schedule, rng, 0..3), wire(schedule, rng, 0..3), wire(schedule, rng, 0..3)],
        11 => vec![wire(schedule, rng, 3..6), wire(schedule, rng, 3..6)],
        BESIDE => vec![long_outage(rng), kill(rng, of), slot(rng, SlotFault::Drop), outage(rng)],
        DROP_UNDER => vec![
            slot(rng, SlotFault::Drop),
            slot(rng, SlotFault::Drop),
            Fault::Slot { how: SlotFault::Drop, times: 3, pause: millis(rng, 0, 300) },
        ],
        TWO_RELAYS => vec![kill(rng, of), terminate(Side::Relays), kill(rng, 1 - of)],
        15 => vec![open(rng, false), open(rng, true), slot(rng, SlotFault::Drop), open(rng, true)],
        SUDDEN_END => vec![restart(rng, ServerEnd::Immediate), restart(rng, ServerEnd::Kill)],
        FAST_RESTARTS => vec![restart(rng, ServerEnd::Fast), restart(rng, ServerEnd::Fast)],
        REPLACED => vec![kill(rng, of), open(rng, true)],
        SINK if schedule.sink.refuses() => {
            vec![outage(rng), schedule.failpoint(rng, of), Fault::Requeue]
        }
        SINK if schedule.sink.takes_outages() => vec![outage(rng), outage(rng), kill(rng, of)],
        SINK => vec![Fault::TearLine, Fault::TearLine, kill(rng, of)],
        RETENTION => vec![kill(rng, of), restart(rng, ServerEnd::Kill), slot(rng, SlotFault::Drop)],
        21 => vec![Fault::ReadOnly { length: millis(rng, 200, 900) }, wire(schedule, rng, 6..7)],
        _ => vec![Fault::KillWriter { writer: 0 }, open(rng, false), terminate(Side::Writers)],
    }
}

fn any_fault(schedule: &Schedule, rng: &mut StdRng, plan: PostgresPlan) -> Fault {
    let of = rng.random_range(0..schedule.relays);
    loop {
        return match rng.random_range(0..20) {
            0 | 1 => kill(rng, of),
            2 => schedule.failpoint(rng, of),
            3 => Fault::HandOver { slot: of },
            4 => Fault::KillWriter { writer: rng.random_range(0..schedule.writers) },
            5 if !plan.replaced => Fault::Pause { slot: of, length: millis(rng, 700, 1_000) },
            6 if !plan.replaced && plan.durable => {
                let sudden = rng.random_bool(0.5);
                restart(rng, if sudden { ServerEnd::Kill } else { ServerEnd::Immediate })
            }
            7 if !plan.replaced => restart(rng, ServerEnd::Fast),
            8 => terminate(side(schedule, rng)),
            9 | 10 => wire(schedule, rng, 0..7),
            11 => open(rng, false),
            12 => open(rng, true),
            13 if !plan.replaced => Fault::ReadOnly { length: millis(rng, 100, 600) },
            14 if schedule.takes_outages() => outage(rng),
            14 => Fault::TearLine,
            15 if schedule.moods.refused_one_in > 0 => Fault::Requeue,
            16 | 17 if !plan.replaced => slot(rng, SlotFault::Drop),
            18 if !plan.replaced => slot(rng, SlotFault::Advance),
            19 if !plan.replaced => slot(rng, SlotFault::Lose),
            _ => continue,
        };
    }
}

fn slot(rng: &mut StdRng, how: SlotFault) -> Fault {
    let again = how == SlotFault::Drop && rng.random_bool(0.4);
    Fault::Slot { how, times: 1 + u32::from(again), pause: millis(rng, 0, 150) }
}

fn publication(rng: &mut StdRng, dropped: bool) -> Fault {
    Fault::Publication { dropped, length: millis(rng, 100, 900) }
}

fn long_outage(rng: &mut StdRng) -> Fault {
    let kind = if rng.random_bool(0.5) { Outage::Silent } else { Outage::ServerError };
    Fault::Outage { kind, length: millis(rng, 1_500, 2_500) }
}

#[cfg(test)]
mod tests {
    use super::super::LEASE_TTL;
    use super::*;
    use crate::schedule::tests::SINKS;

    #[test]
    fn the_same_seed_and_number_give_the_same_schedule_and_others_another() {
        for index in 0..200 {
            let once = derive(7, index, SinkKind::Webhook, None);
            assert_eq!(once, derive(7, index, SinkKind::Webhook, None));
            assert_ne!(once.steps, derive(8, index, SinkKind::Webhook, None).steps);
        }
    }

    #[test]
    fn every_kind_of_fault_comes_up_within_one_round_of_themes() {
        for sink in SINKS {
            let all: Vec<Schedule> = (0..THEMES).map(|at| derive(3, at, sink, None)).collect();
            let steps: Vec<&Step> = all.iter().flat_map(|schedule| &schedule.steps).collect();
            let has = |wanted: fn(&Fault) -> bool| steps.iter().any(|step| wanted(&step.fault));
            assert!(has(|f| matches!(f, Fault::Slot { how: SlotFault::Drop, times: 1, .. })));
            assert!(has(|f| matches!(f, Fault::Slot { how: SlotFault::Drop, times: 2.., .. })));
            assert!(has(|f| matches!(f, Fault::Slot { how: SlotFault::Advance, .. })));
            assert!(has(|f| matches!(f, Fault::Slot { how: SlotFault::Lose, .. })));
            assert!(has(|f| matches!(f, Fault::Publication { dropped: true, .. })));
            assert!(has(|f| matches!(f, Fault::Publication { dropped: false, .. })));
            assert!(has(|f| matches!(f, Fault::Kill { .. })));
            assert!(has(|f| matches!(f, Fault::Failpoint { .. })));
            assert!(has(|f| matches!(f, Fault::Pause { .. })));
            assert!(has(|f| matches!(f, Fault::HandOver { .. })));
            assert!(has(|f| matches!(f, Fault::Terminate { .. })));
            assert!(has(|f| matches!(f, Fault::Wire { .. })));
            assert!(has(|f| matches!(f, Fault::OpenTransaction { prepared: false, .. })));
            assert!(has(|f| matches!(f, Fault::OpenTransaction { prepared: true, .. })));
            assert!(has(|f| matches!(f, Fault::RestartServer { how: ServerEnd::Fast, .. })));
            assert!(has(|f| matches!(f, Fault::RestartServer { how: ServerEnd::Kill, .. })));
            assert!(has(|f| matches!(f, Fault::Replace { .. })));
            assert!(has(|f| matches!(f, Fault::Outage { .. })));
            assert!(all.iter().any(|schedule| schedule.beside));
            assert!(all.iter().any(|schedule| !schedule.beside));
        }
    }

    #[test]
    fn a_fault_only_comes_where_it_can_be_made_and_judged() {
        for (sink, index) in SINKS.into_iter().flat_map(|sink| (0..500).map(move |at| (sink, at))) {
            let schedule = derive(11, index, sink, (index % 3 == 0).then_some(10_000));
            let plan = schedule.postgres.expect("a plan");
            assert!(plan.wal && !plan.pooler && !plan.small_disk);
            assert!(!(plan.replaced && schedule.beside));
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
                        assert!(!plan.replaced && (plan.durable || *how == ServerEnd::Fast));
                    }
                    Fault::Slot { .. } | Fault::Publication { .. } => assert!(!plan.replaced),
                    Fault::Replace { .. } => assert!(plan.replaced),
                    Fault::Outage { .. } | Fault::Requeue => assert!(schedule.takes_outages()),
                    Fault::TearLine => assert_eq!(sink, SinkKind::Jsonl),
                    Fault::Lock { .. }
                    | Fault::MoveClock { .. }
                    | Fault::FillDisk { .. }
                    | Fault::RaisePartitions => panic!("a fault of another source"),
                    _ => {}
                }
            }
        }
    }

    #[test]
    fn many_events_have_many_writers_and_faults_for_as_long() {
        let few = derive(5, 30, SinkKind::Webhook, None);
        let many = derive(5, 30, SinkKind::Webhook, Some(10_000));
        assert_eq!((many.writers, many.events), (16, Some(10_000)));
        assert!(many.writing > few.writing * 2 && many.steps.len() > few.steps.len());
        assert!(many.steps.iter().any(|step| step.at > many.writing / 2));
    }
}
