//! What is particular to the memory store.
//!
//! What lives here: races at commit, clocks that are set back, repeatable seeds, bounded memory,
//! waking up. What does not: behaviours of every store.
//! Invariant: each test is about a way in which only this store could break a promise.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postrider_conformance::clock::{EPOCH, ManualClock};
use postrider_conformance::samples::{
    WHOLE, consumer, event, event_with_id, fresh_id, group, number, relay,
};
use postrider_core::{
    Acquired, Checkpoints, Clock, Entry, ErrorKind, Feed, Leases, PartitionId, Position, Retention,
    RetentionPolicy, Tally, Timestamp,
};
use postrider_store_memory::{MemoryStore, MemoryTransaction, OnDuplicate};
use std::sync::atomic::{AtomicU64, Ordering};

fn store() -> (MemoryStore, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::default());
    (MemoryStore::new(1, clock.clone()), clock)
}

fn only() -> PartitionId {
    PartitionId::numbered(0, 1)
}

async fn numbers(store: &MemoryStore, after: &Position) -> Vec<u64> {
    let page = store.read(&only(), after, WHOLE).await.expect("readable");
    let number = |entry: &Entry| match entry {
        Entry::Record(record) => number(&record.event),
        Entry::Malformed(_) => panic!("unreadable"),
    };
    page.entries.iter().map(number).collect()
}

#[tokio::test]
async fn of_two_open_transactions_with_one_id_the_first_to_commit_wins() {
    let (store, _) = store();
    let id = fresh_id();
    let mut first = store.begin();
    let mut second = store.begin();
    let mut third = store.begin();
    first.append(&[event_with_id(id, "a", 1)]).unwrap();
    second.append(&[event_with_id(id, "a", 2), event("b", 3)]).unwrap();
    third.append_with(&[event_with_id(id, "a", 4), event("b", 5)], OnDuplicate::Ignore).unwrap();
    first.commit().unwrap();
    assert_eq!(second.commit().unwrap_err().kind(), ErrorKind::Permanent);
    third.commit().unwrap();
    assert_eq!(numbers(&store, &Position::START).await, [1, 5]);
}

/// A wall clock that somebody sets.
#[derive(Default)]
struct WallClock(AtomicU64);

#[async_trait]
impl Clock for WallClock {
    fn now(&self) -> Timestamp {
        EPOCH.plus(Duration::from_millis(self.0.load(Ordering::Relaxed)))
    }

    fn elapsed(&self) -> Duration {
        Duration::ZERO
    }

    async fn sleep(&self, _duration: Duration) {}
}

#[tokio::test]
async fn a_clock_set_back_puts_nothing_behind_a_position_that_was_handed_out() {
    let clock = Arc::new(WallClock::default());
    let store = MemoryStore::new(1, clock.clone());
    clock.0.store(60_000, Ordering::Relaxed);
    let quiet = store.read(&only(), &Position::START, WHOLE).await.unwrap().position;
    assert_ne!(quiet, Position::START);
    clock.0.store(1_000, Ordering::Relaxed);
    store.append(&[event("a", 1)]).unwrap();
    assert_eq!(numbers(&store, &quiet).await, [1]);
    let head = store.head(&only()).await.unwrap();
    clock.0.store(0, Ordering::Relaxed);
    store.append(&[event("a", 2)]).unwrap();
    assert_eq!(numbers(&store, &head).await, [2]);
    assert_eq!(numbers(&store, &Position::START).await, [1, 2]);
}

#[tokio::test]
async fn one_seed_gives_the_same_ids_and_positions() {
    let mut runs = Vec::new();
    for seed in [1, 1, 2] {
        let store = MemoryStore::seeded(1, Arc::new(ManualClock::default()), seed);
        store.append(&[event("a", 1), event("b", 2)]).unwrap();
        let page = store.read(&only(), &Position::START, WHOLE).await.unwrap();
        runs.push((store.identity(), page));
    }
    assert_eq!(runs[0], runs[1]);
    assert_ne!(runs[0], runs[2]);
}

#[tokio::test]
async fn a_commit_wakes_a_waiting_reader() {
    let (store, _) = store();
    let mut changed = std::pin::pin!(store.changed());
    tokio::select! {
        biased;
        () = &mut changed => panic!("nothing has changed"),
        () = tokio::task::yield_now() => {}
    }
    store.append(&[event("a", 1)]).unwrap();
    tokio::time::timeout(Duration::from_secs(20), changed).await.expect("the commit wakes it");
}

/// O35: under steady load with retention the store holds what is not pruned, and no more.
#[tokio::test]
async fn o35_pruning_forgets_events_and_their_ids() {
    let (store, clock) = store();
    let answer = store.acquire(&group("g"), &only(), &relay("r"), Duration::from_secs(60)).await;
    let Ok(Acquired::Held(lease)) = answer else { panic!("{answer:?}") };
    let policy = RetentionPolicy { keep: Duration::ZERO, batch: 10_000, dry_run: false };
    let ids: Vec<_> = (0..2_000).map(|_| fresh_id()).collect();
    for round in 0..5 {
        let events: Vec<_> = ids.iter().map(|id| event_with_id(*id, "a", round)).collect();
        store.append(&events).expect("the last round's ids are forgotten");
        clock.advance(Duration::from_millis(10));
        let head = store.head(&only()).await.unwrap();
        store.advance(&lease, &consumer("c"), &head, Tally::default()).await.unwrap();
        assert_eq!(store.prune(Some(&lease), &policy).await.unwrap().events, 2_000);
        assert!(numbers(&store, &Position::START).await.is_empty());
    }
}

/// O1, O7: each transaction commits after a younger one was opened; some roll back.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn o1_late_commits_on_many_threads_are_never_skipped() {
    const EACH: u64 = 200;
    let (store, _) = store();
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..4u64 {
        let store = store.clone();
        writers.spawn(async move {
            let mut held = None;
            for i in 0..EACH {
                let mut transaction = store.begin();
                transaction.append(&[event(&format!("w{writer}"), writer * EACH + i)]).unwrap();
                if i % 7 == 0 {
                    drop(transaction);
                    transaction = store.begin();
                    transaction.append(&[event("again", writer * EACH + i)]).unwrap();
                }
                // The transaction before this one commits after this one was opened.
                if let Some(elder) = held.replace(transaction) {
                    tokio::task::yield_now().await;
                    MemoryTransaction::commit(elder).unwrap();
                }
            }
            held.map(MemoryTransaction::commit).unwrap().unwrap();
        });
    }
    let mut seen = Vec::new();
    let mut after = Position::START;
    while seen.len() < 4 * EACH as usize {
        let page = store.read(&only(), &after, WHOLE).await.unwrap();
        after = page.position;
        seen.extend(page.entries);
        tokio::task::yield_now().await;
    }
    while let Some(done) = writers.join_next().await {
        done.unwrap();
    }
    let all = store.read(&only(), &Position::START, WHOLE).await.unwrap().entries;
    assert_eq!(all, seen, "what was read while writing is what there is");
}
