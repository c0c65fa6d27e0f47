//! Scenarios 3 and 13: serialised writers.

use std::sync::Arc;

use super::world::{Session, World, hex, run, ulid};

/// Two tables of serialised writers.
async fn set_up(world: &Arc<World>) -> Session {
    let mut session = world.session().await;
    session.run("create schema myservice").await;
    for table in ["One", "Two"] {
        session
            .run(&format!(
                "create table myservice.{table} (Shard smallint not null, ULID binary(16) not null,
                     UserID bigint not null, primary key (Shard, ULID))"
            ))
            .await;
        let feed =
            format!("exec changefeed.setup_feed N'myservice.{table}', @serialize_writers = 1");
        session.run(&feed).await;
    }
    session
}

/// Locks a shard of a feed in the session's open transaction; the ULID that is the lock's own.
async fn lock(session: &mut Session, table: &str, shard: i32) -> [u8; 16] {
    let sets = session
        .run(&format!(
            "declare @ulid binary(16);
             exec changefeed.[lock_feed:myservice.{table}] @shard_id = {shard},
                 @ulid = @ulid output;
             select @ulid as ulid;"
        ))
        .await;
    let rows: Vec<_> = sets.into_iter().flatten().collect();
    ulid(rows.last().expect("a row"), 0)
}

async fn insert(session: &mut Session, table: &str, function: &str, user: i64) {
    session
        .run(&format!(
            "insert into myservice.{table} (Shard, ULID, UserID)
             values (0, changefeed.{function}(next value for changefeed.sequence), {user})"
        ))
        .await;
}

async fn users(session: &mut Session, table: &str) -> Vec<i64> {
    let query = format!("select UserID from myservice.{table} where Shard = 0 order by ULID");
    session.run(&query).await[0].iter().filter_map(|row| row.get(0)).collect()
}

/// The low halves of two ULIDs, and whether all before them is the same.
fn lows(first: [u8; 16], second: [u8; 16]) -> (u64, u64, bool) {
    let low = |ulid: [u8; 16]| u64::from_be_bytes(ulid[8..].try_into().expect("eight bytes"));
    (low(first), low(second), first[..8] == second[..8])
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn two_first_ever_writers_of_a_shard_come_one_after_the_other_with_ranges_apart() {
    run(|world| async move {
        let mut first = set_up(&world).await;
        let mut second = world.session().await;
        first.run("begin transaction").await;
        let a = lock(&mut first, "One", 7).await;
        second.run("set lock_timeout 300").await;
        second
            .refused(
                "set xact_abort on; begin transaction;
                 exec changefeed.[lock_feed:myservice.One] @shard_id = 7;",
                77103,
            )
            .await;
        second.run("if @@trancount > 0 rollback transaction; set lock_timeout -1;").await;
        // Another shard does not wait.
        second.run("begin transaction").await;
        lock(&mut second, "One", 8).await;
        second.run("commit transaction").await;
        let waiting = tokio::spawn(async move {
            second.run("begin transaction").await;
            let b = lock(&mut second, "One", 7).await;
            second.run("commit transaction").await;
            b
        });
        first.run("commit transaction").await;
        let b = waiting.await.expect("the second writer");
        assert!(a < b, "{} {}", hex(&a), hex(&b));
        let (from, to, same_time) = lows(a, b);
        assert!(!same_time || to - from >= 100_000_000_000, "ranges lie apart");
    });
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn all_ulids_of_a_transaction_have_one_time_and_stand_in_order() {
    run(|world| async move {
        let mut session = set_up(&world).await;
        session.run("begin transaction").await;
        let own = lock(&mut session, "One", 0).await;
        for user in 1..=5 {
            insert(&mut session, "One", "ulid", user).await;
        }
        session.run("commit transaction").await;
        assert_eq!(users(&mut session, "One").await, [1, 2, 3, 4, 5]);
        let rows = session.run("select ULID from myservice.One order by ULID").await;
        for row in &rows[0] {
            let (from, to, same_time) = lows(own, ulid(row, 0));
            assert!(same_time && to > from && to - from < 100_000_000_000);
        }
    });
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn a_writer_that_aborts_leaves_no_row_and_the_order_stands() {
    run(|world| async move {
        let mut session = set_up(&world).await;
        for (user, end) in [(1, "commit"), (2, "rollback"), (3, "commit"), (4, "commit")] {
            session.run("begin transaction").await;
            lock(&mut session, "One", 0).await;
            insert(&mut session, "One", "ulid", user).await;
            session.run(&format!("{end} transaction")).await;
        }
        assert_eq!(users(&mut session, "One").await, [1, 3, 4]);
    });
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn two_feeds_in_one_transaction_each_have_their_own_and_ulid_means_the_last() {
    run(|world| async move {
        let mut session = set_up(&world).await;
        session.run("begin transaction").await;
        let one = lock(&mut session, "One", 0).await;
        let two = lock(&mut session, "Two", 0).await;
        insert(&mut session, "One", "[ulid:myservice.One]", 1).await;
        insert(&mut session, "Two", "[ulid:myservice.Two]", 2).await;
        insert(&mut session, "Two", "ulid", 3).await;
        session.run("commit transaction").await;
        assert_eq!(users(&mut session, "One").await, [1]);
        assert_eq!(users(&mut session, "Two").await, [2, 3]);
        for (table, own) in [("One", one), ("Two", two)] {
            let query = format!("select ULID from myservice.{table} order by ULID");
            for row in &session.run(&query).await[0] {
                let (from, to, same) = lows(own, ulid(row, 0));
                assert!(same && to > from, "{table}: a ULID of its own range");
            }
        }
    });
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn a_second_lock_in_the_transaction_begins_the_next_range() {
    run(|world| async move {
        let mut session = set_up(&world).await;
        session.run("begin transaction").await;
        let first = lock(&mut session, "One", 0).await;
        let second = lock(&mut session, "One", 0).await;
        session.run("commit transaction").await;
        assert!(first < second);
        let (from, to, same_time) = lows(first, second);
        assert!(!same_time || to - from == 100_000_000_000);
    });
}

/// A conversion that fails is all that a function has to refuse with: 245, whose text says why.
#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn numbers_from_elsewhere_and_a_lock_of_another_transaction_are_refused() {
    run(|world| async move {
        let mut session = set_up(&world).await;
        let ulid = "select changefeed.[ulid:myservice.One](next value for changefeed.sequence)";
        let refusal = session.refused(ulid, 245).await;
        assert!(refusal.text.contains("call lock_feed first"), "{refusal:?}");
        session.run("begin transaction").await;
        lock(&mut session, "One", 0).await;
        session.run("commit transaction; begin transaction;").await;
        let refusal = session.refused(ulid, 245).await;
        assert!(refusal.text.contains("call lock_feed first"), "{refusal:?}");
        session.run("if @@trancount > 0 rollback transaction").await;
        for n in ["@base + 100000000000", "@base - 1", "null"] {
            let refusal = session
                .refused(
                    &format!(
                        "begin transaction; declare @base bigint;
                         exec changefeed.[lock_feed:myservice.One] @base = @base output;
                         select changefeed.[ulid:myservice.One]({n});"
                    ),
                    245,
                )
                .await;
            assert!(refusal.text.contains("not drawn after lock_feed"), "{n}: {refusal:?}");
            session.run("if @@trancount > 0 rollback transaction").await;
        }
        session.refused("exec changefeed.[lock_feed:myservice.One] @shard_id = 0", 77101).await;
    });
}
