//! The faulty wrappers over a memory store and its feed.
//!
//! What lives here: that a caller who tries again ends where one without faults would. What does
//! not: the sink's wrapper.
//! Invariant: every test sees faults strike, or it fails.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use postrider_conformance::clock::{ManualClock, TokioClock};
use postrider_conformance::faulty::{Dice, FaultRates, Faulty};
use postrider_conformance::samples::{WHOLE, consumer, event, group, number, relay};
use postrider_core::{
    Acquired, BatchLimit, Checkpoints, DeadLetterFilter, DeadLetterState, DeadLetters, Entry,
    ErrorKind, FeedSource, HeldLease, Leases, NewDeadLetter, PartitionId, PollInterval,
    ReadOutcome, Reader, Record, Result, Source, StartFrom, Tally,
};
use postrider_store_memory::MemoryStore;

const RATES: FaultRates = FaultRates {
    before: 0.2,
    after: 0.2,
    cut: 0.1,
    delayed: 0.3,
    longest_delay: Duration::from_millis(3),
};

struct World {
    store: Arc<MemoryStore>,
    dice: Arc<Dice>,
}

impl World {
    fn new(seed: u64) -> Self {
        let store = Arc::new(MemoryStore::seeded(1, Arc::new(ManualClock::default()), seed));
        Self { store, dice: Dice::new(seed, RATES, Arc::new(TokioClock::default())) }
    }

    fn faulty(&self) -> Faulty<MemoryStore> {
        Faulty::new(Arc::clone(&self.store), Arc::clone(&self.dice))
    }

    async fn reader(&self) -> Box<dyn Reader> {
        let poll = PollInterval { busy: Duration::from_millis(1), idle: Duration::from_millis(2) };
        let clock = Arc::new(TokioClock::default());
        let source = Arc::new(FeedSource::new(Arc::clone(&self.store), clock, poll));
        let source = Faulty::new(source, Arc::clone(&self.dice));
        let only = PartitionId::numbered(0, 1);
        stubborn(async || source.open(&consumer("c"), &only, StartFrom::Oldest).await).await
    }
}

/// Tries until it succeeds; every failure is the dice's.
async fn stubborn<T, F: Future<Output = Result<T>>>(mut call: impl FnMut() -> F) -> T {
    loop {
        match call().await {
            Ok(value) => return value,
            Err(error) => assert_eq!(error.kind(), ErrorKind::Transient, "{error:?}"),
        }
    }
}

async fn read(reader: &mut dyn Reader, count: usize) -> Vec<Record> {
    let limit = BatchLimit { records: 3, ..WHOLE };
    let mut all = Vec::new();
    while all.len() < count {
        let outcome = tokio::time::timeout(Duration::from_secs(10), reader.next(limit)).await;
        match outcome.expect("there is more to read") {
            Ok(ReadOutcome::Batch(batch)) => all.extend(batch.entries.into_iter().map(|entry| {
                let Entry::Record(record) = entry else { panic!("unreadable") };
                record
            })),
            Ok(ReadOutcome::Ended(successors)) => panic!("ended: {successors:?}"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Transient, "{error:?}"),
        }
    }
    all
}

#[tokio::test(start_paused = true)]
async fn a_reader_loses_and_repeats_nothing_however_often_it_fails() {
    for seed in 0..20 {
        let world = World::new(seed);
        let events: Vec<_> = (0..60).map(|n| event("a", n)).collect();
        world.store.append(&events).unwrap();
        let mut reader = world.reader().await;
        let read = read(&mut *reader, 60).await;
        let numbers: Vec<u64> = read.iter().map(|record| number(&record.event)).collect();
        assert_eq!(numbers, (0..60).collect::<Vec<u64>>(), "seed {seed}");
        assert!(world.dice.strikes() > 0, "seed {seed} struck nothing");
    }
}

#[tokio::test(start_paused = true)]
async fn a_dropped_read_under_faults_loses_nothing() {
    let world = World::new(7);
    let events: Vec<_> = (0..60).map(|n| event("a", n)).collect();
    world.store.append(&events).unwrap();
    let mut reader = world.reader().await;
    let mut numbers = Vec::new();
    while numbers.len() < 60 {
        let cut = tokio::time::timeout(Duration::from_millis(1), reader.next(WHOLE)).await;
        if let Ok(Ok(ReadOutcome::Batch(batch))) = cut {
            numbers.extend(batch.entries.iter().map(|entry| match entry {
                Entry::Record(record) => number(&record.event),
                Entry::Malformed(_) => panic!("unreadable"),
            }));
        }
    }
    assert_eq!(numbers, (0..60).collect::<Vec<u64>>());
}

#[tokio::test(start_paused = true)]
async fn writes_that_are_tried_again_end_as_without_faults() {
    for seed in 0..20 {
        let world = World::new(seed);
        let (store, sink) = (world.faulty(), consumer("sink"));
        let only = PartitionId::numbered(0, 1);
        world.store.append(&[event("a", 0), event("b", 1)]).unwrap();
        let records = read(&mut *world.reader().await, 2).await;
        let lease = acquire(&store).await;
        let letter = NewDeadLetter {
            entry: Entry::Record(records[0].clone()),
            state: DeadLetterState::Parked,
            reason: "refused".to_owned(),
            attempts: 1,
        };
        let letters = [letter];
        stubborn(async || store.park(&lease, &sink, &letters).await).await;
        let none = Tally::default();
        let to = &records[1].position;
        stubborn(async || store.advance(&lease, &sink, to, none).await).await;
        let all = DeadLetterFilter::default();
        stubborn(async || store.requeue(&all).await).await;
        let free = stubborn(async || store.released(&sink, &only, WHOLE).await).await;
        assert_eq!(free.len(), 1, "parked once, seed {seed}");
        stubborn(async || store.resolve(&lease, &sink, &[free[0].id]).await).await;
        let kept = stubborn(async || store.checkpoint(&sink, &only).await).await.unwrap();
        assert_eq!((kept.published, &kept.position), (1, to), "seed {seed}");
        assert!(world.dice.strikes() > 0, "seed {seed} struck nothing");
    }
}

async fn acquire(store: &Faulty<MemoryStore>) -> HeldLease {
    let (group, only, relay) = (group("g"), PartitionId::numbered(0, 1), relay("r"));
    let ttl = Duration::from_secs(60);
    let answer = stubborn(async || store.acquire(&group, &only, &relay, ttl).await).await;
    match answer {
        Acquired::Held(lease) => lease,
        Acquired::Busy { holder, .. } => panic!("held by {holder}"),
    }
}

#[tokio::test(start_paused = true)]
async fn the_same_seed_strikes_the_same_calls() {
    let mut runs = Vec::new();
    for seed in [3, 3, 4] {
        let world = World::new(seed);
        let store = world.faulty();
        let mut answers = Vec::new();
        for _ in 0..50 {
            answers.push(store.progress().await.is_ok());
        }
        assert!(answers.contains(&true) && answers.contains(&false));
        runs.push(answers);
    }
    assert_eq!(runs[0], runs[1]);
    assert_ne!(runs[0], runs[2]);
}

#[tokio::test(start_paused = true)]
async fn a_calm_world_has_no_faults() {
    let world = World::new(1);
    world.dice.set_rates(FaultRates::CALM);
    let store = world.faulty();
    for _ in 0..200 {
        store.progress().await.unwrap();
    }
    assert_eq!(world.dice.strikes(), 0);
}
