//! What becomes of events while the server itself is in trouble; each test has one of its own.
//!
//! What lives here: restarts, crashes, alarms, the server's own limits and permissions. What does
//! not: what leaves a server as it was (`failures.rs`).
//! Invariant: nothing counts as stored that is not in the stream, and nothing is stored twice.

use std::time::Duration;

use postrider_conformance::samples::{record, sized_event};
use postrider_core::{ErrorKind, Outcome, Record, Secret, Sink};
use postrider_servers::rabbitmq::{RabbitMq as Server, Tls};
use postrider_sink_rabbitmq::RabbitMqStreamConfig;
use tokio::time::Instant;

use super::{Broker, confirm, fail, ids_of, publish, publish_all, sink};
use crate::{one, server};

async fn on(server: &Server) -> Broker {
    Broker::on(server.url(), server.stream_url()).await
}

async fn off_the_runtime<T: Send + 'static>(
    server: Server,
    work: impl FnOnce(&mut Server) -> postrider_servers::Result<T> + Send + 'static,
) -> Server {
    let mut server = server;
    let done = tokio::task::spawn_blocking(move || work(&mut server).map(|_| server)).await;
    done.expect("no panic").expect("the server does as it is told")
}

fn events(from: u64) -> Vec<Record> {
    (from..from + 40).map(|n| one(&format!("k{}", n % 5), n)).collect()
}

/// The server ends in order and as by a crash, while events are under way; whoever published then
/// goes on, and another begins afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_server_has_each_event_once() {
    let server = server("", Tls::Off).await;
    let broker = on(&server).await;
    let config =
        RabbitMqStreamConfig { timeout_ms: 2_000, connect_timeout_ms: 2_000, ..broker.config() };
    let first = sink(&config);
    let mut all = events(0);
    confirm(&first, &all).await;
    let mut server = server;
    for (from, crash) in [(100, false), (200, true)] {
        let under_way = events(from);
        let work = async {
            for call in under_way.chunks(2) {
                publish_all(&first, call).await;
            }
        };
        let restart = off_the_runtime(server, move |server| {
            if crash {
                server.kill()?
            } else {
                server.stop()?
            };
            server.start_again()
        });
        ((), server) = tokio::join!(work, restart);
        all.extend(under_way);
    }
    let second = sink(&config);
    let last = events(300);
    publish_all(&second, &[&all[all.len() - 10..], &last].concat()).await;
    all.extend(last);
    assert_eq!(broker.ids().await, ids_of(&all));
}

/// A server that is short of disk reads nothing more of a connection. What was sent by then it
/// takes when the shortage is over, from connections that were given up long ago.
#[tokio::test(flavor = "multi_thread")]
async fn an_alarm_is_waited_for_and_repeats_nothing() {
    let server = server("", Tls::Off).await;
    let broker = on(&server).await;
    let sink = sink(&RabbitMqStreamConfig { timeout_ms: 1_000, ..broker.config() });
    let mut all = events(0);
    confirm(&sink, &all).await;
    let server = off_the_runtime(server, |server| server.is_short_of_disk(true)).await;
    let deadline = Instant::now() + Duration::from_secs(30);
    let mut later = vec![one("a", 1_000)];
    let error = loop {
        // The alarm may take a moment to be heard of.
        match publish(&sink, &later).await.remove(0) {
            Outcome::Failed(error) => break error,
            other => assert!(Instant::now() < deadline, "{other:?}"),
        }
        all.append(&mut later);
        later.push(one("a", 1_000 + all.len() as u64));
    };
    later.extend(events(100));
    assert_eq!(error.kind(), ErrorKind::Throttled { retry_after: None }, "{}", error.chain());
    for _ in 0..3 {
        fail(&sink, &later[0]).await;
    }
    let server = off_the_runtime(server, |server| server.is_short_of_disk(false)).await;
    publish_all(&sink, &later).await;
    all.extend(later);
    assert_eq!(broker.ids().await, ids_of(&all));
    drop(server);
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_and_permissions_are_the_servers_own() {
    let server = server("stream.frame_max = 65536", Tls::Off).await;
    let broker = on(&server).await;
    let by_guest = sink(&broker.config());
    let events = [record(sized_event("a", 1, 65_536), 1), one("b", 2)];
    let outcomes = publish(&by_guest, &events).await;
    match &outcomes[0] {
        Outcome::Failed(error) => {
            assert_eq!(error.kind(), ErrorKind::Permanent);
            let text = error.chain();
            assert!(text.contains("65511") && text.contains("stream.frame_max"), "{text}");
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(outcomes[1], Outcome::Confirmed), "{outcomes:?}");
    let server = off_the_runtime(server, |server| {
        for (user, write, read) in [("reader", "^$", ".*"), ("writer", ".*", "^$")] {
            server.control(&["add_user", user, "w0rd"])?;
            server.control(&["set_permissions", user, "^$", write, read])?;
        }
        Ok(())
    })
    .await;
    for (user, permission) in [("reader", "permission: write"), ("writer", "permission: read")] {
        let config = RabbitMqStreamConfig {
            user: Some(user.into()),
            password: Some(Secret::new("w0rd")),
            ..broker.config()
        };
        let error = fail(&sink(&config), &one("a", 9)).await;
        assert_eq!(error.kind(), ErrorKind::Throttled { retry_after: None });
        assert!(error.chain().contains(permission), "{}", error.chain());
    }
    assert_eq!(broker.ids().await, [events[1].event.id()]);
    drop(server);
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_are_verified_on_both_sides() {
    let server = server("", Tls::Mutual).await;
    let broker = on(&server).await;
    let (certificate, key) = server.certificate();
    let config = RabbitMqStreamConfig {
        servers: vec![Secret::new(server.stream_tls_url())],
        ca_file: Some(server.authority()),
        client_certificate_file: Some(certificate),
        client_key_file: Some(key),
        user: Some("localhost".into()),
        password: Some(Secret::new("p4ss")),
        ..broker.config()
    };
    let over_tls = sink(&config);
    over_tls.check().await.expect("it is there");
    let event = one("a", 1);
    confirm(&over_tls, std::slice::from_ref(&event)).await;
    let unproven = RabbitMqStreamConfig {
        client_certificate_file: None,
        client_key_file: None,
        ..config.clone()
    };
    assert_eq!(fail(&sink(&unproven), &one("a", 2)).await.kind(), ErrorKind::Transient);
    let trusting_nobody = RabbitMqStreamConfig { ca_file: None, ..config };
    let error = fail(&sink(&trusting_nobody), &one("a", 2)).await;
    assert_eq!(error.kind(), ErrorKind::Transient);
    assert!(error.chain().contains("certificate"), "{}", error.chain());
    assert_eq!(broker.ids().await, [event.event.id()]);
}
