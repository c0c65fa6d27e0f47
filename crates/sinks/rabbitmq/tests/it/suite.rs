//! The shared sink suite, against a real server.
//!
//! What lives here: the harness. What does not: behaviours.
//! Invariant: what was delivered is read from the server's queue.

use std::sync::Arc;

use async_trait::async_trait;
use postrider_conformance::sink::{Delivered, ReceiverFault, SinkHarness};
use postrider_core::{EventId, Secret, Sink};
use postrider_sink_rabbitmq::{QueueType, RabbitMq, RabbitMqConfig};

use crate::middle::Middle;
use crate::{Broker, sink};

struct Harness {
    broker: Broker,
    middle: Middle,
    config: RabbitMqConfig,
    sink: Arc<RabbitMq>,
}

#[async_trait]
impl SinkHarness for Harness {
    async fn fresh() -> Self {
        let broker = Broker::shared().await;
        let (login, server) = broker.url.rsplit_once('@').expect("a login");
        let middle = Middle::before(server.parse().expect("an address")).await;
        let (_, password) = login.rsplit_once(':').expect("a password");
        let config = RabbitMqConfig {
            servers: vec![Secret::new(middle.url())],
            user: Some("guest".into()),
            password: Some(Secret::new(password)),
            // Whatever the topic, it goes to the queue.
            exchange: format!("all-{}", broker.exchange),
            queue: Some(broker.queue.clone()),
            queue_type: QueueType::Classic,
            declare: true,
            max_message_bytes: 8 << 20,
            ..broker.config()
        };
        let sink = sink(&config);
        Self { broker, middle, config, sink }
    }
    fn sink(&self) -> Arc<dyn Sink> {
        self.sink.clone()
    }
    async fn delivered(&self) -> Vec<Delivered> {
        self.broker.stored().await
    }
    /// A queue that is full names no wait.
    fn can(&self, fault: ReceiverFault) -> bool {
        !matches!(fault, ReceiverFault::Throttling { .. })
    }
    async fn fail_next(&self, times: u32, fault: ReceiverFault) {
        self.middle.orders().next = Some((times, fault));
    }
    async fn fail_event(&self, id: EventId, fault: ReceiverFault) {
        self.middle.orders().poisoned.insert(id, fault);
    }
    fn can_hold(&self) -> bool {
        true
    }
    async fn hold(&self) {
        self.middle.hold(true);
    }
    async fn release(&self) {
        self.middle.hold(false);
    }
    async fn is_waiting(&self) -> bool {
        self.middle.orders().waiting
    }
    fn secrets(&self) -> Vec<String> {
        vec!["hunter2-in-the-url".into()]
    }
    fn printed(&self) -> String {
        let mut config = self.config.clone();
        config.servers.push(Secret::new("amqp://me:hunter2-in-the-url@127.0.0.1"));
        format!("{:?} {:?} {config:?}", self.sink, self.config)
    }
}

postrider_conformance::sink_suite!(Harness);
