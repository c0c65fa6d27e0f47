//! Emptying segments one by one.
//!
//! What lives here: what a caller of `prune` is told between them. What does not: which segment may
//! be emptied (`retention.rs`).
//! Invariant: nothing is said to be left that the next call would not take.

use std::time::Duration;

use crate::support::*;
use postrider_core::*;
use postrider_servers::postgres::Version;

/// So that a relay can pause in between: a processor is busy for as long as files are freed.
async fn a_call_empties_one_segment_and_tells_of_the_others(version: Version) {
    let world = World::new(version, 1).await;
    for payload in ["1", "2", "3"] {
        world.append(vec![event("a", payload)]).await;
        let rotated = world.database.psql("SELECT postrider.outbox_rotate(0)").expect("rotated");
        assert_eq!(rotated, "t");
    }
    let head = world.store.head(&p(0, 1)).await.expect("head");
    let lease = world.held(&p(0, 1), "r").await;
    world.store.advance(&lease, &consumer("me"), &head, Tally::default()).await.expect("moved");
    let policy = RetentionPolicy { keep: Duration::ZERO, batch: 1_000, dry_run: false };
    for expected in [(1, true), (1, true), (1, false), (0, false)] {
        let pruned = world.store.prune(Some(&lease), &policy).await.expect("pruned");
        assert_eq!((pruned.events, pruned.more), expected);
    }
}

/// Else, where segments fill as fast as they are emptied, some would never be.
async fn the_segment_that_was_filled_first_is_emptied_first(version: Version) {
    let world = World::new(version, 1).await;
    let rotate = || world.database.psql("SELECT postrider.outbox_rotate(0)").expect("rotated");
    for payload in 0..16 {
        world.append(vec![event("a", &payload.to_string())]).await;
        assert_eq!(rotate(), if payload < 15 { "t" } else { "f" });
    }
    let lease = world.held(&p(0, 1), "r").await;
    let policy = RetentionPolicy { keep: Duration::ZERO, batch: 1_000, dry_run: false };
    let prune = async || {
        let head = world.store.head(&p(0, 1)).await.expect("head");
        world.store.advance(&lease, &consumer("me"), &head, Tally::default()).await.expect("moved");
        world.store.prune(Some(&lease), &policy).await.expect("pruned").events
    };
    // The ring is full: its first segment is emptied and used again.
    assert_eq!(prune().await, 1);
    assert_eq!(rotate(), "t");
    world.append(vec![event("a", "younger")]).await;
    for oldest in 2..16 {
        assert_eq!(prune().await, 1);
        let left = "SELECT min(encode(payload, 'escape')::integer)
            FROM postrider.outbox WHERE payload <> 'younger'";
        let left = world.database.psql(left).expect("a number");
        assert_eq!(left, oldest.to_string());
    }
}

on_both_versions! {
    a_call_empties_one_segment_and_tells_of_the_others
    the_segment_that_was_filled_first_is_emptied_first
}
