//! What every store promises when the number of partitions is raised.
//!
//! What lives here: generations, successors, and letters that move. What does not: hashing.
//! Invariant: a consumer that reads a partition only after it has finished the one before sees each
//! key in the order of its commits.

use std::collections::HashMap;

use postrider_core::{
    Checkpoints, DeadLetterState, DeadLetters, ErrorKind, Feed, PartitionId, Position, Record,
    Successor, key_hash,
};

use super::dead_letters::{letter, requeue_all};
use super::{StoreHarness, Supports, TTL, advance, append, lease, partition, read_all};
use crate::samples::{WHOLE, consumer, event, key, number};

/// Whether the store can; if it can't, it must say so.
async fn can_raise<H: StoreHarness>(harness: &H) -> bool {
    if harness.features().raising == Supports::Yes {
        return true;
    }
    let answer = harness.raise_partitions(4).await.map_err(|error| error.kind());
    assert_eq!(answer, Err(ErrorKind::Unsupported));
    false
}

/// Reads a partition to its end: its records and who takes over.
async fn read_to_end<F: Feed + ?Sized>(
    feed: &F,
    partition: &PartitionId,
) -> (Vec<Record>, Position, Vec<Successor>) {
    let records = read_all(feed, partition).await;
    let after = records.last().map_or(Position::START, |record| record.position.clone());
    let page = feed.read(partition, &after, WHOLE).await.expect("the end is readable");
    assert!(page.entries.is_empty());
    (records, page.position, page.ended.expect("the partition has ended"))
}

/// Finishes a partition for the consumer: checkpoint at its end, successors' checkpoints.
async fn finish<H: StoreHarness>(harness: &H, id: &PartitionId) -> Vec<Successor> {
    let (_, end, successors) = read_to_end(&*harness.store(), id).await;
    let held = lease(harness, id, "one", TTL).await;
    advance(harness, &held, &consumer("sink"), &end, 0).await;
    let done = harness.store().finish(&held, &consumer("sink"), &successors).await;
    done.expect("finished");
    successors
}

/// A consumer that goes from each old partition to its successors sees every event once and each
/// key in order, across two raises.
pub async fn raising_keeps_a_keys_order<H: StoreHarness>() {
    let harness = H::fresh(2).await;
    if !can_raise(&harness).await {
        return;
    }
    let mut appended = 0;
    for count in [2, 4, 12] {
        if count > 2 {
            harness.raise_partitions(count).await.expect("raised");
        }
        let events: Vec<_> =
            (appended..appended + 40).map(|n| event(&format!("k{}", n % 10), n)).collect();
        append(&harness, &events).await;
        appended += 40;
    }
    let store = harness.store();
    let mut by_key: HashMap<String, Vec<u64>> = HashMap::new();
    for generation in [2, 4, 12] {
        let listed = store.partitions(&consumer("sink")).await.expect("listed");
        let expected: Vec<_> = (0..generation).map(|i| partition(i, generation)).collect();
        assert_eq!(listed, expected);
        for id in &listed {
            for record in read_all(&*store, id).await {
                let seen = by_key.entry(record.event.key().as_str().to_owned()).or_default();
                seen.push(number(&record.event));
            }
            if generation < 12 {
                finish(&harness, id).await;
            }
        }
    }
    assert_eq!(by_key.values().map(Vec::len).sum::<usize>(), 120);
    for (key, numbers) in by_key {
        assert!(numbers.is_sorted_by(|a, b| a < b), "key {key} was reordered: {numbers:?}");
    }
}

/// A successor is listed only to a consumer that has finished its predecessor, which is listed no
/// more; each new partition has one predecessor; a newcomer begins with the oldest generation.
pub async fn a_successor_is_listed_once_its_predecessor_is_finished<H: StoreHarness>() {
    let harness = H::fresh(2).await;
    if !can_raise(&harness).await {
        return;
    }
    append(&harness, &[event("a", 1)]).await;
    harness.raise_partitions(4).await.expect("raised");
    let store = harness.store();
    let sink = consumer("sink");
    let old = [partition(0, 2), partition(1, 2)];
    assert_eq!(store.partitions(&sink).await.expect("listed"), old);
    let successors = finish(&harness, &old[1]).await;
    let names: Vec<_> = successors.into_iter().map(|one| one.partition).collect();
    assert_eq!(names, [partition(1, 4), partition(3, 4)]);
    let mut listed = store.partitions(&sink).await.expect("listed");
    listed.sort();
    assert_eq!(listed, [partition(0, 2), partition(1, 4), partition(3, 4)]);
    assert_eq!(store.partitions(&consumer("newcomer")).await.expect("listed"), old);
    finish(&harness, &old[0]).await;
    let listed = store.partitions(&sink).await.expect("listed");
    assert_eq!(listed.len(), 4);
    assert!(listed.iter().all(|id| !old.contains(id)), "{listed:?}");
    let progress = store.progress().await.expect("readable");
    let ended: Vec<_> = progress.iter().filter(|one| one.ended).map(|one| &one.partition).collect();
    assert_eq!(ended, [&old[0], &old[1]]);
}

/// Finishing a partition again, as after a crash, does not move a successor's checkpoint.
pub async fn finishing_again_changes_nothing<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    if !can_raise(&harness).await {
        return;
    }
    append(&harness, &[event("a", 1)]).await;
    harness.raise_partitions(2).await.expect("raised");
    append(&harness, &[event("a", 2)]).await;
    let successors = finish(&harness, &partition(0, 1)).await;
    let (store, sink) = (harness.store(), consumer("sink"));
    let new = partition(key_hash(&key("a")) % 2, 2);
    let record = read_all(&*store, &new).await.remove(0);
    let held = lease(&harness, &new, "one", TTL).await;
    advance(&harness, &held, &sink, &record.position, 1).await;
    let old = lease(&harness, &partition(0, 1), "one", TTL).await;
    store.finish(&old, &sink, &successors).await.expect("finishing again is no error");
    let kept = store.checkpoint(&sink, &new).await.expect("readable").expect("written");
    assert_eq!((kept.position, kept.published), (record.position, 1));
}

/// A dead letter of a finished partition holds its key's later events back in the successor, and
/// is released there: nobody works on the old partition any more.
pub async fn a_letter_follows_its_key<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    if !can_raise(&harness).await {
        return;
    }
    append(&harness, &[event("a", 1), event("b", 2)]).await;
    let (store, sink) = (harness.store(), consumer("sink"));
    let records = read_all(&*store, &partition(0, 1)).await;
    let held = lease(&harness, &partition(0, 1), "one", TTL).await;
    let letters: Vec<_> = records.iter().map(|r| letter(r, DeadLetterState::Parked)).collect();
    store.park(&held, &sink, &letters).await.expect("parked");
    harness.raise_partitions(16).await.expect("raised");
    finish(&harness, &partition(0, 1)).await;
    requeue_all(&*store).await;
    for (text, number_of) in [("a", 1), ("b", 2)] {
        let new = partition(key_hash(&key(text)) % 16, 16);
        let keys = [key("a"), key("b")];
        let blocked = store.blocked(&sink, &new, &keys).await.expect("readable");
        assert_eq!(blocked, [key(text)], "in {new}");
        let free = store.released(&sink, &new, WHOLE).await.expect("readable");
        let postrider_core::Entry::Record(record) = &free[0].entry else { panic!("a record") };
        assert_eq!((free.len(), number(&record.event)), (1, number_of));
        let held = lease(&harness, &new, "one", TTL).await;
        store.resolve(&held, &sink, &[free[0].id]).await.expect("resolved");
        assert_eq!(store.blocking(&sink, &new).await.expect("readable"), 0);
    }
}

/// Only a multiple of the present number keeps keys together; all else is refused.
pub async fn partitions_are_raised_by_a_multiple_only<H: StoreHarness>() {
    let harness = H::fresh(2).await;
    if !can_raise(&harness).await {
        return;
    }
    for count in [0, 1, 2, 3, 5, postrider_core::limits::MAX_PARTITIONS * 2] {
        let answer = harness.raise_partitions(count).await.map_err(|error| error.kind());
        assert_eq!(answer, Err(ErrorKind::Permanent), "2 to {count}");
    }
    harness.raise_partitions(6).await.expect("a multiple is accepted");
}
