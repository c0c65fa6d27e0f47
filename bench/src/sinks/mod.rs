//! Brokers as sinks, against their own client libraries.
//!
//! What lives here: the pairs and their judgement. What does not: what is special to a broker
//! (`kafka.rs`, `nats.rs`, `rabbitmq.rs`, `redis.rs`).
//! Invariant: both sides of a pair send the same events in the same form through the same client
//! library to the same server, each to an empty stream or queue, and what is timed ends with the
//! last confirmation. The baseline's messages are made before its time begins.

mod kafka;
mod nats;
mod rabbitmq;
mod redis;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use async_trait::async_trait;
use postrider_core::{Event, EventId, Sink};
use postrider_servers::proxy::Proxy;
use postrider_store_memory::MemoryStore;
use uuid::Uuid;

use crate::figure::{Goal, Report, Samples};
use crate::world::{Maker, clock, drain, per_second, relay, runtime};

/// Keys that the events are dealt out to: more than a call of the relay has events, so that each
/// key comes once in it.
const KEYS: u64 = 10_000;
const PARTITIONS: u32 = 4;
/// Events of the baseline whose confirmations are waited for at a time: more changes nothing.
const PIPELINED: usize = 1_000;
/// Events of which the round trips are counted.
const COUNTED: u64 = 10_000;

/// How a server is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Setting {
    /// As its guide says: what is confirmed outlives the server's sudden end.
    Durable,
    /// With everything in memory, so that nothing but messages takes time.
    Memory,
}

/// What is measured of one broker.
#[async_trait]
trait Broker: Send + Sync {
    /// Where it listens.
    fn address(&self) -> SocketAddr;

    /// Makes an empty stream or queue.
    async fn make(&self, name: &str) -> Result<()>;

    /// A sink that sends to it by this port.
    fn sink(&self, name: &str, port: u16) -> Result<Arc<dyn Sink>>;

    /// Makes the messages of the events, then sends them in a tight pipelined loop; how long the
    /// sending took.
    async fn send(&self, name: &str, events: &[Event]) -> Result<Duration>;

    /// How many messages it holds. It is gone afterwards.
    async fn end(&self, name: &str) -> Result<u64>;
}

type Start = fn(Setting) -> Result<Box<dyn Broker>>;
type Named = (&'static str, Start);

/// Measures all figures.
///
/// # Errors
/// When a server can't be started, or an event is not confirmed.
pub(crate) fn run(report: &mut Report, runs: usize, smoke: bool) -> Result<()> {
    let goal = Some(Goal::AtLeast(0.8));
    let both: &[Setting] = &[Setting::Memory, Setting::Durable];
    let brokers: [(Named, &[Setting], u64, Option<Goal>); 5] = [
        (("nats", nats::start), both, 100_000, goal),
        (("rabbitmq", rabbitmq::start), both, 50_000, goal),
        (("kafka", kafka::start), &[Setting::Memory], 100_000, goal),
        (("redis", redis::start), both, 100_000, goal),
        // Told, not judged: it drops no repetitions.
        (("redis beside XADD alone", redis::start_bare), both, 100_000, None),
    ];
    for ((name, start), settings, events, goal) in brokers {
        for setting in settings.iter().copied() {
            // Where each message is synced, fewer are sent in the same time.
            let events = if setting == Setting::Durable { events / 2 } else { events };
            let (events, runs) = if smoke { (2_000, 1) } else { (events, runs) };
            let kept = if setting == Setting::Memory { "in memory" } else { "durable" };
            let figure = format!("{name}, {kept}, against its client");
            if report.wants(&figure) {
                let measured = measure(start(setting)?, events, runs)?;
                match goal {
                    Some(goal) => report.ratio(&figure, &measured.pairs, "events/s", goal),
                    None => report.ratio_without_goal(&figure, &measured.pairs, "events/s"),
                }
                let trips = format!("{name}, {kept}, round trips per 1,000 events");
                report.absolute(&trips, &Samples(vec![measured.round_trips]), "", None);
            }
        }
    }
    Ok(())
}

struct Measured {
    pairs: Vec<(f64, f64)>,
    round_trips: f64,
}

fn measure(broker: Box<dyn Broker>, events: u64, runs: usize) -> Result<Measured> {
    let runtime = runtime()?;
    let maker = Maker::new()?;
    let mut made = (1_u128..).map(|id| EventId::from_uuid(Uuid::from_u128(id)));
    let mut pairs = Vec::new();
    for run in 0..=runs {
        let own = maker.dealt(0, events, KEYS)?;
        let own: Vec<Event> =
            own.into_iter().filter_map(|new| made.next().map(|id| new.identified(|| id))).collect();
        let alone = runtime.block_on(async {
            let name = format!("alone-{run}");
            broker.make(&name).await?;
            let took = broker.send(&name, &own).await?;
            finish(broker.as_ref(), &name, events).await?;
            anyhow::Ok(per_second(events, took))
        })?;
        drop(own);
        let port = broker.address().port();
        let relayed = runtime.block_on(relayed(broker.as_ref(), &maker, events, run, port))?;
        // The first pair finds everything cold.
        if run > 0 || runs == 1 {
            pairs.push((relayed, alone));
        }
    }
    let counted = events.min(COUNTED);
    let proxy = Proxy::start(broker.address())?;
    let run = runs + 1;
    runtime.block_on(relayed(broker.as_ref(), &maker, counted, run, proxy.port()))?;
    let round_trips = per_thousand(proxy.round_trips(), counted);
    Ok(Measured { pairs, round_trips })
}

/// Events a second of a relay from memory.
async fn relayed(
    broker: &dyn Broker,
    maker: &Maker,
    events: u64,
    run: usize,
    port: u16,
) -> Result<f64> {
    let name = format!("relayed-{run}");
    broker.make(&name).await?;
    let store = Arc::new(MemoryStore::new(PARTITIONS, clock()));
    store.append(&maker.dealt(0, events, KEYS)?)?;
    let sink = broker.sink(&name, port)?;
    // Connected before the time begins, as the baseline is.
    sink.check().await?;
    let took = drain(relay(store, sink)?, events).await?;
    finish(broker, &name, events).await?;
    Ok(per_second(events, took))
}

async fn finish(broker: &dyn Broker, name: &str, events: u64) -> Result<()> {
    let held = broker.end(name).await?;
    ensure!(held == events, "{held} of {events} events are in {name}");
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "counts here are far below 2^53")]
fn per_thousand(count: u64, events: u64) -> f64 {
    count as f64 * 1_000.0 / events as f64
}

/// How long a piece of work takes.
async fn timed(work: impl Future<Output = Result<()>>) -> Result<Duration> {
    let began = Instant::now();
    work.await?;
    Ok(began.elapsed())
}
