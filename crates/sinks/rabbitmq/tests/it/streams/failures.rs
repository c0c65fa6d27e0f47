//! What the sink makes of refusals and limits, on the server that tests share.
//!
//! What lives here: logins, missing streams, events that are too large, super streams. What does
//! not: what disturbs the server itself (`trouble.rs`).
//! Invariant: nothing counts as stored that is not in the stream.

use postrider_conformance::samples::{record, sized_event};
use postrider_core::{ErrorKind, Outcome, Secret, Sink};
use postrider_sink_rabbitmq::{RabbitMqStreamConfig, Unroutable};

use super::{Broker, confirm, fail, ids_of, make_super, publish, read, sink};
use crate::one;

const THROTTLED: ErrorKind = ErrorKind::Throttled { retry_after: None };

#[tokio::test(flavor = "multi_thread")]
async fn logins_and_virtual_hosts_are_told_apart() {
    let broker = Broker::shared().await;
    let server = broker.address();
    let as_whom = |login: &str, path: &str| RabbitMqStreamConfig {
        servers: vec![Secret::new(format!("rabbitmq-stream://{login}{server}{path}"))],
        ..broker.config()
    };
    // Who names nobody is the guest.
    confirm(&sink(&as_whom("", "/%2f")), &[one("a", 1)]).await;
    for (bad, part) in [
        (as_whom("guest:wr0ng@", ""), "login is refused"),
        (as_whom("guest:guest@", "/nowhere"), "virtual host"),
    ] {
        let sink = sink(&bad);
        for error in [fail(&sink, &one("a", 2)).await, sink.check().await.expect_err("refused")] {
            assert_eq!(error.kind(), ErrorKind::Transient);
            assert!(error.chain().contains(part), "{}", error.chain());
            assert!(!error.chain().contains("wr0ng"), "{}", error.chain());
        }
    }
    // The second server of the list is tried as well.
    let mut second = as_whom("guest:guest@", "");
    second.servers.insert(0, Secret::new("rabbitmq-stream://127.0.0.1:1"));
    confirm(&sink(&second), &[one("a", 3)]).await;
    assert_eq!(broker.stored().await.len(), 2);
    // A listener of another protocol is none of this one, and is told by time or by its answer.
    let amqp = broker.amqp.replacen("amqp://", "rabbitmq-stream://", 1);
    let other = RabbitMqStreamConfig {
        servers: vec![Secret::new(amqp)],
        connect_timeout_ms: 2_000,
        ..broker.config()
    };
    assert_eq!(fail(&sink(&other), &one("a", 4)).await.kind(), ErrorKind::Transient);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_stream_is_waited_for_or_parks() {
    let shared = Broker::shared().await;
    let broker = Broker::without_stream(shared.amqp.clone(), shared.url.clone()).await;
    let retrying = sink(&broker.config());
    let parking = sink(&RabbitMqStreamConfig { unroutable: Unroutable::Park, ..broker.config() });
    let event = one("a", 1);
    for (sink, kind) in [(&retrying, THROTTLED), (&parking, ErrorKind::Permanent)] {
        for error in [fail(sink, &event).await, sink.check().await.expect_err("it is missing")] {
            assert_eq!(error.kind(), kind, "{}", error.chain());
            assert!(error.chain().contains("does not exist"), "{}", error.chain());
            assert!(error.chain().contains(&broker.stream), "{}", error.chain());
        }
    }
    broker.make().await;
    retrying.check().await.expect("it is there");
    confirm(&retrying, std::slice::from_ref(&event)).await;
    assert_eq!(broker.ids().await, [event.event.id()]);
}

/// The server would end the whole connection for a frame that is too large.
#[tokio::test(flavor = "multi_thread")]
async fn what_fits_no_frame_parks_alone_with_the_limit_named() {
    let broker = Broker::shared().await;
    let sink = sink(&broker.config());
    // The server takes frames of 2 MiB; headers and properties count as well.
    let most = (2 << 20) - 600;
    let events = [
        one("a", 1),
        record(sized_event("b", 2, most + 600), 2),
        one("b", 3),
        record(sized_event("c", 4, most), 4),
    ];
    let outcomes = publish(&sink, &events).await;
    match &outcomes[1] {
        Outcome::Failed(error) => {
            assert_eq!(error.kind(), ErrorKind::Permanent);
            let limit = ((2 << 20) - 25).to_string();
            assert!(error.chain().contains(&limit), "{}", error.chain());
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(outcomes[2], Outcome::HeldBack), "{outcomes:?}");
    assert!(matches!(outcomes[0], Outcome::Confirmed), "{outcomes:?}");
    assert!(matches!(outcomes[3], Outcome::Confirmed), "{outcomes:?}");
    assert_eq!(broker.ids().await, [events[0].event.id(), events[3].event.id()]);
}

/// A message that is as large as is allowed, to the byte, is taken by the server.
#[tokio::test(flavor = "multi_thread")]
async fn the_limit_is_the_servers_own() {
    let broker = Broker::shared().await;
    let sink = sink(&broker.config());
    let (mut fits, mut too_large) = ((2 << 20) - 1_000, 2 << 20);
    while fits + 1 < too_large {
        let size = (fits + too_large) / 2;
        let outcomes = publish(&sink, &[record(sized_event("a", 1, size), 1)]).await;
        match &outcomes[0] {
            Outcome::Confirmed => fits = size,
            Outcome::Failed(error) if error.kind() == ErrorKind::Permanent => too_large = size,
            other => panic!("{size}: {other:?}"),
        }
    }
    assert!(fits > (2 << 20) - 1_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_are_spread_over_a_super_stream_as_other_clients_do() {
    let broker = Broker::shared().await;
    let channel = broker.channel().await;
    let super_stream = make_super(&broker, 3).await;
    let config = RabbitMqStreamConfig {
        stream: super_stream.clone(),
        super_stream: true,
        ..broker.config()
    };
    let sink = sink(&config);
    sink.check().await.expect("it is there");
    let events: Vec<_> = (0..40).map(|n| one(&format!("key-{}", n % 20), n)).collect();
    confirm(&sink, &events).await;
    let mut streams = Vec::new();
    for n in 0..3 {
        let channel = broker.channel().await;
        let stored = read(&channel, &format!("{super_stream}-{n}")).await;
        streams.push(stored.iter().map(super::delivered).collect::<Vec<_>>());
    }
    assert_eq!(streams.iter().map(Vec::len).sum::<usize>(), 40);
    let of = |key: &str| streams.iter().position(|stream| stream.iter().any(|one| one.key == key));
    // By murmur3 with RabbitMQ's seed, reckoned by another implementation of it.
    for (key, stream) in SPREAD {
        assert_eq!(of(key), Some(*stream), "{key}");
    }
    let mut ids: Vec<_> = streams.iter().flatten().map(|one| one.id).collect();
    let mut sent = ids_of(&events);
    ids.sort();
    sent.sort();
    assert_eq!(ids, sent);
    // One of its streams is deleted: what went there goes to those that are left.
    let gone = format!("{super_stream}-0");
    let options = lapin::options::QueueDeleteOptions::default();
    channel.queue_delete(gone.as_str().into(), options).await.expect("deleted");
    let again = one("key-2", 100);
    assert_eq!(fail(&sink, &again).await.kind(), THROTTLED);
    super::publish_all(&sink, std::slice::from_ref(&again)).await;
    let missing = RabbitMqStreamConfig { stream: "nothing".into(), ..config };
    let error = fail(&crate::streams::sink(&missing), &one("a", 1)).await;
    assert_eq!(error.kind(), THROTTLED);
    assert!(error.chain().contains("\"nothing\" does not exist"), "{}", error.chain());
}

const SPREAD: &[(&str, usize)] = &[
    ("key-0", 2),
    ("key-1", 1),
    ("key-2", 0),
    ("key-3", 1),
    ("key-4", 2),
    ("key-5", 1),
    ("key-6", 1),
    ("key-7", 2),
];
