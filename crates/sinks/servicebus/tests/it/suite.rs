//! The shared sink suite.
//!
//! What lives here: the harness, whose receiver is the emulator's queue and whose faults are the
//! emulator's own or the tap's. What does not: behaviours.
//! Invariant: what was delivered is read from the queue.

use std::sync::Arc;

use async_trait::async_trait;
use postrider_conformance::sink::{Delivered, ReceiverFault, SinkHarness};
use postrider_core::{EventId, Sink};
use postrider_servicebus_emulator::{PropertyValue, StoredMessage};
use postrider_sink_servicebus::{KEY_PROPERTY, ServiceBus, ServiceBusConfig, TOPIC_PROPERTY};
use uuid::Uuid;

use crate::{Bus, QUEUE, sink};

struct Harness {
    bus: Bus,
    config: ServiceBusConfig,
    sink: Arc<ServiceBus>,
}

/// What the sink adds beside the event's own headers; the trace's are headers of the event.
const OWN: [&str; 3] = [TOPIC_PROPERTY, KEY_PROPERTY, "Diagnostic-Id"];

fn delivered(message: StoredMessage) -> Delivered {
    let text = |value: &PropertyValue| match value {
        PropertyValue::Text(text) => text.clone(),
        other => panic!("a property is text, not {other:?}"),
    };
    let properties = &message.application_properties;
    let session = message.session_id.clone().expect("a session");
    let partition_key = message.annotations.get("x-opt-partition-key");
    assert_eq!(partition_key, Some(&PropertyValue::Text(session.clone())));
    let headers = properties.iter().filter(|(name, _)| !OWN.contains(&name.as_str()));
    let mut headers: Vec<(String, String)> =
        headers.map(|(name, value)| (name.to_ascii_lowercase(), text(value))).collect();
    headers.sort();
    let id = message.message_id.expect("an id");
    Delivered {
        id: EventId::from_uuid(id.parse::<Uuid>().expect("a UUID")),
        key: properties.get(KEY_PROPERTY).map_or(session, text),
        topic: text(&properties[TOPIC_PROPERTY]),
        event_type: message.subject.expect("a subject"),
        content_type: message.content_type.expect("a content type"),
        headers,
        payload: message.body,
    }
}

#[async_trait]
impl SinkHarness for Harness {
    async fn fresh() -> Self {
        let bus = Bus::start().await;
        let config = bus.config();
        let sink = Arc::new(sink(&config));
        // The link's limits are known from here on.
        sink.check().await.expect("reachable");
        Self { bus, config, sink }
    }
    fn sink(&self) -> Arc<dyn Sink> {
        self.sink.clone()
    }
    async fn delivered(&self) -> Vec<Delivered> {
        self.bus.stored().into_iter().map(delivered).collect()
    }
    fn can(&self, _: ReceiverFault) -> bool {
        true
    }
    async fn fail_next(&self, times: u32, fault: ReceiverFault) {
        let faults = self.bus.emulator.faults();
        match fault {
            ReceiverFault::Unreachable => self.bus.tap.cut_next(times),
            ReceiverFault::Refusing => {
                faults.reject_next(QUEUE, u64::from(times), "amqp:not-allowed");
            }
            ReceiverFault::Throttling { retry_after } => {
                let text = format!("Please wait {} seconds and try again.", retry_after.as_secs());
                let condition = "com.microsoft:server-busy";
                faults.reject_next_saying(QUEUE, u64::from(times), condition, &text);
            }
            ReceiverFault::LosingConfirms => {
                assert_eq!(times, 1, "the emulator ends the connection of one");
                faults.drop_connection_after(QUEUE, 1);
            }
        }
    }
    async fn fail_event(&self, id: EventId, fault: ReceiverFault) {
        assert_eq!(fault, ReceiverFault::Refusing, "what the suite asks for");
        let emulator = self.bus.emulator.clone();
        // The next transfer that the emulator sees is this one: all before it are through.
        let poison = move |before: usize| {
            let through = emulator.entity(QUEUE).counts().transfers == before as u64;
            if through {
                emulator.faults().reject_next(QUEUE, 1, "amqp:not-allowed");
            }
            through
        };
        self.bus.tap.poison(id.to_string(), Arc::new(poison));
    }
    fn can_hold(&self) -> bool {
        true
    }
    async fn hold(&self) {
        self.bus.tap.hold();
    }
    async fn release(&self) {
        self.bus.tap.release();
    }
    async fn is_waiting(&self) -> bool {
        self.bus.tap.is_waiting()
    }
    fn secrets(&self) -> Vec<String> {
        vec!["SAS_KEY_VALUE".into()]
    }
    fn printed(&self) -> String {
        format!("{:?} {:?}", self.sink, self.config)
    }
}

postrider_conformance::sink_suite!(Harness);
