//! The sink suite: what every sink promises the relay.
//!
//! What lives here: the harness (a sink and the receiver behind it), the macro that lists the
//! behaviours, and shared steps. What does not: the behaviours.
//! Invariant: what was delivered is asked of the receiver, never of the sink.

pub mod delivery;
pub mod failures;
pub mod reader;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postrider_core::{Event, EventId, Outcome, PartitionId, Publish, Record, Sink};

/// One message as the receiver has it, decoded from its medium.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delivered {
    /// The event's id.
    pub id: EventId,
    /// Its key.
    pub key: String,
    /// Its topic.
    pub topic: String,
    /// Its type.
    pub event_type: String,
    /// Its media type.
    pub content_type: String,
    /// Its headers; names in lower case, in the order of the names.
    pub headers: Vec<(String, String)>,
    /// Its payload.
    pub payload: Vec<u8>,
}

impl Delivered {
    /// The message that an event must become.
    pub fn of(event: &Event) -> Self {
        let headers = event.headers().iter();
        let mut headers: Vec<(String, String)> =
            headers.map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned())).collect();
        headers.sort();
        Self {
            id: event.id(),
            key: event.key().as_str().to_owned(),
            topic: event.topic().as_str().to_owned(),
            event_type: event.event_type().as_str().to_owned(),
            content_type: event.content_type().as_str().to_owned(),
            headers,
            payload: event.payload().to_vec(),
        }
    }
}

/// A way in which the receiver can answer badly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReceiverFault {
    /// It can't be reached, or breaks off before it has taken the event. `Transient`.
    Unreachable,
    /// It says that it will never take this event. `Permanent`.
    Refusing,
    /// It asks for a pause of this length. `Throttled`.
    Throttling {
        /// As it is said to the sink: whole seconds.
        retry_after: Duration,
    },
    /// It takes the event and breaks off before it has said so. `Transient`, and delivered.
    LosingConfirms,
}

/// How the suite sets up one kind of sink and the receiver behind it.
#[async_trait]
pub trait SinkHarness: Sized + Send + Sync + 'static {
    /// A new sink with an empty receiver that takes everything.
    async fn fresh() -> Self;

    /// The sink; the same each time.
    fn sink(&self) -> Arc<dyn Sink>;

    /// What the receiver has taken, in the order of taking.
    async fn delivered(&self) -> Vec<Delivered>;

    /// Whether the receiver can be made to answer so. The suite asks nothing of faults that can't
    /// happen in this medium.
    fn can(&self, fault: ReceiverFault) -> bool;

    /// The receiver answers so to the next `times` events that reach it.
    async fn fail_next(&self, times: u32, fault: ReceiverFault);

    /// The receiver answers so to this event, each time it comes, until the end.
    async fn fail_event(&self, id: EventId, fault: ReceiverFault);

    /// Whether the receiver can be held.
    fn can_hold(&self) -> bool;

    /// From now on the receiver takes nothing and confirms nothing, and breaks nothing off.
    async fn hold(&self);

    /// Ends [`hold`](Self::hold).
    async fn release(&self);

    /// Whether a call has reached the held receiver.
    async fn is_waiting(&self) -> bool;

    /// Every secret that the sink was configured with: keys, passwords, tokens.
    fn secrets(&self) -> Vec<String>;

    /// Everything of the sink and its configuration that can be printed, by `Debug` and `Display`.
    fn printed(&self) -> String;
}

/// Publishes records of one partition.
pub(crate) async fn publish(sink: &dyn Sink, records: &[Record]) -> Vec<Outcome> {
    let partition = PartitionId::numbered(0, 1);
    let outcomes = sink.publish(Publish::new(&partition, records)).await;
    assert_eq!(outcomes.len(), records.len(), "one outcome for each event");
    outcomes
}

/// Publishes records as a relay does: in calls that keep to the sink's capabilities.
pub(crate) async fn publish_all(sink: &dyn Sink, records: &[Record]) -> Vec<Outcome> {
    let capabilities = sink.capabilities();
    let mut outcomes = Vec::new();
    let mut rest = records;
    while !rest.is_empty() {
        let mut bytes = 0;
        let mut keys = Vec::new();
        let fits = |record: &&Record| {
            bytes += record.event.cost_bytes();
            let key = record.event.key();
            let chained = capabilities.chain != postrider_core::Chain::One;
            let fits = keys.is_empty()
                || bytes <= capabilities.max_batch_bytes
                    && keys.len() < capabilities.max_batch_records
                    && (chained || !keys.contains(&key.clone()));
            keys.push(key.clone());
            fits
        };
        let count = rest.iter().take_while(fits).count();
        let (call, later) = rest.split_at(count);
        outcomes.extend(publish(sink, call).await);
        rest = later;
    }
    outcomes
}

/// Whether the sink's receiver promised to keep the event.
pub(crate) fn is_confirmed(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Confirmed | Outcome::Duplicate)
}

/// Polls until the receiver holds a call.
pub(crate) async fn until_waiting<H: SinkHarness>(harness: &H) {
    let arrived = async {
        while !harness.is_waiting().await {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let arrived = tokio::time::timeout(Duration::from_secs(20), arrived).await;
    arrived.expect("the call reaches the receiver");
}

/// Lists a test for each behaviour of the sink suite.
///
/// ```text
/// postrider_conformance::sink_suite!(MyHarness);
/// ```
#[macro_export]
macro_rules! sink_suite {
    ($harness:ty) => {
        $crate::listed_tests! { sink_suite, sink, $harness;
            delivery:
                bytes_and_attributes_arrive_unchanged
                texts_that_are_not_ascii_arrive_unchanged
                empty_and_large_payloads_arrive_whole
                order_within_a_key_is_kept
                a_redelivery_carries_the_same_id
                an_empty_call_is_answered_with_nothing
                nothing_is_confirmed_before_the_receiver_has_it
                a_cancelled_call_confirms_nothing
                what_was_confirmed_is_there_after_closing
                a_check_finds_a_working_receiver
                capabilities_can_be_kept_to
                secrets_are_never_printed;
            failures:
                each_event_has_its_own_outcome
                nothing_of_a_key_follows_its_failure
                an_unreachable_receiver_is_transient
                a_refusal_is_permanent
                a_throttled_sink_names_the_wait
                a_lost_confirmation_is_not_a_confirmation
                an_oversize_event_is_refused_and_others_pass;
        }
    };
}
