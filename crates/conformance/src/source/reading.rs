//! What every source promises its readers.
//!
//! What lives here: reading, resuming, starting places and the end of a partition. What does not:
//! positions' meaning.
//! Invariant: what one reader handed out, a later one hands out again, in the same order.

use std::time::Duration;

use postrider_core::{
    Batch, BatchLimit, Entry, ErrorKind, NewEvent, PartitionId, Position, ReadOutcome, Reader,
    Record, Source, StartFrom,
};

use super::SourceHarness;
use crate::samples::{WHOLE, consumer, event, number};
use crate::store::Supports;

const A_MOMENT: Duration = Duration::from_millis(20);
/// Long enough for any reader to find what is there; a broken one fails by it.
const PATIENCE: Duration = Duration::from_secs(20);

async fn partitions(source: &dyn Source) -> Vec<PartitionId> {
    source.partitions(&consumer("c")).await.expect("partitions are listed")
}

async fn only_partition(source: &dyn Source) -> PartitionId {
    partitions(source).await.remove(0)
}

async fn open(source: &dyn Source, partition: &PartitionId, from: StartFrom) -> Box<dyn Reader> {
    source.open(&consumer("c"), partition, from).await.expect("the reader opens")
}

async fn next(reader: &mut dyn Reader, limit: BatchLimit) -> ReadOutcome {
    let outcome = tokio::time::timeout(PATIENCE, reader.next(limit)).await;
    outcome.expect("the reader finds something in time").expect("the read succeeds")
}

async fn next_batch(reader: &mut dyn Reader, limit: BatchLimit) -> Batch {
    match next(reader, limit).await {
        ReadOutcome::Batch(batch) => batch,
        ReadOutcome::Ended(successors) => panic!("the partition ended: {successors:?}"),
    }
}

fn records(batch: &Batch) -> Vec<Record> {
    let record = |entry: &Entry| match entry {
        Entry::Record(record) => record.clone(),
        Entry::Malformed(malformed) => panic!("unreadable entry: {malformed:?}"),
    };
    batch.entries.iter().map(record).collect()
}

/// Reads on until `count` records came.
async fn take(reader: &mut dyn Reader, count: usize, limit: BatchLimit) -> Vec<Record> {
    let mut all = Vec::new();
    while all.len() < count {
        all.extend(records(&next_batch(reader, limit).await));
    }
    assert_eq!(all.len(), count, "no more than was appended");
    all
}

fn numbers(records: &[Record]) -> Vec<u64> {
    records.iter().map(|record| number(&record.event)).collect()
}

fn numbered(range: std::ops::Range<u64>) -> Vec<NewEvent> {
    range.map(|n| event(&format!("k{}", n % 3), n)).collect()
}

/// Events of several transactions come once each, in order, over batches of any size.
pub async fn every_event_is_read_once_and_in_order<H: SourceHarness>() {
    let harness = H::fresh(1).await;
    for n in 0..5 {
        harness.append(&numbered(n * 4..n * 4 + 4)).await;
    }
    let source = harness.source();
    let only = only_partition(&*source).await;
    for records in [1, 3, 100] {
        let mut reader = open(&*source, &only, StartFrom::Oldest).await;
        let all = take(&mut *reader, 20, BatchLimit { records, ..WHOLE }).await;
        assert_eq!(numbers(&all), (0..20).collect::<Vec<u64>>());
    }
}

/// A reader opened after any record's position, or any batch's, goes on exactly there.
pub async fn reading_resumes_at_every_record<H: SourceHarness>() {
    let harness = H::fresh(1).await;
    harness.append(&numbered(0..8)).await;
    let source = harness.source();
    let only = only_partition(&*source).await;
    let mut reader = open(&*source, &only, StartFrom::Oldest).await;
    let all = take(&mut *reader, 8, WHOLE).await;
    for (i, record) in all[..7].iter().enumerate() {
        let from = StartFrom::After(record.position.clone());
        let mut again = open(&*source, &only, from).await;
        assert_eq!(take(&mut *again, 7 - i, WHOLE).await, all[i + 1..], "after record {i}");
    }
    let mut reader = open(&*source, &only, StartFrom::Oldest).await;
    let first = next_batch(&mut *reader, BatchLimit { records: 3, ..WHOLE }).await;
    let seen = first.entries.len();
    let mut again = open(&*source, &only, StartFrom::After(first.position)).await;
    assert_eq!(take(&mut *again, 8 - seen, WHOLE).await, all[seen..]);
}

/// At the head a reader waits, and what is appended then wakes it.
pub async fn a_reader_waits_for_what_comes<H: SourceHarness>() {
    let harness = H::fresh(1).await;
    let source = harness.source();
    let only = only_partition(&*source).await;
    let mut reader = open(&*source, &only, StartFrom::Oldest).await;
    let (seen, ()) = tokio::join!(take(&mut *reader, 2, WHOLE), async {
        tokio::task::yield_now().await;
        harness.append(&numbered(0..2)).await;
    });
    assert_eq!(numbers(&seen), [0, 1]);
}

/// A call that is dropped while it waits takes nothing with it.
pub async fn a_dropped_call_loses_nothing<H: SourceHarness>() {
    let harness = H::fresh(1).await;
    let source = harness.source();
    let only = only_partition(&*source).await;
    let mut reader = open(&*source, &only, StartFrom::Oldest).await;
    let mut seen = Vec::new();
    for n in 0..4 {
        let cut = tokio::time::timeout(Duration::from_millis(3), reader.next(WHOLE)).await;
        if let Ok(outcome) = cut {
            let ReadOutcome::Batch(batch) = outcome.expect("the read succeeds") else {
                panic!("the partition ended")
            };
            seen.extend(records(&batch));
        }
        harness.append(&numbered(n * 2..n * 2 + 2)).await;
    }
    let left = 8 - seen.len();
    seen.extend(take(&mut *reader, left, WHOLE).await);
    assert_eq!(numbers(&seen), (0..8).collect::<Vec<u64>>());
}

/// A batch has no more records and bytes than asked for, unless a single event is larger.
pub async fn a_batch_keeps_to_its_limits<H: SourceHarness>() {
    let harness = H::fresh(1).await;
    harness.append(&numbered(0..10)).await;
    let source = harness.source();
    let only = only_partition(&*source).await;
    for limit in [BatchLimit { records: 3, ..WHOLE }, BatchLimit { records: 100, bytes: 1_300 }] {
        let mut reader = open(&*source, &only, StartFrom::Oldest).await;
        let mut seen = 0;
        while seen < 10 {
            let batch = next_batch(&mut *reader, limit).await;
            let bytes: usize = batch.entries.iter().map(Entry::cost_bytes).sum();
            assert!(batch.entries.len() <= limit.records);
            assert!(bytes <= limit.bytes || batch.entries.len() == 1, "{bytes} bytes");
            seen += batch.entries.len();
        }
    }
}

/// Oldest, now, a time and a position are each where they say.
pub async fn readers_begin_where_they_are_told<H: SourceHarness>() {
    let harness = H::fresh(1).await;
    harness.append(&numbered(0..2)).await;
    harness.pass_time(A_MOMENT).await;
    harness.append(&numbered(2..4)).await;
    let source = harness.source();
    let only = only_partition(&*source).await;
    let mut oldest = open(&*source, &only, StartFrom::Oldest).await;
    let all = take(&mut *oldest, 4, WHOLE).await;
    let mut now = open(&*source, &only, StartFrom::Now).await;
    let time = StartFrom::Time(all[2].appended_at);
    let mut time = open(&*source, &only, time).await;
    let mut after = open(&*source, &only, StartFrom::After(all[0].position.clone())).await;
    harness.append(&numbered(4..5)).await;
    assert_eq!(numbers(&take(&mut *now, 1, WHOLE).await), [4]);
    assert_eq!(numbers(&take(&mut *time, 3, WHOLE).await), [2, 3, 4]);
    assert_eq!(numbers(&take(&mut *after, 4, WHOLE).await), [1, 2, 3, 4]);
}

/// A reader that begins "now" tells that place before anything happens: whoever goes on there
/// later, in another process, misses nothing that came in between.
pub async fn a_reader_tells_where_it_begins<H: SourceHarness>() {
    let harness = H::fresh(1).await;
    harness.append(&numbered(0..2)).await;
    let source = harness.source();
    let only = only_partition(&*source).await;
    let mut now = open(&*source, &only, StartFrom::Now).await;
    let first = next_batch(&mut *now, WHOLE).await;
    assert_eq!(records(&first), []);
    harness.append(&numbered(2..4)).await;
    let mut later = open(&*source, &only, StartFrom::After(first.position)).await;
    assert_eq!(numbers(&take(&mut *later, 2, WHOLE).await), [2, 3]);
    assert_eq!(numbers(&take(&mut *now, 2, WHOLE).await), [2, 3]);
}

/// Several readers of one partition each get everything.
pub async fn readers_do_not_disturb_each_other<H: SourceHarness>() {
    let harness = H::fresh(1).await;
    harness.append(&numbered(0..6)).await;
    let source = harness.source();
    let only = only_partition(&*source).await;
    let mut one = open(&*source, &only, StartFrom::Oldest).await;
    let mut other = open(&*source, &only, StartFrom::Oldest).await;
    let limit = BatchLimit { records: 2, ..WHOLE };
    let mut seen = (Vec::new(), Vec::new());
    while seen.0.len() < 6 {
        seen.0.extend(records(&next_batch(&mut *one, limit).await));
        seen.1.extend(records(&next_batch(&mut *other, limit).await));
    }
    assert_eq!(seen.0, seen.1);
}

/// Confirming reports progress; it neither skips nor repeats, for this reader or the next.
pub async fn confirming_changes_nothing_that_is_read<H: SourceHarness>() {
    let harness = H::fresh(1).await;
    harness.append(&numbered(0..6)).await;
    let source = harness.source();
    let only = only_partition(&*source).await;
    let mut reader = open(&*source, &only, StartFrom::Oldest).await;
    let limit = BatchLimit { records: 1, ..WHOLE };
    let mut all = Vec::new();
    while all.len() < 4 {
        let batch = next_batch(&mut *reader, limit).await;
        reader.confirmed(&batch.position);
        all.extend(records(&batch));
    }
    let resumed = StartFrom::After(all[3].position.clone());
    drop(reader);
    let mut next = open(&*source, &only, resumed).await;
    all.extend(take(&mut *next, 2, WHOLE).await);
    assert_eq!(numbers(&all), (0..6).collect::<Vec<u64>>());
}

/// A position that is not this source's own is refused on opening or on the first read.
pub async fn a_refused_position_is_an_error<H: SourceHarness>() {
    let harness = H::fresh(1).await;
    harness.append(&numbered(0..2)).await;
    let source = harness.source();
    let only = only_partition(&*source).await;
    for bytes in [&b"not a position"[..], &[0xff; 16], &[7; 400]] {
        let position = Position::from_bytes(bytes).expect("a short position");
        let kind = match source.open(&consumer("c"), &only, StartFrom::After(position)).await {
            Err(error) => error.kind(),
            Ok(mut reader) => {
                let read = tokio::time::timeout(PATIENCE, reader.next(WHOLE)).await;
                read.expect("it is answered").expect_err("it is refused").kind()
            }
        };
        assert_eq!(kind, ErrorKind::Permanent);
    }
    let unknown = PartitionId::new("no such partition").expect("a valid name");
    let answer = match source.open(&consumer("c"), &unknown, StartFrom::Now).await {
        Err(error) => Err(error),
        Ok(mut reader) => reader.next(WHOLE).await,
    };
    assert_eq!(answer.map(drop).map_err(|error| error.kind()), Err(ErrorKind::Permanent));
}

/// The list is the same each time it is asked for, whoever asks.
pub async fn partitions_are_listed_in_a_stable_order<H: SourceHarness>() {
    let harness = H::fresh(4).await;
    let source = harness.source();
    let first = partitions(&*source).await;
    assert!(!first.is_empty());
    assert_eq!(partitions(&*harness.source()).await, first);
    let other = source.partitions(&consumer("other")).await.expect("listed");
    assert_eq!(other, first);
}

/// The identity stays while the data does, and another source has another.
pub async fn an_identity_names_the_data<H: SourceHarness>() {
    let (one, other) = (H::fresh(1).await, H::fresh(1).await);
    let identity = one.source().identity();
    one.append(&numbered(0..1)).await;
    assert_eq!(one.source().identity(), identity);
    assert_ne!(other.source().identity(), identity);
    assert!((1..=255).contains(&identity.len()), "{identity}");
}

/// After its last record a partition that was split or raised says who takes over, and from where;
/// together they have every later event. One that can't be answers `Unsupported`.
pub async fn a_partition_that_ends_names_its_successors<H: SourceHarness>() {
    let harness = H::fresh(1).await;
    if harness.raising() == Supports::No {
        let answer = harness.raise_partitions(2).await.map_err(|error| error.kind());
        assert_eq!(answer, Err(ErrorKind::Unsupported));
        return;
    }
    harness.append(&numbered(0..6)).await;
    let source = harness.source();
    let only = only_partition(&*source).await;
    harness.raise_partitions(2).await.expect("raised");
    harness.append(&numbered(6..12)).await;
    let mut reader = open(&*source, &only, StartFrom::Oldest).await;
    assert_eq!(numbers(&take(&mut *reader, 6, WHOLE).await), (0..6).collect::<Vec<u64>>());
    let successors = loop {
        match next(&mut *reader, WHOLE).await {
            ReadOutcome::Batch(batch) => assert!(batch.entries.is_empty(), "all were read"),
            ReadOutcome::Ended(successors) => break successors,
        }
    };
    assert_eq!(successors.len(), 2);
    let mut later = Vec::new();
    for successor in successors {
        let from = StartFrom::After(successor.from);
        let mut reader = open(&*source, &successor.partition, from).await;
        loop {
            let wait = Duration::from_millis(100);
            match tokio::time::timeout(wait, reader.next(WHOLE)).await {
                Ok(Ok(ReadOutcome::Batch(batch))) => later.extend(records(&batch)),
                Ok(other) => panic!("a successor reads on, not {other:?}"),
                Err(_) => break,
            }
        }
    }
    let mut later = numbers(&later);
    later.sort_unstable();
    assert_eq!(later, (6..12).collect::<Vec<u64>>());
}
