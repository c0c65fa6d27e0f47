//! What a server in trouble makes of events.
//!
//! What lives here: memory, replicas, wrong keys, missing streams, logins, certificates, lost
//! answers, silence. What does not: sizes and times (`limits.rs`), breaks in the middle of an
//! event, which the suite has.
//! Invariant: nothing counts as sent that is not in the stream, and nothing of a key overtakes.

use std::time::Duration;

use postrider_conformance::samples;
use postrider_conformance::sink::ReceiverFault;
use postrider_core::{
    ContentType, ErrorKind, EventType, NewEvent, Outcome, Record, Secret, Sink, Topic,
};
use postrider_servers::proxy::{Direction, Proxy};
use postrider_servers::redis::{Redis as Server, Tls};
use postrider_sink_redis::{Redis, RedisConfig, Unroutable};

use crate::middle::Middle;
use crate::{
    STREAM, admin, config, confirm, entries, fail, ids, one, publish, run, server, sink, stored_ids,
};

/// Of what is wrong with one stream: others may go on.
const WAITS: ErrorKind = ErrorKind::Throttled { retry_after: None };

pub(crate) fn all_confirmed(outcomes: &[Outcome]) -> bool {
    outcomes.iter().all(|one| matches!(one, Outcome::Confirmed))
}

/// The first of a key's events fails and nothing else of it is sent.
pub(crate) fn first_failed(outcomes: &[Outcome]) -> &postrider_core::Error {
    assert!(outcomes[1..].iter().all(|one| matches!(one, Outcome::HeldBack)), "{outcomes:?}");
    match &outcomes[0] {
        Outcome::Failed(error) => error,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_out_of_memory_asks_for_patience_and_flows_again() {
    let server = server("").await;
    let mut admin = admin(&server.url()).await;
    let sink = sink(&config(server.url()));
    let events: Vec<Record> = (0..4).map(|n| one("a", n)).collect();
    confirm(&sink, &events[0]).await;
    run(&mut admin, "CONFIG SET maxmemory 1").await;
    let outcomes = publish(&sink, &events[1..]).await;
    let error = first_failed(&outcomes);
    assert_eq!(error.kind(), ErrorKind::Throttled { retry_after: None }, "{}", error.chain());
    assert!(error.chain().contains("maxmemory"), "{}", error.chain());
    run(&mut admin, "CONFIG SET maxmemory 0").await;
    assert!(all_confirmed(&publish(&sink, &events[1..]).await));
    assert_eq!(stored_ids(&admin).await, ids(&events));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_primary_that_became_a_replica_is_waited_for() {
    let server = server("").await;
    let mut admin = admin(&server.url()).await;
    let sink = sink(&config(server.url()));
    let events: Vec<Record> = (0..3).map(|n| one("a", n)).collect();
    confirm(&sink, &events[0]).await;
    // Of a primary that there is not: it keeps what it has.
    run(&mut admin, "REPLICAOF 127.0.0.1 1").await;
    let outcomes = publish(&sink, &events[1..]).await;
    let error = first_failed(&outcomes);
    assert_eq!(error.kind(), ErrorKind::Transient);
    assert!(error.chain().contains("READONLY"), "{}", error.chain());
    let error = sink.check().await.expect_err("a replica");
    assert!(error.chain().contains("name the primary"), "{}", error.chain());
    run(&mut admin, "REPLICAOF NO ONE").await;
    sink.check().await.expect("a primary");
    assert!(all_confirmed(&publish(&sink, &events[1..]).await));
    assert_eq!(stored_ids(&admin).await, ids(&events));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_stream_is_waited_for_or_parks() {
    let server = server("").await;
    let mut admin = admin(&server.url()).await;
    let closed = RedisConfig { create_streams: false, ..config(server.url()) };
    let waiting = sink(&RedisConfig { stream: STREAM.into(), ..closed.clone() });
    let parking = sink(&RedisConfig { unroutable: Unroutable::Park, ..closed });
    let events = [one("a", 1), one("a", 2)];
    let outcomes = publish(&waiting, &events).await;
    let error = first_failed(&outcomes);
    assert_eq!(error.kind(), WAITS);
    assert!(error.chain().contains("the stream orders does not exist"), "{}", error.chain());
    assert_eq!(fail(&parking, &events[0]).await.kind(), ErrorKind::Permanent);
    assert!(waiting.check().await.is_err());
    run(&mut admin, "XGROUP CREATE orders readers $ MKSTREAM").await;
    waiting.check().await.expect("there is one");
    // Nothing was remembered of the events that no stream took.
    assert!(all_confirmed(&publish(&waiting, &events).await));
    assert_eq!(stored_ids(&admin).await, ids(&events));
    let making = sink(&config(server.url()));
    run(&mut admin, "DEL orders").await;
    confirm(&making, &one("b", 3)).await;
    assert_eq!(stored_ids(&admin).await.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_of_another_type_is_named_and_mended() {
    let server = server("").await;
    let mut admin = admin(&server.url()).await;
    let sink = sink(&RedisConfig { stream: STREAM.into(), ..config(server.url()) });
    run(&mut admin, "SET orders x").await;
    let events = [one("a", 1), one("a", 2)];
    let outcomes = publish(&sink, &events).await;
    let error = first_failed(&outcomes);
    assert_eq!(error.kind(), WAITS);
    assert!(error.chain().contains("the key orders holds something else"), "{}", error.chain());
    let error = sink.check().await.expect_err("a string").chain();
    assert!(error.contains("the key orders holds a string"), "{error}");
    run(&mut admin, "DEL orders").await;
    sink.check().await.expect("mended");
    assert!(all_confirmed(&publish(&sink, &events).await));
    assert_eq!(stored_ids(&admin).await, ids(&events));
}

/// Streams by type: the second event of the key goes to a key that is none.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_overtakes_an_event_that_is_refused_in_the_middle() {
    let server = server("").await;
    let mut admin = admin(&server.url()).await;
    let middle = Middle::before(server.address()).await;
    let closed = RedisConfig { create_streams: false, ..config(middle.url()) };
    let sink = sink(&closed);
    run(&mut admin, "XGROUP CREATE orders readers $ MKSTREAM").await;
    let events: Vec<Record> = (0..4).map(|n| one("a", n)).collect();
    let refused = events[1].event.id();
    middle.orders().poisoned.insert(refused, ReceiverFault::Refusing);
    for attempt in 0..3 {
        let outcomes = publish(&sink, &events).await;
        let first_is_fine = match attempt {
            0 => matches!(outcomes[0], Outcome::Confirmed),
            _ => matches!(outcomes[0], Outcome::Duplicate),
        };
        assert!(first_is_fine, "{outcomes:?}");
        first_failed(&outcomes[1..]);
        assert_eq!(stored_ids(&admin).await, ids(&events[..1]));
    }
    middle.orders().poisoned.clear();
    publish(&sink, &events).await;
    assert_eq!(stored_ids(&admin).await, ids(&events));
}

/// Many calls run, and none of their answers arrives.
#[tokio::test(flavor = "multi_thread")]
async fn events_whose_answers_were_lost_are_not_appended_twice() {
    let server = server("").await;
    let admin = admin(&server.url()).await;
    let middle = Middle::before(server.address()).await;
    let sink = sink(&config(middle.url()));
    let events: Vec<Record> = (0..60).map(|n| one(&format!("k{}", n % 5), n)).collect();
    for attempt in 0..3 {
        middle.orders().next = Some((5, ReceiverFault::LosingConfirms));
        let outcomes = publish(&sink, &events).await;
        let failed = outcomes.iter().filter(|one| matches!(one, Outcome::Failed(_))).count();
        assert!(failed > 0, "attempt {attempt}: {outcomes:?}");
        middle.orders().next = None;
    }
    let outcomes = publish(&sink, &events).await;
    assert!(outcomes.iter().all(|one| matches!(one, Outcome::Confirmed | Outcome::Duplicate)));
    assert!(outcomes.iter().any(|one| matches!(one, Outcome::Duplicate)), "{outcomes:?}");
    let stored = stored_ids(&admin).await;
    assert_eq!(stored.len(), events.len(), "missing, or twice");
    for key in 0..5 {
        let of_key: Vec<_> = events.iter().skip(key).step_by(5).map(|r| r.event.id()).collect();
        let found: Vec<_> = stored.iter().filter(|id| of_key.contains(id)).copied().collect();
        assert_eq!(found, of_key, "k{key}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repetition_is_told_within_the_window_and_appended_without_one() {
    let server = server("").await;
    let mut admin = admin(&server.url()).await;
    let windowed = sink(&config(server.url()));
    assert_eq!(windowed.capabilities().dedup_window, Some(Duration::from_secs(600)));
    let event = one("a", 1);
    confirm(&windowed, &event).await;
    let again = publish(&windowed, std::slice::from_ref(&event)).await;
    assert!(matches!(again[0], Outcome::Duplicate), "{again:?}");
    let seen = format!("postrider:seen:orders:{}", event.event.id());
    let left: i64 = redis::cmd("PTTL").arg(&seen).query_async(&mut admin).await.expect("a time");
    assert!((1..=600_000).contains(&left), "{left}");
    let without = sink(&RedisConfig { seen_for_ms: 0, ..config(server.url()) });
    assert_eq!(without.capabilities().dedup_window, None);
    for _ in 0..2 {
        confirm(&without, &event).await;
    }
    assert_eq!(stored_ids(&admin).await, [event.event.id(); 3]);
}

/// The server forgets its scripts while the connection stays.
#[tokio::test(flavor = "multi_thread")]
async fn a_forgotten_script_is_given_again() {
    let server = server("").await;
    let mut admin = admin(&server.url()).await;
    let sink = sink(&config(server.url()));
    confirm(&sink, &one("a", 1)).await;
    run(&mut admin, "SCRIPT FLUSH").await;
    confirm(&sink, &one("a", 2)).await;
    assert_eq!(stored_ids(&admin).await.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_server_is_left() {
    let server = server("").await;
    let admin = admin(&server.url()).await;
    let proxy = Proxy::start(server.address()).expect("a proxy");
    let url = format!("redis://127.0.0.1:{}", proxy.port());
    let sink = sink(&RedisConfig { timeout_ms: 1_000, ..config(url) });
    confirm(&sink, &one("a", 1)).await;
    proxy.black_hole();
    let event = one("a", 2);
    let error = fail(&sink, &event).await;
    assert_eq!(error.kind(), ErrorKind::Transient);
    assert!(error.chain().contains("1000 ms"), "{}", error.chain());
    proxy.thaw();
    // On the old connection nothing would ever come back.
    proxy.lose_all(Direction::ToClient);
    let until = tokio::time::Instant::now() + Duration::from_secs(20);
    loop {
        let again = publish(&sink, std::slice::from_ref(&event)).await;
        if matches!(again[0], Outcome::Confirmed | Outcome::Duplicate) {
            break;
        }
        assert!(tokio::time::Instant::now() < until, "{again:?}");
    }
    assert_eq!(stored_ids(&admin).await.len(), 2);
}

/// An idle connection that ended is noticed before an event is given to it.
#[tokio::test(flavor = "multi_thread")]
async fn a_restart_between_two_calls_is_not_noticed() {
    let mut server = server("").await;
    let sink = sink(&config(server.url()));
    let events = [one("a", 1), one("a", 2)];
    confirm(&sink, &events[0]).await;
    let restarted = tokio::task::spawn_blocking(move || {
        server.kill()?;
        server.start_again().map(|()| server)
    });
    let server = restarted.await.expect("no panic").expect("restarted");
    confirm(&sink, &events[1]).await;
    let admin = admin(&server.url()).await;
    assert_eq!(stored_ids(&admin).await, ids(&events), "a confirmed event survives a kill");
}

#[tokio::test(flavor = "multi_thread")]
async fn logins_are_told_apart() {
    let may = "resetchannels ~orders ~postrider:seen:* -@all +evalsha +script|load +set +xadd";
    let server = server(&format!(
        "requirepass adm1n\nuser app on >p4ss {may}\nuser mute on >p4ss ~* +@all -xadd\n\
         user blind on >p4ss ~orders +@all"
    ))
    .await;
    let admin = admin(&server.url().replace("//", "//:adm1n@")).await;
    let login = |user: &str, word: &str| RedisConfig {
        user: Some(user.into()),
        password: Some(Secret::new(word)),
        ..config(server.url())
    };
    let in_url = config(server.url().replace("//", "//app:p4ss@"));
    for (n, good) in [login("app", "p4ss"), in_url].iter().enumerate() {
        confirm(&sink(good), &one("a", n as u64)).await;
    }
    // The server would take its events for those of the user `default`.
    let half = Redis::new(&config(server.url().replace("//", "//app@"))).expect_err("no password");
    assert_eq!(half.kind(), ErrorKind::Permanent);
    let least = sink(&RedisConfig { stream: STREAM.into(), ..login("app", "p4ss") });
    least.check().await.expect("a login that may not look is no obstacle");
    for (bad, kind, part) in [
        (login("app", "wr0ng"), ErrorKind::Transient, "login is refused"),
        (config(server.url()), ErrorKind::Transient, "login is refused"),
        (login("mute", "p4ss"), WAITS, "lacks a permission"),
        (login("blind", "p4ss"), WAITS, "lacks a permission"),
    ] {
        let error = fail(&sink(&bad), &one("a", 9)).await;
        assert_eq!(error.kind(), kind, "{}", error.chain());
        assert!(error.chain().contains(part), "{part}: {}", error.chain());
        assert!(!error.chain().contains("wr0ng"), "{}", error.chain());
    }
    assert_eq!(stored_ids(&admin).await.len(), 2);
}

fn to_stream(key: &str, stream: &str) -> Record {
    let topic = Topic::new(stream).expect("a topic");
    let json = ContentType::new("application/json").expect("a content type");
    let kind = EventType::new("OrderPlaced").expect("a type");
    let event = NewEvent::builder(samples::key(key), topic, kind).id(samples::fresh_id());
    samples::record(event.payload(json, "1").build().expect("within the limits"), 1)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_the_login_may_not_use_keeps_back_nothing_before_it() {
    let may = "resetchannels ~orders ~postrider:seen:* -@all +evalsha +script|load +set +xadd";
    let server = server(&format!("user app on >p4ss {may}")).await;
    let admin = admin(&server.url()).await;
    let login = config(server.url().replace("//", "//app:p4ss@"));
    let sink = sink(&login);
    let events: Vec<Record> = ["orders", "secret", "orders"]
        .into_iter()
        .map(|to| to_stream("a", to))
        .chain([to_stream("b", "secret"), to_stream("c", "orders")])
        .collect();
    for attempt in 0..2 {
        let outcomes = publish(&sink, &events).await;
        let is_fine = |one: &Outcome| matches!(one, Outcome::Confirmed | Outcome::Duplicate);
        assert!(is_fine(&outcomes[0]) && is_fine(&outcomes[4]), "{attempt}: {outcomes:?}");
        for refused in [&outcomes[1..3], &outcomes[3..4]] {
            let error = first_failed(refused);
            assert_eq!(error.kind(), WAITS);
            let chain = error.chain();
            assert!(chain.contains("to append to the stream secret"), "{chain}");
        }
    }
    let mut found = stored_ids(&admin).await;
    found.sort();
    let mut expected = [events[0].event.id(), events[4].event.id()];
    expected.sort();
    assert_eq!(found, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_are_verified_on_both_sides() {
    for tls in [Tls::On, Tls::Mutual] {
        let started = move || Server::start_with("", tls);
        let server =
            tokio::task::spawn_blocking(started).await.expect("no panic").expect("started");
        let (certificate, key) = server.certificate();
        let known = RedisConfig { ca_file: Some(server.authority()), ..config(server.url()) };
        let proven = RedisConfig {
            client_certificate_file: Some(certificate),
            client_key_file: Some(key),
            ..known.clone()
        };
        let (good, bad) = match tls {
            Tls::Mutual => (proven, known),
            _ => (known, config(server.url())),
        };
        let event = one("a", 1);
        let sink_of = sink(&good);
        confirm(&sink_of, &event).await;
        let error = fail(&sink(&bad), &one("a", 2)).await;
        assert_eq!(error.kind(), ErrorKind::Transient);
        assert!(error.chain().contains("ertificate") || tls == Tls::Mutual, "{}", error.chain());
        let again = publish(&sink_of, std::slice::from_ref(&event)).await;
        assert!(matches!(again[0], Outcome::Duplicate), "{again:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_of_a_cluster_is_named() {
    let server = server("cluster-enabled yes").await;
    let sink = sink(&config(server.url()));
    for chain in
        [fail(&sink, &one("a", 1)).await.chain(), sink.check().await.expect_err("a node").chain()]
    {
        assert!(chain.contains("Redis Cluster"), "{chain}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn cloud_events_have_their_attributes_beside_the_event() {
    use postrider_encoding::Encoding;
    let server = server("").await;
    let admin = admin(&server.url()).await;
    for encoding in [Encoding::CloudEventsBinary, Encoding::CloudEventsStructured] {
        confirm(&sink(&RedisConfig { encoding, ..config(server.url()) }), &one("a", 1)).await;
    }
    let entries = entries(&admin).await;
    let of = |entry: usize, name: &str| {
        let found = entries[entry].iter().find(|(field, _)| field == name);
        found.map(|(_, value)| String::from_utf8_lossy(value).into_owned())
    };
    assert_eq!(of(0, "ce-specversion").as_deref(), Some("1.0"));
    assert_eq!(of(0, "ce-id"), of(0, "id"));
    assert_eq!(of(1, "ce-id"), None);
    assert_eq!(of(1, "content-type").as_deref(), Some("application/cloudevents+json"));
    assert!(of(1, "payload").expect("one").contains("\"specversion\":\"1.0\""));
}
