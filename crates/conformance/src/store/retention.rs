//! What every store promises of retention: it never deletes what a consumer has not passed.
//!
//! What lives here: pruning and the horizon. What does not: when a relay prunes.
//! Invariant: an implementation may keep more than it could prune (its newest row, say), so each
//! behaviour leaves an unpassed row at the end; one that deletes whole segments keeps the ten
//! events until all of them may go.

use std::sync::Arc;
use std::time::Duration;

use postrider_core::{
    Checkpoints, ErrorKind, Feed, Leases, Position, Pruned, Record, Retention, RetentionPolicy,
    Timestamp,
};

use super::{
    PAST_SHORT_TTL, Prunes, StoreHarness, TTL, advance, append, lease, partition, read_all,
};
use crate::samples::{WHOLE, consumer, event, event_with_id, fresh_id, number};

const ALL: RetentionPolicy = RetentionPolicy { keep: Duration::ZERO, batch: 1_000, dry_run: false };

/// A store with ten old events in one partition.
struct Shed<H: StoreHarness> {
    harness: H,
    store: Arc<H::Store>,
    records: Vec<Record>,
}

impl<H: StoreHarness> Shed<H> {
    async fn filled() -> Self {
        let harness = H::fresh(1).await;
        let events: Vec<_> = (1..=10).map(|n| event(&format!("k{}", n % 3), n)).collect();
        append(&harness, &events).await;
        harness.pass_time(PAST_SHORT_TTL).await;
        let store = harness.store();
        let records = read_all(&*store, &partition(0, 1)).await;
        Self { harness, store, records }
    }

    /// Lets a consumer pass the first `count` events.
    async fn pass(&self, name: &str, count: usize) {
        let held = lease(&self.harness, &partition(0, 1), "one", TTL).await;
        let to = &self.records[count - 1].position;
        advance(&self.harness, &held, &consumer(name), to, 0).await;
        self.store.release(&held).await.expect("released");
    }

    fn by_segments(&self) -> bool {
        self.harness.features().pruning == Prunes::Segments
    }

    /// How many events go when so many were passed newly, and not all.
    fn go(&self, passed: u64) -> u64 {
        if self.by_segments() { 0 } else { passed }
    }

    /// What is left of the ten events when those before `first` were passed by all.
    fn stay(&self, first: u64) -> Vec<u64> {
        (if self.by_segments() { 1 } else { first }..=10).collect()
    }

    async fn prune(&self, policy: RetentionPolicy) -> Pruned {
        self.store.prune(None, &policy).await.expect("pruned")
    }

    async fn left(&self) -> Vec<u64> {
        let records = read_all(&*self.store, &partition(0, 1)).await;
        records.iter().map(|record| number(&record.event)).collect()
    }
}

/// Without any consumer nothing is deleted, however old.
pub async fn nothing_is_pruned_without_a_consumer<H: StoreHarness>() {
    let shed = Shed::<H>::filled().await;
    assert_eq!(shed.prune(ALL).await.events, 0);
    assert_eq!(shed.left().await.len(), 10);
}

/// The slowest consumer's checkpoint bounds what is deleted.
pub async fn nothing_is_pruned_past_the_slowest_consumer<H: StoreHarness>() {
    let shed = Shed::<H>::filled().await;
    shed.pass("fast", 9).await;
    shed.pass("slow", 4).await;
    assert_eq!(shed.prune(ALL).await.events, shed.go(4));
    assert_eq!(shed.left().await, shed.stay(5));
    assert_eq!(shed.prune(ALL).await.events, 0, "there is no more to prune");
    shed.pass("slow", 7).await;
    assert_eq!(shed.prune(ALL).await.events, shed.go(3));
    assert_eq!(shed.left().await, shed.stay(8));
    if shed.by_segments() {
        shed.pass("slow", 10).await;
        assert_eq!(shed.prune(ALL).await.events, 0, "the other one has not passed the last");
        shed.pass("fast", 10).await;
        assert_eq!(shed.prune(ALL).await.events, 10);
        assert_eq!(shed.left().await, [0; 0]);
    }
}

/// Events younger than asked stay, also when every consumer has passed them.
pub async fn young_events_stay<H: StoreHarness>() {
    let shed = Shed::<H>::filled().await;
    shed.pass("sink", 9).await;
    let policy = RetentionPolicy { keep: Duration::from_secs(3_600), ..ALL };
    assert_eq!(shed.prune(policy).await.events, 0);
    assert_eq!(shed.left().await.len(), 10);
}

/// At most one batch is deleted a call, oldest first, and the answer says whether to go on. Whole
/// segments go as such, whatever the batch.
pub async fn pruning_goes_by_batches<H: StoreHarness>() {
    let shed = Shed::<H>::filled().await;
    let policy = RetentionPolicy { batch: 3, ..ALL };
    if shed.by_segments() {
        shed.pass("sink", 10).await;
        let pruned = shed.prune(policy).await;
        assert_eq!((pruned.events, pruned.more), (10, false));
        assert_eq!(shed.prune(policy).await.events, 0);
        return;
    }
    shed.pass("sink", 7).await;
    let first = shed.prune(policy).await;
    assert_eq!((first.events, first.more), (3, true));
    assert_eq!(shed.left().await, [4, 5, 6, 7, 8, 9, 10]);
    let mut events = first.events;
    let mut calls = 1;
    while shed.prune(policy).await.events > 0 {
        events += 3;
        calls += 1;
        assert!(calls < 10, "pruning ends");
    }
    assert!(events >= 7);
    assert!(!shed.prune(policy).await.more);
    assert_eq!(shed.left().await, [8, 9, 10]);
}

/// A dry run counts what would go and deletes nothing.
pub async fn a_dry_run_deletes_nothing<H: StoreHarness>() {
    let shed = Shed::<H>::filled().await;
    shed.pass("sink", 5).await;
    let policy = RetentionPolicy { dry_run: true, ..ALL };
    assert_eq!(shed.prune(policy).await.events, shed.go(5));
    if shed.by_segments() {
        shed.pass("sink", 10).await;
        assert_eq!(shed.prune(policy).await.events, 10);
    }
    assert_eq!(shed.left().await.len(), 10);
    let page = shed.store.read(&partition(0, 1), &shed.records[0].position, WHOLE).await;
    assert_eq!(page.expect("nothing lies below a horizon").entries.len(), 9);
}

/// A position below the horizon is an error that names the horizon; the start means the oldest
/// kept, and the horizon itself can be read from.
pub async fn a_position_below_the_horizon_is_refused_by_name<H: StoreHarness>() {
    let shed = Shed::<H>::filled().await;
    let mut passed = 6;
    if shed.by_segments() {
        passed = 10;
        shed.pass("sink", passed).await;
        shed.prune(ALL).await;
        let more: Vec<_> = (11..=14).map(|n| event("a", n)).collect();
        append(&shed.harness, &more).await;
    }
    shed.pass("sink", passed).await;
    let pruned = shed.prune(ALL).await;
    let horizon = pruned.horizon.expect("something was pruned");
    let only = partition(0, 1);
    let below = shed.store.read(&only, &shed.records[1].position, WHOLE).await;
    let error = below.map(|page| page.entries.len()).expect_err("it lies below the horizon");
    assert_eq!(error.kind(), ErrorKind::Permanent);
    assert!(error.chain().contains(&horizon.to_string()), "{error} names {horizon}");
    for kept in [&Position::START, &horizon, &shed.records[passed - 1].position] {
        let page = shed.store.read(&only, kept, WHOLE).await.expect("the position is kept");
        assert_eq!(page.entries.len(), 4, "after {kept}");
    }
    let old = shed.store.position_at(&only, Timestamp::from_millis(1)).await;
    assert_eq!(old.map_err(|error| error.kind()), Err(ErrorKind::Permanent));
}

/// A removed consumer pins nothing any more; an id that was forgotten may be used again.
pub async fn a_removed_consumer_pins_nothing<H: StoreHarness>() {
    let shed = Shed::<H>::filled().await;
    let id = fresh_id();
    append(&shed.harness, &[event_with_id(id, "a", 11), event("a", 12)]).await;
    shed.harness.pass_time(PAST_SHORT_TTL).await;
    let records = read_all(&*shed.store, &partition(0, 1)).await;
    let shed = Shed { records, ..shed };
    shed.pass("live", if shed.by_segments() { 12 } else { 11 }).await;
    shed.pass("dead", 2).await;
    assert_eq!(shed.prune(ALL).await.events, shed.go(2));
    assert!(shed.store.remove_consumer(&consumer("dead")).await.expect("removed"));
    let (events, left) = if shed.by_segments() { (12, vec![]) } else { (9, vec![12]) };
    assert_eq!(shed.prune(ALL).await.events, events);
    assert_eq!(shed.left().await, left);
}
