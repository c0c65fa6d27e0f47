//! The feed's contract, clause by clause, and the positions it accepts.

use std::time::Duration;

use postrider_core::ulid::Ulid;
use postrider_core::*;
use postrider_store_sqlite::{OnDuplicate, append};

use crate::support::*;

fn refused(result: Result<FeedPage>) -> String {
    let error = result.expect_err("the position is refused");
    assert_eq!(error.kind(), ErrorKind::Permanent, "{error}");
    error.to_string()
}

/// Cases O1 and O7: connections that commit in any order; the reader gets everything, in order.
#[tokio::test(flavor = "multi_thread")]
async fn o1_nothing_is_skipped_while_many_write_and_read() {
    let world = World::new(2).await;
    let writers: Vec<_> = (0..4)
        .map(|writer| {
            let mut connection = world.connection();
            std::thread::spawn(move || {
                for number in 0..50 {
                    let tx = connection.transaction().expect("begin");
                    let key = format!("{writer}-{}", number % 5);
                    append(&tx, &[event(&key, &number.to_string())]).expect("append");
                    if number % 7 == 0 { tx.rollback() } else { tx.commit() }.expect("end");
                }
            })
        })
        .collect();
    let mut seen: Vec<Vec<Record>> = vec![Vec::new(), Vec::new()];
    let deadline = std::time::Instant::now() + Duration::from_secs(30);
    while seen.iter().map(Vec::len).sum::<usize>() < 4 * 42 {
        assert!(std::time::Instant::now() < deadline, "missing events");
        for (index, seen) in (0..).zip(&mut seen) {
            let after = seen.last().map_or(Position::START, |last| last.position.clone());
            let page = world.page(&p(index, 2), &after).await;
            seen.extend(page.entries.iter().map(|entry| record(entry).clone()));
        }
    }
    writers.into_iter().for_each(|writer| writer.join().expect("writer"));
    for (index, seen) in (0..).zip(&seen) {
        let mut last = std::collections::HashMap::new();
        for record in seen {
            let number: u32 =
                std::str::from_utf8(record.event.payload()).expect("text").parse().expect("number");
            let before = last.insert(record.event.key().clone(), number);
            assert!(before.is_none_or(|before| before < number), "order of {record:?}");
        }
        let again = world.page(&p(index, 2), &Position::START).await;
        let again: Vec<Record> = again.entries.iter().map(|e| record(e).clone()).collect();
        assert_eq!(again, *seen, "a replay gives the same records in the same order");
    }
}

/// Case O13: a writing transaction stays open; what was committed before still flows, and readers
/// do not wait.
#[tokio::test]
async fn o13_an_open_writer_stops_no_reader() {
    let world = World::new(1).await;
    world.append(vec![event("k", "1")]).await;
    let mut connection = world.connection();
    let idle = connection.transaction().expect("begin");
    append(&idle, &[event("k", "unseen")]).expect("append");
    let page = world.page(&p(0, 1), &Position::START).await;
    assert_eq!(payloads(&page), ["1"]);
    drop(idle);
    world.append(vec![event("k", "2")]).await;
    let page = world.page(&p(0, 1), &page.position).await;
    assert_eq!(payloads(&page), ["2"]);
}

#[tokio::test]
async fn a_page_keeps_both_limits_and_only_an_empty_one_is_the_head() {
    let world = World::new(1).await;
    world.append((0..5).map(|i| event("k", &format!("{i}{}", "x".repeat(1_000)))).collect()).await;
    let cost = {
        let page = world.page(&p(0, 1), &Position::START).await;
        page.entries[0].cost_bytes()
    };
    for (limit, sizes) in [
        (BatchLimit { records: 2, bytes: usize::MAX }, vec![2, 2, 1, 0]),
        (BatchLimit { records: 9, bytes: 3 * cost }, vec![3, 2, 0]),
        (BatchLimit { records: 9, bytes: 1 }, vec![1, 1, 1, 1, 1, 0]),
    ] {
        let mut after = Position::START;
        for size in sizes {
            let page = Feed::read(&world.store, &p(0, 1), &after, limit).await.expect("page");
            assert_eq!(page.entries.len(), size);
            after = page.position;
        }
    }
}

#[tokio::test]
async fn a_quiet_partition_gives_the_outbox_head_as_its_position() {
    let world = World::new(8).await;
    world.append(vec![event("a", "1")]).await;
    let busy = key_hash(&key("a")) % 8;
    let quiet = p((busy + 1) % 8, 8);
    let head = world.page(&p(busy, 8), &Position::START).await.position;
    let page = world.page(&quiet, &Position::START).await;
    assert!(page.entries.is_empty());
    assert_eq!(page.position, head);
    assert_eq!(world.store.head(&quiet).await.expect("head"), head);
    assert!(world.page(&quiet, &head).await.entries.is_empty(), "it is accepted again");
}

#[tokio::test]
async fn positions_that_name_nothing_are_refused() {
    let world = World::new(1).await;
    world.append(vec![event("k", "1"), event("k", "2")]).await;
    let head = world.store.head(&p(0, 1)).await.expect("head").to_ulid().expect("a ULID");
    let read = |at: Ulid| {
        let position: Position = at.into();
        let store = world.store.clone();
        async move { Feed::read(&store, &p(0, 1), &position, LIMIT).await }
    };
    let beyond = Ulid::from_parts(head.time(), 0, head.low() + 1);
    assert!(refused(read(beyond).await).contains("beyond the head"));
    let middle = Ulid::from_parts(head.time(), 1, 1);
    assert!(refused(read(middle).await).contains("beyond the head"));
    let earlier = Timestamp::from_millis(head.time().as_millis() - 1);
    let other_time = Ulid::from_parts(earlier, 0, 1);
    assert!(refused(read(other_time).await).contains("names no event"));
    let odd = Ulid::from_parts(earlier, 7, 1);
    assert!(refused(read(odd).await).contains("names no event"));
    let future = Ulid::from_time(head.time().plus(Duration::from_secs(3_600)));
    assert!(refused(read(future).await).contains("not come yet"));
    let short = Position::from_bytes(&[1, 2, 3]).expect("short");
    let other = Feed::read(&world.store, &p(0, 1), &short, LIMIT).await;
    assert!(refused(other).contains("another kind of source"));
    let error = Feed::read(&world.store, &p(0, 3), &Position::START, LIMIT).await;
    assert!(refused(error).contains("partition 0/3 does not exist"));
    let plain = read(Ulid::from_time(head.time())).await.expect("a time is accepted");
    assert!(!plain.entries.is_empty(), "records of that millisecond follow it");
}

#[tokio::test]
async fn a_time_finds_the_first_event_at_or_after_it() {
    let world = World::new(1).await;
    let (store, clock) = (world.store.clone(), world.clock.clone());
    for number in 0..40 {
        let store_of = store.clone();
        let new = event("k", &number.to_string());
        store
            .transaction(move |tx| store_of.append(tx, &[new], OnDuplicate::Fail))
            .await
            .expect("append");
        clock.advance(Duration::from_millis(if number % 3 == 0 { 0 } else { 50 }));
    }
    let records = world.drain().await;
    assert_eq!(records.len(), 40);
    for wanted in &records {
        for shift in [-1i64, 0, 1] {
            let ms = wanted.appended_at.as_millis().saturating_add_signed(shift);
            let time = Timestamp::from_millis(ms);
            let at = store.position_at(&p(0, 1), time).await.expect("position");
            let page = world.page(&p(0, 1), &at).await;
            let expected: Vec<_> = records.iter().filter(|r| r.appended_at >= time).collect();
            let found: Vec<_> = page.entries.iter().map(record).collect();
            assert_eq!(found, expected, "from {ms}");
        }
    }
    let head = store.head(&p(0, 1)).await.expect("head");
    let late = Timestamp::from_millis(u64::MAX);
    assert_eq!(store.position_at(&p(0, 1), late).await.expect("head"), head);
}

/// The wall clock set back: times stand still, order stays.
#[tokio::test]
async fn a_clock_set_back_never_reorders() {
    let world = World::new(1).await;
    for step in [0, -3_600_000, 1_000, 7_200_000, -1] {
        world.clock.move_wall_clock(step);
        let store = world.store.clone();
        world
            .store
            .transaction(move |tx| {
                store.append(tx, &[event("k", &step.to_string())], OnDuplicate::Fail)
            })
            .await
            .expect("append");
    }
    let records = world.drain().await;
    assert_eq!(records.len(), 5);
    assert!(records.windows(2).all(|pair| pair[0].appended_at <= pair[1].appended_at));
    assert!(records.windows(2).all(|pair| {
        pair[0].position.to_ulid().expect("ULID") < pair[1].position.to_ulid().expect("ULID")
    }));
}

#[tokio::test]
async fn raised_partitions_keep_each_keys_order_and_end_the_old_ones() {
    let world = World::new(2).await;
    let (store, me) = (&world.store, consumer("drain"));
    world.append((0..20).map(|i| event(&format!("k{}", i % 5), &i.to_string())).collect()).await;
    for bad in [0, 1, 2, 3, 2_048] {
        let error = store.raise_partitions(bad).await.expect_err("no multiple");
        assert_eq!(error.kind(), ErrorKind::Permanent);
    }
    store.raise_partitions(6).await.expect("raise");
    world.append((20..40).map(|i| event(&format!("k{}", i % 5), &i.to_string())).collect()).await;
    let old = store.partitions(&me).await.expect("partitions");
    assert_eq!(old, [p(0, 2), p(1, 2)], "successors come after their predecessor is finished");
    let mut texts = std::collections::HashMap::<String, Vec<u32>>::new();
    let mut take = |page: &FeedPage| {
        for entry in &page.entries {
            let key = record(entry).event.key().to_string();
            texts.entry(key).or_default().push(payload(entry).parse().expect("number"));
        }
    };
    for partition in old {
        let page = world.page(&partition, &Position::START).await;
        take(&page);
        let successors = page.ended.expect("it has ended");
        let (index, _) = partition.to_numbers().expect("numbers");
        let expected: Vec<_> = [index, index + 2, index + 4].map(|i| p(i, 6)).into();
        let named: Vec<_> = successors.iter().map(|s| s.partition.clone()).collect();
        assert_eq!(named, expected);
        let empty = world.page(&partition, &page.position).await;
        assert!(empty.entries.is_empty() && empty.ended.is_some());
        let lease = world.held(&partition, "r").await;
        store.finish(&lease, &me, &successors).await.expect("finish");
        store.finish(&lease, &me, &successors).await.expect("again is no change");
    }
    let new = store.partitions(&me).await.expect("partitions");
    assert_eq!(new, (0..6).map(|i| p(i, 6)).collect::<Vec<_>>());
    for partition in new {
        let at = store.checkpoint(&me, &partition).await.expect("read").expect("was made");
        take(&world.page(&partition, &at.position).await);
    }
    assert_eq!(texts.values().map(Vec::len).sum::<usize>(), 40);
    assert!(texts.values().all(|numbers| numbers.is_sorted()), "{texts:?}");
}

/// Case O61: a row that cannot be read is told with its bytes, and the feed goes on.
#[tokio::test]
async fn o61_an_unreadable_row_is_told_and_the_feed_goes_on() {
    let world = World::new(1).await;
    world.append(vec![event("k", "1")]).await;
    let connection = world.connection();
    connection.execute_batch("PRAGMA ignore_check_constraints = ON").expect("pragma");
    for (key, topic, headers) in [
        ("'k'", "''", "NULL"),
        ("CAST(x'ff' AS TEXT)", "'t'", "NULL"),
        ("'k'", "'t'", "'{\"a\":{\"b\":1}}'"),
    ] {
        connection.execute_batch("DROP TRIGGER IF EXISTS postrider_outbox_headers").expect("drop");
        let sql = format!(
            "INSERT INTO postrider_outbox
                 (partition, at_ms, id, key, topic, type, content_type, headers, payload)
             VALUES (0, 9999999999999, randomblob(16), {key}, {topic}, 'E', 'c', {headers},
                 x'0102')"
        );
        connection.execute(&sql, []).expect("insert");
    }
    world.append(vec![event("k", "2")]).await;
    let page = world.page(&p(0, 1), &Position::START).await;
    assert_eq!(page.entries.len(), 5);
    assert_eq!(payload(&page.entries[4]), "2");
    let told: Vec<_> = page.entries[1..4]
        .iter()
        .map(|entry| match entry {
            Entry::Malformed(malformed) => malformed.clone(),
            Entry::Record(record) => panic!("readable: {record:?}"),
        })
        .collect();
    assert!(told.iter().all(|malformed| *malformed.raw == [1, 2]));
    assert_eq!(told[0].key, Some(key("k")));
    assert!(told[0].reason.contains("topic is empty"), "{}", told[0].reason);
    assert_eq!(told[1].key, None);
    assert!(told[1].reason.contains("key is not UTF-8"), "{}", told[1].reason);
    assert!(told[2].reason.contains("headers"), "{}", told[2].reason);
    let lease = world.held(&p(0, 1), "r").await;
    let letters: Vec<_> = page.entries[1..4]
        .iter()
        .map(|entry| NewDeadLetter {
            entry: entry.clone(),
            state: DeadLetterState::Parked,
            reason: "unreadable".into(),
            attempts: 0,
        })
        .collect();
    let me = consumer("sink");
    assert_eq!(world.store.park(&lease, &me, &letters).await.expect("park"), 3);
    let kept = world.store.list(&DeadLetterFilter::default(), None, 10).await.expect("list");
    let kept: Vec<_> = kept.into_iter().map(|letter| letter.entry).collect();
    assert_eq!(kept, page.entries[1..4]);
}
