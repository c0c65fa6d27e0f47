//! Each of the known bugs, put back into a procedure on the server: the scenario that guards
//! against it has to fail.

use std::sync::Arc;

use super::races::a_late_insert_comes_first;
use super::scenarios::{
    check, first_allocation_counts, my_event, shards_are_apart, the_feed_is_read_again,
};
use super::world::{World, run, run_with_feed};
use crate::mutations::{
    FIRST_ALLOCATION, KEY_COLUMNS, Mutation, ONE_SCAN, READ_AGAIN, SHARD_FILTER,
};
use crate::text::{Template, template};

/// Puts the procedure with the bug in place of the feed's own.
async fn put_back(world: &Arc<World>, mutation: &Mutation) {
    let mut session = world.session().await;
    let (drop, text) = match mutation.template {
        Some(name) => {
            let template = Template { text: mutation.text.to_owned(), ..template(name) };
            let drop = format!("drop procedure [changefeed].[{name}:myservice.MyEvent]");
            (drop, my_event(world).render(&template))
        }
        None => ("drop procedure [changefeed].[describe_key]".into(), mutation.text.to_owned()),
    };
    session.run(&drop).await;
    session.run(&text).await;
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn a_first_allocation_that_does_not_count_is_found() {
    run_with_feed(|world| async move {
        put_back(&world, &FIRST_ALLOCATION).await;
        let found = first_allocation_counts(world).await;
        assert!(found.is_err(), "the bug is back and nobody noticed");
    });
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn a_feed_that_is_not_read_again_is_found() {
    run_with_feed(|world| async move {
        put_back(&world, &READ_AGAIN).await;
        let found = the_feed_is_read_again(world).await;
        assert!(found.is_err(), "the bug is back and nobody noticed");
    });
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn an_outbox_that_is_moved_whatever_the_shard_is_found() {
    run_with_feed(|world| async move {
        put_back(&world, &SHARD_FILTER).await;
        let found = shards_are_apart(world).await;
        assert!(found.is_err(), "the bug is back and nobody noticed");
    });
}

/// Where readers see committed versions, one scan is enough, and nothing is to be found.
#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn an_outbox_that_is_scanned_once_is_found_where_readers_wait_for_writers() {
    run_with_feed(|world| async move {
        put_back(&world, &ONE_SCAN).await;
        let found = a_late_insert_comes_first(world.clone()).await;
        assert_eq!(found.is_ok(), world.snapshots, "{found:?}");
    });
}

/// The columns of a feed whose table's key columns come last, and in another order than the key's.
async fn key_columns_are_those_of_the_key(world: Arc<World>) -> Result<(), String> {
    let mut session = world.session().await;
    session.run("create schema myservice").await;
    session
        .run(
            "create table myservice.KeyLast (Size int not null, Note nvarchar(10) null,
                 Version int not null, AggregateID bigint not null,
                 primary key (AggregateID, Version))",
        )
        .await;
    session.run("exec changefeed.setup_feed @table = N'myservice.KeyLast', @outbox = 1").await;
    let columns = "select lower(c.name), lower(type_name(c.user_type_id)) from sys.columns as c
        where c.object_id = object_id(N'[changefeed].[feed:myservice.KeyLast]') and c.column_id > 2
        order by c.column_id";
    let rows = session.run(columns).await.into_iter().flatten();
    let found: Vec<String> = rows
        .map(|row| {
            let part = |column| row.get::<&str, _>(column).unwrap_or_default().to_owned();
            part(0) + " " + &part(1)
        })
        .collect();
    check(found == ["aggregateid bigint", "version int"], format!("{found:?}"))
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn key_columns_are_found_wherever_they_stand_in_the_table() {
    run(|world| async move {
        key_columns_are_those_of_the_key(world).await.expect("the key's columns");
    });
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn key_columns_that_are_looked_up_by_their_place_in_the_index_are_found() {
    run(|world| async move {
        put_back(&world, &KEY_COLUMNS).await;
        let found = key_columns_are_those_of_the_key(world).await;
        assert!(found.is_err(), "the bug is back and nobody noticed");
    });
}
