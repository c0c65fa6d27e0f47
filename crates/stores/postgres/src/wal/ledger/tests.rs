//! The ledger against the model, in any order of events.
//!
//! What lives here: schedules. What does not: the model (`model.rs`).

use proptest::prelude::*;

use super::model::{Outcome, World};
use super::*;

#[derive(Debug, Clone)]
enum Op {
    Begin,
    Insert(usize),
    Record(usize),
    End(usize),
    RollBack(usize),
    Foreign(u64),
    TakeSnapshot,
    OfferBase,
    Read(usize),
    Republish(usize),
    Checkpoint(usize, Outcome),
    Acknowledge,
    Crash,
    LoseSlot,
    FallBehind,
    Restore,
    Tick,
    Remember,
    Adopt,
}

impl Op {
    fn run(&self, world: &mut World) {
        match *self {
            Self::Begin => world.server.begin(),
            Self::Insert(which) => world.server.insert(which),
            Self::Record(which) => world.server.record(which),
            Self::End(which) => world.server.end(which),
            Self::RollBack(which) => world.server.roll_back(which),
            Self::Foreign(records) => world.server.write(records),
            Self::TakeSnapshot => world.take_snapshot(),
            Self::OfferBase => world.offer_base(),
            Self::Read(most) => world.read(most, false),
            Self::Republish(most) => {
                // What the stream passed over is read from the table; the slot stays.
                world.crash();
                world.read(most, true);
            }
            Self::Checkpoint(which, outcome) => world.checkpoint(which, outcome),
            Self::Acknowledge => world.acknowledge(),
            Self::Crash => world.crash(),
            Self::LoseSlot => world.lose_slot(),
            Self::FallBehind => world.fall_behind(),
            Self::Restore => world.restore(),
            Self::Tick => world.tick(),
            Self::Remember => world.remember(),
            Self::Adopt => world.adopt(),
        }
    }
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let which = 0..8usize;
    let outcome = prop_oneof![
        6 => Just(Outcome::Done),
        1 => Just(Outcome::Unknown),
        1 => Just(Outcome::Failed),
    ];
    let op = prop_oneof![
        6 => Just(Op::Begin),
        14 => which.clone().prop_map(Op::Insert),
        6 => which.clone().prop_map(Op::Record),
        6 => which.clone().prop_map(Op::End),
        1 => which.clone().prop_map(Op::RollBack),
        1 => (1..4u64).prop_map(Op::Foreign),
        3 => Just(Op::TakeSnapshot),
        4 => Just(Op::OfferBase),
        10 => (1..6usize).prop_map(Op::Read),
        1 => (0..6usize).prop_map(Op::Republish),
        9 => (which, outcome).prop_map(|(which, outcome)| Op::Checkpoint(which, outcome)),
        3 => Just(Op::Acknowledge),
        2 => Just(Op::Crash),
        2 => Just(Op::LoseSlot),
        1 => Just(Op::FallBehind),
        1 => Just(Op::Restore),
        1 => Just(Op::Tick),
        1 => Just(Op::Remember),
        1 => Just(Op::Adopt),
    ];
    prop::collection::vec(op, 0..160)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    /// Whatever commits when, whatever fails when: each row comes until it is durable and never
    /// after, and what a consumer has is told exactly at every moment.
    #[test]
    fn nothing_is_missing_and_nothing_durable_comes_again(ops in ops()) {
        let mut world = World::new();
        ops.iter().for_each(|op| op.run(&mut world));
        prop_assert_eq!(world.finish().0, 0);
        prop_assert!(world.kept() <= 1, "little is kept beyond a new base");
    }
}

fn run(ops: &[Op]) -> World {
    let mut world = World::new();
    ops.iter().for_each(|op| op.run(&mut world));
    world
}

/// Two transactions draw `created_at` in one order and commit in the other; then the slot is lost.
/// The seed's scheme has sent the later one and reads what is above it: the earlier one is lost.
#[test]
fn the_seeds_scheme_loses_what_commits_in_reverse_order() {
    use Op::*;
    let schedule = [
        Read(1),
        Begin,
        Begin,
        Insert(0),
        Insert(1),
        Record(1),
        End(0),
        Read(1),
        Checkpoint(7, Outcome::Done),
        Record(0),
        End(0),
        LoseSlot,
    ];
    assert_eq!(run(&schedule).finish(), (0, 1), "never sent: by us, by the seed's scheme");
    let with_the_slot = &schedule[..schedule.len() - 1];
    assert_eq!(run(with_the_slot).finish(), (0, 0), "the slot itself has both");
}

/// That is no rare case: of schedules with a lost slot and nothing else amiss, many lose something.
#[test]
fn the_seeds_scheme_loses_in_many_schedules() {
    use Op::*;
    let mut losing = 0;
    for schedule in 0..1_000usize {
        let mut world = run(&[Read(1), Begin, Begin, Begin]);
        let mut dice = schedule;
        for _ in 0..12 {
            let which = dice % 3;
            dice = dice / 3 + 41 * which + 7;
            run_on(&mut world, &[Insert(which), Insert(which + 1)]);
            if dice % 2 == 0 {
                run_on(&mut world, &[Record(which), End(0), Begin, Read(9)]);
            }
            run_on(&mut world, &[Checkpoint(9, Outcome::Done)]);
        }
        world.lose_slot();
        let (ours, by_created_at) = world.finish();
        assert_eq!(ours, 0);
        losing += usize::from(by_created_at > 0);
    }
    assert!(losing > 300, "{losing} of 1,000");
}

fn run_on(world: &mut World, ops: &[Op]) {
    ops.iter().for_each(|op| op.run(world));
}

fn base_at(lsn: u64, xmax: u64) -> Base {
    let snapshot = Snapshot::parse(&format!("{xmax}:{xmax}:")).expect("a snapshot");
    let (lsn, publication) = (Lsn(lsn), "p".to_owned());
    Base { snapshot, lsn, seq: 0, floor: 0, system: 7, timeline: 1, publication }
}

fn place_at(lsn: u64, ordinal: u32) -> WalPlace {
    WalPlace { system: 7, timeline: 1, lsn: Lsn(lsn), ordinal }
}

fn caught_up(base: Base) -> Ledger {
    let mut ledger = Ledger::new(Delivered::default());
    let place = WalPlace { lsn: base.lsn, ..place_at(0, 0) };
    ledger.begin_catch_up(base);
    write(&mut ledger, place);
    ledger
}

fn write(ledger: &mut Ledger, to: WalPlace) {
    let step = ledger.plan(to).expect("planned");
    ledger.done(step);
}

/// A consumer that drains a backlog is far behind each base that is offered. New ones come all the
/// time; one of them must stay until it is passed.
#[test]
fn a_slow_consumer_comes_to_a_new_base() {
    let mut ledger = caught_up(base_at(800, 100));
    for n in 1..1_000u64 {
        ledger.candidate(base_at(800 + n * 800, 100 + n));
        ledger.handed_out(place_at(800 + n * 8, 1), Some(100 + n), n as i64);
        write(&mut ledger, place_at(800 + n * 8 + 8, 0));
        assert!(ledger.candidates.len() <= MAX_CANDIDATES);
    }
    let base = ledger.delivered().base.as_ref().expect("one");
    assert!(base.lsn > Lsn(1_600), "still the base of the beginning");
}

/// Catch-ups that are interrupted again and again, each earlier than the one before, are told apart
/// up to a bound; beyond it a new one says nothing until it says more than another.
#[test]
fn interrupted_catch_ups_are_bounded() {
    let mut delivered = caught_up(base_at(800, 2)).delivered().clone();
    for n in 0..200u64 {
        let mut ledger = Ledger::new(delivered);
        ledger.begin_catch_up(base_at(8_000 + n * 800, 100 + n));
        let place = place_at(8_000 + n * 800 - 1, 1);
        ledger.handed_out(place, Some(5), 1_000 - n as i64);
        write(&mut ledger, place);
        delivered = ledger.delivered().clone();
        assert!(delivered.recoveries.len() <= MAX_RECOVERIES);
    }
    assert!(delivered.has(7, Some(5), 1_000) && !delivered.has(7, Some(5), 1_001));
    assert!(delivered.has(7, Some(162), 1_000 - 63) && !delivered.has(7, Some(163), 1));
    // One that comes further than all of them takes their place.
    let mut ledger = Ledger::new(delivered);
    ledger.begin_catch_up(base_at(900_000, 500));
    let place = place_at(899_999, 1);
    ledger.handed_out(place, Some(5), 2_000);
    write(&mut ledger, place);
    assert_eq!(ledger.delivered().recoveries.len(), 1);
    // The stream alone would leave out what it has not read.
    let mut ledger = Ledger::new(ledger.delivered().clone());
    assert!(ledger.plan(place_at(900_800, 0)).is_err());
    ledger.begin_catch_up(base_at(900_800, 500));
    write(&mut ledger, place_at(900_800, 0));
    assert_eq!(ledger.delivered().recoveries, []);
}

/// What was passed over while another publication was in force is not in the stream.
#[test]
fn a_base_of_another_publication_is_not_adopted() {
    let mut ledger = caught_up(base_at(800, 100));
    ledger.candidate(Base { publication: "other".to_owned(), ..base_at(1_600, 200) });
    write(&mut ledger, place_at(2_400, 0));
    assert_eq!(ledger.delivered().base, Some(base_at(800, 100)));
    ledger.candidate(base_at(2_400, 300));
    write(&mut ledger, place_at(2_400, 0));
    assert_eq!(ledger.delivered().base, Some(base_at(2_400, 300)));
    assert!(ledger.plan(place_at(2_399, 9)).is_err(), "back");
}
