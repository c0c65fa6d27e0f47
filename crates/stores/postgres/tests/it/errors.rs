//! What errors say, where only a server can tell whether they mislead.
//!
//! What lives here: whose statement it was. What does not: the table of codes, which is tested in
//! `src/error.rs`.
//! Invariant: a remedy at Postrider's own tables is given for Postrider's own statements alone.

use postrider_core::{Error, ErrorKind, Result};
use postrider_servers::postgres::Version;
use postrider_store_postgres::{Outbox, postgres_error};

use crate::support::{World, event, on_both_versions, session};

on_both_versions! {
    an_own_statement_of_the_application_is_not_answered_with_postriders_remedies
    what_has_to_come_first_is_said_and_not_tried_again
}

/// As the guide shows it.
async fn run(world: &World, sql: &'static str) -> Result<()> {
    let work = world.store.transaction(move |tx| {
        Box::pin(async move {
            let done = tx.batch_execute(sql).await;
            done.map_err(|error| postgres_error("place the order", error))
        })
    });
    work.await
}

async fn refused(world: &World, sql: &'static str) -> Error {
    let error = run(world, sql).await.expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::Permanent, "{sql}: {error:?}");
    error
}

async fn an_own_statement_of_the_application_is_not_answered_with_postriders_remedies(
    version: Version,
) {
    let world = World::new(version, 1).await;
    let role = format!("{}_bare", world.database.name());
    world
        .database
        .psql(&format!("CREATE ROLE {role} LOGIN; CREATE TABLE mine (a integer)"))
        .expect("a role");
    for sql in [
        "INSERT INTO shop_order VALUES (42)",
        "INSERT INTO shop.shop_order VALUES (42)",
        "SELECT amount FROM mine",
        "SELECT place_order(42)",
    ] {
        let error = refused(&world, sql).await;
        let text = error.to_string();
        assert!(text.contains("the application's own migrations"), "{sql}: {text}");
        assert!(!text.contains("ostrider"), "{sql}: {text}");
        assert!(error.chain().contains("does not exist"), "what is missing: {}", error.chain());
    }
    let client = session(&world.database.url_as(&role, None)).await;
    let error = client.batch_execute("SELECT * FROM mine").await.expect_err("refused");
    let text = postgres_error("read the orders", error).to_string();
    assert!(text.contains("lacks a privilege") && !text.contains("grant_relay"), "{text}");
    // Postrider's own statements still say what to do about them.
    let mut client = client;
    let tx = client.transaction().await.expect("begin");
    let error = Outbox::default().append(&tx, &[event("k", "1")]).await.expect_err("refused");
    assert!(error.to_string().contains("Roles in docs/stores/postgres.md"), "{error}");
    drop(tx);
    drop(client);
    world.database.psql(&format!("DROP ROLE {role}")).expect("dropped");
}

async fn what_has_to_come_first_is_said_and_not_tried_again(version: Version) {
    let world = World::new(version, 1).await;
    world
        .database
        .psql(
            "CREATE TABLE bare (id integer); CREATE TABLE item (id integer PRIMARY KEY);
             SELECT postrider.setup_feed('item'), postrider.setup_serialised_feed('f', 1);
             DELETE FROM postrider.table_feed",
        )
        .expect("tables");
    for (sql, says) in [
        ("SELECT postrider.next_ulid('f', 0)", "is not locked by this transaction"),
        ("SELECT postrider.setup_feed('bare')", "has no primary key"),
        ("INSERT INTO item VALUES (1)", "the feed of public.item is gone"),
    ] {
        let error = refused(&world, sql).await;
        assert!(error.to_string().contains(says), "{sql}: {error}");
    }
}
