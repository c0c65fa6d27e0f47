//! What the slot is told, seen by a third connection, and catch-ups beside a stream.

use std::time::Duration;

use postrider_core::*;
use postrider_servers::postgres::{Options, Version};
use tokio::time::{Instant, sleep};
use tokio_postgres::Client;

use crate::support::*;
use crate::wal_support::*;
use crate::wal_taker::*;

on_both_versions! {
    what_is_not_confirmed_is_not_acknowledged
    a_catch_up_beside_a_stream_is_finished_after_an_end
    a_catch_up_whose_connection_ends_goes_on
    a_consumer_far_behind_holds_up_no_other
}

/// Bytes 11 to 17 of a position are its place in the log.
fn lsn(position: &Position) -> i64 {
    let bytes = &position.as_bytes()[11..18];
    bytes.iter().fold(0, |lsn, byte| lsn << 8 | i64::from(*byte))
}

const CONFIRMED: &str = "SELECT (confirmed_flush_lsn - '0/0')::bigint FROM pg_replication_slots
    WHERE slot_name = 'postrider_outbox'";

/// Waits until the server has been told of this place, or beyond.
async fn until_told(session: &Client, place: i64) {
    let deadline = Instant::now() + PATIENCE;
    while one::<i64>(session, CONFIRMED).await < place {
        assert!(Instant::now() < deadline, "{place} was not acknowledged");
        sleep(Duration::from_millis(10)).await;
    }
}

/// Three transactions: what is confirmed is told within seconds, and never more, not with time, nor
/// with the log of others, nor at an end.
async fn what_is_not_confirmed_is_not_acknowledged(version: Version) {
    let cluster = Cluster::with(Options::new(version).setting("autovacuum = off")).await;
    let session = cluster.session().await;
    let mut taker = Taker::new(cluster.database.url());
    cluster.append(&[("k", "first")]).await;
    taker.streams(&session).await;
    for name in ["1", "2", "3"] {
        cluster.append(&[("k", name)]).await;
    }
    taker.comes("3", PATIENCE).await;
    let places: Vec<i64> = taker.places().map(lsn).collect();
    assert_eq!(places.len(), 3);
    for (confirmed, place) in places.iter().enumerate() {
        session.execute("SELECT pg_switch_wal()", &[]).await.expect("foreign log");
        let deadline = Instant::now() + Duration::from_millis(2_500);
        while Instant::now() < deadline {
            let told = one::<i64>(&session, CONFIRMED).await;
            // A commit's own place is where it begins: it is sent again from there.
            assert!(told <= *place, "{told} was acknowledged, {place} is not confirmed");
            sleep(Duration::from_millis(20)).await;
        }
        taker.confirm(1).await;
        if let Some(next) = places.get(confirmed + 1) {
            until_told(&session, *place).await;
            assert!(one::<i64>(&session, CONFIRMED).await <= *next);
        }
    }
    taker.end();
    taker.judge(&session).await;
}

/// The slot was lost and made anew without the second consumer, which then reads the table beside
/// the first one's stream. When their process ends, the slot is not beyond the place where the
/// second one was: only that its catch-up had not come to its end tells what it lacks.
async fn a_catch_up_beside_a_stream_is_finished_after_an_end(version: Version) {
    let cluster = Cluster::new(version).await;
    let session = cluster.session().await;
    let mut first = Taker::new(cluster.database.url());
    cluster.append(&[("k", "first")]).await;
    first.streams(&session).await;
    let begun = first.rider().await.beside("second", StartFrom::Oldest).await;
    let mut second = Taker::of(begun, "second");
    second.until("first", PATIENCE).await;
    second.idle(Duration::from_millis(500)).await;
    first.end();
    second.end();
    drop_slot(&session).await;
    for n in 0..40 {
        cluster.append(&[("k", &n.to_string())]).await;
    }
    first.until("39", PATIENCE).await;
    first.streams(&session).await;
    cluster.append(&[("k", "40")]).await;
    first.comes("40", PATIENCE).await;
    let again = first.rider().await.beside("second", StartFrom::Oldest).await;
    second.goes_on(again);
    while second.unconfirmed() < 10 {
        second.step(Duration::from_secs(1), 5).await;
    }
    second.confirm(6).await;
    first.end();
    second.end();
    cluster.append(&[("k", "41")]).await;
    second.at(cluster.database.url());
    second.judge(&session).await;
    second.end();
    first.judge(&session).await;
}

/// The snapshot is still there, and is read a second time: from where the checkpoint stands in it.
async fn a_catch_up_whose_connection_ends_goes_on(version: Version) {
    let cluster = Cluster::new(version).await;
    let session = cluster.session().await;
    // More than all buffers hold.
    let fill = "SELECT count(postrider.append('k' || n % 7, 't', 'T',
        convert_to(n || repeat('x', 2000), 'UTF8'))) FROM generate_series(1, 12000) AS n";
    assert_eq!(one::<i64>(&session, fill).await, 12_000);
    let mut taker = Taker::new(cluster.database.url());
    while taker.had.len() < 700 {
        taker.step(Duration::from_secs(1), 100).await;
    }
    taker.confirm(500).await;
    let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
        WHERE query LIKE 'SELECT l.xid, %'";
    assert_eq!(session.execute(end, &[]).await.expect("terminate"), 1);
    taker.judge(&session).await;
    assert_eq!(taker.wal().await.counts().catch_ups, 2);
}

/// One consumer does not come for its events; the other one has all of them, and in the end so has
/// the first.
async fn a_consumer_far_behind_holds_up_no_other(version: Version) {
    let cluster = Cluster::new(version).await;
    let session = cluster.session().await;
    let mut quick = Taker::new(cluster.database.url());
    cluster.append(&[("k", "first")]).await;
    quick.streams(&session).await;
    let begun = quick.rider().await.beside("slow", StartFrom::Oldest).await;
    let mut slow = Taker::of(begun, "slow");
    slow.until("first", PATIENCE).await;
    slow.idle(Duration::from_millis(300)).await;
    let fill = "SELECT count(postrider.append('k' || n % 7, 't', 'T',
        convert_to(n || repeat('x', 2000), 'UTF8'))) FROM generate_series(1, 12000) AS n";
    assert_eq!(one::<i64>(&session, fill).await, 12_000);
    quick.judge(&session).await;
    slow.judge(&session).await;
}
