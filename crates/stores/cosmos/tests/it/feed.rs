//! What this store promises of the change feed: exact places, splits, order, expiry.
//!
//! What lives here: behaviours that differ from a SQL store's feed. What does not: the shared ones
//! (`conformance.rs`).
//! Invariant: the emulator is Microsoft's own; events are written as any client would.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use postrider_conformance::samples::{consumer, event, key, number, sized_event};
use postrider_core::{
    BatchLimit, Checkpoints, Entry, ErrorKind, Feed, FeedSource, Key, PartitionId, PollInterval,
    Position, ReadOutcome, Record, Source, StartFrom, Timestamp,
};
use serde_json::{Value, json};
use uuid::Uuid;

use postrider_store_cosmos::CosmosStore;

use crate::support::{CONTAINER, DATABASE, WHOLE, World, config, read_from};

fn whole() -> PartitionId {
    PartitionId::new("00-FF").expect("a valid name")
}

fn numbers(records: &[Record]) -> Vec<u64> {
    records.iter().map(|record| number(&record.event)).collect()
}

/// Reading on from any record, by pages of any size, gives exactly what follows it.
#[tokio::test]
async fn reading_goes_on_exactly_after_any_record() {
    let world = World::new(1).await;
    for batch in 0..5u64 {
        let events: Vec<_> = (0..4).map(|i| event(&format!("k{}", i % 2), batch * 4 + i)).collect();
        world.append(&events).await;
    }
    let (all, head, _) = read_from(&world.store, &whole(), &Position::START, WHOLE).await;
    let expected = numbers(&all);
    assert_eq!(expected.len(), 20);
    for records in [1, 2, 7, 20, 21] {
        let limit = BatchLimit { records, ..WHOLE };
        let (again, _, _) = read_from(&world.store, &whole(), &Position::START, limit).await;
        assert_eq!(numbers(&again), expected, "by {records}");
        for (i, record) in again.iter().enumerate() {
            let (rest, _, _) = read_from(&world.store, &whole(), &record.position, WHOLE).await;
            assert_eq!(numbers(&rest), expected[i + 1..], "after record {i} of pages of {records}");
        }
    }
    let (none, _, _) = read_from(&world.store, &whole(), &head, WHOLE).await;
    assert_eq!(numbers(&none), [] as [u64; 0]);
}

/// A page that is cut by its bytes goes on within; a record that is deleted meanwhile takes no
/// other with it.
#[tokio::test]
async fn a_page_is_left_and_entered_in_the_middle() {
    let world = World::new(1).await;
    let events: Vec<_> = (0..10).map(|n| sized_event("k", n, 3_000)).collect();
    let ids = world.append(&events).await;
    let limit = BatchLimit { records: 100, bytes: 12_000 };
    let first =
        Feed::read(&world.store, &whole(), &Position::START, limit).await.expect("readable");
    let count = first.entries.len();
    assert!((1..10).contains(&count), "{count}");
    // Deleted: one that was handed out and one that was not.
    for id in [ids[0], ids[9]] {
        let container = world.store.container();
        container.delete_item("k", &id.to_string(), None).await.expect("it is there");
    }
    let (rest, _, _) = read_from(&world.store, &whole(), &first.position, limit).await;
    assert_eq!(numbers(&rest), (count as u64..9).collect::<Vec<_>>());
}

/// Pages without events are no end: what follows them comes with the same reading.
#[tokio::test]
async fn pages_without_events_are_read_over() {
    let world = World::new(1).await;
    for n in 0..7 {
        let key = format!("k{n}");
        let contact = |i| {
            let id = format!("c{i}");
            json!({ "id": id, "partitionKey": key, "type": "contact", "data": {} })
        };
        world.write(&key, &(0..60).map(contact).collect::<Vec<_>>()).await;
    }
    world.append(&[event("k", 1)]).await;
    let page = Feed::read(&world.store, &whole(), &Position::START, WHOLE).await.expect("readable");
    assert_eq!(page.entries.len(), 1);
    let rest = Feed::read(&world.store, &whole(), &page.position, WHOLE).await.expect("readable");
    assert!(rest.entries.is_empty());
}

/// Documents of other types are passed over; what looks like an event and can't be read comes as
/// it was found.
#[tokio::test]
async fn other_documents_are_skipped_and_broken_events_are_not() {
    let world = World::new(1).await;
    let id = Uuid::new_v4().to_string();
    let contact = json!({ "id": "c1", "partitionKey": "k", "type": "contact", "data": {} });
    let broken = json!({ "id": id, "partitionKey": "k", "type": "domainEvent", "data": {} });
    world.write("k", &[contact, broken]).await;
    world.append(&[event("k", 1)]).await;
    let page = Feed::read(&world.store, &whole(), &Position::START, WHOLE).await.expect("readable");
    let [Entry::Malformed(malformed), Entry::Record(record)] = &page.entries[..] else {
        panic!("{:?}", page.entries);
    };
    assert_eq!(malformed.key.as_ref().map(|key| key.as_str()), Some("k"));
    assert!(malformed.reason.contains("names the event"), "{}", malformed.reason);
    let raw: Value = serde_json::from_slice(&malformed.raw).expect("JSON");
    assert_eq!(raw["id"], json!(id));
    assert_eq!(number(&record.event), 1);
}

/// Events that share a batch come in the order of their numbers, however they stand in it.
#[tokio::test]
async fn events_of_one_batch_come_by_their_numbers() {
    let world = World::new(1).await;
    let made = |seq: u64| {
        json!({
            "id": Uuid::new_v4().to_string(), "partitionKey": "k", "type": "domainEvent",
            "data": { "action": "Counted", "n": seq }, "seq": seq,
        })
    };
    world.write("k", &[made(3), made(1), made(2)]).await;
    let (records, _, _) = read_from(&world.store, &whole(), &Position::START, WHOLE).await;
    let order: Vec<Value> = records
        .iter()
        .map(|record| serde_json::from_slice::<Value>(record.event.payload()).expect("JSON"))
        .map(|data| data["n"].clone())
        .collect();
    assert_eq!(order, [json!(1), json!(2), json!(3)]);
}

/// A page may end in the middle of a batch, whose events stand in no order: they come by their
/// numbers all the same, and reading goes on exactly after each of them.
#[tokio::test]
async fn a_batch_that_a_page_cuts_comes_by_its_numbers() {
    let world = World::new(1).await;
    for batch in 0..12u64 {
        let events: Vec<_> = (0..5).map(|i| event("k", batch * 5 + i)).collect();
        world.append(&events).await;
    }
    for (items, records) in [(1, 100), (2, 1), (3, 2), (4, 100), (7, 3)] {
        // Another process, that knows nothing of the numbers before.
        let mut config = config(&world.account);
        config.max_items = items;
        let store = CosmosStore::open(&config).await.expect("the store opens");
        let limit = BatchLimit { records, ..WHOLE };
        let (all, _, _) = read_from(&store, &whole(), &Position::START, limit).await;
        assert_eq!(numbers(&all), (0..60).collect::<Vec<_>>(), "by {items}, {records}");
        for (i, record) in all.iter().enumerate().step_by(7) {
            let (rest, _, _) = read_from(&store, &whole(), &record.position, limit).await;
            assert_eq!(numbers(&rest), (i as u64 + 1..60).collect::<Vec<_>>(), "after {i}");
        }
    }
}

/// A range that is split ends for each of its readers just where it stands, also within a page;
/// its successors go on there: nothing is missing, nothing comes twice, keys keep their order.
#[tokio::test]
async fn a_split_range_goes_on_in_its_successors() {
    const KEYS: u64 = 64;
    let world = World::new(4).await;
    let all: Vec<_> = (0..KEYS * 3).map(|n| event(&format!("key-{}", n % KEYS), n)).collect();
    world.append(&all).await;
    let first = world.store.partitions(&consumer("one")).await.expect("listed").remove(0);
    let (known, _, _) = read_from(&world.store, &first, &Position::START, WHOLE).await;
    let keys: HashSet<Key> = known.iter().map(|record| record.event.key().clone()).collect();
    let limit = BatchLimit { records: 7, ..WHOLE };
    let page = Feed::read(&world.store, &first, &Position::START, limit).await.expect("readable");
    let record = |entry: Entry| match entry {
        Entry::Record(record) => record,
        Entry::Malformed(malformed) => panic!("{}", malformed.reason),
    };
    // In the middle of the page: three of seven were confirmed.
    let mut seen: Vec<Record> = page.entries.into_iter().map(record).take(3).collect();
    let after = seen[2].position.clone();
    world.account.split(DATABASE, CONTAINER, 0).expect("split");
    let more: Vec<_> =
        (KEYS * 3..KEYS * 5).map(|n| event(&format!("key-{}", n % KEYS), n)).collect();
    world.append(&more).await;
    let (some, end, successors) = read_to_the_end(&world, &first, &after).await;
    seen.extend(some);
    assert_eq!(successors.len(), 2, "{successors:?}");
    assert!(successors.iter().all(|next| next.from == end));
    // Whatever of it was read before the split was heard of.
    let last: Vec<_> =
        (KEYS * 5..KEYS * 6).map(|n| event(&format!("key-{}", n % KEYS), n)).collect();
    world.append(&last).await;
    let mut shares = Vec::new();
    for next in successors {
        let small = BatchLimit { records: 4, ..WHOLE };
        let (records, _, ended) = read_from(&world.store, &next.partition, &next.from, small).await;
        assert!(ended.is_none());
        shares.push(records.len());
        seen.extend(records);
    }
    assert!(shares.iter().all(|share| *share > 0), "both have some: {shares:?}");
    let mut by_key: HashMap<&Key, Vec<u64>> = HashMap::new();
    for record in &seen {
        by_key.entry(record.event.key()).or_default().push(number(&record.event));
    }
    assert!(by_key.values().all(|order| order.is_sorted()), "{by_key:?}");
    let mut found = numbers(&seen);
    found.sort_unstable();
    let of_first = |n: &u64| keys.contains(&key(&format!("key-{}", n % KEYS)));
    assert_eq!(found, (0..KEYS * 6).filter(of_first).collect::<Vec<u64>>());
}

/// Ranges that are merged go on for each of their readers where it stands, as parts of the larger
/// one: also within a page, and when that is split and merged with another one. Nothing is missing,
/// nothing comes twice, keys keep their order.
#[tokio::test]
async fn merged_ranges_go_on_where_each_of_them_stood() {
    const KEYS: u64 = 64;
    let world = World::new(4).await;
    let written = std::cell::Cell::new(0);
    let write = async |rounds: u64| {
        let from = written.replace(written.get() + KEYS * rounds);
        let numbers = from..written.get();
        let events: Vec<_> = numbers.map(|n| event(&format!("key-{}", n % KEYS), n)).collect();
        world.append(&events).await;
    };
    write(3).await;
    let mut partitions = world.store.partitions(&consumer("one")).await.expect("listed");
    // The last one stays as it is.
    partitions.truncate(3);
    let (mut seen, mut expected) = (Vec::new(), 0);
    for (partition, had) in partitions.iter().zip([3, 10_000, 0]) {
        let (all, _, _) = read_from(&world.store, partition, &Position::START, WHOLE).await;
        expected += all.len() * 3;
        // In the middle of a page, at its end, and before everything.
        seen.push(all.into_iter().take(had).collect::<Vec<Record>>());
    }
    let after = |seen: &[Record]| seen.last().map_or(Position::START, |last| last.position.clone());
    world.account.merge(DATABASE, CONTAINER, [0, 1]).expect("merged");
    write(3).await;
    // The process that was there, and one that comes later.
    let late = world.another().await;
    for (partition, seen) in partitions.iter().zip(&mut seen) {
        let limit = BatchLimit { records: 5, ..WHOLE };
        let (records, _, ended) = read_from(&world.store, partition, &after(seen), limit).await;
        assert!(ended.is_none() && !records.is_empty());
        let (again, _, _) = read_from(&late, partition, &after(seen), limit).await;
        assert_eq!(numbers(&again), numbers(&records), "{partition}");
        seen.extend(records);
    }
    // What was the second range, and the third.
    world.account.split(DATABASE, CONTAINER, 4).expect("split");
    world.account.merge(DATABASE, CONTAINER, [6, 2]).expect("merged");
    write(3).await;
    for (partition, seen) in partitions.iter().zip(&mut seen) {
        let (records, _, ended) = read_from(&world.store, partition, &after(seen), WHOLE).await;
        assert!(ended.is_none() && !records.is_empty());
        seen.extend(records);
    }
    let mut by_key: HashMap<&Key, Vec<u64>> = HashMap::new();
    for record in seen.iter().flatten() {
        by_key.entry(record.event.key()).or_default().push(number(&record.event));
    }
    assert!(by_key.values().all(|order| order.is_sorted()), "{by_key:?}");
    let found: HashSet<u64> = by_key.into_values().flatten().collect();
    let total: usize = seen.iter().map(Vec::len).sum();
    assert_eq!((found.len(), total), (expected, expected));
}

/// Reads until the process has heard of the split.
async fn read_to_the_end(
    world: &World,
    partition: &PartitionId,
    after: &Position,
) -> (Vec<Record>, Position, Vec<postrider_core::Successor>) {
    let (mut records, mut after) = (Vec::new(), after.clone());
    let until = tokio::time::Instant::now() + Duration::from_secs(30);
    loop {
        let (some, at, ended) = read_from(&world.store, partition, &after, WHOLE).await;
        records.extend(some);
        after = at;
        if let Some(ended) = ended {
            return (records, after, ended);
        }
        assert!(tokio::time::Instant::now() < until, "the split is never heard of");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Consumers begin with the same ranges, and come to smaller ones by finishing those that held
/// them.
#[tokio::test]
async fn partitions_follow_the_ranges() {
    use postrider_core::Leases;
    let world = World::new(4).await;
    let (one, other) = (consumer("one"), consumer("other"));
    let begun = world.store.partitions(&one).await.expect("listed");
    assert_eq!(begun.len(), 4);
    world.account.split(DATABASE, CONTAINER, 0).expect("split");
    // Another process that asks for the first time begins with the same.
    let late = world.another().await;
    assert_eq!(late.partitions(&other).await.expect("listed"), begun);
    let first = &begun[0];
    let (_, _, successors) = read_to_the_end(&world, first, &Position::START).await;
    let group = postrider_conformance::samples::group("relays");
    let relay = postrider_conformance::samples::relay("r");
    let ttl = Duration::from_secs(60);
    let held = world.store.acquire(&group, first, &relay, ttl).await.expect("an answer");
    let postrider_core::Acquired::Held(lease) = held else { panic!("it is free") };
    world.store.finish(&lease, &one, &successors).await.expect("finished");
    let now = world.store.partitions(&one).await.expect("listed");
    assert_eq!(now.len(), 5);
    assert!(!now.contains(first));
    assert_eq!(late.partitions(&other).await.expect("listed"), begun);
    for next in &successors {
        let kept = world.store.checkpoint(&one, &next.partition).await.expect("readable");
        assert_eq!(kept.map(|kept| kept.position), Some(next.from.clone()));
    }
}

/// Every event is in one range, however many there are, and each range comes to its head.
#[tokio::test]
async fn ranges_share_the_events_out() {
    const KEYS: u64 = 40;
    let world = World::new(12).await;
    let events: Vec<_> =
        (0..KEYS * 15).map(|n| event(&format!("w/köln {}", n % KEYS), n)).collect();
    world.append(&events).await;
    let partitions = world.store.partitions(&consumer("one")).await.expect("listed");
    assert_eq!(partitions.len(), 12);
    let mut found = Vec::new();
    for partition in partitions {
        let (records, _, _) = read_from(&world.store, &partition, &Position::START, WHOLE).await;
        found.extend(numbers(&records));
    }
    found.sort_unstable();
    assert_eq!(found, (0..KEYS * 15).collect::<Vec<u64>>());
}

/// Entities that change with their events are passed over, and the head stays the head.
#[tokio::test]
async fn changing_entities_bring_nothing_back() {
    let world = World::new(12).await;
    let mut expected = Vec::new();
    for round in 0..10u64 {
        for n in 0..20u64 {
            let key = format!("w0/köln {n}");
            let id = Uuid::new_v4().to_string();
            let entity = json!({
                "id": key.replace('/', "-"), "partitionKey": key, "type": "order",
                "data": {}, "ttl": -1, "lastSeq": round + 1,
            });
            let event = json!({
                "id": id, "partitionKey": key, "type": "domainEvent",
                "data": { "action": "OrderChanged", "n": round }, "ttl": 60, "seq": round + 1,
            });
            world.upsert(&key, &[entity, event]).await;
            expected.push(id);
        }
    }
    let mut found = Vec::new();
    for partition in world.store.partitions(&consumer("one")).await.expect("listed") {
        let (records, head, _) = read_from(&world.store, &partition, &Position::START, WHOLE).await;
        found.extend(records.iter().map(|record| record.event.id().to_string()));
        let store = world.another().await;
        let (again, _, _) = read_from(&store, &partition, &head, WHOLE).await;
        assert_eq!(numbers(&again), [] as [u64; 0], "{partition}");
    }
    found.sort_unstable();
    expected.sort_unstable();
    assert_eq!(found.len(), expected.len());
    assert_eq!(found, expected);
}

/// A backlog longer than a page is counted whole, in the ranges that a consumer has.
#[tokio::test]
async fn a_long_backlog_is_counted() {
    use postrider_core::Leases;
    let world = World::new(1).await;
    let group = postrider_conformance::samples::group("relays");
    let relay = postrider_conformance::samples::relay("r");
    let ttl = Duration::from_secs(60);
    let held = world.store.acquire(&group, &whole(), &relay, ttl).await.expect("an answer");
    let postrider_core::Acquired::Held(lease) = held else { panic!("it is free") };
    let sink = consumer("sink");
    let none = postrider_core::Tally::default();
    world.store.advance(&lease, &sink, &Position::START, none).await.expect("begun");
    for batch in 0..5u64 {
        let events: Vec<_> = (0..50).map(|n| event("k", batch * 50 + n)).collect();
        world.append(&events).await;
        // The database's time is told in seconds: what is counted by it has another one.
        tokio::time::sleep(Duration::from_millis(1_050)).await;
    }
    let progress = world.store.progress().await.expect("readable");
    assert_eq!(progress[0].pending, 250);
    assert!(progress[0].oldest_pending_at.is_some());
}

/// "Now" stays the same moment for a reader that comes back to it, and a time is found.
#[tokio::test]
async fn now_and_a_time_are_places() {
    let world = World::new(1).await;
    world.append(&[event("k", 1)]).await;
    let now = world.store.head(&whole()).await.expect("a head");
    world.append(&[event("k", 2)]).await;
    let (after, _, _) = read_from(&world.store, &whole(), &now, WHOLE).await;
    assert_eq!(numbers(&after), [2]);
    let (again, _, _) = read_from(&world.store, &whole(), &now, WHOLE).await;
    assert_eq!(numbers(&again), [2]);
    let dawn = Timestamp::from_millis(1_000);
    let from = world.store.position_at(&whole(), dawn).await.expect("a place");
    let (all, _, _) = read_from(&world.store, &whole(), &from, WHOLE).await;
    assert_eq!(numbers(&all), [1, 2]);
}

/// The service answers a start by time with a place alone at first: what follows it comes, also to
/// one that waits for it, and what is older does not.
#[tokio::test]
async fn a_time_is_read_on_from_though_its_first_answer_is_empty() {
    let world = World::new(2).await;
    let keys: Vec<String> = (0..8).map(|n| format!("key-{n}")).collect();
    let round = |round: u64| {
        let numbered = keys.iter().zip(round * 8..);
        numbered.map(|(key, n)| event(key, n)).collect::<Vec<_>>()
    };
    world.append(&round(0)).await;
    let partitions = world.store.partitions(&consumer("one")).await.expect("listed");
    let mut last = Timestamp::default();
    for partition in &partitions {
        let (records, _, _) = read_from(&world.store, partition, &Position::START, WHOLE).await;
        last = records.iter().map(|record| record.appended_at).fold(last, Timestamp::max);
    }
    let time = last.plus(Duration::from_secs(1));
    let mut from = Vec::new();
    for partition in partitions {
        let place = world.store.position_at(&partition, time).await.expect("a place");
        let (none, place, _) = read_from(&world.store, &partition, &place, WHOLE).await;
        assert_eq!(numbers(&none), [] as [u64; 0]);
        from.push((partition, place));
    }
    // The database tells its time in seconds.
    tokio::time::sleep(Duration::from_millis(2_050)).await;
    world.append(&round(1)).await;
    let mut found = Vec::new();
    for (partition, place) in from {
        let (records, _, _) = read_from(&world.store, &partition, &place, WHOLE).await;
        let fresh = world.store.position_at(&partition, time).await.expect("a place");
        let (again, _, _) = read_from(&world.store, &partition, &fresh, WHOLE).await;
        assert_eq!(numbers(&again), numbers(&records));
        found.extend(numbers(&records));
    }
    found.sort_unstable();
    assert_eq!(found, (8..16).collect::<Vec<u64>>());
}

/// A relay's source on top: it waits, hands out what comes, and tells of a split.
#[tokio::test]
async fn a_source_reads_it() {
    let world = World::new(1).await;
    let poll = PollInterval { busy: Duration::from_millis(5), idle: Duration::from_millis(50) };
    let clock = std::sync::Arc::new(postrider_conformance::clock::TokioClock::default());
    let source = FeedSource::new(std::sync::Arc::new(world.store.clone()), clock, poll);
    let sink = consumer("sink");
    let mut reader = source.open(&sink, &whole(), StartFrom::Now).await.expect("opened");
    let begins = reader.next(WHOLE).await.expect("its place");
    assert!(matches!(begins, ReadOutcome::Batch(batch) if batch.entries.is_empty()));
    world.append(&[event("k", 7)]).await;
    let next = tokio::time::timeout(Duration::from_secs(30), reader.next(WHOLE)).await;
    let Ok(Ok(ReadOutcome::Batch(batch))) = next else { panic!("{next:?}") };
    assert_eq!(batch.entries.len(), 1);
    world.account.split(DATABASE, CONTAINER, 0).expect("split");
    loop {
        let next = tokio::time::timeout(Duration::from_secs(30), reader.next(WHOLE)).await;
        match next.expect("it is told").expect("readable") {
            ReadOutcome::Ended(successors) => {
                assert_eq!(successors.len(), 2);
                break;
            }
            ReadOutcome::Batch(batch) => assert!(batch.entries.is_empty()),
        }
    }
}

/// A container that was deleted and made anew is told from the old one, never read as empty.
#[tokio::test]
async fn a_container_made_anew_is_refused() {
    let world = World::new(1).await;
    world.append(&[event("k", 1)]).await;
    let (records, _, _) = read_from(&world.store, &whole(), &Position::START, WHOLE).await;
    // As a process that starts later finds it: the same name, another identifier.
    let mut place: Value = serde_json::from_slice(records[0].position.as_bytes()).expect("JSON");
    place["r"] = json!("AAAAAYAAAAI=");
    let place = Position::from_bytes(place.to_string().as_bytes()).expect("short enough");
    let refused = Feed::read(&world.store, &whole(), &place, WHOLE).await;
    let error = refused.map(drop).expect_err("another container's place");
    assert_eq!(error.kind(), ErrorKind::Permanent);
    assert!(error.to_string().contains("another container"), "{error}");
    // Who has it open while it is deleted and made anew reads no emptiness.
    world.store.container().delete(None).await.expect("it is there");
    world.account.create_container(DATABASE, CONTAINER, 1).expect("a container");
    let open = Feed::read(&world.store, &whole(), &records[0].position, WHOLE).await;
    assert!(open.is_err(), "{open:?}");
}

/// An event that was deleted before it was read leaves a gap, which is told.
#[tokio::test]
async fn an_event_that_expired_unsent_is_told() {
    let world = World::new(1).await;
    let ids = world.append(&[event("k", 1), event("k", 2), event("k", 3)]).await;
    // The emulator lets nothing expire: it is deleted, as the service would.
    let container = world.store.container();
    container.delete_item("k", &ids[1].to_string(), None).await.expect("it is there");
    let (records, _, _) = read_from(&world.store, &whole(), &Position::START, WHOLE).await;
    assert_eq!(numbers(&records), [1, 3]);
    let told = world.store.advice().await.expect("advice");
    assert!(told.iter().any(|text| text.contains("1 events were deleted")), "{told:?}");
}

/// Whoever counts what is pending leaves alone what a relay has seen of the numbers.
#[tokio::test]
async fn counting_hides_no_gap() {
    use postrider_core::Leases;
    let world = World::new(1).await;
    let group = postrider_conformance::samples::group("relays");
    let relay = postrider_conformance::samples::relay("r");
    let ttl = Duration::from_secs(60);
    let held = world.store.acquire(&group, &whole(), &relay, ttl).await.expect("an answer");
    let postrider_core::Acquired::Held(lease) = held else { panic!("it is free") };
    world.append(&[event("k", 1)]).await;
    let (_, place, _) = read_from(&world.store, &whole(), &Position::START, WHOLE).await;
    let none = postrider_core::Tally::default();
    world.store.advance(&lease, &consumer("sink"), &place, none).await.expect("noted");
    let ids = world.append(&[event("k", 2)]).await;
    assert_eq!(world.store.progress().await.expect("readable")[0].pending, 1);
    let container = world.store.container();
    container.delete_item("k", &ids[0].to_string(), None).await.expect("it is there");
    world.append(&[event("k", 3)]).await;
    let (records, _, _) = read_from(&world.store, &whole(), &place, WHOLE).await;
    assert_eq!(numbers(&records), [3]);
    let told = world.store.advice().await.expect("advice");
    assert!(told.iter().any(|text| text.contains("1 events were deleted")), "{told:?}");
}

/// A range that was with another relay for a while comes back without a false alarm: what the other
/// one has read is not missing here.
#[tokio::test]
async fn a_range_that_comes_back_has_no_gap() {
    let world = World::new(1).await;
    let other = world.another().await;
    world.append(&[event("k", 1), event("k", 2)]).await;
    let (records, here, _) = read_from(&world.store, &whole(), &Position::START, WHOLE).await;
    assert_eq!(numbers(&records), [1, 2]);
    world.append(&[event("k", 3), event("k", 4)]).await;
    let (records, there, _) = read_from(&other, &whole(), &here, WHOLE).await;
    assert_eq!(numbers(&records), [3, 4]);
    world.append(&[event("k", 5)]).await;
    let (records, _, _) = read_from(&world.store, &whole(), &there, WHOLE).await;
    assert_eq!(numbers(&records), [5]);
    let told = world.store.advice().await.expect("advice");
    assert!(!told.iter().any(|text| text.contains("were deleted")), "{told:?}");
}
