//! Scenario 15: a writer cannot read the feed or touch the state; a reader cannot write the feed
//! directly, and moves it by the procedure alone.

use super::world::{START, run, run_with_feed};
use crate::text::FILES;

const PASSWORD: &str = "a-Long_enough1Password";

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn each_role_may_do_its_part_and_nothing_else() {
    run_with_feed(|world| async move {
        let mut session = world.session().await;
        let users = [world.text("myservice_w"), world.text("myservice_r")];
        for user in &users {
            session
                .run(&format!(
                    "create login [{user}] with password = '{PASSWORD}';
                     create user [{user}] for login [{user}];"
                ))
                .await;
        }
        session
            .run(&format!(
                "alter role [changefeed.writers:myservice.MyEvent] add member [{}];
                 alter role [changefeed.readers:myservice.MyEvent] add member [{}];",
                users[0], users[1]
            ))
            .await;

        let denied = [
            "select * from changefeed.[feed:myservice.MyEvent]",
            "select * from changefeed.[state:myservice.MyEvent]",
            "update changefeed.[state:myservice.MyEvent] set ulid_low = 0",
            "delete from changefeed.[outbox:myservice.MyEvent]",
            "insert into changefeed.[feed:myservice.MyEvent] (shard_id, ulid, AggregateID, Version)
                 values (0, 0x01, 1, 1)",
            "exec changefeed.[update_state:myservice.MyEvent] 0, 0, 1, 0x00, 0, 0, 0, 0",
            "exec changefeed.[move_outbox:myservice.MyEvent] 0, 10",
            "exec changefeed.[prune_feed:myservice.MyEvent] 0, 0xFF",
        ];
        let insert = "insert into changefeed.[outbox:myservice.MyEvent]
            (shard_id, AggregateID, Version) values (0, 1, 1)";

        let mut writer = world.session_as(&users[0], PASSWORD).await;
        writer.run(insert).await;
        for batch in denied {
            writer.refused(batch, 229).await;
        }
        writer.refused("exec changefeed.[read_page:myservice.MyEvent] 0, 0x00", 229).await;

        let mut reader = world.session_as(&users[1], PASSWORD).await;
        for batch in denied.iter().chain(&[insert]) {
            reader.refused(batch, 229).await;
        }
        // Babelfish has no ownership chaining: there a reader needs the tables, too.
        if !world.babelfish() {
            assert_eq!(reader.read(0, START, 10).await.len(), 1);
            let at = "declare @c binary(16);
                exec changefeed.[position_at:myservice.MyEvent] 0, null, @c output;";
            reader.run(at).await;
        }
        drop((writer, reader));
        for user in &users {
            session.run(&format!("drop user [{user}]; drop login [{user}];")).await;
        }
    });
}

/// What opening a store asks for, as `src/migrate.rs` and `src/lib.rs` ask it.
const OPENING: [&str; 2] =
    [include_str!("../../../src/sql/version.sql"), include_str!("../../../src/sql/identity.sql")];

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn each_role_of_the_ready_made_outbox_opens_it_and_keeps_its_rights_when_a_file_is_run_again() {
    run(|world| async move {
        world.migrate(FILES[1].1).await;
        world.migrate(FILES[0].1).await;
        let mut session = world.session().await;
        session.run("exec changefeed.create_partitions 1").await;
        for (n, role) in ["writers:outbox", "relay", "documents", "inbox"].into_iter().enumerate() {
            let user = world.text(&format!("myservice_{n}"));
            session
                .run(&format!(
                    "create login [{user}] with password = '{PASSWORD}';
                     create user [{user}] for login [{user}];
                     alter role [changefeed.{role}] add member [{user}];"
                ))
                .await;
            let mut opens = world.session_as(&user, PASSWORD).await;
            let version = opens.run(OPENING[0]).await.into_iter().flatten().last();
            assert_eq!(version.and_then(|row| row.get::<i32, _>(0)), Some(2), "{role}");
            let identity = opens.run(OPENING[1]).await.into_iter().flatten().last();
            assert!(identity.is_some_and(|row| row.get::<uuid::Uuid, _>(0).is_some()), "{role}");
            // Babelfish has no ownership chaining: there a reader needs the tables, too.
            if role == "relay" && !world.babelfish() {
                opens.run("exec changefeed.[read_page:outbox] 0, 0x00, 10").await;
                opens
                    .run(
                        "begin transaction; exec changefeed.[lock_shard:outbox] 0;
                         declare @random binary(10), @a bigint, @b bigint, @c bigint, @d bigint;
                         exec changefeed.random_bytes @random output;
                         exec changefeed.[update_state:outbox] 0, 1, 0, @random, @a output,
                             @b output, @c output, @d output;
                         commit transaction;
                         exec changefeed.[prune_feed:outbox] 0, 0x00;",
                    )
                    .await;
            }
            drop(opens);
            session.run(&format!("drop user [{user}]; drop login [{user}];")).await;
        }
    });
}
