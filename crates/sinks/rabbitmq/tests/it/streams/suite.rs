//! The shared sink suite, against a real stream.
//!
//! What lives here: the harness. What does not: behaviours.
//! Invariant: what was delivered is read from the server's stream.

use std::sync::Arc;

use async_trait::async_trait;
use postrider_conformance::sink::{Delivered, ReceiverFault, SinkHarness};
use postrider_core::{EventId, Secret, Sink};
use postrider_sink_rabbitmq::{RabbitMqStream, RabbitMqStreamConfig};

use super::middle::Middle;
use super::{Broker, sink};

struct Harness {
    broker: Broker,
    middle: Middle,
    config: RabbitMqStreamConfig,
    sink: Arc<RabbitMqStream>,
}

#[async_trait]
impl SinkHarness for Harness {
    async fn fresh() -> Self {
        let broker = Broker::shared().await;
        let middle = Middle::before(broker.address()).await;
        let config = RabbitMqStreamConfig {
            servers: vec![Secret::new(middle.url())],
            user: Some("guest".into()),
            password: Some(Secret::new("guest")),
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
    /// A server refuses no single event of a frame, and names no wait.
    fn can(&self, fault: ReceiverFault) -> bool {
        matches!(fault, ReceiverFault::Unreachable | ReceiverFault::LosingConfirms)
    }
    async fn fail_next(&self, times: u32, fault: ReceiverFault) {
        self.middle.orders().next = Some((times, fault));
    }
    async fn fail_event(&self, id: EventId, _: ReceiverFault) {
        self.middle.orders().poisoned.insert(id);
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
        let secret = "rabbitmq-stream://me:hunter2-in-the-url@127.0.0.1";
        config.servers.push(Secret::new(secret));
        format!("{:?} {:?} {config:?}", self.sink, self.config)
    }
}

postrider_conformance::sink_suite!(Harness);
