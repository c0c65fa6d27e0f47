//! What every store promises of checkpoints and of a consumer's standing.
//!
//! What lives here: positions, tallies, progress and removal. What does not: fencing, retention.
//! Invariant: published + parked + dropped + pending = appended, at every moment.

use postrider_core::{
    Checkpoints, ConsumerProgress, DeadLetterFilter, DeadLetterState, DeadLetters, ErrorKind, Key,
    Leases, Tally,
};

use super::dead_letters::letter;
use super::{StoreHarness, TTL, advance, append, lease, partition, read_all};
use crate::samples::{WHOLE, consumer, event, key};

/// There is none at first; then it stands where it was moved, and its tally adds up.
pub async fn a_checkpoint_is_kept_with_its_tally<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    append(&harness, &[event("a", 1), event("a", 2), event("a", 3)]).await;
    let (store, only, sink) = (harness.store(), partition(0, 1), consumer("sink"));
    assert_eq!(store.checkpoint(&sink, &only).await.expect("readable"), None);
    let records = read_all(&*store, &only).await;
    let held = lease(&harness, &only, "one", TTL).await;
    for (record, published) in records.iter().zip([1, 2, 3]) {
        advance(&harness, &held, &sink, &record.position, 1).await;
        let kept = store.checkpoint(&sink, &only).await.expect("readable").expect("written");
        assert_eq!((kept.position, kept.published), (record.position.clone(), published));
    }
}

/// Moving back is refused and changes nothing; staying is allowed and adds nothing.
pub async fn a_checkpoint_never_moves_back<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    append(&harness, &[event("a", 1), event("a", 2)]).await;
    let (store, only, sink) = (harness.store(), partition(0, 1), consumer("sink"));
    let records = read_all(&*store, &only).await;
    let held = lease(&harness, &only, "one", TTL).await;
    advance(&harness, &held, &sink, &records[1].position, 2).await;
    let tally = Tally { published: 5, parked: 0 };
    let back = store.advance(&held, &sink, &records[0].position, tally).await;
    assert_eq!(back.map_err(|error| error.kind()), Err(ErrorKind::Permanent));
    let kept = store.checkpoint(&sink, &only).await.expect("readable").expect("written");
    assert_eq!((kept.position, kept.published), (records[1].position.clone(), 2));
    // The repetition of a write whose outcome was unknown counts nothing twice.
    advance(&harness, &held, &sink, &records[1].position, 2).await;
    let kept = store.checkpoint(&sink, &only).await.expect("readable").expect("written");
    assert_eq!(kept.published, 2);
}

/// Each consumer has its own checkpoint in each partition.
pub async fn consumers_have_checkpoints_of_their_own<H: StoreHarness>() {
    let harness = H::fresh(2).await;
    let events: Vec<_> = (0..16).map(|n| event(&format!("k{n}"), n)).collect();
    append(&harness, &events).await;
    let store = harness.store();
    let (one, other) = (consumer("one"), consumer("other"));
    let record = read_all(&*store, &partition(0, 2)).await.remove(0);
    let held = lease(&harness, &partition(0, 2), "relay", TTL).await;
    advance(&harness, &held, &one, &record.position, 1).await;
    assert_eq!(store.checkpoint(&other, &partition(0, 2)).await.expect("readable"), None);
    assert_eq!(store.checkpoint(&one, &partition(1, 2)).await.expect("readable"), None);
}

/// Every appended event is published, among the dead letters, dropped, or pending.
pub async fn progress_accounts_for_every_event<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    let events: Vec<_> = (0..10).map(|n| event(&format!("k{n}"), n)).collect();
    append(&harness, &events).await;
    let (store, only, sink) = (harness.store(), partition(0, 1), consumer("sink"));
    let records = read_all(&*store, &only).await;
    let held = lease(&harness, &only, "one", TTL).await;
    let letters: Vec<_> =
        records[..3].iter().map(|record| letter(record, DeadLetterState::Parked)).collect();
    store.park(&held, &sink, &letters).await.expect("parked");
    let tally = Tally { published: 3, parked: 3 };
    store.advance(&held, &sink, &records[5].position, tally).await.expect("moved");
    assert_eq!(standing(&*store).await, [3, 3, 0, 4]);
    let found = store.progress().await.expect("readable");
    assert_eq!(found[0].consumer, sink);
    assert_eq!(found[0].oldest_pending_at, Some(records[6].appended_at));
    assert!(!found[0].ended);
    store.requeue(&of_key("k0")).await.expect("requeued");
    let free = store.released(&sink, &only, WHOLE).await.expect("readable");
    store.resolve(&held, &sink, &[free[0].id]).await.expect("resolved");
    assert_eq!(standing(&*store).await, [4, 2, 0, 4]);
    store.discard(&of_key("k1")).await.expect("dropped");
    store.skip(&of_key("k2")).await.expect("skipped");
    assert_eq!(standing(&*store).await, [4, 1, 1, 4]);
    advance(&harness, &held, &sink, &records[9].position, 4).await;
    assert_eq!(standing(&*store).await, [8, 1, 1, 0]);
    assert_eq!(store.progress().await.expect("readable")[0].oldest_pending_at, None);
}

/// A removed consumer leaves neither checkpoint nor letters; an unknown one is reported so.
pub async fn a_removed_consumer_is_forgotten<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    append(&harness, &[event("a", 1)]).await;
    let (store, only) = (harness.store(), partition(0, 1));
    let (gone, stays) = (consumer("gone"), consumer("stays"));
    let record = read_all(&*store, &only).await.remove(0);
    let held = lease(&harness, &only, "one", TTL).await;
    for consumer in [&gone, &stays] {
        let letters = [letter(&record, DeadLetterState::Parked)];
        store.park(&held, consumer, &letters).await.expect("parked");
        advance(&harness, &held, consumer, &record.position, 0).await;
    }
    store.release(&held).await.expect("released");
    assert!(store.remove_consumer(&gone).await.expect("removed"), "it was known");
    assert!(!store.remove_consumer(&gone).await.expect("answered"), "it is known no more");
    assert_eq!(store.checkpoint(&gone, &only).await.expect("readable"), None);
    let left = store.list(&DeadLetterFilter::default(), None, 10).await.expect("listed");
    assert_eq!(left.iter().map(|letter| &letter.consumer).collect::<Vec<_>>(), [&stays]);
    let progress = store.progress().await.expect("readable");
    assert_eq!(progress.iter().map(|one| &one.consumer).collect::<Vec<_>>(), [&stays]);
}

/// A consumer whose relay is at work can't be removed: it would come back half forgotten.
pub async fn a_consumer_at_work_is_not_removed<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    append(&harness, &[event("a", 1)]).await;
    let (store, only, sink) = (harness.store(), partition(0, 1), consumer("sink"));
    let record = read_all(&*store, &only).await.remove(0);
    let held = lease(&harness, &only, "one", TTL).await;
    advance(&harness, &held, &sink, &record.position, 1).await;
    let refused = store.remove_consumer(&sink).await.map_err(|error| error.kind());
    assert_eq!(refused, Err(ErrorKind::Transient));
    assert!(store.checkpoint(&sink, &only).await.expect("readable").is_some());
    store.release(&held).await.expect("released");
    assert!(store.remove_consumer(&sink).await.expect("removed"));
}

fn of_key(text: &str) -> DeadLetterFilter {
    let key: Key = key(text);
    DeadLetterFilter { key: Some(key), ..DeadLetterFilter::default() }
}

/// Published, parked, dropped and pending of the one consumer.
async fn standing<C: Checkpoints + ?Sized>(store: &C) -> [u64; 4] {
    let progress = store.progress().await.expect("readable");
    let [ConsumerProgress { checkpoint, parked, dropped, pending, .. }] = &progress[..] else {
        panic!("one consumer in one partition, not {progress:?}");
    };
    [checkpoint.published, *parked, *dropped, *pending]
}
