//! One store, one sink, and relays that can be stopped, killed and looked into.
//!
//! What lives here: set-up and waiting. What does not: any assertion about delivery.
//! Invariant: time is tokio's paused time, so that a test never waits for real.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use postrider_conformance::clock::TokioClock;
use postrider_conformance::samples::{consumer, event, group, number, relay};
use postrider_core::{
    Capabilities, Checkpoints, Clock, DeadLetter, DeadLetterFilter, DeadLetters, FeedSource,
    NewEvent, Outcome, PollInterval, Publish, RetryPolicy, Sink,
};
use postrider_relay::{Keeper, Relay, RelayOptions, RelayStatus, SinkOptions};
use postrider_sink_memory::MemorySink;
use postrider_store_memory::MemoryStore;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

pub(crate) const SINK: &str = "broker";

pub(crate) struct World {
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) store: MemoryStore,
    pub(crate) sink: MemorySink,
}

/// One broker behind the sinks of several relays: a relay that ends closes only its own.
pub(crate) struct KeptOpen(pub(crate) MemorySink);

#[async_trait::async_trait]
impl Sink for KeptOpen {
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    async fn publish(&self, batch: Publish<'_>) -> Vec<Outcome> {
        self.0.publish(batch).await
    }

    async fn check(&self) -> postrider_core::Result<()> {
        self.0.check().await
    }

    async fn close(&self) -> postrider_core::Result<()> {
        Ok(())
    }
}

pub(crate) struct Running {
    pub(crate) status: RelayStatus,
    stop: CancellationToken,
    task: JoinHandle<postrider_core::Result<()>>,
}

impl Running {
    /// A planned stop; returns when everything is handed over.
    pub(crate) async fn stop(self) {
        self.stop.cancel();
        self.task.await.expect("the relay does not panic").expect("the relay ends well");
    }

    /// Like kill -9: nothing more happens.
    pub(crate) async fn kill(self) {
        self.task.abort();
        let _ = self.task.await;
    }
}

impl World {
    pub(crate) fn new(partitions: u32) -> Self {
        let clock: Arc<dyn Clock> = Arc::new(TokioClock::default());
        Self {
            store: MemoryStore::seeded(partitions, Arc::clone(&clock), 7),
            sink: MemorySink::new(Arc::clone(&clock)),
            clock,
        }
    }

    pub(crate) fn source(&self) -> Arc<FeedSource<MemoryStore>> {
        let feed = Arc::new(self.store.clone());
        Arc::new(FeedSource::new(feed, Arc::clone(&self.clock), PollInterval::default()))
    }

    pub(crate) fn options(name: &str) -> RelayOptions {
        let mut options = RelayOptions::new(group("relays"), relay(name));
        options.keeper = Keeper::SameRuntime;
        options.seed = Some(11);
        options
    }

    pub(crate) fn sink_options() -> SinkOptions {
        SinkOptions::new(consumer(SINK))
    }

    pub(crate) fn relay(&self, name: &str) -> Running {
        self.relay_with(Self::options(name), Self::sink_options())
    }

    pub(crate) fn relay_with(&self, options: RelayOptions, sink: SinkOptions) -> Running {
        let relay = Relay::builder(self.source(), Arc::new(self.store.clone()), options)
            .clock(Arc::clone(&self.clock))
            .sink(sink, Arc::new(KeptOpen(self.sink.clone())))
            .build()
            .expect("valid options");
        start(relay)
    }

    pub(crate) fn append(&self, events: &[NewEvent]) {
        self.store.append(events).expect("the memory store takes valid events");
    }

    /// Events `0..count`, dealt out to keys `k0, k1, …`.
    pub(crate) fn append_dealt(&self, count: u64, keys: u64) {
        let events: Vec<NewEvent> =
            (0..count).map(|n| event(&format!("k{}", n % keys), n)).collect();
        for chunk in events.chunks(500) {
            self.append(chunk);
        }
    }

    /// Waits until `done` holds, for at most an hour of virtual time.
    pub(crate) async fn until(&self, what: &str, mut done: impl FnMut(&Self) -> bool) {
        let give_up = self.clock.elapsed() + Duration::from_secs(3_600);
        while !done(self) {
            assert!(self.clock.elapsed() < give_up, "waited an hour in vain until {what}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    pub(crate) async fn until_delivered(&self, count: u64) {
        self.until(&format!("{count} are delivered"), |world| world.sink.delivered() >= count)
            .await;
    }

    pub(crate) async fn letters(&self) -> Vec<DeadLetter> {
        let all = DeadLetterFilter::default();
        self.store.list(&all, None, 100_000).await.expect("the memory store lists")
    }

    pub(crate) async fn until_letters(&self, count: usize) -> Vec<DeadLetter> {
        let give_up = self.clock.elapsed() + Duration::from_secs(3_600);
        loop {
            let letters = self.letters().await;
            if letters.len() == count {
                return letters;
            }
            assert!(
                self.clock.elapsed() < give_up,
                "waited an hour for {count} letters; there are {}",
                letters.len()
            );
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Numbers of a key's events, in the order in which they first arrived.
    pub(crate) fn first_arrivals(&self, key: &str) -> Vec<u64> {
        let mut seen = Vec::new();
        for delivery in self.sink.deliveries() {
            if delivery.event.key().as_str() == key && !seen.contains(&number(&delivery.event)) {
                seen.push(number(&delivery.event));
            }
        }
        seen
    }

    /// How many deliveries repeat an earlier one.
    pub(crate) fn repetitions(&self) -> usize {
        let mut ids = HashMap::new();
        for delivery in self.sink.deliveries() {
            *ids.entry(delivery.event.id()).or_insert(0usize) += 1;
        }
        ids.values().map(|count| count - 1).sum()
    }

    /// Asserts that `0..count` arrived, each key's in order.
    pub(crate) fn assert_all_in_order(&self, count: u64, keys: u64) {
        for k in 0..keys {
            let expected: Vec<u64> = (0..count).filter(|n| n % keys == k).collect();
            assert_eq!(self.first_arrivals(&format!("k{k}")), expected, "key k{k}");
        }
    }

    pub(crate) async fn pending(&self) -> u64 {
        let progress = self.store.progress().await.expect("the memory store answers");
        progress.iter().map(|one| one.pending).sum()
    }
}

pub(crate) fn start(relay: Relay) -> Running {
    let (stop, status) = (CancellationToken::new(), relay.status());
    #[expect(clippy::disallowed_methods, reason = "a test kills the relay by its handle")]
    let task = tokio::spawn(relay.run(stop.clone()));
    Running { status, stop, task }
}

pub(crate) fn quick_retries(max_attempts: u32) -> RetryPolicy {
    RetryPolicy { max_attempts, ..RetryPolicy::default() }
}
