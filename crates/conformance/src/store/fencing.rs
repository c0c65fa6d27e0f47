//! What every store promises of writes under a lease: a stale one writes nothing.
//!
//! What lives here: each fenced write, tried under an epoch that another has outranked. What does
//! not: how a lease is lost (`leases.rs`).
//! Invariant: `Fenced` comes with an unchanged store.

use postrider_core::{
    BatchLimit, Checkpoints, DeadLetterFilter, DeadLetterState, DeadLetters, ErrorKind, Feed,
    Position, Result, Retention, RetentionPolicy, Successor, Tally,
};
use std::time::Duration;

use super::dead_letters::{letter, requeue_all};
use super::{
    PAST_SHORT_TTL, Prunes, SHORT_TTL, StoreHarness, TTL, advance, append, lease, partition,
    read_all, superseded_lease,
};
use crate::samples::{WHOLE, consumer, event};

const ONE: Tally = Tally { published: 1, parked: 0 };

/// After a take-over the old holder's checkpoint is refused and the new one's stands.
pub async fn a_stale_lease_cannot_move_a_checkpoint<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    append(&harness, &[event("a", 1), event("a", 2)]).await;
    let (store, only, sink) = (harness.store(), partition(0, 1), consumer("sink"));
    let records = read_all(&*store, &only).await;
    let (old, new) = superseded_lease(&harness, &only).await;
    assert_fenced(store.advance(&old, &sink, &records[0].position, ONE).await);
    assert_eq!(store.checkpoint(&sink, &only).await.expect("readable"), None);
    advance(&harness, &new, &sink, &records[0].position, 1).await;
    assert_fenced(store.advance(&old, &sink, &records[1].position, ONE).await);
    let kept = store.checkpoint(&sink, &only).await.expect("readable").expect("there is one");
    assert_eq!((kept.position, kept.published), (records[0].position.clone(), 1));
}

/// After a take-over the old holder cannot end the partition for the consumer.
pub async fn a_stale_lease_cannot_finish_a_partition<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    let (store, only, sink) = (harness.store(), partition(0, 1), consumer("sink"));
    let (old, _new) = superseded_lease(&harness, &only).await;
    let successor = Successor { partition: partition(0, 2), from: Position::START };
    assert_fenced(store.finish(&old, &sink, &[successor]).await);
    let successor = store.checkpoint(&sink, &partition(0, 2)).await.expect("readable");
    assert_eq!(successor, None);
    assert_eq!(store.partitions(&sink).await.expect("listed"), [only]);
}

/// After a take-over the old holder cannot add dead letters.
pub async fn a_stale_lease_cannot_park<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    append(&harness, &[event("a", 1)]).await;
    let (store, only) = (harness.store(), partition(0, 1));
    let record = read_all(&*store, &only).await.remove(0);
    let (old, _new) = superseded_lease(&harness, &only).await;
    let letters = [letter(&record, DeadLetterState::Parked)];
    assert_fenced(store.park(&old, &consumer("sink"), &letters).await.map(drop));
    let listed = store.list(&DeadLetterFilter::default(), None, 10).await.expect("listed");
    assert!(listed.is_empty());
}

/// After a take-over the old holder can neither remove a letter nor park it again: a late answer
/// of its sink changes nothing.
pub async fn a_stale_lease_cannot_resolve_or_refuse<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    append(&harness, &[event("a", 1)]).await;
    let (store, only, sink) = (harness.store(), partition(0, 1), consumer("sink"));
    let record = read_all(&*store, &only).await.remove(0);
    let old = lease(&harness, &only, "old", SHORT_TTL).await;
    let letters = [letter(&record, DeadLetterState::Parked)];
    store.park(&old, &sink, &letters).await.expect("parked");
    advance(&harness, &old, &sink, &record.position, 0).await;
    requeue_all(&*store).await;
    let before = store.released(&sink, &only, WHOLE).await.expect("readable");
    harness.pass_time(PAST_SHORT_TTL).await;
    lease(&harness, &only, "new", TTL).await;
    assert_fenced(store.resolve(&old, &sink, &[before[0].id]).await);
    assert_fenced(store.refuse(&old, before[0].id, DeadLetterState::Parked, "no", 1).await);
    assert_eq!(store.released(&sink, &only, WHOLE).await.expect("readable"), before);
}

/// After a take-over the old leader cannot prune.
pub async fn a_stale_lease_cannot_prune<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    append(&harness, &[event("a", 1), event("a", 2), event("a", 3)]).await;
    let (store, only) = (harness.store(), partition(0, 1));
    let records = read_all(&*store, &only).await;
    let (old, new) = superseded_lease(&harness, &only).await;
    // Others may never prune the last one; a whole segment goes with it alone.
    let last = if harness.features().pruning == Prunes::Segments { 2 } else { 1 };
    advance(&harness, &new, &consumer("sink"), &records[last].position, 2).await;
    harness.pass_time(PAST_SHORT_TTL).await;
    let policy = RetentionPolicy { keep: Duration::ZERO, batch: 10, dry_run: false };
    assert_fenced(store.prune(Some(&old), &policy).await.map(drop));
    assert_eq!(read_all(&*store, &only).await.len(), 3);
    let pruned = store.prune(Some(&new), &policy).await.expect("the holder may prune");
    assert_eq!(pruned.events, last as u64 + 1);
}

/// A holder whose lease ran out unnoticed may finish its write while no other has the lease: its
/// epoch is still the highest.
pub async fn an_expired_lease_that_nobody_took_still_writes<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    append(&harness, &[event("a", 1)]).await;
    let (store, only, sink) = (harness.store(), partition(0, 1), consumer("sink"));
    let record = read_all(&*store, &only).await.remove(0);
    let held = lease(&harness, &only, "one", SHORT_TTL).await;
    harness.pass_time(PAST_SHORT_TTL).await;
    store.advance(&held, &sink, &record.position, ONE).await.expect("nobody outranks it");
    let letters = store.released(&sink, &only, BatchLimit { records: 1, bytes: 1 }).await;
    assert!(letters.expect("readable").is_empty());
}

fn assert_fenced(result: Result<()>) {
    assert_eq!(result.map_err(|error| error.kind()), Err(ErrorKind::Fenced));
}
