//! The shared sink suite.
//!
//! What lives here: the harness. What does not: behaviours.
//! Invariant: what was delivered is read from the broker's topic.

use std::sync::Arc;

use async_trait::async_trait;
use postrider_conformance::sink::{Delivered, ReceiverFault, SinkHarness};
use postrider_core::{EventId, Secret, Sink};
use postrider_servers::kafka::Kafka as Broker;
use postrider_sink_kafka::{Kafka, KafkaConfig};

use crate::middle::Middle;
use crate::transactions::{NOTES, committed};
use crate::{TOPIC, brokers, config, delivered, make_topic, sink, stored};

const PASSWORD: &str = "s3cret-p4ss";

struct Harness<const IN_TRANSACTIONS: bool> {
    brokers: String,
    middle: Middle,
    config: KafkaConfig,
    sink: Arc<Kafka>,
    _broker: Broker,
}

#[async_trait]
impl<const IN_TRANSACTIONS: bool> SinkHarness for Harness<IN_TRANSACTIONS> {
    async fn fresh() -> Self {
        let broker = crate::empty_broker().await;
        let brokers = brokers(&broker);
        // The suite's largest event has a payload of a whole MiB.
        make_topic(&brokers, TOPIC, 1, &[("max.message.bytes", "2000000")]).await;
        make_topic(&brokers, NOTES, 1, &[]).await;
        let middle = Middle::before(broker.address()).await;
        let mut config = KafkaConfig { topic: TOPIC.into(), ..config(middle.brokers()) };
        config.transactions = IN_TRANSACTIONS.then(|| "suite".to_owned());
        config.librdkafka.insert("ssl.key.password".into(), Secret::new(PASSWORD));
        let sink = sink(&config);
        Self { brokers, middle, config, sink, _broker: broker }
    }

    fn sink(&self) -> Arc<dyn Sink> {
        self.sink.clone()
    }

    async fn delivered(&self) -> Vec<Delivered> {
        match IN_TRANSACTIONS {
            true => committed(&self.brokers, TOPIC).await.iter().map(delivered).collect(),
            false => stored(&self.brokers).await,
        }
    }

    /// No broker names a wait.
    fn can(&self, fault: ReceiverFault) -> bool {
        !matches!(fault, ReceiverFault::Throttling { .. })
    }

    async fn fail_next(&self, times: u32, fault: ReceiverFault) {
        match IN_TRANSACTIONS {
            true => self.middle.orders().spoil_next_transactions(times, fault),
            false => self.middle.orders().spoil_next(times, fault),
        }
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
        vec![PASSWORD.into()]
    }

    fn printed(&self) -> String {
        format!("{:?} {:?}", self.sink, self.config)
    }
}

mod each_by_itself {
    postrider_conformance::sink_suite!(crate::suite::Harness<false>);
}

mod in_transactions {
    postrider_conformance::sink_suite!(crate::suite::Harness<true>);
}
