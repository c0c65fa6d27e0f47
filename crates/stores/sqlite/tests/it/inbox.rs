//! Exactly one effect, however often a message is delivered.

use std::time::Duration;

use postrider_core::*;
use postrider_store_sqlite::{
    Handled, InboxOptions, SqliteInbox, append, first_time, sqlite_error,
};
use uuid::Uuid;

use crate::support::*;

fn id(number: u128) -> EventId {
    EventId::from_uuid(Uuid::from_u128(number))
}

fn insert(tx: &rusqlite::Transaction<'_>, value: i64) -> Result<()> {
    tx.execute("INSERT INTO effect VALUES (?1)", [value])
        .map(drop)
        .map_err(|error| sqlite_error("insert the effect", error))
}

fn effects(world: &World) -> i64 {
    let count = "SELECT count(*) FROM effect";
    world.connection().query_row(count, [], |row| row.get(0)).expect("count")
}

async fn world_with_effects() -> World {
    let world = World::new(1).await;
    world.connection().execute_batch("CREATE TABLE effect (value INTEGER)").expect("table");
    world
}

#[tokio::test]
async fn a_handler_runs_once_per_consumer_and_a_failed_one_may_run_again() {
    let world = world_with_effects().await;
    let inbox = SqliteInbox::new(world.store.clone(), InboxOptions::default()).expect("inbox");
    let me = consumer("billing");
    let failed: Result<Handled<()>> = inbox
        .handle(&me, id(1), |tx| {
            insert(tx, 1)?;
            Err(Error::transient("not now"))
        })
        .await;
    assert!(failed.is_err());
    assert_eq!(effects(&world), 0);
    for expected in [Handled::Now(7), Handled::Before, Handled::Before] {
        let handled = inbox.handle(&me, id(1), |tx| {
            insert(tx, 1)?;
            append(tx, &[event("k", "follow-up")])?;
            Ok::<_, Error>(7)
        });
        assert_eq!(handled.await.expect("handled"), expected);
    }
    assert_eq!(effects(&world), 1);
    assert_eq!(world.drain().await.len(), 1, "the handler's event shares its fate");
    let other = inbox.handle(&consumer("mail"), id(1), |tx| insert(tx, 2)).await;
    assert_eq!(other.expect("handled"), Handled::Now(()));
}

#[tokio::test]
async fn the_note_shares_the_fate_of_the_callers_transaction() {
    let world = world_with_effects().await;
    let mut connection = world.connection();
    let me = consumer("billing");
    for (commit, expected) in [(false, true), (true, true), (true, false)] {
        let tx = connection.transaction().expect("begin");
        assert_eq!(first_time(&tx, &me, id(1)).expect("note"), expected);
        if commit { tx.commit() } else { tx.rollback() }.expect("end");
    }
}

/// Case O31: ids expire by the broker's horizon, not by the wall clock alone.
#[tokio::test]
async fn o31_an_id_outlives_every_redelivery() {
    let world = world_with_effects().await;
    let hour = Duration::from_secs(3_600);
    let short = InboxOptions { dedup_window: hour, broker_horizon: 2 * hour };
    let error = SqliteInbox::new(world.store.clone(), short).expect_err("too short");
    assert!(error.to_string().contains("raise dedup_window"), "{error}");
    let options = InboxOptions { dedup_window: hour, broker_horizon: hour };
    let inbox = SqliteInbox::new(world.store.clone(), options).expect("inbox");
    let me = consumer("billing");
    let handled = || inbox.handle(&me, id(1), |tx| insert(tx, 1));
    assert_eq!(handled().await.expect("handled"), Handled::Now(()));
    let sent = Timestamp::from_millis(u64::try_from(wall_ms(&world)).expect("after 1970") - 1_000);
    assert_eq!(inbox.prune(&me, None, 10).await.expect("prune"), 0, "too young");
    world.clock.move_wall_clock(86_400_000);
    let pruned = inbox.prune(&me, Some(sent), 10).await.expect("prune");
    assert_eq!(pruned, 0, "the broker still holds a message as old as that");
    assert_eq!(handled().await.expect("redelivered"), Handled::Before);
    assert_eq!(inbox.prune(&me, None, 10).await.expect("prune"), 1);
    assert_eq!(handled().await.expect("forgotten"), Handled::Now(()));
}

fn wall_ms(world: &World) -> i64 {
    let seen = "SELECT max(seen_ms) FROM postrider_inbox";
    world.connection().query_row(seen, [], |row| row.get(0)).expect("seen")
}
