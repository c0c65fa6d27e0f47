//! Connections that nobody uses, that fell silent, and how many there are.
//!
//! What lives here: heartbeats, and the bound of connections. What does not: what becomes of events
//! that were under way (`once.rs`).
//! Invariant: a connection that lives is kept, one that is dead is noticed in bounded time, and
//! there are never more than the sink may have.

use std::time::Duration;

use postrider_core::{ErrorKind, Outcome, PartitionId, Publish, Secret, Sink};
use postrider_sink_rabbitmq::RabbitMqStreamConfig;
use tokio::time::{Instant, sleep, timeout};

use super::middle::Middle;
use super::{Broker, confirm, fail, ids_of, make_super, publish_all, sink};
use crate::one;

/// The limit that the guide names.
const MAX_CONNECTIONS: usize = 256;

fn through(middle: &Middle, broker: &Broker) -> RabbitMqStreamConfig {
    RabbitMqStreamConfig {
        servers: vec![Secret::new(middle.url())],
        timeout_ms: 120_000,
        ..broker.config()
    }
}

/// The server ends a connection that is silent for two to three times of the second.
#[tokio::test(flavor = "multi_thread")]
async fn an_idle_connection_lives_by_heartbeats() {
    let broker = Broker::shared().await;
    let middle = Middle::before(broker.address()).await;
    middle.orders().heartbeat_s = Some(1);
    let sink = sink(&through(&middle, &broker));
    confirm(&sink, &[one("a", 1)]).await;
    // Two a second: it outlives the server's patience more than twice.
    let deadline = Instant::now() + Duration::from_secs(40);
    while middle.orders().heartbeats < 16 {
        assert!(Instant::now() < deadline, "heartbeats: {}", middle.orders().heartbeats);
        sleep(Duration::from_millis(50)).await;
    }
    confirm(&sink, &[one("a", 2)]).await;
    assert_eq!(middle.orders().connections, 1);
    assert!(timeout(Duration::from_secs(20), sink.close()).await.is_ok());
}

/// Its answers are waited for longer than the test may take: it is by its silence that it is
/// noticed.
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_fell_silent_is_noticed_idle_and_in_use() {
    let broker = Broker::shared().await;
    let middle = Middle::before(broker.address()).await;
    middle.orders().heartbeat_s = Some(1);
    let sink = sink(&through(&middle, &broker));
    let events = [one("a", 1), one("a", 2), one("a", 3)];
    confirm(&sink, &events[..1]).await;
    middle.orders().silenced = 1;
    let deadline = Instant::now() + Duration::from_secs(40);
    while middle.orders().ended < 1 {
        assert!(Instant::now() < deadline, "it was not noticed");
        sleep(Duration::from_millis(50)).await;
    }
    confirm(&sink, &events[1..2]).await;
    assert_eq!(middle.orders().connections, 2);
    middle.orders().silenced = 2;
    let failed = timeout(Duration::from_secs(40), fail(&sink, &events[2])).await;
    let error = failed.expect("it was noticed");
    assert_eq!(error.kind(), ErrorKind::Transient, "{}", error.chain());
    publish_all(&sink, &events[2..]).await;
    assert_eq!(broker.ids().await, ids_of(&events));
}

/// Of more partitions and streams than connections, each gets one in its turn.
#[tokio::test(flavor = "multi_thread")]
async fn there_are_never_more_connections_than_the_limit() {
    let broker = Broker::shared().await;
    let middle = Middle::before(broker.address()).await;
    let super_stream = make_super(&broker, 4).await;
    let config = RabbitMqStreamConfig {
        stream: super_stream,
        super_stream: true,
        ..through(&middle, &broker)
    };
    let sink = sink(&config);
    let partitions: Vec<PartitionId> = (0..70).map(|n| PartitionId::numbered(n, 70)).collect();
    for partition in &partitions {
        // By twelve keys each of the streams is met.
        let records: Vec<_> = (0..12).map(|n| one(&format!("{partition}-{n}"), n)).collect();
        let outcomes = sink.publish(Publish::new(partition, &records)).await;
        let all = outcomes.iter().all(|one| matches!(one, Outcome::Confirmed));
        assert!(all, "{partition}: {outcomes:?}");
    }
    let (connections, most) = {
        let orders = middle.orders();
        (orders.connections, orders.most_open)
    };
    // The middle hears of an end a little later than who ended it; without a limit there are 280.
    assert!(connections > MAX_CONNECTIONS && most <= MAX_CONNECTIONS + 8, "{connections}, {most}");
}
