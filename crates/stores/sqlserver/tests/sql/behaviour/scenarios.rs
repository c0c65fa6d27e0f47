//! Scenarios 2 to 12 of an outbox: what readers see, whatever writers and other readers do.
//!
//! Those that find a known bug return what they saw instead of asserting, so that `mutations.rs`
//! can show that they find it.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::gate::{self, GATE};
use super::world::{START, Session, World, enqueue, run_with_feed, ulid};
use crate::text::{Feed, template};

const NOON: &str = "2023-05-31T12:00:00";

/// The feed that tests set up.
pub(crate) fn my_event(world: &World) -> Feed {
    Feed {
        schema: world.text("myservice"),
        table: "MyEvent".into(),
        shard_key_type: "int",
        outbox: true,
        key: vec![("AggregateID".into(), "bigint".into()), ("Version".into(), "int".into())],
    }
}

/// What has to be so.
pub(crate) fn check(holds: bool, otherwise: String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(otherwise) }
}

/// Scenario 2: the allocation after the first one of a shard begins where that ended.
pub(crate) async fn first_allocation_counts(world: Arc<World>) -> Result<(), String> {
    let mut session = world.session().await;
    for version in 1..=3 {
        session.enqueue(5, 1, version, NOON).await;
    }
    let first = session.read(5, START, 10).await;
    for version in 4..=5 {
        session.enqueue(5, 1, version, NOON).await;
    }
    let second = session.try_read(5, first[2].ulid, 10).await;
    let second = second.map_err(|refusal| format!("the second page: {refusal:?}"))?;
    let lows: Vec<u64> = first.iter().chain(&second).map(|record| record.low()).collect();
    let expected: Vec<u64> = (0..5).map(|n| first[0].low() + n).collect();
    check(lows == expected, format!("{lows:x?} instead of {expected:x?}"))?;
    let times: BTreeSet<u64> = first.iter().chain(&second).map(|record| record.time_ms()).collect();
    check(times.len() == 1, format!("times {times:?}"))
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn the_second_allocation_on_a_new_shard_begins_where_the_first_ended() {
    run_with_feed(|world| async move {
        first_allocation_counts(world).await.expect("no ULID is given twice");
    });
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn two_readers_that_come_first_to_a_shard_share_one_allocation() {
    run_with_feed(|world| async move {
        let mut session = world.session().await;
        for version in 1..=40 {
            session.enqueue(9, 1, version, NOON).await;
        }
        let mut readers = Vec::new();
        for _ in 0..4 {
            let mut reader = world.session().await;
            readers.push(tokio::spawn(async move { reader.read_all(9, START).await }));
        }
        let mut seen = Vec::new();
        for reader in readers {
            seen.push(reader.await.expect("a reader"));
        }
        assert!(seen.iter().all(|records| *records == seen[0]), "all see the same");
        let versions: Vec<i32> = seen[0].iter().map(|record| record.version).collect();
        assert_eq!(versions, (1..=40).collect::<Vec<_>>());
    });
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn the_order_beats_the_time_and_the_running_maximum_goes_over_pages() {
    run_with_feed(|world| async move {
        let mut session = world.session().await;
        for (version, second) in [0, 3, 2, 1, 10].into_iter().enumerate() {
            let version = i32::try_from(version).expect("a few");
            session.enqueue(0, 1, version, &format!("2023-05-31T12:00:{second:02}")).await;
        }
        let first = session.read(0, START, 3).await;
        let second = session.read(0, first[2].ulid, 3).await;
        let noon = first[0].time_ms();
        let seconds = |page: &[super::world::Record]| -> Vec<u64> {
            page.iter().map(|record| (record.time_ms() - noon) / 1000).collect()
        };
        assert_eq!((seconds(&first), seconds(&second)), (vec![0, 3, 3], vec![3, 10]));
        let all: Vec<i32> = first.iter().chain(&second).map(|record| record.version).collect();
        assert_eq!(all, [0, 1, 2, 3, 4]);
        assert_eq!(session.read_all(0, START).await.len(), 5, "a replay sees the same");
    });
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn a_hint_far_in_the_future_or_before_1970_does_not_poison_a_shard() {
    run_with_feed(|world| async move {
        let mut session = world.session().await;
        session.enqueue(0, 1, 1, "2150-01-01T00:00:00").await;
        session.enqueue(1, 1, 2, "1950-01-01T00:00:00").await;
        let ahead = session.read(0, START, 10).await;
        let old = session.read(1, START, 10).await;
        let now = "[changefeed].[time_ms](sysutcdatetime())";
        let now = u64::try_from(session.number(now).await).expect("after 1970");
        assert!(ahead[0].time_ms() <= now + 60_000, "at most a minute ahead");
        assert_eq!(old[0].time_ms(), 0);
    });
}

/// Scenario 5: a reader finds nothing; another moves a page and is done; the first one then gets
/// the lock at once, and has to return that page before anything else.
pub(crate) async fn the_feed_is_read_again(world: Arc<World>) -> Result<(), String> {
    let mut session = world.session().await;
    let lock = my_event(&world).render(&template("lock_shard"));
    session.run(&world.text("drop procedure [changefeed].[lock_shard:myservice.MyEvent]")).await;
    session.run(&lock.replacen("as\nbegin\n", &format!("as\nbegin\n{GATE}"), 1)).await;
    session.enqueue(0, 1, 1, NOON).await;
    session.enqueue(0, 1, 2, NOON).await;

    gate::close(&mut session).await;
    let mut slow = world.session().await;
    gate::wait_at_gate(&mut slow).await;
    let slow = tokio::spawn(async move { slow.read(0, START, 1).await });
    gate::reached(&mut session).await;
    let quick = world.session().await.read(0, START, 1).await;
    gate::open(&mut session).await;
    let slow = slow.await.expect("the slow reader");
    check(quick[0].version == 1, format!("the quick reader saw {quick:?}"))?;
    check(slow == quick, format!("the slow reader saw {slow:?}, and never {quick:?}"))
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn a_reader_that_gets_the_lock_at_once_returns_what_another_has_moved() {
    run_with_feed(|world| async move {
        the_feed_is_read_again(world).await.expect("nothing is jumped over");
    });
}

/// Scenario 6: a reader of one shard moves no row of another.
pub(crate) async fn shards_are_apart(world: Arc<World>) -> Result<(), String> {
    let mut session = world.session().await;
    for n in 1..=6 {
        session.enqueue(n % 2, i64::from(n % 2), n, NOON).await;
    }
    let zero = session.try_read(0, START, 10).await.map_err(|refusal| format!("{refusal:?}"))?;
    let left = session
        .number("select count(*) from changefeed.[outbox:myservice.MyEvent] where shard_id = 1")
        .await;
    check(left == 3, format!("shard 1 has {left} of 3 rows left in the outbox"))?;
    let one = session.try_read(1, START, 10).await.map_err(|refusal| format!("{refusal:?}"))?;
    for (shard, page) in [(0, zero), (1, one)] {
        let apart = page.len() == 3 && page.iter().all(|record| record.aggregate == shard);
        check(apart, format!("shard {shard}: {page:?}"))?;
    }
    Ok(())
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn a_reader_of_one_shard_moves_no_row_of_another() {
    run_with_feed(|world| async move {
        shards_are_apart(world).await.expect("shards are apart");
    });
}

/// Where readers wait for writers (no READ_COMMITTED_SNAPSHOT), the early read is refused by its
/// `lock_timeout`; where they don't, it sees what is committed. Nothing is lost either way.
#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn a_late_committer_with_an_earlier_number_is_delivered_behind() {
    run_with_feed(|world| async move {
        let mut late = world.session().await;
        late.run("begin transaction;").await;
        late.run(&enqueue(0, 1, 1, NOON)).await;
        let mut session = world.session().await;
        session.enqueue(0, 2, 1, NOON).await;
        session.run("set lock_timeout 2000;").await;
        let mut seen = match session.try_read(0, START, 10).await {
            Ok(page) => page,
            Err(refusal) if !world.snapshots => {
                assert_eq!(refusal.number, 1222, "{refusal:?}");
                Vec::new()
            }
            Err(refusal) => panic!("{refusal:?}"),
        };
        assert!(seen.iter().all(|record| record.aggregate == 2), "{seen:?}");
        late.run("commit transaction;").await;
        let after = seen.last().map_or(START, |record| record.ulid);
        seen.extend(session.read_all(0, after).await);
        let mut aggregates: Vec<i64> = seen.iter().map(|record| record.aggregate).collect();
        if world.snapshots {
            assert_eq!(aggregates, [2, 1]);
        }
        aggregates.sort_unstable();
        assert_eq!(aggregates, [1, 2]);
        assert_eq!(session.read_all(0, START).await, seen, "a replay sees the same");
    });
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn what_was_committed_before_another_began_comes_first() {
    run_with_feed(|world| async move {
        let mut sessions = [world.session().await, world.session().await];
        for n in 0..20 {
            sessions[n % 2].enqueue(0, 1, i32::try_from(n).expect("a few"), NOON).await;
        }
        let seen = sessions[0].read_all(0, START).await;
        let versions: Vec<i32> = seen.iter().map(|record| record.version).collect();
        assert_eq!(versions, (0..20).collect::<Vec<_>>());
    });
}

/// Scenario 9: the reader's session ends when rows have been put into the feed and deleted from the
/// outbox, and nothing is committed.
#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn a_reader_that_dies_while_it_moves_loses_and_doubles_nothing() {
    run_with_feed(|world| async move {
        let mut session = world.session().await;
        session
            .run(&format!(
                "create trigger [changefeed].[dies] on [changefeed].[outbox:myservice.MyEvent]
                 after delete as begin {GATE} end"
            ))
            .await;
        for version in 1..=3 {
            session.enqueue(0, 1, version, NOON).await;
        }
        gate::close(&mut session).await;
        let mut dying = world.session().await;
        gate::wait_at_gate(&mut dying).await;
        let dying = tokio::spawn(async move { dying.read(0, START, 10).await });
        gate::reached(&mut session).await;
        dying.abort();
        assert!(dying.await.is_err_and(|error| error.is_cancelled()));
        gate::open(&mut session).await;
        let seen = session.read_all(0, START).await;
        let versions: Vec<i32> = seen.iter().map(|record| record.version).collect();
        assert_eq!(versions, [1, 2, 3]);
        assert_eq!(outbox_rows(&mut session).await, 0);
    });
}

pub(crate) async fn outbox_rows(session: &mut Session) -> i64 {
    session.number("select count(*) from changefeed.[outbox:myservice.MyEvent]").await
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn a_page_is_short_where_feed_and_outbox_meet_and_empty_only_at_the_head() {
    run_with_feed(|world| async move {
        let mut session = world.session().await;
        assert!(session.read(0, START, 10).await.is_empty());
        for version in 1..=3 {
            session.enqueue(0, 1, version, NOON).await;
        }
        let first = session.read(0, START, 2).await;
        assert_eq!(first.len(), 2);
        session.enqueue(0, 1, 4, NOON).await;
        assert_eq!(session.read(0, START, 10).await, first, "short: it is all that the feed has");
        let rest = session.read(0, first[1].ulid, 10).await;
        assert_eq!(rest.len(), 2);
        assert!(session.read(0, rest[1].ulid, 10).await.is_empty());
    });
}

/// The same by both doors, and columns in their places.
#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn a_page_as_a_result_set_is_the_same_page() {
    run_with_feed(|world| async move {
        let mut session = world.session().await;
        for version in 1..=5 {
            session.enqueue(0, i64::from(version) * 7, version, NOON).await;
        }
        let page = session.read(0, START, 10).await;
        let batch = "exec changefeed.[read_page:myservice.MyEvent] 0, 0x00, 10";
        let sets = session.run(batch).await;
        let rows: Vec<_> = sets.into_iter().flatten().collect();
        assert_eq!(rows.len(), 5);
        for (row, record) in rows.iter().zip(&page) {
            assert_eq!(ulid(row, 0), record.ulid);
            assert_eq!(row.get::<i64, _>(1), Some(record.aggregate));
            assert_eq!(row.get::<i32, _>(2), Some(record.version));
        }
    });
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn a_key_that_is_enqueued_twice_is_two_records() {
    run_with_feed(|world| async move {
        let mut session = world.session().await;
        session.enqueue(0, 1, 1, NOON).await;
        session
            .run(
                "insert into changefeed.[outbox:myservice.MyEvent]
                     (shard_id, time_hint, AggregateID, Version) values (0, '2023-05-31', 1, 1)",
            )
            .await;
        let seen = session.read_all(0, START).await;
        assert_eq!(seen.len(), 2);
        assert!(seen[0].ulid < seen[1].ulid && seen[0].aggregate == seen[1].aggregate);
    });
}

/// Old events through the outbox, beside live ones, before anybody has read: the first read decides
/// the order, which is that of the outbox.
#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn old_events_go_through_the_outbox_before_the_first_read() {
    run_with_feed(|world| async move {
        let mut session = world.session().await;
        for version in 1..=8 {
            let time = if version == 3 { "2023-05-31T12:00:00" } else { "2020-01-01T00:00:00" };
            session.enqueue(0, 1, version, time).await;
        }
        let seen = session.read_all(0, START).await;
        let versions: Vec<i32> = seen.iter().map(|record| record.version).collect();
        assert_eq!(versions, (1..=8).collect::<Vec<_>>());
        assert!(seen.is_sorted_by_key(|record| record.ulid));
    });
}

/// Put into the feed by hand: readers that have passed never see it, new ones do; and where there
/// is nothing but such records, what is moved comes behind them, whatever its time.
#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn records_put_into_the_feed_by_hand_are_seen_by_new_readers_only() {
    run_with_feed(|world| async move {
        let mut session = world.session().await;
        let by_hand = |shard: i32, time: &str, version: i32| {
            format!(
                "insert into changefeed.[feed:myservice.MyEvent]
                     (shard_id, ulid, AggregateID, Version)
                 values ({shard}, [changefeed].[join_ulid](
                     [changefeed].[time_ms]('{time}') * 65536 + 7, 9), 1, {version})"
            )
        };
        session.enqueue(0, 1, 1, NOON).await;
        let seen = session.read_all(0, START).await;
        session.run(&by_hand(0, "2020-01-01T00:00:00", 100)).await;
        assert!(session.read(0, seen[0].ulid, 10).await.is_empty());
        assert_eq!(session.read_all(0, START).await[0].version, 100);

        session.run(&by_hand(1, "2023-06-01T00:00:00", 200)).await;
        session.enqueue(1, 1, 2, NOON).await;
        let versions: Vec<i32> =
            session.read_all(1, START).await.iter().map(|record| record.version).collect();
        assert_eq!(versions, [200, 2]);
    });
}

/// READ COMMITTED is forced: a session in SNAPSHOT reads the same.
#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn a_reader_with_settings_of_its_own_reads_the_same() {
    run_with_feed(|world| async move {
        let mut session = world.session().await;
        session.enqueue(0, 1, 1, NOON).await;
        let mut other = world.session().await;
        other.run("set transaction isolation level snapshot").await;
        let page = other.read(0, START, 10).await;
        assert_eq!(page.len(), 1);
        assert_eq!(session.read(0, START, 10).await, page);
    });
}
