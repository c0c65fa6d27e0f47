//! What a broker in trouble makes of events, on both versions.
//!
//! What lives here: streams that are missing, full or others, limits, logins, restarts. What does
//! not: breaks in the middle of an event, which the suite has.
//! Invariant: nothing counts as sent that is not in the stream.

use std::time::Duration;

use async_nats::jetstream::stream;
use nkeys::KeyPair;
use postrider_conformance::samples::sized_event;
use postrider_core::{ErrorKind, Outcome, PartitionId, Publish, Record, Secret, Sink};
use postrider_servers::nats::{Nats as Server, Tls, Version};
use postrider_sink_nats::{NatsConfig, Unroutable};

use crate::{STREAM, admin, config, confirm, everything, fail, one, publish, server, sink, stored};

macro_rules! on_both_versions {
    ($($name:ident)*) => {
        mod old {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                super::$name(super::Version::Old).await;
            })*
        }
        mod new {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                super::$name(super::Version::New).await;
            })*
        }
    };
}

on_both_versions! {
    a_missing_stream_is_waited_for_or_parks
    another_stream_than_asked_for_takes_nothing
    a_full_stream_asks_for_patience
    an_event_above_a_limit_parks_with_the_limit_named
    a_limit_that_was_raised_is_heard_of_without_a_restart
    a_stream_that_does_not_acknowledge_is_no_good
    a_repetition_is_told_as_one
    what_failed_while_the_server_was_away_is_not_sent_later
    a_silent_server_is_left
    logins_are_told_apart
    a_forbidden_subject_is_named
    certificates_are_verified_on_both_sides
    a_call_ends_in_time_and_gives_back_the_rest
    a_call_ends_in_time_also_while_others_fill_the_connection
}

fn ids(delivered: &[postrider_conformance::sink::Delivered]) -> Vec<postrider_core::EventId> {
    delivered.iter().map(|one| one.id).collect()
}

async fn a_missing_stream_is_waited_for_or_parks(version: Version) {
    let server = server(version, "").await;
    let context = admin(&server.url()).await;
    let waiting = sink(&config(server.url()));
    let parking = sink(&NatsConfig { unroutable: Unroutable::Park, ..config(server.url()) });
    let event = one("a", 1);
    let error = fail(&waiting, &event).await;
    assert_eq!(error.kind(), ErrorKind::Throttled { retry_after: None });
    assert!(error.chain().contains("events.orders"), "{}", error.chain());
    assert_eq!(fail(&parking, &event).await.kind(), ErrorKind::Permanent);
    let named = sink(&NatsConfig { stream: Some(STREAM.into()), ..config(server.url()) });
    let error = named.check().await.expect_err("there is none").chain();
    assert!(error.contains(STREAM), "{error}");
    context.create_stream(everything()).await.expect("a stream");
    named.check().await.expect("there is one");
    assert_eq!(named.capabilities().dedup_window, Some(Duration::from_secs(120)));
    confirm(&waiting, &event).await;
    confirm(&parking, &one("a", 2)).await;
    assert_eq!(stored(&context).await.len(), 2);
}

async fn another_stream_than_asked_for_takes_nothing(version: Version) {
    let server = server(version, "").await;
    let context = admin(&server.url()).await;
    context.create_stream(everything()).await.expect("a stream");
    let other = NatsConfig { stream: Some("OTHER".into()), ..config(server.url()) };
    let error = fail(&sink(&other), &one("a", 1)).await;
    assert_eq!(error.kind(), ErrorKind::Throttled { retry_after: None }, "{}", error.chain());
    assert!(error.chain().contains("another stream"), "{}", error.chain());
    assert!(stored(&context).await.is_empty());
}

async fn a_full_stream_asks_for_patience(version: Version) {
    let server = server(version, "").await;
    let context = admin(&server.url()).await;
    let small = stream::Config { max_messages: 1, ..everything() };
    let stream = context.create_stream(small).await.expect("a stream");
    let sink = sink(&config(server.url()));
    let (first, second) = (one("a", 1), one("a", 2));
    confirm(&sink, &first).await;
    let error = fail(&sink, &second).await;
    assert_eq!(error.kind(), ErrorKind::Throttled { retry_after: None }, "{}", error.chain());
    stream.purge().await.expect("room again");
    confirm(&sink, &second).await;
    assert_eq!(ids(&stored(&context).await), [second.event.id()]);
}

fn sized(key: &str, n: u64, bytes: usize) -> Record {
    postrider_conformance::samples::record(sized_event(key, n, bytes), n)
}

async fn an_event_above_a_limit_parks_with_the_limit_named(version: Version) {
    let server = server(version, "max_payload: 64KB").await;
    let context = admin(&server.url()).await;
    let small = stream::Config { max_message_size: 10_000, ..everything() };
    context.create_stream(small).await.expect("a stream");
    let sink = sink(&config(server.url()));
    let events =
        [one("a", 1), sized("b", 2, 70_000), sized("c", 3, 20_000), one("b", 4), one("d", 5)];
    let outcomes = publish(&sink, &events).await;
    let permanent = |outcome: &Outcome| match outcome {
        Outcome::Failed(error) if error.kind() == ErrorKind::Permanent => error.chain(),
        other => panic!("{other:?}"),
    };
    assert!(permanent(&outcomes[1]).contains("65536"), "{outcomes:?}");
    assert!(permanent(&outcomes[2]).contains("max_msg_size of 10000 bytes"), "{outcomes:?}");
    assert!(matches!(outcomes[3], Outcome::HeldBack), "{outcomes:?}");
    let expected = [events[0].event.id(), events[4].event.id()];
    assert_eq!(ids(&stored(&context).await), expected);
}

/// The client library learns the limit when it connects, and never again.
async fn a_limit_that_was_raised_is_heard_of_without_a_restart(version: Version) {
    let server = server(version, "max_payload: 64KB").await;
    let context = admin(&server.url()).await;
    context.create_stream(everything()).await.expect("a stream");
    let sink = sink(&config(server.url()));
    let event = sized("a", 1, 70_000);
    assert_eq!(fail(&sink, &event).await.kind(), ErrorKind::Permanent);
    server.configure("max_payload: 1MB").expect("written");
    let reloaded = tokio::task::spawn_blocking(move || server.reload().map(|()| server));
    let _server = reloaded.await.expect("no panic").expect("reloaded");
    let until = tokio::time::Instant::now() + Duration::from_secs(60);
    // What was learned a moment ago still holds; then it is asked for again, and the event waits.
    let waits = loop {
        let error = fail(&sink, &event).await;
        if error.kind() != ErrorKind::Permanent {
            break error;
        }
        assert!(tokio::time::Instant::now() < until, "{}", error.chain());
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    assert_eq!(waits.kind(), ErrorKind::Throttled { retry_after: None }, "{}", waits.chain());
    assert!(waits.chain().contains("was 65536 and is 1048576 now"), "{}", waits.chain());
    confirm(&sink, &event).await;
    assert_eq!(ids(&stored(&context).await), [event.event.id()]);
}

/// It would never confirm anything.
async fn a_stream_that_does_not_acknowledge_is_no_good(version: Version) {
    let server = server(version, "").await;
    let context = admin(&server.url()).await;
    let silent = stream::Config { no_ack: true, ..everything() };
    context.create_stream(silent).await.expect("a stream");
    let named = sink(&NatsConfig { stream: Some(STREAM.into()), ..config(server.url()) });
    let error = named.check().await.expect_err("it is told").chain();
    assert!(error.contains("take no_ack from it"), "{error}");
}

async fn a_repetition_is_told_as_one(version: Version) {
    let server = server(version, "").await;
    let context = admin(&server.url()).await;
    context.create_stream(everything()).await.expect("a stream");
    let sink = sink(&config(server.url()));
    let event = one("a", 1);
    confirm(&sink, &event).await;
    let again = publish(&sink, std::slice::from_ref(&event)).await;
    assert!(matches!(again[0], Outcome::Duplicate), "{again:?}");
    assert_eq!(stored(&context).await.len(), 1);
}

async fn stopped(mut server: Server) -> Server {
    let stopped = tokio::task::spawn_blocking(move || server.stop().map(|()| server)).await;
    stopped.expect("no panic").expect("stopped")
}

async fn started(mut server: Server) -> Server {
    let started = tokio::task::spawn_blocking(move || server.start_again().map(|()| server)).await;
    started.expect("no panic").expect("started")
}

/// A client library that reconnects by itself sends what it still held: here an event that the
/// relay has given up and that another relay may have sent long ago.
async fn what_failed_while_the_server_was_away_is_not_sent_later(version: Version) {
    let server = server(version, "").await;
    let context = admin(&server.url()).await;
    context.create_stream(everything()).await.expect("a stream");
    let sink = sink(&NatsConfig { timeout_ms: 500, ..config(server.url()) });
    let events = [one("a", 1), one("b", 2), one("c", 3)];
    confirm(&sink, &events[0]).await;
    let server = stopped(server).await;
    let given_up = one("z", 9);
    // The first notices that the connection is gone, the second finds no server.
    for event in [&given_up, &events[1]] {
        assert_eq!(fail(&sink, event).await.kind(), ErrorKind::Transient);
    }
    let _server = started(server).await;
    let until = tokio::time::Instant::now() + Duration::from_secs(20);
    for event in &events[1..] {
        while !matches!(publish(&sink, std::slice::from_ref(event)).await[0], Outcome::Confirmed) {
            assert!(tokio::time::Instant::now() < until, "the server is back");
        }
    }
    // A second is what a reconnecting client needs several times over.
    let until = tokio::time::Instant::now() + Duration::from_secs(1);
    while tokio::time::Instant::now() < until {
        let found = ids(&stored(&context).await);
        assert!(!found.contains(&given_up.event.id()), "it was sent after it was given up");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let expected: Vec<_> = events.iter().map(|one| one.event.id()).collect();
    assert_eq!(ids(&stored(&context).await), expected);
}

async fn a_silent_server_is_left(version: Version) {
    let server = server(version, "").await;
    let context = admin(&server.url()).await;
    context.create_stream(everything()).await.expect("a stream");
    let proxy = postrider_servers::proxy::Proxy::start(server.address()).expect("a proxy");
    let url = format!("nats://127.0.0.1:{}", proxy.port());
    let sink = sink(&NatsConfig { timeout_ms: 500, connect_timeout_ms: 500, ..config(url) });
    confirm(&sink, &one("a", 1)).await;
    proxy.black_hole();
    let event = one("a", 2);
    let error = fail(&sink, &event).await;
    assert_eq!(error.kind(), ErrorKind::Throttled { retry_after: None });
    assert!(error.chain().contains("500 ms"), "{}", error.chain());
    proxy.thaw();
    // On the old connection nothing would ever come back.
    proxy.lose_all(postrider_servers::proxy::Direction::ToClient);
    confirm(&sink, &event).await;
    assert_eq!(stored(&context).await.len(), 2);
}

async fn logins_are_told_apart(version: Version) {
    let user = KeyPair::new_user();
    let settings = format!(
        "authorization {{ users: [ {{ nkey: {} }}, {{ user: app, password: \"p@ss\" }} ] }}",
        user.public_key()
    );
    let server = server(version, Box::leak(settings.into_boxed_str())).await;
    let admin = async_nats::ConnectOptions::with_user_and_password("app".into(), "p@ss".into());
    let admin = admin.connect(server.url()).await.expect("the server answers");
    let context = async_nats::jetstream::new(admin);
    context.create_stream(everything()).await.expect("a stream");
    let base = config(server.url());
    let password = |word: &str| NatsConfig {
        user: Some("app".into()),
        password: Some(Secret::new(word)),
        ..base.clone()
    };
    let nkey = |pair: &KeyPair| NatsConfig {
        nkey: Some(Secret::new(pair.seed().expect("made just now"))),
        ..base.clone()
    };
    let in_url = config(server.url().replace("//", "//app:p%40ss@"));
    for (n, good) in [password("p@ss"), nkey(&user), in_url].iter().enumerate() {
        confirm(&sink(good), &one("a", n as u64)).await;
    }
    for bad in [password("wr0ng"), nkey(&KeyPair::new_user()), base.clone()] {
        let error = fail(&sink(&bad), &one("a", 9)).await;
        assert_eq!(error.kind(), ErrorKind::Transient);
        assert!(error.chain().contains("login is refused"), "{}", error.chain());
        assert!(!error.chain().contains("wr0ng"), "{}", error.chain());
    }
    assert_eq!(stored(&context).await.len(), 3);
}

async fn a_forbidden_subject_is_named(version: Version) {
    let settings = "authorization { users: [
        { user: admin, password: a }
        { user: app, password: b, permissions: { publish: \"other.>\", subscribe: \"_INBOX.>\" } }
    ] }";
    let server = server(version, settings).await;
    let admin = async_nats::ConnectOptions::with_user_and_password("admin".into(), "a".into());
    let admin = admin.connect(server.url()).await.expect("the server answers");
    let context = async_nats::jetstream::new(admin);
    context.create_stream(everything()).await.expect("a stream");
    let sink =
        sink(&NatsConfig { timeout_ms: 500, ..config(server.url().replace("//", "//app:b@")) });
    let error = fail(&sink, &one("a", 1)).await;
    assert_eq!(error.kind(), ErrorKind::Throttled { retry_after: None });
    let text = error.chain().to_lowercase();
    assert!(text.contains("permissions violation"), "{text}");
    assert!(stored(&context).await.is_empty());
}

async fn certificates_are_verified_on_both_sides(version: Version) {
    for tls in [Tls::On, Tls::Mutual] {
        let started = move || Server::start_with(version, "", tls);
        let server =
            tokio::task::spawn_blocking(started).await.expect("no panic").expect("started");
        let (certificate, key) = server.certificate();
        let known = NatsConfig { ca_file: Some(server.authority()), ..config(server.url()) };
        let proven = NatsConfig {
            client_certificate_file: Some(certificate.clone()),
            client_key_file: Some(key.clone()),
            ..known.clone()
        };
        let options = async_nats::ConnectOptions::new()
            .add_root_certificates(server.authority())
            .add_client_certificate(certificate, key);
        let admin = options.connect(server.url()).await.expect("the server answers");
        let context = async_nats::jetstream::new(admin);
        context.create_stream(everything()).await.expect("a stream");
        let (good, bad) = match tls {
            Tls::Mutual => (proven, known),
            _ => (known, config(server.url())),
        };
        confirm(&sink(&good), &one("a", 1)).await;
        let error = fail(&sink(&bad), &one("a", 2)).await;
        assert_eq!(error.kind(), ErrorKind::Transient);
        assert!(error.chain().contains("certificate") || tls == Tls::Mutual, "{}", error.chain());
        assert_eq!(stored(&context).await.len(), 1);
    }
}

/// A key's events go one after the other: a call of many takes as many round trips.
async fn a_call_ends_in_time_and_gives_back_the_rest(version: Version) {
    let server = server(version, "").await;
    let context = admin(&server.url()).await;
    context.create_stream(everything()).await.expect("a stream");
    let proxy = postrider_servers::proxy::Proxy::start(server.address()).expect("a proxy");
    let sink = sink(&config(format!("nats://127.0.0.1:{}", proxy.port())));
    sink.check().await.expect("connected");
    proxy.delay(Duration::from_millis(20));
    let events: Vec<Record> = (0..30).map(|n| one("hot", n)).collect();
    let partition = PartitionId::numbered(0, 1);
    let (mut sent, mut calls) = (0, 0);
    while sent < events.len() {
        let call = Publish::new(&partition, &events[sent..]).within(Duration::from_millis(150));
        let outcomes = sink.publish(call).await;
        let confirmed = outcomes.iter().take_while(|one| matches!(one, Outcome::Confirmed)).count();
        let rest = &outcomes[confirmed..];
        assert!(rest.iter().all(|one| matches!(one, Outcome::HeldBack)), "{outcomes:?}");
        assert!(confirmed > 0, "each call gets on");
        (sent, calls) = (sent + confirmed, calls + 1);
    }
    assert!(calls > 1, "30 round trips of 40 ms fit into 150 ms");
    let expected: Vec<_> = events.iter().map(|one| one.event.id()).collect();
    assert_eq!(ids(&stored(&context).await), expected);
}

/// What waits for a place waits no longer than the call may send.
async fn a_call_ends_in_time_also_while_others_fill_the_connection(version: Version) {
    let server = server(version, "").await;
    let context = admin(&server.url()).await;
    context.create_stream(everything()).await.expect("a stream");
    let proxy = postrider_servers::proxy::Proxy::start(server.address()).expect("a proxy");
    let url = format!("nats://127.0.0.1:{}", proxy.port());
    let sink = sink(&NatsConfig { timeout_ms: 60_000, ..config(url) });
    sink.check().await.expect("connected");
    proxy.black_hole();
    let mut crowd = tokio::task::JoinSet::new();
    for call in 0..4 {
        let sink = std::sync::Arc::clone(&sink);
        crowd.spawn(async move {
            let events: Vec<Record> = (0..512).map(|n| one(&format!("{call}-{n}"), n)).collect();
            publish(&sink, &events).await
        });
    }
    let partition = PartitionId::numbered(0, 1);
    let events = [one("late", 1), one("late", 2)];
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
    match &outcomes[..] {
        [Outcome::Failed(error), Outcome::HeldBack] => {
            assert_eq!(error.kind(), ErrorKind::Throttled { retry_after: None });
            assert!(error.chain().contains("under way"), "{}", error.chain());
        }
        other => panic!("{other:?}"),
    }
    crowd.abort_all();
}
