//! Exactly one effect, however often a message is delivered.

use std::time::Duration;

use postrider_core::*;
use postrider_servers::postgres::Version;
use postrider_store_postgres::tokio_postgres::Transaction;
use postrider_store_postgres::{Handled, InboxOptions, PostgresInbox, postgres_error};
use uuid::Uuid;

use crate::support::*;

on_both_versions! {
    a_handler_runs_once_per_consumer_and_a_failed_one_may_run_again
    of_two_deliveries_at_once_one_is_handled
    the_note_shares_the_fate_of_the_callers_transaction
    o31_an_id_outlives_every_redelivery
}

fn id(number: u128) -> EventId {
    EventId::from_uuid(Uuid::from_u128(number))
}

async fn insert(tx: &Transaction<'_>, value: i32) -> Result<()> {
    let insert = "INSERT INTO effect VALUES ($1)";
    tx.execute(insert, &[&value])
        .await
        .map(drop)
        .map_err(|error| postgres_error("insert the effect", error))
}

async fn effects(world: &World) -> i64 {
    one(&world.session().await, "SELECT count(*) FROM effect").await
}

async fn world_with_effects(version: Version) -> World {
    let world = World::new(version, 1).await;
    let table = "CREATE TABLE effect (value integer)";
    world.session().await.batch_execute(table).await.expect("table");
    world
}

async fn handled(inbox: &PostgresInbox, consumer: &ConsumerName, id: EventId) -> Handled<()> {
    let handled = inbox.handle(consumer, id, |tx| Box::pin(insert(tx, 1)));
    handled.await.expect("handled")
}

async fn a_handler_runs_once_per_consumer_and_a_failed_one_may_run_again(version: Version) {
    let world = world_with_effects(version).await;
    let inbox = PostgresInbox::new(world.store.clone(), InboxOptions::default()).expect("inbox");
    let me = consumer("billing");
    let failed: Result<Handled<()>, Box<dyn std::error::Error + Send + Sync>> = inbox
        .handle(&me, id(1), |tx| {
            Box::pin(async move {
                insert(tx, 1).await?;
                Err("the handler's own".into())
            })
        })
        .await;
    assert_eq!(failed.expect_err("it failed").to_string(), "the handler's own");
    assert_eq!(effects(&world).await, 0);
    for expected in [Handled::Now(7), Handled::Before, Handled::Before] {
        let outbox = world.store.outbox();
        let handled = inbox.handle(&me, id(1), |tx| {
            Box::pin(async move {
                insert(tx, 1).await?;
                outbox.append(tx, &[event("k", "1")]).await?;
                Ok::<_, Error>(7)
            })
        });
        assert_eq!(handled.await.expect("handled"), expected);
    }
    assert_eq!(effects(&world).await, 1);
    let appended = world.records(&p(0, 1)).await;
    assert_eq!(appended.len(), 1, "the handler's event shares its fate");
    assert_eq!(handled(&inbox, &consumer("mail"), id(1)).await, Handled::Now(()));
}

async fn of_two_deliveries_at_once_one_is_handled(version: Version) {
    let world = world_with_effects(version).await;
    let inbox = PostgresInbox::new(world.store.clone(), InboxOptions::default()).expect("inbox");
    let me = consumer("billing");
    for round in 0..10 {
        let deliver = || handled(&inbox, &me, id(round));
        let (one, two, three) = tokio::join!(deliver(), deliver(), deliver());
        let now = [one, two, three].iter().filter(|how| **how == Handled::Now(())).count();
        assert_eq!(now, 1);
    }
    assert_eq!(effects(&world).await, 10);
}

async fn the_note_shares_the_fate_of_the_callers_transaction(version: Version) {
    let world = world_with_effects(version).await;
    let mut session = world.session().await;
    let (me, outbox) = (consumer("billing"), world.store.outbox());
    for (commit, expected) in [(false, true), (true, true), (true, false)] {
        let tx = session.transaction().await.expect("begin");
        assert_eq!(outbox.first_time(&tx, &me, id(1)).await.expect("note"), expected);
        if commit { tx.commit().await } else { tx.rollback().await }.expect("end");
    }
}

#[cfg(feature = "sqlx")]
mod through_sqlx {
    use super::*;
    use sqlx::Connection as _;

    on_both_versions! { a_note_shares_the_fate_of_its_sqlx_transaction }

    async fn a_note_shares_the_fate_of_its_sqlx_transaction(version: Version) {
        let world = world_with_effects(version).await;
        let connection = sqlx::PgConnection::connect(&world.database.url()).await;
        let mut connection = connection.expect("connect");
        let (me, outbox) = (consumer("billing"), world.store.outbox());
        for (commit, expected) in [(false, true), (true, true), (true, false)] {
            let mut tx = connection.begin().await.expect("begin");
            let first = outbox.first_time_sqlx(&mut tx, &me, id(1)).await;
            assert_eq!(first.expect("note"), expected);
            if commit { tx.commit().await } else { tx.rollback().await }.expect("end");
        }
    }
}

/// Case O31: ids expire by the broker's horizon, not by the clock alone.
async fn o31_an_id_outlives_every_redelivery(version: Version) {
    let world = world_with_effects(version).await;
    let hour = Duration::from_secs(3_600);
    let short = InboxOptions { dedup_window: hour, broker_horizon: 2 * hour };
    let error = PostgresInbox::new(world.store.clone(), short).expect_err("too short");
    assert!(error.to_string().contains("raise dedup_window"), "{error}");
    let options = InboxOptions { dedup_window: hour, broker_horizon: hour };
    let inbox = PostgresInbox::new(world.store.clone(), options).expect("inbox");
    let me = consumer("billing");
    assert_eq!(handled(&inbox, &me, id(1)).await, Handled::Now(()));
    assert_eq!(inbox.prune(&me, None, 10).await.expect("prune"), 0, "too young");
    let client = world.session().await;
    let age = "UPDATE postrider.inbox SET seen_at = seen_at - interval '1 day'";
    client.batch_execute(age).await.expect("aged");
    let ms = "SELECT (extract(epoch FROM min(seen_at)) * 1000)::bigint - 1000 FROM postrider.inbox";
    let sent = Timestamp::from_millis(one::<i64>(&client, ms).await.unsigned_abs());
    let pruned = inbox.prune(&me, Some(sent), 10).await.expect("prune");
    assert_eq!(pruned, 0, "the broker still holds a message as old as that");
    assert_eq!(handled(&inbox, &me, id(1)).await, Handled::Before);
    assert_eq!(inbox.prune(&consumer("mail"), None, 10).await.expect("prune"), 0, "not its own");
    assert_eq!(inbox.prune(&me, None, 10).await.expect("prune"), 1);
    assert_eq!(handled(&inbox, &me, id(1)).await, Handled::Now(()));
}
