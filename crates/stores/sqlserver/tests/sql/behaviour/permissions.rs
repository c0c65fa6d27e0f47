//! Scenario 15: a writer cannot read the feed or touch the state; a reader cannot write the feed
//! directly, and moves it by the procedure alone.

use super::world::{START, run_with_feed};

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
