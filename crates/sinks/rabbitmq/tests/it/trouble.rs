//! What becomes of events while the server itself is in trouble; each test has one of its own.
//!
//! What lives here: restarts, alarms, the server's own limits and permissions. What does not: what
//! leaves a server as it was (`failures.rs`).
//! Invariant: nothing counts as sent that is not in the queue.

use std::time::Duration;

use lapin::types::FieldTable;
use postrider_conformance::samples::{record, sized_event};
use postrider_core::{ErrorKind, Outcome, Sink};
use postrider_servers::rabbitmq::{RabbitMq as Server, Tls};
use postrider_sink_rabbitmq::RabbitMqConfig;
use tokio::time::Instant;

use crate::{Broker, confirm, fail, one, publish, server, sink};

async fn bound(server: &Server) -> Broker {
    let broker = Broker::on(server.url(), FieldTable::default()).await;
    broker.bind("orders").await;
    broker
}

async fn off_the_runtime<T: Send + 'static>(
    server: Server,
    work: impl FnOnce(&mut Server) -> postrider_servers::Result<T> + Send + 'static,
) -> Server {
    let mut server = server;
    let done = tokio::task::spawn_blocking(move || work(&mut server).map(|_| server)).await;
    done.expect("no panic").expect("the server does as it is told")
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_above_the_servers_limit_parks_with_the_limit_named() {
    let server = server("max_message_size = 65536\nframe_max = 0", Tls::Off).await;
    let broker = bound(&server).await;
    let sink = sink(&broker.config());
    let events = [
        one("a", 1),
        record(sized_event("b", 2, 70_000), 2),
        one("b", 3),
        record(sized_event("c", 4, 65_536), 4),
    ];
    let outcomes = publish(&sink, &events).await;
    match &outcomes[1] {
        Outcome::Failed(error) => {
            assert_eq!(error.kind(), ErrorKind::Permanent);
            assert!(error.chain().contains("65536"), "{}", error.chain());
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(outcomes[2], Outcome::HeldBack), "{outcomes:?}");
    assert!(matches!(outcomes[0], Outcome::Confirmed), "{outcomes:?}");
    assert!(matches!(outcomes[3], Outcome::Confirmed), "{outcomes:?}");
    confirm(&sink, &events[2]).await;
    // The server has no limit for frames, and this side has its own.
    let mut headers = postrider_core::Headers::new();
    for n in 0..20 {
        headers.insert(&format!("h{n}"), &"x".repeat(8_000)).expect("valid");
    }
    let error = fail(&sink, &crate::failures::event("a", headers, "1")).await;
    assert!(error.chain().contains("131072"), "{}", error.chain());
    assert_eq!(broker.stored().await.len(), 3);
    // Who may not write is told so, and loses nothing.
    let server = off_the_runtime(server, |server| {
        server.control(&["add_user", "reader", "w0rd"])?;
        server.control(&["set_permissions", "reader", ".*", "^$", ".*"])
    })
    .await;
    let reader = RabbitMqConfig {
        user: Some("reader".into()),
        password: Some(postrider_core::Secret::new("w0rd")),
        ..broker.config()
    };
    let error = fail(&crate::sink(&reader), &one("a", 9)).await;
    assert_eq!(error.kind(), ErrorKind::Throttled { retry_after: None });
    assert!(error.chain().contains("may not publish"), "{}", error.chain());
    assert_eq!(broker.stored().await.len(), 3);
    drop(server);
}

/// A client library that reconnects by itself sends what it still held: here an event that the
/// relay has given up and that another relay may have sent long ago.
#[tokio::test(flavor = "multi_thread")]
async fn what_failed_while_the_server_was_away_is_not_sent_later() {
    let server = server("", Tls::Off).await;
    let broker = bound(&server).await;
    let sink = sink(&RabbitMqConfig { connect_timeout_ms: 1_000, ..broker.config() });
    let events = [one("a", 1), one("b", 2), one("c", 3)];
    confirm(&sink, &events[0]).await;
    let server = off_the_runtime(server, Server::stop).await;
    let given_up = one("z", 9);
    // The first notices that the connection is gone, the second finds no server.
    for event in [&given_up, &events[1]] {
        assert_eq!(fail(&sink, event).await.kind(), ErrorKind::Transient);
    }
    let server = off_the_runtime(server, Server::start_again).await;
    let until = Instant::now() + Duration::from_secs(20);
    for event in &events[1..] {
        while !matches!(publish(&sink, std::slice::from_ref(event)).await[0], Outcome::Confirmed) {
            assert!(Instant::now() < until, "the server is back");
        }
    }
    let connection = lapin::Connection::connect(&server.url(), Default::default()).await;
    let channel = connection.as_ref().expect("it answers").create_channel().await;
    let channel = channel.expect("a channel");
    let expected: Vec<_> = events.iter().map(|one| one.event.id()).collect();
    // A second is what a reconnecting client needs several times over.
    let until = Instant::now() + Duration::from_secs(1);
    while Instant::now() < until {
        let found = crate::stored(&channel, &broker.queue).await;
        assert_eq!(found.iter().map(|one| one.id).collect::<Vec<_>>(), expected);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_short_of_memory_is_waited_for_without_a_new_connection() {
    let server = server("", Tls::Off).await;
    let broker = bound(&server).await;
    let sink = sink(&RabbitMqConfig { timeout_ms: 1_000, ..broker.config() });
    confirm(&sink, &one("a", 0)).await;
    let server = off_the_runtime(server, |server| server.is_short_of_memory(true)).await;
    // The broker tells a connection only once it publishes again.
    let until = Instant::now() + Duration::from_secs(20);
    let mut confirmed = 1;
    let error = loop {
        assert!(Instant::now() < until, "it never blocks");
        match publish(&sink, &[one("a", 1)]).await.remove(0) {
            Outcome::Confirmed => confirmed += 1,
            Outcome::Failed(error) => break error,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(error.kind(), ErrorKind::Throttled { retry_after: None }, "{}", error.chain());
    assert!(error.chain().contains("memory"), "{}", error.chain());
    let again = fail(&sink, &one("b", 2)).await;
    assert_eq!(again.kind(), ErrorKind::Throttled { retry_after: None });
    // Told before anything was sent: what is sent and not answered has an unknown fate instead.
    assert!(again.chain().contains("memory"), "{}", again.chain());
    let server = off_the_runtime(server, |server| server.is_short_of_memory(false)).await;
    let last = one("c", 3);
    while !matches!(publish(&sink, std::slice::from_ref(&last)).await[0], Outcome::Confirmed) {
        assert!(Instant::now() < until, "it never takes messages again");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let found = broker.ids().await;
    assert_eq!(found.last(), Some(&last.event.id()));
    // What was under way when it blocked may have been taken in the end.
    assert!((confirmed + 1..=confirmed + 2).contains(&found.len()), "{confirmed}: {found:?}");
    let closes = server.log().matches("closing AMQP connection").count();
    assert_eq!(closes, 0, "{}", server.log());
    sink.close().await.expect("closed");
}
