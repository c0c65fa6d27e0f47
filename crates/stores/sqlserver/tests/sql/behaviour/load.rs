//! Scenario 8: many writers and readers at once, with writers that roll back and sessions that end.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::scenarios::outbox_rows;
use super::world::{START, World, enqueue, run_with_feed};

const PAGE: i32 = 10;
/// How long readers may go on after the last writer has ended.
const PATIENCE: Duration = Duration::from_secs(300);
const NOON: &str = "2023-05-31T12:00:00";

/// A small generator of one's own, so that a run can be repeated.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

/// Writes `count` events; some transactions are held open, some rolled back, some sessions killed.
async fn write(world: Arc<World>, writer: i64, count: i32) {
    let mut dice = Dice(u64::try_from(writer).expect("not negative") + 1);
    let mut session = world.session().await;
    let mut version = 1;
    while version <= count {
        session.run("begin transaction").await;
        session.run(&enqueue(0, writer, version, NOON)).await;
        tokio::time::sleep(Duration::from_millis(dice.roll(10))).await;
        match dice.roll(10) {
            0 => drop(session.run("rollback transaction").await),
            // The session goes, and its transaction with it.
            1 => session = world.session().await,
            _ => {
                session.run("commit transaction").await;
                version += 1;
            }
        }
    }
}

/// Reads until all events have been seen; which, in the order of the feed.
async fn read(world: Arc<World>, expected: usize) -> Vec<(i64, i32)> {
    let mut session = world.session().await;
    session.run("set lock_timeout 60000").await;
    let ends = Instant::now() + PATIENCE;
    let (mut seen, mut cursor) = (Vec::new(), START);
    while seen.len() < expected {
        let page = session.read(0, cursor, PAGE).await;
        assert!(Instant::now() < ends, "stuck behind {} of {expected} events", seen.len());
        if page.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        cursor = page.last().map_or(cursor, |record| record.ulid);
        seen.extend(page.iter().map(|record| (record.aggregate, record.version)));
    }
    assert!(session.read(0, cursor, PAGE).await.is_empty(), "more than were written");
    seen
}

fn load(writers: i64, readers: usize, each: i32) {
    run_with_feed(move |world| async move {
        let expected = usize::try_from(writers * i64::from(each)).expect("a number");
        let mut tasks = Vec::new();
        for writer in 0..writers {
            tasks.push(tokio::spawn(write(world.clone(), writer, each)));
        }
        let reading: Vec<_> =
            (0..readers).map(|_| tokio::spawn(read(world.clone(), expected))).collect();
        for task in tasks {
            task.await.expect("a writer");
        }
        let mut first: Option<Vec<(i64, i32)>> = None;
        for reader in reading {
            let seen = reader.await.expect("a reader");
            let mut next: BTreeMap<i64, i32> = BTreeMap::new();
            for (writer, version) in &seen {
                let due = next.entry(*writer).or_insert(1);
                assert_eq!(*version, *due, "writer {writer}: its events in order, none twice");
                *due += 1;
            }
            assert!(next.len() == usize::try_from(writers).expect("a number"));
            assert!(next.values().all(|due| *due == each + 1), "{next:?}");
            if let Some(first) = &first {
                assert_eq!(*first, seen, "all readers see the same order");
            }
            first.get_or_insert(seen);
        }
        let mut session = world.session().await;
        assert_eq!(outbox_rows(&mut session).await, 0);
        let fed = "select count(*) from changefeed.[feed:myservice.MyEvent]";
        assert_eq!(session.number(fed).await, i64::try_from(expected).expect("a number"));
    });
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn ten_writers_and_five_readers_of_100_events_each() {
    load(10, 5, 100);
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn ten_writers_and_ten_readers_of_200_events_each() {
    load(10, 10, 200);
}
