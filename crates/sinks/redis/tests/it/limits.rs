//! Sizes and times.
//!
//! What lives here: events that are larger than the server takes, calls that are split, the time
//! that a call may send. What does not: trouble (`failures.rs`).
//! Invariant: what is too large is refused alone, with the limit in the reason.

use std::time::Duration;

use postrider_conformance::samples::sized_event;
use postrider_core::{ErrorKind, Outcome, PartitionId, Publish, Record, Sink};
use postrider_servers::proxy::Proxy;
use postrider_sink_redis::RedisConfig;

use crate::middle::Middle;
use crate::{admin, config, confirm, ids, one, publish, run, server, sink, stored_ids};

const MIB: usize = 1 << 20;
/// The smallest that a server can be told.
const LIMIT: &str = "proto-max-bulk-len 1mb";

fn sized(key: &str, n: u64, bytes: usize) -> Record {
    postrider_conformance::samples::record(sized_event(key, n, bytes), n)
}

fn permanent(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Failed(error) if error.kind() == ErrorKind::Permanent => error.chain(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_above_the_limit_parks_with_the_limit_named() {
    let server = server(LIMIT).await;
    let admin = admin(&server.url()).await;
    let sink = sink(&config(server.url()));
    let events = [one("a", 1), sized("a", 2, 2 * MIB), one("a", 3), one("b", 4)];
    let outcomes = publish(&sink, &events).await;
    assert!(permanent(&outcomes[1]).contains("1048576"), "{outcomes:?}");
    assert!(matches!(outcomes[2], Outcome::HeldBack), "{outcomes:?}");
    let mut found = stored_ids(&admin).await;
    found.sort();
    let mut expected = [events[0].event.id(), events[3].event.id()];
    expected.sort();
    assert_eq!(found, expected);
    assert_eq!(sink.capabilities().max_event_bytes, Some(MIB));
}

/// The connection stays the same, and nothing else is sent.
#[tokio::test(flavor = "multi_thread")]
async fn an_event_flows_once_the_limit_is_raised() {
    let server = server(LIMIT).await;
    let mut admin = admin(&server.url()).await;
    let sink = sink(&config(server.url()));
    let event = sized("a", 1, 2 * MIB);
    let outcomes = publish(&sink, std::slice::from_ref(&event)).await;
    permanent(&outcomes[0]);
    run(&mut admin, "CONFIG SET proto-max-bulk-len 4mb").await;
    confirm(&sink, &event).await;
    assert_eq!(sink.capabilities().max_event_bytes, Some(4 * MIB));
}

/// Nobody may ask for the limit, and the server refuses a call as a whole.
#[tokio::test(flavor = "multi_thread")]
async fn an_event_above_an_untold_limit_is_found_and_parks_alone() {
    let server = server(&format!("{LIMIT}\nuser default on nopass ~* +@all -config")).await;
    let admin = admin(&server.url()).await;
    let sink = sink(&config(server.url()));
    let events = [one("a", 1), one("a", 2), sized("a", 3, 2 * MIB), one("a", 4)];
    let until = tokio::time::Instant::now() + Duration::from_secs(20);
    let mut outcomes = publish(&sink, &events).await;
    // The server's answer can be lost when it ends the connection in the middle of a command.
    while !matches!(&outcomes[2], Outcome::Failed(e) if e.kind() == ErrorKind::Permanent) {
        assert!(tokio::time::Instant::now() < until, "{outcomes:?}");
        outcomes = publish(&sink, &events).await;
    }
    assert!(permanent(&outcomes[2]).contains("proto-max-bulk-len"), "{outcomes:?}");
    assert!(matches!(outcomes[3], Outcome::HeldBack), "{outcomes:?}");
    assert_eq!(stored_ids(&admin).await, ids(&events[..2]));
    assert_eq!(sink.capabilities().max_event_bytes, None);
}

/// A key's events of one call need one round trip, and as many as they have times 4 MiB.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_needs_one_round_trip_unless_it_has_many_bytes() {
    let server = server("").await;
    let admin = admin(&server.url()).await;
    let middle = Middle::before(server.address()).await;
    let sink = sink(&RedisConfig { timeout_ms: 30_000, ..config(middle.url()) });
    let small: Vec<Record> = (0..100).map(|n| one("a", n)).collect();
    publish(&sink, &small).await;
    assert_eq!(middle.orders().calls, 1);
    middle.orders().calls = 0;
    let large: Vec<Record> = (0..5).map(|n| sized("b", n, 3 * MIB / 2)).collect();
    let outcomes = publish(&sink, &large).await;
    assert!(outcomes.iter().all(|one| matches!(one, Outcome::Confirmed)), "{outcomes:?}");
    assert_eq!(middle.orders().calls, 3, "two events of 1.5 MiB fit into 4 MiB");
    let expected: Vec<_> = small.iter().chain(&large).map(|one| one.event.id()).collect();
    assert_eq!(stored_ids(&admin).await, expected);
}

/// Large events of one key go in several calls of the script, one after the other.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_ends_in_time_and_gives_back_the_rest() {
    let server = server("").await;
    let admin = admin(&server.url()).await;
    let sink = sink(&RedisConfig { timeout_ms: 30_000, ..config(server.url()) });
    let events: Vec<Record> = (0..4).map(|n| sized("hot", n, 3 * MIB)).collect();
    let partition = PartitionId::numbered(0, 1);
    for first in 0..events.len() {
        let call = Publish::new(&partition, &events[first..]).within(Duration::ZERO);
        let outcomes = sink.publish(call).await;
        assert!(matches!(outcomes[0], Outcome::Confirmed), "each call gets on: {outcomes:?}");
        let rest = &outcomes[1..];
        assert!(rest.iter().all(|one| matches!(one, Outcome::HeldBack)), "{outcomes:?}");
        assert_eq!(stored_ids(&admin).await, ids(&events[..=first]));
    }
}

/// 2 MiB at 16 KiB in 20 ms, by a time for answers that they exceed.
#[tokio::test(flavor = "multi_thread")]
async fn a_large_event_gets_over_a_slow_link() {
    let server = server("").await;
    let admin = admin(&server.url()).await;
    let proxy = Proxy::start(server.address()).expect("a proxy");
    let url = format!("redis://127.0.0.1:{}", proxy.port());
    let sink = sink(&RedisConfig { timeout_ms: 1_000, ..config(url) });
    confirm(&sink, &one("a", 1)).await;
    proxy.delay(Duration::from_millis(20));
    // The small one is sent behind the large one, and waits for it.
    let events = [sized("a", 2, 2 * MIB), one("b", 3)];
    let outcomes = publish(&sink, &events).await;
    assert!(outcomes.iter().all(|one| matches!(one, Outcome::Confirmed)), "{outcomes:?}");
    assert_eq!(stored_ids(&admin).await[1..], ids(&events));
}

/// As many calls are under way as may be, and none of them is answered.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_without_a_free_place_is_given_back_in_time() {
    let server = server("").await;
    let admin = admin(&server.url()).await;
    let middle = Middle::before(server.address()).await;
    let sink = sink(&RedisConfig { timeout_ms: 60_000, ..config(middle.url()) });
    confirm(&sink, &one("first", 0)).await;
    middle.hold(true);
    let mut crowd = tokio::task::JoinSet::new();
    for n in 0..256 {
        let sink = std::sync::Arc::clone(&sink);
        crowd.spawn(async move { publish(&sink, &[one(&format!("crowd-{n}"), n)]).await });
    }
    let events = [one("a", 1), one("b", 2), one("a", 3), one("b", 4)];
    let partition = PartitionId::numbered(0, 1);
    let until = tokio::time::Instant::now() + Duration::from_secs(30);
    // As long as there is a place it is sent, and then no answer comes.
    let outcomes = loop {
        let call = Publish::new(&partition, &events).within(Duration::from_millis(200));
        let ended = tokio::time::timeout(Duration::from_secs(2), sink.publish(call)).await;
        match ended {
            Ok(outcomes) => break outcomes,
            Err(_) => assert!(tokio::time::Instant::now() < until, "no call ends"),
        }
    };
    let throttled = |outcome: &Outcome| {
        let kind = ErrorKind::Throttled { retry_after: None };
        matches!(outcome, Outcome::Failed(error) if error.kind() == kind)
    };
    assert!(outcomes[..2].iter().all(throttled), "the first of each key: {outcomes:?}");
    let waits = |outcome: &Outcome| matches!(outcome, Outcome::HeldBack);
    assert!(outcomes[2..].iter().all(waits), "the second of each: {outcomes:?}");
    crowd.abort_all();
    middle.hold(false);
    let fine = |outcome: &Outcome| matches!(outcome, Outcome::Confirmed | Outcome::Duplicate);
    while !publish(&sink, &events).await.iter().all(fine) {
        assert!(tokio::time::Instant::now() < until, "all arrive");
    }
    let stored = stored_ids(&admin).await;
    let place = |n: usize| stored.iter().position(|id| *id == events[n].event.id());
    assert!((0..2).all(|n| place(n).is_some() && place(n) < place(n + 2)));
}

/// Keys with few events share a call, and what is wrong with one of them keeps back no other.
#[tokio::test(flavor = "multi_thread")]
async fn keys_share_a_call_and_not_their_trouble() {
    let server = server("").await;
    let mut admin = admin(&server.url()).await;
    let middle = Middle::before(server.address()).await;
    let config = RedisConfig { stream: "{key}".into(), ..config(middle.url()) };
    let sink = sink(&config);
    run(&mut admin, "SET bad text").await;
    let events = [one("a", 1), one("bad", 2), one("a", 3), one("b", 4), one("bad", 5)];
    let outcomes = publish(&sink, &events).await;
    assert_eq!(middle.orders().calls, 1);
    let confirmed = [0, 2, 3].map(|n| matches!(outcomes[n], Outcome::Confirmed));
    assert_eq!(confirmed, [true; 3], "{outcomes:?}");
    assert!(matches!(&outcomes[1], Outcome::Failed(error) if error.chain().contains("bad")));
    assert!(matches!(outcomes[4], Outcome::HeldBack), "{outcomes:?}");
    for (stream, length) in [("a", 2), ("b", 1)] {
        let found: i64 = redis::cmd("XLEN").arg(stream).query_async(&mut admin).await.expect("a");
        assert_eq!(found, length, "{stream}");
    }
    // Nothing of the bad key is remembered as sent.
    run(&mut admin, "DEL bad").await;
    let again = [events[1].clone(), events[4].clone()];
    let outcomes = publish(&sink, &again).await;
    assert!(outcomes.iter().all(|one| matches!(one, Outcome::Confirmed)), "{outcomes:?}");
}

/// It accepts connections and says nothing: all keys of a call wait for one of them.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_greets_nobody_is_waited_for_once() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("bound").port();
    let mut accepted = Vec::new();
    let settings = config(format!("redis://127.0.0.1:{port}"));
    let sink = sink(&RedisConfig { connect_timeout_ms: 500, ..settings });
    let events: Vec<Record> = (0..300).map(|n| one(&format!("k{n}"), n)).collect();
    let outcomes = tokio::select! {
        outcomes = publish(&sink, &events) => outcomes,
        _ = async { loop { accepted.push(listener.accept().await) } } => unreachable!("endless"),
    };
    assert!(outcomes.iter().all(|one| matches!(one, Outcome::Failed(_))), "{outcomes:?}");
    assert_eq!(accepted.len(), 1);
}

/// How many calls of scripts the server has run.
async fn script_calls(admin: &mut redis::aio::MultiplexedConnection) -> u64 {
    let mut info = redis::cmd("INFO");
    let told: String = info.arg("commandstats").query_async(admin).await.expect("permitted");
    let calls = told.split("cmdstat_evalsha:calls=").nth(1).and_then(|rest| rest.split(',').next());
    calls.map_or(0, |calls| calls.parse().expect("a number"))
}

/// An event is held up on its way for so long that another relay has sent it, and its successor.
#[tokio::test(flavor = "multi_thread")]
async fn what_arrives_late_is_dropped() {
    let server = server("").await;
    let mut admin = admin(&server.url()).await;
    let proxy = Proxy::start(server.address()).expect("a proxy");
    let url = format!("redis://127.0.0.1:{}", proxy.port());
    let held_up = sink(&RedisConfig { timeout_ms: 2_000, ..config(url) });
    let other = sink(&config(server.url()));
    confirm(&held_up, &one("b", 0)).await;
    proxy.freeze();
    let events = [one("a", 1), one("a", 2)];
    let outcomes = publish(&held_up, &events[..1]).await;
    assert!(matches!(outcomes[0], Outcome::Failed(_)), "{outcomes:?}");
    for event in &events {
        confirm(&other, event).await;
    }
    let before = script_calls(&mut admin).await;
    proxy.thaw();
    let until = tokio::time::Instant::now() + Duration::from_secs(20);
    while script_calls(&mut admin).await == before {
        assert!(tokio::time::Instant::now() < until, "what was held up arrives");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(stored_ids(&admin).await[1..], ids(&events));
}
