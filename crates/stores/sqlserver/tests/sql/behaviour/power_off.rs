//! Scenario 14: a client that vanishes with a transaction open. Its connection is closed here,
//! which the server notices at once; a client without power is noticed by the keep-alive only,
//! which no test can hurry (docs/stores/sqlserver.md says how to bound the wait).

use super::world::{START, enqueue, run, run_with_feed};

const NOON: &str = "2023-05-31T12:00:00";

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn a_serialised_writer_that_vanishes_holds_up_its_shard_for_a_bounded_time() {
    run(|world| async move {
        let mut session = world.session().await;
        session.run("create schema myservice").await;
        session
            .run(
                "create table myservice.E (Shard int not null, ULID binary(16) not null,
                     primary key (Shard, ULID))",
            )
            .await;
        session.run("exec changefeed.setup_feed N'myservice.E', @serialize_writers = 1").await;
        let mut vanishing = world.session().await;
        vanishing.run("begin transaction").await;
        vanishing.run("exec changefeed.[lock_feed:myservice.E] @shard_id = 0").await;
        // Another shard goes on.
        let write = |shard: i32| {
            format!(
                "begin transaction; exec changefeed.[lock_feed:myservice.E] @shard_id = {shard};
                 insert into myservice.E (Shard, ULID)
                 values ({shard}, changefeed.ulid(next value for changefeed.sequence));
                 commit transaction;"
            )
        };
        session.run(&write(1)).await;
        drop(vanishing);
        session.run("set lock_timeout 120000").await;
        session.run(&write(0)).await;
        assert_eq!(session.number("select count(*) from myservice.E").await, 2);
    });
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn an_outbox_writer_that_vanishes_holds_up_nobody() {
    run_with_feed(|world| async move {
        let mut vanishing = world.session().await;
        vanishing.run("begin transaction").await;
        vanishing.run(&enqueue(0, 1, 1, NOON)).await;
        let mut session = world.session().await;
        session.run("set lock_timeout 5000").await;
        session.enqueue(0, 2, 1, NOON).await;
        if world.snapshots {
            assert_eq!(session.read(0, START, 10).await.len(), 1, "readers don't wait either");
        }
        drop(vanishing);
        session.run("set lock_timeout 120000").await;
        let seen = session.read_all(0, START).await;
        assert_eq!(seen.len(), 1, "what was never committed is never seen");
    });
}
