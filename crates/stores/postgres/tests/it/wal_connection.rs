//! A connection that breaks, in each of the ways in which one does.
//!
//! What lives here: resets, ends, lost ways and ended processes, and what is left of them on the
//! server. What does not: lost slots (`wal_schedules.rs`).
//! Invariant: in a process that goes on, each event comes once, whatever happens to connections.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use postrider_servers::postgres::{Options, Version};
use postrider_servers::proxy::{Direction, Proxy};
use tokio::time::{Instant, sleep};

use crate::support::*;
use crate::wal_support::*;
use crate::wal_taker::*;

on_both_versions! {
    events_flow_again_after_each_break
    an_idle_stream_that_fell_silent_is_found
    the_connection_of_a_process_that_ended_is_waited_for
    a_server_process_that_stands_still_is_told_of
}

/// What the issue allows.
const FLOWING: Duration = Duration::from_secs(15);

/// The connection beside the stream, by what it asked last.
const CONTROL: &str = "pid <> pg_backend_pid() AND backend_type = 'client backend'
    AND query LIKE '%current_setting(''wal_sender_timeout'')%'";

/// The cluster's database behind a proxy.
fn behind(cluster: &Cluster) -> (Proxy, String) {
    let port = cluster.server.port();
    let proxy = Proxy::start(([127, 0, 0, 1], port).into()).expect("a proxy");
    let url = cluster.database.url().replace(&format!(":{port}/"), &format!(":{}/", proxy.port()));
    (proxy, url)
}

async fn append(cluster: &Cluster, number: u64) {
    let (key, text) = (format!("k{}", number % 3), number.to_string());
    cluster.append(&[(key.as_str(), text.as_str())]).await;
}

async fn end_by(cluster: &Cluster, which: &str) {
    let sql = format!("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {which}");
    cluster.session().await.execute(&sql, &[]).await.expect("terminate");
}

async fn events_flow_again_after_each_break(version: Version) {
    let cluster = Arc::new(Cluster::new(version).await);
    let (proxy, url) = behind(&cluster);
    let mut taker = Taker::new(url);
    let (written, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let writer = {
        let (cluster, written) = (Arc::clone(&cluster), Arc::clone(&written));
        let stop = Arc::clone(&stop);
        tokio::spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                append(&cluster, written.load(Ordering::Relaxed)).await;
                written.fetch_add(1, Ordering::Relaxed);
                sleep(Duration::from_millis(20)).await;
            }
        })
    };
    taker.streams(&cluster.session().await).await;
    for fault in 0..8 {
        let began = Instant::now();
        match fault {
            0 => proxy.reset_all(),
            1 => proxy.close_all(),
            2 => proxy.half_close_all(),
            3 => end_by(&cluster, "backend_type = 'walsender'").await,
            4 => end_by(&cluster, CONTROL).await,
            5 => proxy.lose_all(Direction::ToClient),
            6 => proxy.lose_all(Direction::ToServer),
            _ => {
                proxy.lose_all(Direction::ToClient);
                proxy.lose_all(Direction::ToServer);
            }
        }
        let after = written.load(Ordering::Relaxed) + 20;
        taker.comes(&after.to_string(), FLOWING).await;
        println!("fault {fault}: {:?}", began.elapsed());
        taker.confirm_all().await;
    }
    stop.store(true, Ordering::Relaxed);
    writer.await.expect("it writes");
    taker.judge(&cluster.session().await).await;
}

/// Nothing comes, and nobody says that nothing can come any more. The server's own process would
/// hold the slot for a minute.
async fn an_idle_stream_that_fell_silent_is_found(version: Version) {
    let cluster = Cluster::new(version).await;
    let (proxy, url) = behind(&cluster);
    let mut taker = Taker::new(url);
    append(&cluster, 0).await;
    taker.streams(&cluster.session().await).await;
    for (number, ways) in [
        (1, &[Direction::ToClient][..]),
        (2, &[Direction::ToServer]),
        (3, &[Direction::ToServer, Direction::ToClient]),
    ] {
        ways.iter().for_each(|way| proxy.lose_all(*way));
        append(&cluster, number).await;
        let began = Instant::now();
        taker.comes(&number.to_string(), FLOWING).await;
        println!("lost {ways:?}: {:?}", began.elapsed());
        taker.confirm_all().await;
    }
    taker.judge(&cluster.session().await).await;
}

/// W33, W35: the message names the slot and who holds it, and the wait is the server's own.
async fn the_connection_of_a_process_that_ended_is_waited_for(version: Version) {
    let cluster = Cluster::with(Options::new(version).setting("wal_sender_timeout = 3s")).await;
    let (proxy, url) = behind(&cluster);
    let mut taker = Taker::new(url);
    append(&cluster, 0).await;
    taker.streams(&cluster.session().await).await;
    let pid: i32 =
        one(&cluster.session().await, "SELECT active_pid FROM pg_replication_slots").await;
    proxy.lose_all(Direction::ToServer);
    proxy.lose_all(Direction::ToClient);
    taker.end();
    let began = Instant::now();
    append(&cluster, 1).await;
    taker.at(cluster.database.url());
    taker.told(&[SLOT, &pid.to_string()], Duration::from_secs(3)).await;
    taker.until("1", PATIENCE).await;
    let took = began.elapsed();
    println!("{took:?}");
    assert!(took <= Duration::from_secs(4), "{took:?}");
    taker.judge(&cluster.session().await).await;
}

/// W51: the walsender is stopped as a process; no time-out of its own can end it.
async fn a_server_process_that_stands_still_is_told_of(version: Version) {
    let cluster = Cluster::new(version).await;
    let mut taker = Taker::new(cluster.database.url());
    append(&cluster, 0).await;
    let session = cluster.session().await;
    taker.streams(&session).await;
    let pid: i32 = one(&session, "SELECT active_pid FROM pg_replication_slots").await;
    let signal = |name: &str| {
        let status = std::process::Command::new("kill").arg(name).arg(pid.to_string()).status();
        assert!(status.expect("kill").success());
    };
    signal("-STOP");
    append(&cluster, 1).await;
    taker.told(&[SLOT, &pid.to_string()], Duration::from_secs(30)).await;
    signal("-CONT");
    taker.until("1", FLOWING).await;
    taker.judge(&session).await;
}
