//! Feeds of tables with odd names and keys, set up, written and read on the server; and that what
//! the server generates is what the tests' renderer makes of the same templates.

use super::scenarios::my_event;
use super::world::{run, run_with_feed};
use crate::text::{quoted, templates};

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn tables_with_odd_names_are_feeds_like_others() {
    run(|world| async move {
        let mut session = world.session().await;
        session.run("create schema myservice").await;
        let long = "n".repeat(120);
        for name in ["a.b", "it's", "a \"b\" c", "[a]]b", " x", "{T}{K}", "日本 Zoë", &long] {
            let table = format!("myservice.{}", quoted(name));
            let text = table.replace('\'', "''");
            session
                .run(&format!(
                    "create table {table} (Note int null, [c]]'.{{O}} \"] int not null,
                         b nvarchar(20) not null, [a a] datetime2(3) not null,
                         primary key ([a a], b, [c]]'.{{O}} \"]))"
                ))
                .await;
            session.run(&format!("exec changefeed.setup_feed N'{text}', @outbox = 1")).await;
            let find = format!("select name from changefeed.feed where table_name like N'%{}%'", {
                // A text that `like` takes as it is.
                let plain = name.replace(['[', ']', '\''], "_");
                plain.chars().take(20).collect::<String>()
            });
            let rows = session.run(&find).await;
            let feed = rows[0].last().and_then(|row| row.get::<&str, _>(0)).expect("a feed");
            let object = |kind: &str| format!("[changefeed].{}", quoted(&format!("{kind}:{feed}")));
            session
                .run(&format!(
                    "insert into {} (shard_id, [a a], b, [c]]'.{{O}} \"])
                     values (3, '2023-05-31', N'x', 7)",
                    object("outbox")
                ))
                .await;
            let page = format!("exec {} 3, 0x00, 10", object("read_page"));
            let rows: Vec<_> = session.run(&page).await.into_iter().flatten().collect();
            assert_eq!(rows.len(), 1, "{name}");
            assert_eq!(rows[0].get::<i32, _>(3), Some(7), "{name}: the key's last column");
            session.run(&format!("exec changefeed.teardown_feed N'{text}'")).await;
        }
    });
}

/// SQL Server alone keeps a procedure's text as it was given.
#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn the_server_makes_the_texts_that_the_parser_was_shown() {
    run_with_feed(|world| async move {
        if world.babelfish() {
            return;
        }
        let mut session = world.session().await;
        let feed = my_event(&world);
        for template in templates().iter().filter(|t| t.outbox && t.kind == "procedure") {
            let name =
                format!("[changefeed].{}", quoted(&format!("{}:{}", template.name, feed.name())));
            let rows =
                session.run(&format!("select object_definition(object_id(N'{name}'))")).await;
            let text: &str = rows[0][0].get(0).expect("its text");
            assert_eq!(text, world.text(&feed.render(template)), "{}", template.name);
        }
    });
}
