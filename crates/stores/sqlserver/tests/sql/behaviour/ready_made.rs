//! The ready-made outbox by T-SQL: appending, the key's partition, more partitions, leases.

use super::world::{Session, run};
use crate::text::FILES;

async fn append(session: &mut Session, arguments: &str) {
    session.run(&format!("begin transaction; {} commit transaction;", call(arguments))).await;
}

fn call(arguments: &str) -> String {
    format!(
        "declare @payload varbinary(max) = 0x01;
         exec changefeed.append {arguments}, @payload = @payload;"
    )
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn events_are_appended_to_the_partition_of_their_key_and_read_whole() {
    run(|world| async move {
        world.migrate(FILES[1].1).await;
        world.migrate(FILES[1].1).await;
        let mut session = world.session().await;
        let event = "@key = N'order-42', @topic = N'orders', @type = N'OrderPlaced'";
        let early = format!("begin transaction; {}", call(event));
        session.refused(&early, 77202).await;
        session.run("if @@trancount > 0 rollback transaction").await;
        session
            .run("exec changefeed.create_partitions 8; exec changefeed.create_partitions 16;")
            .await;

        for (key, hash) in [
            ("a", 0xca97_8112_i64),
            ("order-42", 0x3bf8_b157),
            ("Zoë", 0xc6a1_2698),
            ("日本", 0xcf2a_bf0c),
        ] {
            let query = format!("[changefeed].[key_hash](N'{key}')");
            assert_eq!(session.number(&query).await, hash, "{key}");
        }
        append(&mut session, event).await;
        let id = "018f0000-0000-7000-8000-000000000001";
        append(&mut session, &format!("{event}, @headers = N'{{\"a\": \"b\"}}', @id = '{id}'"))
            .await;
        append(&mut session, &format!("{event}, @id = '{id}', @on_duplicate = 'ignore'")).await;
        let again = format!("begin transaction; {}", call(&format!("{event}, @id = '{id}'")));
        session.refused(&again, 77201).await;
        session.run("if @@trancount > 0 rollback transaction").await;
        let shard = 0x3bf8_b157_i64 % 8;
        let page = format!("exec changefeed.[read_page:outbox] {shard}, 0x00, 10");
        let rows: Vec<_> = session.run(&page).await.into_iter().flatten().collect();
        assert_eq!(rows.len(), 2);
        assert_eq!(rows[0].get::<&str, _>("key"), Some("order-42"));
        assert_eq!(rows[1].get::<&str, _>("headers"), Some("{\"a\": \"b\"}"));
        assert_eq!(
            rows[1].get::<uuid::Uuid, _>("id").map(|id| id.to_string()).as_deref(),
            Some(id)
        );
    });
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn an_event_that_no_reader_would_take_is_refused() {
    run(|world| async move {
        world.migrate(FILES[1].1).await;
        let mut session = world.session().await;
        session.run("exec changefeed.create_partitions 1").await;
        let long = "é".repeat(513);
        for (wrong, why) in [
            ("@key = N'', @topic = N't', @type = N'e'".to_owned(), "key is empty"),
            (format!("@key = N'{long}', @topic = N't', @type = N'e'"), "more than 1024 bytes"),
            ("@key = N'a\tb', @topic = N't', @type = N'e'".to_owned(), "control character"),
            ("@key = N'k', @topic = null, @type = N'e'".to_owned(), "topic is empty"),
            (
                "@key = N'k', @topic = N't', @type = N'e', @headers = N'[1]'".to_owned(),
                "no JSON object",
            ),
            (
                "@key = N'k', @topic = N't', @type = N'e', @headers = N'{\"a\": 1}'".to_owned(),
                "quote the values",
            ),
            (
                "@key = N'k', @topic = N't', @type = N'e', @headers = N'{\"a b\": \"\"}'"
                    .to_owned(),
                "illegal character",
            ),
        ] {
            let refusal =
                session.refused(&format!("begin transaction; {}", call(&wrong)), 77102).await;
            assert!(refusal.text.contains(why), "{why:?} is not in {refusal:?}");
            session.run("if @@trancount > 0 rollback transaction").await;
        }
        // A text on Babelfish has no halves, and so it refuses them by itself.
        if !world.babelfish() {
            let headers = "@key = N'k', @topic = N't', @type = N'e',
                @headers = N'{\"a\": \"\\ud83d\"}'";
            let refusal =
                session.refused(&format!("begin transaction; {}", call(headers)), 77102).await;
            assert!(refusal.text.contains("half of a surrogate pair"), "{refusal:?}");
            session.run("if @@trancount > 0 rollback transaction").await;
            for half in ["nchar(55357)", "nchar(56832) + N'a'", "N'a' + nchar(55357) + N'b'"] {
                let key = format!(
                    "declare @key nvarchar(20) = {half}, @payload varbinary(max) = 0x01;
                     exec changefeed.append @key, N't', N'e', @payload;"
                );
                let refusal = session.refused(&format!("begin transaction; {key}"), 77102).await;
                assert!(refusal.text.contains("half of a surrogate pair"), "{refusal:?}");
                session.run("if @@trancount > 0 rollback transaction").await;
            }
        }
        let pairs = "😀".repeat(256);
        append(&mut session, &format!("@key = N'{pairs}', @topic = N't', @type = N'e'")).await;
        let wide = format!(
            "begin transaction; {}",
            call(&format!("@key = N'{pairs}a', @topic = N't', @type = N'e'"))
        );
        session.refused(&wide, 77102).await;
        session.run("if @@trancount > 0 rollback transaction").await;
        let fine = "@key = N'k', @topic = N't', @type = N'e'";
        session.refused(&call(fine), 77101).await;
        assert_eq!(session.number("select count(*) from changefeed.[outbox]").await, 1);
    });
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn partitions_are_raised_when_open_appends_have_ended() {
    run(|world| async move {
        world.migrate(FILES[1].1).await;
        let mut session = world.session().await;
        session.run("exec changefeed.create_partitions 2").await;
        let event = "@key = N'k', @topic = N't', @type = N'e'";
        let mut open = world.session().await;
        open.run(&format!("begin transaction; {}", call(event))).await;
        session.run("set lock_timeout 300").await;
        session.refused("exec changefeed.raise_partitions 4", 77103).await;
        open.run("commit transaction").await;
        session.run("set lock_timeout 60000").await;
        session.refused("exec changefeed.raise_partitions 3", 77202).await;
        session.run("exec changefeed.raise_partitions 4").await;
        append(&mut session, event).await;
        let shards = "select shard_id from changefeed.[outbox] order by order_sequence";
        let shards: Vec<i32> =
            session.run(shards).await[0].iter().filter_map(|r| r.get(0)).collect();
        assert!(shards[0] < 2 && shards[1] >= 2, "{shards:?}");
        assert_eq!((shards[1] - 2) % 2, shards[0], "the key's successor");
    });
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn a_lease_has_one_holder_and_a_fence_that_holds() {
    run(|world| async move {
        world.migrate(FILES[1].1).await;
        let mut session = world.session().await;
        let acquire = |relay: &str, ms: i64| {
            format!(
                "declare @epoch bigint, @holder nvarchar(255), @left bigint;
                 exec changefeed.acquire_lease N'g', N'0/1', N'{relay}', {ms}, @epoch output,
                     @holder output, @left output;
                 select isnull(@epoch, 0), @holder;"
            )
        };
        let fence = |relay: &str, epoch: i64| {
            format!(
                "begin transaction; exec changefeed.fence N'g', N'0/1', N'{relay}', {epoch};
                 commit transaction;"
            )
        };
        for (relay, ms, epoch, holder) in
            [("a", 60_000, 1, "a"), ("b", 60_000, 0, "a"), ("a", 1, 2, "a")]
        {
            let rows: Vec<_> =
                session.run(&acquire(relay, ms)).await.into_iter().flatten().collect();
            let row = rows.last().expect("a row");
            assert_eq!((row.get::<i64, _>(0), row.get::<&str, _>(1)), (Some(epoch), Some(holder)));
        }
        session.run(&fence("a", 2)).await;
        session.refused(&fence("a", 1), 77200).await;
        session.run("if @@trancount > 0 rollback transaction").await;
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        loop {
            let rows: Vec<_> =
                session.run(&acquire("b", 60_000)).await.into_iter().flatten().collect();
            if rows.last().and_then(|row| row.get::<i64, _>(0)) == Some(3) {
                break;
            }
            assert!(std::time::Instant::now() < deadline, "the lease never expired");
        }
        session.refused(&fence("a", 2), 77200).await;
        session.run("if @@trancount > 0 rollback transaction").await;
        session.run(&fence("b", 3)).await;
    });
}
