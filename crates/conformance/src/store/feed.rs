//! What every store promises of its feed: the contract, clause by clause.
//!
//! What lives here: order, completeness and positions. What does not: retention and raising, which
//! have files of their own.
//! Invariant: nothing committed is skipped, and nothing appears behind what was read.

use std::collections::HashSet;
use std::time::Duration;

use postrider_core::ulid::Ulid;
use postrider_core::{
    BatchLimit, ErrorKind, Feed, NewEvent, PartitionId, Position, Record, Timestamp, key_hash,
};
use tokio::task::JoinSet;

use super::{StoreHarness, Times, Writers, append, partition, read_all, read_from};
use crate::samples::{WHOLE, consumer, event, key, number, sized_event};

const A_MOMENT: Duration = Duration::from_millis(20);

/// Two transactions are open and the younger commits first: the reader gets it at once, and the
/// elder later, behind nothing that was read. A store with one writer gets them one by one.
pub async fn a_late_commit_is_not_skipped<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    let store = harness.store();
    let only = partition(0, 1);
    append(&harness, &[event("before", 0)]).await;
    let mut elder = harness.begin().await;
    harness.append(&mut elder, &[event("elder", 1)]).await.expect("the append is accepted");
    let concurrent = harness.features().writers == Writers::Concurrent;
    if concurrent {
        append(&harness, &[event("younger", 2)]).await;
    }
    let (seen, after) = read_from(&*store, &only, &Position::START, WHOLE).await;
    assert_eq!(numbers(&seen), if concurrent { vec![0, 2] } else { vec![0] });
    harness.pass_time(A_MOMENT).await;
    let (_, after) = read_from(&*store, &only, &after, WHOLE).await;
    harness.commit(elder).await.expect("the commit succeeds");
    if !concurrent {
        append(&harness, &[event("younger", 2)]).await;
    }
    let (late, _) = read_from(&*store, &only, &after, WHOLE).await;
    assert_eq!(numbers(&late), if concurrent { vec![1] } else { vec![1, 2] });
    let replayed = read_all(&*store, &only).await;
    assert_eq!(replayed, [seen, late].concat(), "nothing moved, nothing appeared behind");
}

/// While a transaction stays open, readers answer at once and show neither its events nor less
/// than what was committed before.
pub async fn an_open_transaction_holds_no_reader_back<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    append(&harness, &[event("a", 1)]).await;
    let mut open = harness.begin().await;
    harness.append(&mut open, &[event("a", 2)]).await.expect("the append is accepted");
    let store = harness.store();
    let only = partition(0, 1);
    let read = tokio::time::timeout(Duration::from_secs(10), read_all(&*store, &only)).await;
    assert_eq!(numbers(&read.expect("the reader does not wait for the writer")), [1]);
    harness.rollback(open).await;
}

/// Readers with pages of different sizes, reading while others write, see one and the same order.
pub async fn concurrent_readers_agree<H: StoreHarness>() {
    const WRITERS: u64 = 3;
    const EACH: u64 = 20;
    let harness = std::sync::Arc::new(H::fresh(1).await);
    let mut writers = JoinSet::new();
    for writer in 0..WRITERS {
        let harness = std::sync::Arc::clone(&harness);
        writers.spawn(async move {
            for i in 0..EACH {
                append(&*harness, &[event(&format!("w{writer}"), writer * EACH + i)]).await;
            }
        });
    }
    let mut readers = JoinSet::new();
    for records in [1, 3, 100] {
        let harness = std::sync::Arc::clone(&harness);
        readers.spawn(async move {
            let limit = BatchLimit { records, ..WHOLE };
            let store = harness.store();
            let all = follow(&*store, (WRITERS * EACH) as usize, limit);
            tokio::time::timeout(Duration::from_secs(60), all).await.expect("all are seen")
        });
    }
    while let Some(done) = writers.join_next().await {
        done.expect("a writer ends well");
    }
    let expected = read_all(&*harness.store(), &partition(0, 1)).await;
    assert_eq!(expected.len() as u64, WRITERS * EACH);
    while let Some(seen) = readers.join_next().await {
        assert_eq!(seen.expect("a reader ends well"), expected);
    }
    for writer in 0..WRITERS {
        let of_key = |record: &&Record| number(&record.event) / EACH == writer;
        let order: Vec<u64> = expected.iter().filter(of_key).map(|r| number(&r.event)).collect();
        assert!(order.is_sorted(), "key w{writer} was reordered: {order:?}");
    }
}

/// Reading again, from the start or after any record and by any page size, gives the same records
/// at the same positions.
pub async fn a_replay_is_identical_from_every_record<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    for batch in 0..5u64 {
        let events: Vec<NewEvent> =
            (0..4).map(|i| event(&format!("k{}", i % 2), batch * 4 + i)).collect();
        append(&harness, &events).await;
    }
    let store = harness.store();
    let only = partition(0, 1);
    let all = read_all(&*store, &only).await;
    assert_eq!(all.len(), 20);
    for records in [1, 2, 7, 20, 21] {
        let limit = BatchLimit { records, ..WHOLE };
        assert_eq!(read_from(&*store, &only, &Position::START, limit).await.0, all);
    }
    for (i, record) in all.iter().enumerate() {
        let (rest, _) = read_from(&*store, &only, &record.position, WHOLE).await;
        assert_eq!(rest, all[i + 1..], "after record {i}");
    }
}

/// What was known to be committed before a transaction began comes before it, whatever the keys.
pub async fn an_earlier_commit_comes_first<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    for n in 0..30 {
        append(&harness, &[event(&format!("k{}", n % 7), n)]).await;
    }
    let all = read_all(&*harness.store(), &partition(0, 1)).await;
    assert_eq!(numbers(&all), (0..30).collect::<Vec<u64>>());
}

/// Pages may be short, and reading on until an empty one gives everything; at the head every page
/// is empty, without an error.
pub async fn only_an_empty_page_means_the_head<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    let (store, only) = (harness.store(), partition(0, 1));
    let empty = store.read(&only, &Position::START, WHOLE).await.expect("an empty feed is read");
    assert!(empty.entries.is_empty() && empty.ended.is_none());
    let events: Vec<NewEvent> = (0..25).map(|n| event("a", n)).collect();
    append(&harness, &events).await;
    let limit = BatchLimit { records: 4, ..WHOLE };
    let (all, end) = read_from(&*store, &only, &Position::START, limit).await;
    assert_eq!(all.len(), 25);
    let again = store.read(&only, &end, limit).await.expect("the head is read again");
    assert!(again.entries.is_empty());
}

/// A page has at most the records and bytes asked for; an event above the bytes comes alone.
pub async fn a_page_keeps_to_its_limits<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    let sizes = [10, 10, 5_000, 10, 10, 10];
    let events: Vec<NewEvent> =
        sizes.iter().zip(0..).map(|(bytes, n)| sized_event("a", n, *bytes)).collect();
    append(&harness, &events).await;
    let (store, only) = (harness.store(), partition(0, 1));
    for limit in [
        BatchLimit { records: 2, ..WHOLE },
        BatchLimit { records: 100, bytes: 2_000 },
        BatchLimit { records: 100, bytes: 1 },
    ] {
        let mut after = Position::START;
        let mut seen = 0;
        loop {
            let page = store.read(&only, &after, limit).await.expect("the page is readable");
            let bytes: usize = page.entries.iter().map(|entry| entry.cost_bytes()).sum();
            assert!(page.entries.len() <= limit.records, "{} records", page.entries.len());
            assert!(bytes <= limit.bytes || page.entries.len() == 1, "{bytes} bytes");
            if page.entries.is_empty() {
                break;
            }
            seen += page.entries.len();
            after = page.position;
        }
        assert_eq!(seen, sizes.len());
    }
}

/// Positions have 16 bytes and grow bytewise, and a page's position is its last record's or later.
pub async fn positions_are_ulids_that_grow<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    for n in 0..10 {
        append(&harness, &[event("a", 2 * n), event("b", 2 * n + 1)]).await;
    }
    let store = harness.store();
    let all = read_all(&*store, &partition(0, 1)).await;
    let ulids: Vec<Ulid> =
        all.iter().map(|r| r.position.to_ulid().expect("a feed's position is a ULID")).collect();
    assert!(ulids.is_sorted_by(|a, b| a < b), "{ulids:?}");
    assert!(ulids.iter().zip(&all).all(|(ulid, r)| match harness.features().times {
        Times::OfTheAppend => ulid.time() == r.appended_at,
        Times::OfTheLook => ulid.time() >= r.appended_at,
    }));
    let page = store.read(&partition(0, 1), &Position::START, WHOLE).await.expect("readable");
    let last = page.entries.last().expect("the page has entries").position();
    let end = page.position.to_ulid().expect("a ULID");
    assert!(end >= last.to_ulid().expect("a ULID"));
}

/// A position that no record has reached yet is refused, never answered with what lies below it.
pub async fn a_position_beyond_the_head_is_refused<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    append(&harness, &[event("a", 1)]).await;
    let (store, only) = (harness.store(), partition(0, 1));
    let last = read_all(&*store, &only).await.remove(0);
    let day = Duration::from_secs(86_400);
    let tomorrow = last.appended_at.plus(day * 366);
    for beyond in
        [Ulid::from_time(tomorrow), Ulid::from_parts(tomorrow, 1, 1), Ulid::from_bytes([255; 16])]
    {
        assert_refused(&*store, &only, &beyond.into()).await;
    }
}

/// A position between records that is no plain time is refused.
pub async fn a_position_that_names_nothing_is_refused<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    append(&harness, &[event("a", 1)]).await;
    harness.pass_time(A_MOMENT).await;
    append(&harness, &[event("a", 2)]).await;
    let (store, only) = (harness.store(), partition(0, 1));
    let first = read_all(&*store, &only).await.remove(0).position.to_ulid().expect("a ULID");
    let nothing = Ulid::from_parts(first.time(), first.middle() ^ 0x5555, first.low());
    assert_refused(&*store, &only, &nothing.into()).await;
    let plain = Ulid::from_time(first.time());
    let (from_time, _) = read_from(&*store, &only, &plain.into(), WHOLE).await;
    assert_eq!(numbers(&from_time), [1, 2], "a plain time is a position");
}

/// A position that is no ULID comes from another kind of source and is refused.
pub async fn a_position_of_another_source_is_refused<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    append(&harness, &[event("a", 1)]).await;
    let (store, only) = (harness.store(), partition(0, 1));
    for bytes in [&b""[..], b"0/16B3748", &[0; 15], &[7; 300]] {
        let foreign = Position::from_bytes(bytes).expect("a short position");
        assert_refused(&*store, &only, &foreign).await;
    }
}

/// The head can be read from, and only what is committed later follows it.
pub async fn the_head_is_followed_by_what_is_new_only<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    let (store, only) = (harness.store(), partition(0, 1));
    let empty_head = store.head(&only).await.expect("an empty feed has a head");
    append(&harness, &[event("a", 1)]).await;
    let head = store.head(&only).await.expect("the head is known");
    append(&harness, &[event("a", 2)]).await;
    assert_eq!(numbers(&read_from(&*store, &only, &empty_head, WHOLE).await.0), [1, 2]);
    assert_eq!(numbers(&read_from(&*store, &only, &head, WHOLE).await.0), [2]);
}

/// A partition without events of its own gives its readers a position that moves, so that it pins
/// nothing, and what is appended later follows that position.
pub async fn a_quiet_partition_gives_a_position<H: StoreHarness>() {
    let harness = H::fresh(2).await;
    let (busy, quiet) = ("a", keys_in(1 - key_hash(&key("a")) % 2));
    let quiet_partition = partition(key_hash(&key(&quiet)) % 2, 2);
    append(&harness, &[event(busy, 1)]).await;
    harness.pass_time(A_MOMENT).await;
    append(&harness, &[event(busy, 2)]).await;
    let store = harness.store();
    let page = store.read(&quiet_partition, &Position::START, WHOLE).await.expect("readable");
    assert!(page.entries.is_empty());
    assert_ne!(page.position, Position::START, "the position moves without events");
    append(&harness, &[event(&quiet, 3)]).await;
    let (records, _) = read_from(&*store, &quiet_partition, &page.position, WHOLE).await;
    assert_eq!(numbers(&records), [3]);
}

/// A time gives the position from which everything appended at or after it follows; a time that
/// has not come yet gives the head.
pub async fn a_time_finds_the_records_from_then_on<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    for n in 0..3 {
        append(&harness, &[event("a", n)]).await;
        harness.pass_time(A_MOMENT).await;
    }
    let (store, only) = (harness.store(), partition(0, 1));
    let all = read_all(&*store, &only).await;
    for (i, record) in all.iter().enumerate() {
        let from = store.position_at(&only, record.appended_at).await.expect("a time is found");
        let (found, _) = read_from(&*store, &only, &from, WHOLE).await;
        assert_eq!(found, all[i..], "from the time of record {i}");
    }
    let between = Timestamp::from_millis(all[1].appended_at.as_millis() - 1);
    let from = store.position_at(&only, between).await.expect("a time is found");
    assert_eq!(read_from(&*store, &only, &from, WHOLE).await.0, all[1..]);
    let future = all[2].appended_at.plus(Duration::from_secs(86_400));
    let from = store.position_at(&only, future).await.expect("a later time is the head");
    assert!(read_from(&*store, &only, &from, WHOLE).await.0.is_empty());
    let dawn = store.position_at(&only, Timestamp::from_millis(1)).await.expect("nothing pruned");
    assert_eq!(read_from(&*store, &only, &dawn, WHOLE).await.0, all);
}

/// The partition of an event is its key's hash, modulo their number; every one is listed.
pub async fn a_key_stays_in_its_partition<H: StoreHarness>() {
    const COUNT: u32 = 4;
    let harness = H::fresh(COUNT).await;
    let keys: Vec<String> = (0..32).map(|n| format!("key-{n}")).collect();
    let events: Vec<NewEvent> = keys.iter().zip(0..).map(|(key, n)| event(key, n)).collect();
    append(&harness, &events).await;
    let store = harness.store();
    let listed = store.partitions(&consumer("c")).await.expect("partitions are listed");
    assert_eq!(listed, (0..COUNT).map(|i| partition(i, COUNT)).collect::<Vec<_>>());
    let mut seen = HashSet::new();
    for (index, id) in (0..COUNT).zip(&listed) {
        for record in read_all(&*store, id).await {
            assert_eq!(key_hash(record.event.key()) % COUNT, index);
            seen.insert(number(&record.event));
        }
    }
    assert_eq!(seen.len(), keys.len());
}

/// A partition that the store does not have is an error, not an empty feed.
pub async fn an_unknown_partition_is_refused<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    let (store, unknown) = (harness.store(), partition(1, 7));
    assert_refused(&*store, &unknown, &Position::START).await;
    let head = store.head(&unknown).await.map(drop).map_err(|error| error.kind());
    assert_eq!(head, Err(ErrorKind::Permanent));
}

/// The identity names the data: it is stable, short, and differs between two stores.
pub async fn each_store_has_its_own_identity<H: StoreHarness>() {
    let (one, other) = (H::fresh(1).await, H::fresh(1).await);
    let identity = one.store().identity();
    append(&one, &[event("a", 1)]).await;
    assert_eq!(one.store().identity(), identity);
    assert_ne!(other.store().identity(), identity);
    assert!((1..=255).contains(&identity.len()), "{identity}");
}

async fn assert_refused<F: Feed + ?Sized>(feed: &F, partition: &PartitionId, after: &Position) {
    let answer = feed.read(partition, after, WHOLE).await;
    let kind = answer.map(|page| page.entries.len()).map_err(|error| error.kind());
    assert_eq!(kind, Err(ErrorKind::Permanent), "reading {partition} after {after}");
}

/// Reads until `count` records were seen, polling at the head.
async fn follow<F: Feed + ?Sized>(feed: &F, count: usize, limit: BatchLimit) -> Vec<Record> {
    let mut all = Vec::new();
    let mut after = Position::START;
    while all.len() < count {
        let (records, position) = read_from(feed, &partition(0, 1), &after, limit).await;
        all.extend(records);
        after = position;
        tokio::task::yield_now().await;
    }
    all
}

/// A key whose partition of two is `index`.
fn keys_in(index: u32) -> String {
    let texts = (0..).map(|n| format!("quiet-{n}"));
    let mut fitting = texts.filter(|text| key_hash(&key(text)) % 2 == index);
    fitting.next().expect("half of all keys fit")
}

fn numbers(records: &[Record]) -> Vec<u64> {
    records.iter().map(|record| number(&record.event)).collect()
}
