//! Writers whose steps are taken one by one, so that a scan or a check meets them half-way: rows
//! that go in where a scan has been, one id by two transactions, a snapshot from before a raise.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::world::{START, Session, World, run_with_feed};

/// How long a session may take until it waits for another.
const PATIENCE: Duration = Duration::from_secs(60);

/// The number by which a server calls the session.
async fn spid(session: &mut Session) -> i64 {
    session.number("@@spid").await
}

/// Returns once the session waits for a lock. Babelfish does not tell: where a session has to wait
/// there, for an application lock, the order of what follows does not matter.
async fn waits(world: &Arc<World>, spid: i64) {
    if world.babelfish() {
        return;
    }
    let mut session = world.session().await;
    let ends = Instant::now() + PATIENCE;
    let blocked = format!(
        "select count(*) from sys.dm_exec_requests
         where session_id = {spid} and blocking_session_id <> 0"
    );
    while session.number(&blocked).await == 0 {
        assert!(Instant::now() < ends, "the session waits for nobody");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn insert(sequence: i64, aggregate: i64, version: i32) -> String {
    format!(
        "insert into changefeed.[outbox:myservice.MyEvent]
             (shard_id, order_sequence, AggregateID, Version)
         values (0, {sequence}, {aggregate}, {version});"
    )
}

/// A has drawn 5 and inserts it late; W inserts 6 and stays open; B, which begins behind A's
/// commit, gets 7. A scan that waits at 6 has passed the place of 5.
#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn a_row_that_goes_in_where_a_waiting_scan_has_been_comes_before_what_follows_it() {
    run_with_feed(|world| async move {
        let mut open = world.session().await;
        open.run(&format!("begin transaction; {}", insert(6, 2, 1))).await;
        let mut reader = world.session().await;
        let number = spid(&mut reader).await;
        let early = tokio::spawn(async move { reader.read(0, START, 10).await });
        if !world.snapshots {
            waits(&world, number).await;
        }
        let mut key = world.session().await;
        key.run(&insert(5, 1, 1)).await;
        key.run(&insert(7, 1, 2)).await;
        open.run("commit transaction").await;
        let mut seen = early.await.expect("a reader");
        let after = seen.last().map_or(START, |record| record.ulid);
        seen.extend(key.read_all(0, after).await);
        let versions = seen.iter().filter(|record| record.aggregate == 1);
        let versions: Vec<i32> = versions.map(|record| record.version).collect();
        assert_eq!(versions, [1, 2], "{seen:?}");
        assert_eq!(seen.len(), 3);
        assert_eq!(key.read_all(0, START).await, seen, "a replay sees the same");
    });
}
