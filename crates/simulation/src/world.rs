//! A world: one store, two brokers, relays that come and go.
//!
//! What lives here: set-up and the relays' handles. What does not: what happens in it.
//! Invariant: everything random hangs on the world's seed, and all time is tokio's paused time.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postrider_conformance::clock::TokioClock;
use postrider_conformance::faulty::{Dice, FaultRates, Faulty};
use postrider_conformance::samples::{consumer, group, relay as relay_id};
use postrider_core::{
    Capabilities, Chain, Clock, FeedSource, Outcome, PollInterval, Publish, Result,
    RetentionPolicy, RetryPolicy, Sink,
};
use postrider_relay::{Keeper, Relay, RelayOptions, RelayStatus, Retain, SinkOptions};
use postrider_sink_memory::MemorySink;
use postrider_store_memory::MemoryStore;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// The relay's sinks; each has checkpoints of its own.
pub(crate) const SINKS: [&str; 2] = ["broker", "second"];

pub(crate) struct World {
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) store: MemoryStore,
    /// One behind each of the relay's sinks.
    pub(crate) brokers: [MemorySink; SINKS.len()],
    /// Events older than this are pruned, if any are.
    keep: Option<Duration>,
    pub(crate) dice: Arc<Dice>,
    pub(crate) sink_dice: Arc<Dice>,
    pub(crate) rng: StdRng,
    lives: u64,
}

/// A relay at work. Dropping it is like kill -9.
pub(crate) struct Running {
    pub(crate) status: RelayStatus,
    stop: CancellationToken,
    task: JoinSet<Result<()>>,
}

impl Running {
    /// A planned stop.
    pub(crate) async fn stop(mut self) {
        self.stop.cancel();
        while self.task.join_next().await.is_some() {}
    }
}

impl World {
    pub(crate) fn new(seed: u64) -> Self {
        let clock: Arc<dyn Clock> = Arc::new(TokioClock::default());
        let mut rng = StdRng::seed_from_u64(seed);
        let partitions = rng.random_range(1..=4);
        let brokers = SINKS.map(|_| {
            let limits = Capabilities {
                max_event_bytes: None,
                max_batch_records: rng.random_range(1..=64),
                max_batch_bytes: 1 << 20,
                max_in_flight: rng.random_range(1..=4),
                chain: [Chain::One, Chain::InTurn, Chain::Many][rng.random_range(0..3)],
                dedup_window: None,
            };
            MemorySink::new(Arc::clone(&clock)).with_capabilities(limits)
        });
        let keep =
            rng.random::<bool>().then(|| Duration::from_millis(rng.random_range(2_000..6_000)));
        Self {
            store: MemoryStore::seeded(partitions, Arc::clone(&clock), rng.random()),
            brokers,
            keep,
            dice: Dice::new(rng.random(), FaultRates::CALM, Arc::clone(&clock)),
            sink_dice: Dice::new(rng.random(), FaultRates::CALM, Arc::clone(&clock)),
            clock,
            rng,
            lives: 0,
        }
    }

    /// Starts a relay whose store, source and sink fail by the dice.
    pub(crate) fn relay(&mut self) -> Running {
        self.lives += 1;
        let feed = Arc::new(self.store.clone());
        let poll = PollInterval::default();
        let source = Arc::new(FeedSource::new(feed, Arc::clone(&self.clock), poll));
        let mut options = RelayOptions::new(group("relays"), relay_id(&format!("r{}", self.lives)));
        options.keeper = Keeper::SameRuntime;
        options.seed = Some(self.rng.random());
        options.lease_ttl = Duration::from_millis(600);
        options.retention = self.keep.map(|keep| Retain {
            every: Duration::from_millis(500),
            policy: RetentionPolicy { keep, batch: 20, dry_run: false },
        });
        let mut builder = Relay::builder(
            Arc::new(Faulty::new(source, Arc::clone(&self.dice))),
            Arc::new(Faulty::new(Arc::new(self.store.clone()), Arc::clone(&self.dice))),
            options,
        )
        .clock(Arc::clone(&self.clock));
        for (name, broker) in SINKS.iter().zip(self.brokers.clone()) {
            let mut sink = SinkOptions::new(consumer(name));
            sink.publish_timeout = Duration::from_secs(2);
            sink.retry = RetryPolicy {
                max_attempts: self.rng.random_range(2..=6),
                max_delay: Duration::from_secs(2),
                ..RetryPolicy::default()
            };
            let broker = Arc::new(KeptOpen(broker));
            builder =
                builder.sink(sink, Arc::new(Faulty::new(broker, Arc::clone(&self.sink_dice))));
        }
        let relay = builder.build().expect("the world's options are valid");
        let stop = CancellationToken::new();
        let (mut task, status) = (JoinSet::new(), relay.status());
        task.spawn(relay.run(stop.clone()));
        Running { status, stop, task }
    }
}

/// One broker behind the sinks of several relays: a relay that ends closes only its own.
struct KeptOpen(MemorySink);

#[async_trait]
impl Sink for KeptOpen {
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    async fn publish(&self, batch: Publish<'_>) -> Vec<Outcome> {
        self.0.publish(batch).await
    }

    async fn check(&self) -> Result<()> {
        self.0.check().await
    }

    async fn close(&self) -> Result<()> {
        Ok(())
    }
}
