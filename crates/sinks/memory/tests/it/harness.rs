//! The memory sink's harness.
//!
//! What lives here: the sink is its own receiver, so faults are its scripts. What does not: tests.
//! Invariant: every fault of the suite can be scripted.

use std::marker::PhantomData;
use std::sync::Arc;

use async_trait::async_trait;
use postrider_conformance::clock::ManualClock;
use postrider_conformance::sink::{Delivered, ReceiverFault, SinkHarness};
use postrider_core::{Capabilities, Chain, ErrorKind, EventId, Sink};
use postrider_sink_memory::{Fault, MemorySink};

/// A choice of capabilities.
pub(crate) trait Limits: Send + Sync + 'static {
    const CAPABILITIES: Capabilities;
}

pub(crate) struct Chains;

impl Limits for Chains {
    const CAPABILITIES: Capabilities = Capabilities {
        max_event_bytes: Some(100_000),
        max_batch_records: 7,
        max_batch_bytes: 64 * 1024,
        max_in_flight: 2,
        chain: Chain::Many,
        dedup_window: None,
    };
}

pub(crate) struct Singles;

impl Limits for Singles {
    const CAPABILITIES: Capabilities = Capabilities {
        max_event_bytes: None,
        chain: Chain::One,
        dedup_window: Some(std::time::Duration::from_secs(60)),
        ..Chains::CAPABILITIES
    };
}

pub(crate) struct MemorySinkHarness<L> {
    sink: MemorySink,
    limits: PhantomData<L>,
}

fn fault(fault: ReceiverFault) -> Fault {
    match fault {
        ReceiverFault::Unreachable => Fault::Refuse(ErrorKind::Transient),
        ReceiverFault::Refusing => Fault::Refuse(ErrorKind::Permanent),
        ReceiverFault::Throttling { retry_after } => {
            Fault::Refuse(ErrorKind::Throttled { retry_after: Some(retry_after) })
        }
        ReceiverFault::LosingConfirms => Fault::LoseConfirm,
    }
}

#[async_trait]
impl<L: Limits> SinkHarness for MemorySinkHarness<L> {
    async fn fresh() -> Self {
        let sink = MemorySink::new(Arc::new(ManualClock::default()));
        Self { sink: sink.with_capabilities(L::CAPABILITIES), limits: PhantomData }
    }

    fn sink(&self) -> Arc<dyn Sink> {
        Arc::new(self.sink.clone())
    }

    async fn delivered(&self) -> Vec<Delivered> {
        let log = self.sink.deliveries();
        log.into_iter().map(|delivery| Delivered::of(&delivery.event)).collect()
    }

    fn can(&self, _fault: ReceiverFault) -> bool {
        true
    }

    async fn fail_next(&self, times: u32, one: ReceiverFault) {
        self.sink.fail_next(times, fault(one));
    }

    async fn fail_event(&self, id: EventId, one: ReceiverFault) {
        self.sink.fail_event(id, u32::MAX, fault(one));
    }

    fn can_hold(&self) -> bool {
        true
    }

    async fn hold(&self) {
        self.sink.hold();
    }

    async fn release(&self) {
        self.sink.release();
    }

    async fn is_waiting(&self) -> bool {
        self.sink.waiting_calls() > 0
    }

    fn secrets(&self) -> Vec<String> {
        Vec::new()
    }

    fn printed(&self) -> String {
        format!("{:?}", self.sink.capabilities())
    }
}
