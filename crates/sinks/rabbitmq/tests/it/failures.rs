//! What the sink makes of refusals, limits, logins and silence, on the server that tests share.
//!
//! What lives here: full queues, limits, logins, a connection on which nothing comes back. What
//! does not: what disturbs the server itself (`trouble.rs`), and breaks in the middle of an event,
//! which the suite has.
//! Invariant: nothing counts as sent that is not in the queue.

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lapin::types::{AMQPValue, FieldTable};
use postrider_conformance::samples::{event_with_id, fresh_id, record};
use postrider_core::{
    ContentType, ErrorKind, EventType, Headers, Key, NewEvent, Outcome, PartitionId, Publish,
    Record, Secret, Sink, Topic,
};
use postrider_servers::proxy::{Direction, Proxy};
use postrider_sink_rabbitmq::{QueueType, RabbitMqConfig};
use tokio::time::{Instant, timeout};

use crate::middle::Middle;
use crate::{Broker, confirm, fail, one, publish, sink};

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_asks_for_patience() {
    let shared = Broker::shared().await;
    let mut limits = FieldTable::default();
    limits.insert("x-max-length".into(), AMQPValue::LongInt(1));
    limits.insert("x-overflow".into(), AMQPValue::LongString("reject-publish".into()));
    let broker = Broker::on(shared.url.clone(), limits).await;
    broker.bind("orders").await;
    let sink = sink(&broker.config());
    let (first, second) = (one("a", 1), one("a", 2));
    confirm(&sink, &first).await;
    let error = fail(&sink, &second).await;
    assert_eq!(error.kind(), ErrorKind::Throttled { retry_after: None }, "{}", error.chain());
    broker.purge().await;
    confirm(&sink, &second).await;
    assert_eq!(broker.ids().await, [second.event.id()]);
}

pub(crate) fn event(key: &str, headers: Headers, payload: &str) -> Record {
    let event = NewEvent::builder(
        Key::new(key).expect("valid"),
        Topic::new("orders").expect("valid"),
        EventType::new("OrderPlaced").expect("valid"),
    )
    .headers(headers)
    .payload(ContentType::new("text/plain").expect("valid"), payload.to_owned())
    .build()
    .expect("valid");
    record(event, 1)
}

/// The server would end the whole connection for a frame that is too large.
#[tokio::test(flavor = "multi_thread")]
async fn what_fits_no_frame_or_field_parks_alone() {
    let broker = Broker::bound().await;
    let by_key = RabbitMqConfig { routing_key: "orders.{key}".into(), ..broker.config() };
    let (sink, by_key) = (sink(&broker.config()), sink(&by_key));
    let mut headers = Headers::new();
    for n in 0..20 {
        headers.insert(&format!("h{n}"), &"x".repeat(8_000)).expect("valid");
    }
    let events = [event("a", headers, "1"), one("b", 2), one("c", 3)];
    let outcomes = publish(&sink, &events).await;
    assert!(
        matches!(&outcomes[0], Outcome::Failed(error)
            if error.kind() == ErrorKind::Permanent && error.chain().contains("131072")),
        "{outcomes:?}"
    );
    assert!(outcomes[1..].iter().all(|one| matches!(one, Outcome::Confirmed)), "{outcomes:?}");
    let error = fail(&by_key, &one(&"k".repeat(300), 1)).await;
    assert_eq!(error.kind(), ErrorKind::Permanent);
    assert!(error.chain().contains("255"), "{}", error.chain());
    assert_eq!(broker.stored().await.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_larger_than_the_settings_allow_is_never_sent() {
    let broker = Broker::bound().await;
    let sink = sink(&RabbitMqConfig { max_message_bytes: 1_000, ..broker.config() });
    assert_eq!(sink.capabilities().max_event_bytes, Some(1_000));
    let error = fail(&sink, &event("a", Headers::new(), &"x".repeat(1_001))).await;
    assert_eq!(error.kind(), ErrorKind::Permanent);
    assert!(error.chain().contains("1000"), "{}", error.chain());
    confirm(&sink, &event("a", Headers::new(), &"x".repeat(1_000))).await;
    assert_eq!(broker.stored().await.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn logins_and_virtual_hosts_are_told_apart() {
    let broker = Broker::bound().await;
    let server = broker.url.rsplit_once('@').expect("a login").1.to_owned();
    let as_whom = |login: &str, path: &str| RabbitMqConfig {
        servers: vec![Secret::new(format!("amqp://{login}{server}{path}"))],
        ..broker.config()
    };
    // Who names nobody is the guest.
    confirm(&sink(&as_whom("", "/%2f")), &one("a", 1)).await;
    for (bad, part) in [
        (as_whom("guest:wr0ng@", ""), "login is refused"),
        (as_whom("guest:guest@", "/nowhere"), "virtual host"),
    ] {
        let error = fail(&sink(&bad), &one("a", 2)).await;
        assert_eq!(error.kind(), ErrorKind::Transient);
        assert!(error.chain().contains(part), "{}", error.chain());
        assert!(!error.chain().contains("wr0ng"), "{}", error.chain());
    }
    // The second server of the list is tried as well.
    let mut second = as_whom("guest:guest@", "");
    second.servers.insert(0, Secret::new("amqp://127.0.0.1:1"));
    confirm(&sink(&second), &one("a", 3)).await;
    assert_eq!(broker.stored().await.len(), 2);
}

fn behind(proxy: &Proxy, broker: &Broker, timeout_ms: u64) -> RabbitMqConfig {
    RabbitMqConfig {
        servers: vec![Secret::new(format!("amqp://127.0.0.1:{}", proxy.port()))],
        timeout_ms,
        ..broker.config()
    }
}

fn proxy(broker: &Broker) -> Proxy {
    let server = broker.url.rsplit_once('@').expect("a login").1;
    Proxy::start(server.parse().expect("an address")).expect("a proxy")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_server_is_left() {
    let broker = Broker::bound().await;
    let proxy = proxy(&broker);
    let sink = sink(&behind(&proxy, &broker, 700));
    sink.check().await.expect("connected");
    confirm(&sink, &one("a", 1)).await;
    proxy.black_hole();
    let event = one("a", 2);
    let error = fail(&sink, &event).await;
    assert_eq!(error.kind(), ErrorKind::Throttled { retry_after: None });
    assert!(error.chain().contains("700 ms"), "{}", error.chain());
    proxy.thaw();
    // On the old connection nothing would ever come back.
    proxy.lose_all(Direction::ToClient);
    confirm(&sink, &event).await;
    assert_eq!(broker.stored().await.len(), 2);
}

/// A key's events go one after the other: a call of many takes as many round trips.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_ends_in_time_and_gives_back_the_rest() {
    let broker = Broker::bound().await;
    let proxy = proxy(&broker);
    let sink = sink(&behind(&proxy, &broker, 20_000));
    confirm(&sink, &one("hot", 0)).await;
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
    assert_eq!(broker.ids().await[1..], expected);
}

/// The client library tells an error of the connection to whoever waits for an answer.
#[tokio::test(flavor = "multi_thread")]
async fn an_error_of_the_connection_is_no_events_own() {
    let broker = Broker::bound().await;
    let server = broker.url.rsplit_once('@').expect("a login").1;
    let middle = Middle::before(server.parse().expect("an address")).await;
    let sink =
        sink(&RabbitMqConfig { servers: vec![Secret::new(middle.url())], ..broker.config() });
    // The word and the end of the connection arrive together, now one first, now the other.
    for round in 0..10 {
        confirm(&sink, &one("a", round)).await;
        middle.orders().ends_connection = true;
        for outcome in publish(&sink, &[one("a", 20), one("b", 21), one("c", 22)]).await {
            let Outcome::Failed(error) = outcome else { panic!("{outcome:?}") };
            assert_eq!(error.kind(), ErrorKind::Transient, "{error:?}");
        }
        assert!(!middle.orders().ends_connection, "it was ended");
    }
    confirm(&sink, &one("a", 23)).await;
    assert_eq!(broker.stored().await.len(), 11);
}

/// Waits until an event of the call is in the middle.
async fn until_held(middle: &Middle, call: &mut (impl Future<Output = Vec<Outcome>> + Unpin)) {
    let until = Instant::now() + Duration::from_secs(20);
    while !middle.orders().waiting {
        assert!(Instant::now() < until, "it never arrives");
        timeout(Duration::from_millis(5), &mut *call).await.expect_err("it is held");
    }
}

/// The client library writes a channel's close before messages that have not left, and for a
/// message on a closed channel the broker ends the connection.
#[tokio::test(flavor = "multi_thread")]
async fn an_event_that_is_given_up_keeps_its_channel_until_it_is_answered() {
    let broker = Broker::bound().await;
    let server = broker.url.rsplit_once('@').expect("a login").1;
    let middle = Middle::before(server.parse().expect("an address")).await;
    let sink =
        sink(&RabbitMqConfig { servers: vec![Secret::new(middle.url())], ..broker.config() });
    let events = [one("a", 1), one("a", 2)];
    middle.hold(true);
    let mut given_up = Box::pin(publish(&sink, &events));
    until_held(&middle, &mut given_up).await;
    drop(given_up);
    middle.hold(false);
    // Of the call that was dropped, only what was under way arrives.
    for event in &events {
        confirm(&sink, event).await;
    }
    let expected = [&events[0], &events[0], &events[1]].map(|one| one.event.id());
    assert_eq!(broker.ids().await, expected);
    assert_eq!(middle.orders().closed, 0, "channels were closed");
}

/// A connection ends before the numbers of its channels do, and has to last for all that may be
/// under way.
#[tokio::test(flavor = "multi_thread")]
async fn one_connection_is_enough_for_as_many_events_as_the_settings_allow() {
    let broker = Broker::bound().await;
    let server = broker.url.rsplit_once('@').expect("a login").1;
    let middle = Middle::before(server.parse().expect("an address")).await;
    let config = RabbitMqConfig {
        servers: vec![Secret::new(middle.url())],
        exchange: format!("all-{}", broker.exchange),
        queue: Some(broker.queue.clone()),
        queue_type: QueueType::Classic,
        declare: true,
        in_flight: 640,
        ..broker.config()
    };
    let sink = sink(&config);
    for round in 0..3 {
        let events: Vec<Record> = (0..1_100).map(|key| one(&format!("k{key}"), round)).collect();
        let outcomes = publish(&sink, &events).await;
        assert!(outcomes.iter().all(|one| matches!(one, Outcome::Confirmed)), "{outcomes:?}");
    }
    assert_eq!(middle.orders().connections, 1);
}

/// What waits for room waits no longer than the call may send.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_ends_in_time_also_while_others_fill_the_connection() {
    let broker = Broker::bound().await;
    let server = broker.url.rsplit_once('@').expect("a login").1;
    let middle = Middle::before(server.parse().expect("an address")).await;
    let config = RabbitMqConfig {
        servers: vec![Secret::new(middle.url())],
        in_flight: 1,
        timeout_ms: 60_000,
        ..broker.config()
    };
    let sink = sink(&config);
    confirm(&sink, &one("a", 1)).await;
    middle.hold(true);
    let first = one("a", 2);
    let call = std::slice::from_ref(&first);
    let mut filling = Box::pin(publish(&sink, call));
    until_held(&middle, &mut filling).await;
    let partition = PartitionId::numbered(0, 1);
    let events = [one("b", 3), one("b", 4), one("c", 5)];
    let short = Publish::new(&partition, &events).within(Duration::from_millis(200));
    let outcomes = timeout(Duration::from_secs(30), sink.publish(short)).await.expect("in time");
    match &outcomes[..] {
        [Outcome::Failed(b), Outcome::HeldBack, Outcome::Failed(c)] => {
            for error in [b, c] {
                assert_eq!(error.kind(), ErrorKind::Throttled { retry_after: None });
                assert!(error.chain().contains("under way"), "{}", error.chain());
            }
        }
        other => panic!("{other:?}"),
    }
    middle.hold(false);
    assert!(matches!(filling.await[0], Outcome::Confirmed));
    for event in &events {
        confirm(&sink, event).await;
    }
    assert_eq!(broker.stored().await.len(), 5);
}

/// Whoever gives up waiting for the first server finds the second.
#[tokio::test(flavor = "multi_thread")]
async fn a_mute_server_is_not_tried_first_again() {
    let broker = Broker::bound().await;
    // It takes connections and says nothing.
    let mute = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = mute.local_addr().expect("bound").port();
    let mut config = RabbitMqConfig { connect_timeout_ms: 60_000, ..broker.config() };
    config.servers.insert(0, Secret::new(format!("amqp://127.0.0.1:{port}")));
    let sink = sink(&config);
    let event = one("a", 1);
    let call = std::slice::from_ref(&event);
    tokio::select! {
        biased;
        outcomes = publish(&sink, call) => panic!("{outcomes:?}"),
        accepted = mute.accept() => drop(accepted.expect("connected")),
    }
    timeout(Duration::from_secs(30), confirm(&sink, &event)).await.expect("the second server");
    assert_eq!(broker.stored().await.len(), 1);
}

#[derive(Clone, Default)]
struct Written(Arc<Mutex<Vec<u8>>>);

impl Write for Written {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("not poisoned").extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// The client library would log each message that comes back, and what its connection lost.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_of_an_event_is_logged_when_it_comes_back() {
    let written = Written::default();
    let writer = written.clone();
    let logs = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_writer(move || writer.clone());
    logs.init();
    let broker = Broker::shared().await;
    let proxy = proxy(&broker);
    let sink = sink(&behind(&proxy, &broker, 5_000));
    let mut headers = Headers::new();
    headers.insert("card", "4111-1111").expect("valid");
    fail(&sink, &event("a", headers, "my diary")).await;
    proxy.reset_all();
    broker.bind("orders").await;
    let event = record(event_with_id(fresh_id(), "a", 2), 2);
    while !matches!(publish(&sink, std::slice::from_ref(&event)).await[0], Outcome::Confirmed) {}
    tracing::info!("still logging");
    let text = String::from_utf8(written.0.lock().expect("not poisoned").clone()).expect("text");
    assert!(text.contains("still logging"));
    let payload = format!("{:?}", b"my diary");
    let payload = payload.trim_matches(['[', ']']);
    for secret in ["my diary", payload, "4111-1111", "guest\\0guest"] {
        assert!(!text.contains(secret), "{secret} was logged");
    }
}
