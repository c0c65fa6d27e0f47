//! Writers whose steps are taken one by one, so that a scan or a check meets them half-way: rows
//! that go in where a scan has been, one id by two transactions, a snapshot from before a raise.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::scenarios::check;
use super::world::{START, Session, World, run, run_with_feed};
use crate::text::FILES;

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
pub(crate) async fn a_late_insert_comes_first(world: Arc<World>) -> Result<(), String> {
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
    check(versions == [1, 2] && seen.len() == 3, format!("{seen:?}"))?;
    let again = key.read_all(0, START).await;
    check(again == seen, format!("a replay sees {again:?} instead of {seen:?}"))
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn a_row_that_goes_in_where_a_waiting_scan_has_been_comes_before_what_follows_it() {
    run_with_feed(|world| async move {
        a_late_insert_comes_first(world).await.expect("a key's order is kept");
    });
}

/// The ready-made outbox with one partition, and its sessions.
async fn ready_made(world: &Arc<World>) -> [Session; 2] {
    world.migrate(FILES[1].1).await;
    let mut sessions = [world.session().await, world.session().await];
    sessions[0].run("exec changefeed.create_partitions 1").await;
    sessions
}

fn append(key: &str, topic: &str, id: &str) -> String {
    format!(
        "declare @payload varbinary(max) = 0x01;
         exec changefeed.append @key = N'{key}', @topic = N'{topic}', @type = N'e',
             @payload = @payload, @id = '{id}';"
    )
}

const ID: &str = "018f0000-0000-7000-8000-000000000001";

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn one_id_under_two_keys_is_appended_once() {
    run(|world| async move {
        let [mut first, mut second] = ready_made(&world).await;
        first.run(&format!("begin transaction; {}", append("a", "t", ID))).await;
        let number = spid(&mut second).await;
        let late = tokio::spawn(async move {
            // As an application that does not look at what went wrong.
            let again = format!("begin transaction; {}", append("b", "t", ID));
            second.refused(&again, 77201).await;
            second.run("if @@trancount > 0 commit transaction").await;
        });
        waits(&world, number).await;
        first.run("commit transaction").await;
        late.await.expect("the second is refused");
        assert_eq!(first.number("select count(*) from changefeed.[outbox]").await, 1);
        assert_eq!(first.number("select count(*) from changefeed.[event_id]").await, 1);
    });
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn an_append_that_fails_half_way_leaves_no_id_behind() {
    run(|world| async move {
        let [mut session, _] = ready_made(&world).await;
        session
            .run("alter table changefeed.[outbox] add constraint no_z check (topic <> N'z')")
            .await;
        session.refused(&format!("begin transaction; {}", append("a", "z", ID)), 547).await;
        session.run("if @@trancount > 0 commit transaction").await;
        assert_eq!(session.number("select count(*) from changefeed.[event_id]").await, 0);
        session
            .run(&format!("begin transaction; {} commit transaction;", append("a", "t", ID)))
            .await;
        assert_eq!(session.number("select count(*) from changefeed.[outbox]").await, 1);
    });
}

/// It would read the partitions as they were before a raise for which its lock has waited. 3952:
/// the database does not allow such transactions at all.
#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn an_append_under_snapshot_is_refused() {
    run(|world| async move {
        if world.babelfish() {
            return;
        }
        let [mut session, _] = ready_made(&world).await;
        session.run("set transaction isolation level snapshot").await;
        let refused =
            session.try_run(&format!("begin transaction; {}", append("a", "t", ID))).await;
        let refused = refused.expect_err("it is refused");
        assert!([77203, 3952].contains(&refused.number), "{refused:?}");
        session.run("if @@trancount > 0 rollback transaction").await;
        session.run("set transaction isolation level read committed").await;
        assert_eq!(session.number("select count(*) from changefeed.[outbox]").await, 0);
    });
}
