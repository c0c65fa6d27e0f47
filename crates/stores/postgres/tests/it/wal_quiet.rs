//! What a quiet or a blocked consumer costs the server: log, shutdowns, connections.
//!
//! `POSTRIDER_WAL_FOREIGN_MB` and `POSTRIDER_WAL_IDLE_SECONDS` set how much others write and how
//! long nobody does: 1000 and 60 for the proof, less by default.

use std::time::Duration;

use postrider_servers::postgres::{Options, Shutdown, Version};
use tokio::time::{Instant, sleep};
use tokio_postgres::Client;

use crate::support::*;
use crate::wal_schedules::number;
use crate::wal_support::*;
use crate::wal_taker::*;

on_both_versions! {
    a_blocked_sink_costs_no_connection
    what_others_write_is_not_kept
    an_idle_pair_writes_next_to_nothing
    a_server_stops_while_a_consumer_waits
}

const READER: &str = "SELECT active_pid FROM pg_replication_slots";

/// It does not ask for anything for three times the server's patience, with nothing to read and
/// with more than all buffers hold.
async fn a_blocked_sink_costs_no_connection(version: Version) {
    let cluster = Cluster::with(Options::new(version).setting("wal_sender_timeout = 2s")).await;
    let session = cluster.session().await;
    let mut taker = Taker::new(cluster.database.url());
    cluster.append(&[("k", "first")]).await;
    taker.streams(&session).await;
    let pid: i32 = one(&session, READER).await;
    sleep(Duration::from_secs(6)).await;
    let fill = "SELECT count(postrider.append('k' || n % 7, 't', 'T',
        convert_to(n || repeat('x', 2000), 'UTF8'))) FROM generate_series(1, 20000) AS n";
    assert_eq!(one::<i64>(&session, fill).await, 20_000);
    sleep(Duration::from_secs(6)).await;
    taker.judge(&session).await;
    assert_eq!(one::<i32>(&session, READER).await, pid, "another connection");
    assert_eq!(taker.wal().await.counts().reconnects, 0);
    assert_eq!(taker.wal().await.counts().catch_ups, 1, "that of the beginning");
}

const KEPT: &str = "SELECT (pg_current_wal_lsn() - restart_lsn)::bigint FROM pg_replication_slots";
const TOLERATED: i64 = 32 << 20;

async fn write_mb(session: &Client, megabytes: u64) {
    session.batch_execute("CREATE TABLE IF NOT EXISTS foreign_rows (t text)").await.expect("table");
    for _ in 0..megabytes.div_ceil(10) {
        let fill =
            "INSERT INTO foreign_rows SELECT repeat('x', 1000) FROM generate_series(1, 9500)";
        session.batch_execute(fill).await.expect("fill");
        session.batch_execute("TRUNCATE foreign_rows").await.expect("truncate");
    }
}

/// W1, W5, W7: log of another table, and of another database, with an idle outbox.
async fn what_others_write_is_not_kept(version: Version) {
    let cluster = Cluster::new(version).await;
    let session = cluster.session().await;
    let mut taker = Taker::new(cluster.database.url());
    cluster.append(&[("k", "first")]).await;
    taker.until("first", PATIENCE).await;
    let megabytes = number("POSTRIDER_WAL_FOREIGN_MB", 200);
    let elsewhere = Cluster::on(std::sync::Arc::clone(&cluster.server)).await;
    let other = elsewhere.session().await;
    for writer in [&session, &other] {
        let before: i64 = one(&session, "SELECT (pg_current_wal_lsn() - '0/0')::bigint").await;
        let writes = write_mb(writer, megabytes);
        tokio::pin!(writes);
        loop {
            tokio::select! {
                () = &mut writes => break,
                () = taker.idle(Duration::from_millis(500)) => {}
            }
        }
        let after: i64 = one(&session, "SELECT (pg_current_wal_lsn() - '0/0')::bigint").await;
        assert!(after - before > i64::try_from(megabytes << 19).expect("small"), "no log");
        session.batch_execute("CHECKPOINT").await.expect("checkpoint");
        let ended = Instant::now();
        loop {
            let kept: i64 = one(&session, KEPT).await;
            if kept <= TOLERATED {
                println!("{kept} bytes are kept after {:?}", ended.elapsed());
                break;
            }
            assert!(ended.elapsed() < Duration::from_secs(30), "{kept} bytes are kept");
            taker.idle(Duration::from_millis(200)).await;
        }
    }
    taker.judge(&session).await;
}

/// What is acknowledged must be durable first, which writes log, which has to be acknowledged.
///
/// Images of whole pages are left out: the server writes one at the first change of each page
/// after a checkpoint, its own hint bits among them, whoever is there.
async fn an_idle_pair_writes_next_to_nothing(version: Version) {
    let cluster = Cluster::with(Options::new(version).setting("autovacuum = off")).await;
    let session = cluster.session().await;
    let mut taker = Taker::new(cluster.database.url());
    cluster.append(&[("k", "first")]).await;
    taker.until("first", PATIENCE).await;
    session.batch_execute("CREATE EXTENSION pg_walinspect; CHECKPOINT").await.expect("prepared");
    taker.idle(Duration::from_secs(12)).await;
    let before: String = one(&session, "SELECT pg_current_wal_flush_lsn()::text").await;
    let seconds = number("POSTRIDER_WAL_IDLE_SECONDS", 25);
    taker.idle(Duration::from_secs(seconds)).await;
    let stats = format!(
        "SELECT sum(record_size)::bigint, sum(fpi_size)::bigint
         FROM pg_get_wal_stats('{before}', pg_current_wal_flush_lsn())"
    );
    let row = session.query_one(&stats, &[]).await.expect("statistics of the log");
    let (records, images): (i64, i64) = (row.get(0), row.get(1));
    println!("{records} bytes of records in {seconds} s, {images} of whole pages beside them");
    let allowed = 100_000 * i64::try_from(seconds).expect("small") / 60;
    assert!(records > 0, "an idle server writes its running transactions, at least");
    assert!(records <= allowed, "{records} bytes in {seconds} s");
}

/// W9: an idle reader must not hold up the server's end; nor one whose sink is blocked.
async fn a_server_stops_while_a_consumer_waits(version: Version) {
    let cluster = Cluster::new(version).await;
    let mut taker = Taker::new(cluster.database.url());
    cluster.append(&[("k", "first")]).await;
    taker.until("first", PATIENCE).await;
    for is_blocked in [false, true] {
        // Something that is not acknowledged, which the server would wait for.
        cluster.append(&[("k", if is_blocked { "third" } else { "second" })]).await;
        let server = std::sync::Arc::clone(&cluster.server);
        let stop = tokio::task::spawn_blocking(move || {
            let began = Instant::now();
            server.stop(Shutdown::Fast).expect("stop");
            began.elapsed()
        });
        let took = if is_blocked {
            stop.await.expect("it stops")
        } else {
            tokio::pin!(stop);
            loop {
                tokio::select! {
                    took = &mut stop => break took.expect("it stops"),
                    _ = taker.step(Duration::from_millis(50), 512) => {}
                }
            }
        };
        println!("blocked: {is_blocked}: {took:?}");
        assert!(took <= Duration::from_secs(5), "{took:?}");
        let server = std::sync::Arc::clone(&cluster.server);
        tokio::task::spawn_blocking(move || server.start().expect("start")).await.expect("starts");
    }
    taker.until("third", PATIENCE).await;
    taker.judge(&cluster.session().await).await;
}
