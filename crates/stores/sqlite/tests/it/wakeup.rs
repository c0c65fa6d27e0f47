//! Waking waiting readers, and costing nothing while idle.

use std::sync::Arc;
use std::time::{Duration, Instant};

use postrider_core::*;
use postrider_store_sqlite::append;

use crate::support::*;

/// How soon a waiting reader hears of what `write` does.
async fn heard_after(world: &World, write: impl AsyncFnOnce()) -> Duration {
    let store = world.store.clone();
    let waiting = Arc::new(tokio::sync::Notify::new());
    let begun = Arc::clone(&waiting);
    let waiter = async move {
        begun.notify_one();
        store.changed().await;
        Instant::now()
    };
    let mut waiter = std::pin::pin!(waiter);
    // Lets the look-out take its first look, so that what comes now is news to it.
    let early = tokio::time::timeout(Duration::from_millis(100), &mut waiter).await;
    assert!(early.is_err(), "nothing has happened yet");
    let written = Instant::now();
    write().await;
    let heard = tokio::time::timeout(Duration::from_secs(10), waiter).await.expect("woken");
    heard.saturating_duration_since(written)
}

#[tokio::test]
async fn a_commit_through_the_store_wakes_its_readers() {
    let world = World::new(1).await;
    let heard = heard_after(&world, async || {
        world.append(vec![event("k", "1")]).await;
    })
    .await;
    assert!(heard < Duration::from_secs(1), "{heard:?}");
}

/// Case O55: a commit through a connection of the application's own arrives as fast.
#[tokio::test]
async fn o55_a_commit_by_somebody_else_wakes_readers_too() {
    let world = World::new(1).await;
    let heard = heard_after(&world, async || {
        let mut connection = world.connection();
        let tx = connection.transaction().expect("begin");
        append(&tx, &[event("k", "1")]).expect("append");
        tx.commit().expect("commit");
    })
    .await;
    assert!(heard < Duration::from_secs(1), "{heard:?}");
}

/// Cases O45 and O65: bookkeeping and idling wake nobody.
#[tokio::test]
async fn o65_what_appends_nothing_wakes_nobody() {
    let world = World::new(1).await;
    world.append(vec![event("k", "1")]).await;
    let store = world.store.clone();
    let _ = tokio::time::timeout(Duration::from_millis(100), store.changed()).await;
    let lease = world.held(&p(0, 1), "r").await;
    let mut waiter = std::pin::pin!(store.changed());
    for _ in 0..20 {
        world.store.renew(&[&lease], TTL).await.expect("renew");
        let woken = tokio::time::timeout(Duration::from_millis(10), &mut waiter).await;
        assert!(woken.is_err(), "a renewal is no news");
    }
}
