//! Scenarios 10 and 11, and what else a user will do wrong: the error's number, a text with a
//! remedy, and nothing changed.

use super::world::{START, Session, hex, run, run_with_feed};

const NOON: &str = "2023-05-31T12:00:00";

/// What a failed set-up must leave as it was: feeds, and objects in the schema.
async fn everything(session: &mut Session) -> (i64, i64) {
    let objects = "select count(*) from sys.objects as o
        inner join sys.schemas as s on s.schema_id = o.schema_id where s.name = N'[changefeed]'";
    let objects = objects.replace("N'[changefeed]'", "parsename(N'[changefeed]', 1)");
    (session.number("select count(*) from changefeed.feed").await, session.number(&objects).await)
}

async fn refused_unchanged(session: &mut Session, batch: &str, number: u32, remedy: &str) {
    let before = everything(session).await;
    let refusal = session.refused(batch, number).await;
    assert!(refusal.text.contains(remedy), "{remedy:?} is not in {refusal:?}");
    session.run("if @@trancount > 0 rollback transaction").await;
    assert_eq!(everything(session).await, before, "{batch}");
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn a_wrong_set_up_says_what_is_wrong_and_changes_nothing() {
    run(|world| async move {
        let mut session = world.session().await;
        session.run("create schema myservice").await;
        session.run("create table myservice.E (a int not null primary key, b int)").await;
        session.run("create table myservice.NoKey (a int not null, b int)").await;
        session
            .run("create table myservice.Named (a int not null, Ulid int not null primary key)")
            .await;
        session.run("create table myservice.Odd (a sql_variant not null primary key)").await;
        let set_up = |what: &str| format!("exec changefeed.setup_feed {what}");
        let cases = [
            ("N'myservice.Nothing', @outbox = 1", 71000, "give schema.table"),
            ("N'a.b.c', @outbox = 1", 71000, "give schema.table"),
            ("N'', @outbox = 1", 71000, "give schema.table"),
            ("null, @outbox = 1", 71000, "give schema.table"),
            ("N'myservice.E'", 55000, "exactly one"),
            ("N'myservice.E', @outbox = 1, @serialize_writers = 1", 55000, "exactly one"),
            ("N'myservice.E', @outbox = null", 55000, "exactly one"),
            ("N'myservice.E', N'text', @outbox = 1", 71004, "must be tinyint"),
            ("N'myservice.E', @outbox = 1, @max_ahead_ms = -1", 77102, "between 0 and a year"),
            ("N'myservice.NoKey', @outbox = 1", 71001, "add one"),
            ("N'myservice.Named', @outbox = 1", 71003, "rename it"),
        ];
        for (what, number, remedy) in cases {
            refused_unchanged(&mut session, &set_up(what), number, remedy).await;
        }
        if !world.babelfish() {
            let odd = set_up("N'myservice.Odd', @outbox = 1");
            refused_unchanged(&mut session, &odd, 71002, "plain types").await;
        }
        let inside = format!("begin transaction; {}", set_up("N'myservice.E', @outbox = 1"));
        refused_unchanged(&mut session, &inside, 77100, "commit first").await;

        session.run(&set_up("N'myservice.E', @outbox = 1")).await;
        session.run(&set_up("N'myservice.E', @outbox = 1, @max_ahead_ms = 1000")).await;
        let other = set_up("N'myservice.E', @serialize_writers = 1");
        refused_unchanged(&mut session, &other, 55001, "teardown_feed").await;
        let other = set_up("N'myservice.E', N'bigint', @outbox = 1");
        refused_unchanged(&mut session, &other, 55001, "teardown_feed").await;
    });
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn setting_up_again_keeps_what_is_there() {
    run_with_feed(|world| async move {
        let mut session = world.session().await;
        session.enqueue(0, 1, 1, NOON).await;
        session.enqueue(0, 1, 2, NOON).await;
        let first = session.read(0, START, 1).await;
        let before = everything(&mut session).await;
        session.run("exec changefeed.setup_feed N'myservice.MyEvent', @outbox = 1").await;
        session.run("exec changefeed.upgrade_feeds").await;
        world.migrate(crate::text::FILES[0].1).await;
        assert_eq!(everything(&mut session).await, before);
        assert_eq!(session.read(0, START, 1).await, first);
        assert_eq!(session.read(0, first[0].ulid, 10).await.len(), 1);
    });
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn reading_where_it_can_t_be_is_refused_and_moves_nothing() {
    run_with_feed(|world| async move {
        let mut session = world.session().await;
        session.enqueue(0, 1, 1, NOON).await;
        let unread = "select count(*) from changefeed.[outbox:myservice.MyEvent]";
        let table = "drop table if exists #read; create table #read (ulid binary(16) not null,
            AggregateID bigint not null, Version int not null);";
        let read = |arguments: &str| {
            format!("{table} exec changefeed.[read_feed:myservice.MyEvent] {arguments}")
        };
        let inside = format!("begin transaction; {}", read("0, 0x00"));
        session.refused(&inside, 77100).await;
        session.run("if @@trancount > 0 rollback transaction").await;
        for arguments in ["null, 0x00", "0, null", "0, 0x00, 0", "0, 0x00, 10001", "0, 0x00, null"]
        {
            session.refused(&read(arguments), 77102).await;
        }
        // A cursor of nowhere: beyond a head that there is not, then beyond one that there is.
        let nowhere = [0xee; 16];
        assert_eq!(session.try_read(0, nowhere, 10).await.map_err(|r| r.number), Err(77111));
        assert_eq!(session.number(unread).await, 1, "nothing was moved");
        let page = session.read(0, START, 10).await;
        session.enqueue(0, 1, 2, NOON).await;
        assert_eq!(session.try_read(0, nowhere, 10).await.map_err(|r| r.number), Err(77111));
        assert_eq!(session.try_read(1, page[0].ulid, 10).await.map_err(|r| r.number), Err(77111));
        assert_eq!(session.number(unread).await, 1, "nothing was moved");
        let mut beside = page[0].ulid;
        beside[15] ^= 1;
        let refusal = session.try_read(0, beside, 10).await.expect_err("it names nothing");
        assert!([77111, 77113].contains(&refusal.number), "{refusal:?}");
        assert!(refusal.text.contains("position_at"), "{refusal:?}");
        // A time is no record and may be read from.
        let mut time = page[0].ulid;
        time[6..].fill(0);
        assert_eq!(session.read(0, time, 10).await, page);
        session
            .refused(
                &format!("exec changefeed.[read_page:myservice.MyEvent] 0, {}", hex(&nowhere)),
                77111,
            )
            .await;
    });
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn a_feed_is_taken_away_whole_and_not_while_somebody_would_miss_events() {
    run_with_feed(|world| async move {
        let mut session = world.session().await;
        session.enqueue(0, 1, 1, NOON).await;
        let down = "exec changefeed.teardown_feed N'myservice.MyEvent'";
        refused_unchanged(&mut session, down, 71007, "@drop_unread = 1").await;
        refused_unchanged(
            &mut session,
            "exec changefeed.teardown_feed N'myservice.No'",
            71006,
            "no feed",
        )
        .await;
        session.run("exec changefeed.teardown_feed N'myservice.MyEvent', @drop_unread = 1").await;
        let left = "select count(*) from sys.objects where name like N'%:' + N'myservice' + N'.%'";
        assert_eq!(session.number(left).await, 0);
        let roles = "select count(*) from sys.database_principals where name like N'%:myservice.%'";
        assert_eq!(session.number(roles).await, 0);
        assert_eq!(session.number("select count(*) from myservice.MyEvent").await, 1);
        session.run("exec changefeed.setup_feed N'myservice.MyEvent', @outbox = 1").await;
        assert!(session.read(0, START, 10).await.is_empty());
    });
}

/// A table that is called as another one with its schema: `[a].[b.c]` and `[a.b].[c]`.
#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn two_tables_whose_feeds_would_have_one_name_are_told_apart() {
    run(|world| async move {
        let mut session = world.session().await;
        session.run("create schema myservice").await;
        session.run("create schema [myservice.b]").await;
        session.run("create table myservice.[b.c] (a int not null primary key)").await;
        session.run("create table [myservice.b].c (a int not null primary key)").await;
        session.run("exec changefeed.setup_feed N'myservice.[b.c]', @outbox = 1").await;
        let other = "exec changefeed.setup_feed N'[myservice.b].c', @outbox = 1";
        refused_unchanged(&mut session, other, 71005, "rename").await;
        session.run("drop table [myservice.b].c; drop schema [myservice.b];").await;
    });
}
