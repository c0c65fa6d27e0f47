//! The write seam: where events are delivered to.
//!
//! What lives here: `Sink`, its outcomes and capabilities. What does not: retries, order across
//! calls and parking, which are the relay's.
//! Invariant: `Confirmed` is said only after the broker's own promise that the event is durable.

use std::collections::HashMap;
use std::time::Duration;

use async_trait::async_trait;

use crate::{Error, Key, PartitionId, Record, Result};

/// How many events of one key a sink takes in one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chain {
    /// One: it sends concurrently and could not hold the second back when the first fails.
    One,
    /// Any number: it sends a key's events in order and stops a key at its first failure. Each is
    /// sent after the answer to the one before, so a call lasts as long as its longest chain: a
    /// relay gives it the more of a key the fewer keys wait.
    InTurn,
    /// Any number, in as little time as one: it sends a key's events together, in order, and stops
    /// a key at its first failure.
    Many,
}

/// What a sink can take. A relay respects all of it before it calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Largest event, in bytes of payload, if the sink knows; larger ones are parked unsent.
    pub max_event_bytes: Option<usize>,
    /// Most events in one call.
    pub max_batch_records: usize,
    /// Most bytes in one call, as `Event::cost_bytes` counts. A single event above it still comes.
    pub max_batch_bytes: usize,
    /// Most calls at the same time from one partition.
    pub max_in_flight: usize,
    /// How many events of one key in one call.
    pub chain: Chain,
    /// How long the broker removes repetitions by event id, if it does.
    pub dedup_window: Option<Duration>,
}

/// How long a call goes on sending, unless the caller says otherwise.
const SENDING_TIME: Duration = Duration::from_secs(10);

/// One call's events. Different keys in any order; within a key, feed order.
#[derive(Debug, Clone, Copy)]
pub struct Publish<'a> {
    partition: &'a PartitionId,
    records: &'a [Record],
    sending_time: Duration,
}

impl<'a> Publish<'a> {
    /// A call for `records` of `partition`.
    pub fn new(partition: &'a PartitionId, records: &'a [Record]) -> Self {
        Self { partition, records, sending_time: SENDING_TIME }
    }

    /// The same call with another [`sending_time`](Self::sending_time).
    #[must_use]
    pub fn within(mut self, sending_time: Duration) -> Self {
        self.sending_time = sending_time;
        self
    }

    /// For how long a call begins to send events, 10 s unless said otherwise; what it has not
    /// begun to send by then it gives back as [`Outcome::HeldBack`]. The caller waits several times
    /// as long, and forgets all outcomes of a call that has not ended by then. So a sink that waits
    /// for each confirmation before it sends a key's next event still gets on, however slow.
    pub fn sending_time(&self) -> Duration {
        self.sending_time
    }

    /// The partition they come from.
    pub fn partition(&self) -> &'a PartitionId {
        self.partition
    }

    /// The events, with their positions.
    pub fn records(&self) -> &'a [Record] {
        self.records
    }
}

/// The places of a call's records by key: keys in the order of their first ones, each key's places
/// in order.
pub fn by_key(records: &[Record]) -> Vec<Vec<usize>> {
    let mut chains: Vec<Vec<usize>> = Vec::new();
    let mut chain_of: HashMap<&Key, usize> = HashMap::with_capacity(records.len());
    for (place, record) in records.iter().enumerate() {
        let chain = *chain_of.entry(record.event.key()).or_insert_with(|| {
            chains.push(Vec::new());
            chains.len() - 1
        });
        chains[chain].push(place);
    }
    chains
}

/// What became of one event.
#[derive(Debug)]
pub enum Outcome {
    /// The broker promised that it is durable there.
    Confirmed,
    /// The broker already had it under its id: confirmed as well.
    Duplicate,
    /// It was refused, or its fate is unknown: it will be sent again or parked, by the kind.
    Failed(Error),
    /// Not sent, because an earlier event of its key failed in this call, or because its
    /// [`sending_time`](Publish::sending_time) is over. Behind a confirmed event of its key it
    /// counts as no failure.
    HeldBack,
}

/// A broker, file or endpoint.
#[async_trait]
pub trait Sink: Send + Sync {
    /// What it can take. Cheap; may change after a connection was made.
    fn capabilities(&self) -> Capabilities;

    /// Sends events and waits for the broker's own confirmation: one outcome for each, in order.
    /// After a failure no later event of the same key is sent in this call.
    ///
    /// # Cancellation
    /// A dropped call leaves every event's fate unknown: not acknowledged, so delivered again.
    async fn publish(&self, batch: Publish<'_>) -> Vec<Outcome>;

    /// Whether the sink can be reached and is set up to take events.
    async fn check(&self) -> Result<()>;

    /// Flushes and closes. Nothing is published after it.
    async fn close(&self) -> Result<()>;
}
