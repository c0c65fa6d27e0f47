//! Which server the sink stays with.
//!
//! What lives here: replicas, and what a server says that is none of use any more. What does not:
//! other trouble of one server (`failures.rs`).
//! Invariant: an address that leads to another server is followed without a restart, and a replica
//! confirms nothing.

use std::time::Duration;

use postrider_core::{ErrorKind, Record, Secret, Sink};
use postrider_servers::proxy::Proxy;
use postrider_servers::redis::Redis as Server;
use postrider_sink_redis::RedisConfig;
use redis::aio::MultiplexedConnection;

use crate::failures::{all_confirmed, first_failed};
use crate::{admin, config, confirm, fail, ids, one, publish, run, server, sink, stored_ids};

/// Confirms an event by a server that is in trouble afterwards, while its address leads to another:
/// the next call is told, and the one after it has arrived there.
async fn is_left(old: Server, trouble: impl AsyncFnOnce(&Server), part: &str) {
    let new = server("").await;
    let proxy = Proxy::start(old.address()).expect("a proxy");
    let sink = sink(&config(format!("redis://127.0.0.1:{}", proxy.port())));
    let events: Vec<Record> = (0..3).map(|n| one("a", n)).collect();
    confirm(&sink, &events[0]).await;
    trouble(&old).await;
    proxy.switch_upstream(new.address());
    let outcomes = publish(&sink, &events[1..]).await;
    let error = first_failed(&outcomes);
    assert_eq!(error.kind(), ErrorKind::Transient);
    assert!(error.chain().contains(part), "{}", error.chain());
    let outcomes = publish(&sink, &events[1..]).await;
    assert!(all_confirmed(&outcomes), "{part}: {outcomes:?}");
    assert_eq!(stored_ids(&admin(&new.url()).await).await, ids(&events[1..]), "{part}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_was_demoted_is_left() {
    for (settings, part) in [("", "READONLY"), ("replica-serve-stale-data no", "without primary")] {
        let demote = async |old: &Server| {
            run(&mut admin(&old.url()).await, "REPLICAOF 127.0.0.1 1").await;
        };
        is_left(server(settings).await, demote, part).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_its_replicas_is_left() {
    let isolate = async |old: &Server| {
        run(&mut admin(&old.url()).await, "CONFIG SET min-replicas-to-write 1").await;
    };
    is_left(server("").await, isolate, "NOREPLICAS").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_its_disk_is_left() {
    let spoil = async |old: &Server| {
        // Nothing can take a folder's place.
        let folder = old.authority().with_file_name("dump.rdb");
        std::fs::create_dir(folder).expect("made");
        let mut admin = admin(&old.url()).await;
        run(&mut admin, "BGSAVE").await;
        let until = tokio::time::Instant::now() + Duration::from_secs(20);
        while !info(&mut admin).await.contains("rdb_last_bgsave_status:err") {
            assert!(tokio::time::Instant::now() < until, "a snapshot fails");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    is_left(server("save 3600 1000000").await, spoil, "MISCONF").await;
}

async fn info(admin: &mut MultiplexedConnection) -> String {
    redis::cmd("INFO").query_async(admin).await.expect("permitted")
}

async fn connections(admin: &mut MultiplexedConnection) -> u64 {
    let told = info(admin).await;
    let found = told.lines().find_map(|line| line.strip_prefix("total_connections_received:"));
    found.expect("told").trim().parse().expect("a number")
}

/// What a stream is called says nothing about its server.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_is_not_left_for_the_name_of_a_stream() {
    let server = server("").await;
    let mut admin = admin(&server.url()).await;
    let sink = sink(&RedisConfig { stream: "READONLY".into(), ..config(server.url()) });
    run(&mut admin, "SET READONLY x").await;
    fail(&sink, &one("a", 1)).await;
    let before = connections(&mut admin).await;
    let error = fail(&sink, &one("a", 1)).await;
    assert!(error.chain().contains("the key READONLY holds something else"), "{}", error.chain());
    assert_eq!(connections(&mut admin).await, before);
}

/// It takes writes of its own, which its primary never gets.
#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_can_be_written_to_confirms_nothing() {
    let may = "resetchannels ~orders ~postrider:seen:* -@all +evalsha +script|load +set +xadd";
    let server = server(&format!(
        "replica-read-only no\nuser rolled on >p4ss {may} +role\nuser told on >p4ss {may} +info"
    ))
    .await;
    let mut admin = admin(&server.url()).await;
    run(&mut admin, "REPLICAOF 127.0.0.1 1").await;
    let event = one("a", 1);
    let logins = ["rolled", "told"].map(|user| RedisConfig {
        user: Some(user.into()),
        password: Some(Secret::new("p4ss")),
        ..config(server.url())
    });
    for login in [config(server.url())].iter().chain(&logins) {
        let error = fail(&sink(login), &event).await;
        assert_eq!(error.kind(), ErrorKind::Transient);
        assert!(error.chain().contains("name the primary"), "{}", error.chain());
    }
    assert!(stored_ids(&admin).await.is_empty());
    // A connection that was there before is given up by the next look.
    run(&mut admin, "REPLICAOF NO ONE").await;
    let sink = sink(&logins[1]);
    confirm(&sink, &event).await;
    run(&mut admin, "REPLICAOF 127.0.0.1 1").await;
    sink.check().await.expect_err("a replica");
    assert!(fail(&sink, &one("a", 2)).await.chain().contains("name the primary"));
    assert_eq!(stored_ids(&admin).await, [event.event.id()]);
}
