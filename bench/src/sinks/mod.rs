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
use crate::world::{Maker, as_f64, clock, cpu, drain, per_second, relay, runtime};

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

    /// Makes the messages of the events, then sends them in a tight pipelined loop; what the
    /// sending cost.
    async fn send(&self, name: &str, events: &[Event]) -> Result<Cost>;

    /// How many messages it holds. It is gone afterwards.
    async fn end(&self, name: &str) -> Result<u64>;
}

/// What sending costs.
#[derive(Debug, Clone, Copy)]
struct Cost {
    took: Duration,
    /// The processors' time of this process, which the server is not part of.
    cpu: Duration,
}

impl Cost {
    fn rate(self, events: u64) -> f64 {
        per_second(events, self.took)
    }

    /// In microseconds of a processor.
    fn of_each(self, events: u64) -> f64 {
        self.cpu.as_secs_f64() * 1e6 / as_f64(events)
    }
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
                    Some(goal) => report.ratio(&figure, &measured.rates, "events/s", goal),
                    None => report.ratio_without_goal(&figure, &measured.rates, "events/s"),
                }
                let cpu = format!("{name}, {kept}, processor time an event");
                report.ratio_without_goal(&cpu, &measured.cpus, "us");
                let trips = format!("{name}, {kept}, round trips per 1,000 events");
                report.absolute(&trips, &Samples(vec![measured.round_trips]), "", None);
            }
        }
    }
    Ok(())
}

/// Pairs of the relay and its baseline.
#[derive(Default)]
struct Measured {
    /// Events a second.
    rates: Vec<(f64, f64)>,
    /// Microseconds of a processor for each event.
    cpus: Vec<(f64, f64)>,
    round_trips: f64,
}

fn measure(broker: Box<dyn Broker>, events: u64, runs: usize) -> Result<Measured> {
    let runtime = runtime()?;
    let maker = Maker::new()?;
    let mut made = (1_u128..).map(|id| EventId::from_uuid(Uuid::from_u128(id)));
    let mut measured = Measured::default();
    for run in 0..=runs {
        let own = maker.dealt(0, events, KEYS)?;
        let own: Vec<Event> =
            own.into_iter().filter_map(|new| made.next().map(|id| new.identified(|| id))).collect();
        let alone = || runtime.block_on(alone(broker.as_ref(), &own, run));
        let before = if run % 2 == 1 { Some(alone()?) } else { None };
        let port = broker.address().port();
        let relayed = runtime.block_on(relayed(broker.as_ref(), &maker, events, run, port))?;
        let alone = match before {
            Some(before) => before,
            None => alone()?,
        };
        // The first pair finds everything cold.
        if run > 0 || runs == 1 {
            measured.rates.push((relayed.rate(events), alone.rate(events)));
            measured.cpus.push((relayed.of_each(events), alone.of_each(events)));
        }
    }
    let counted = events.min(COUNTED);
    let proxy = Proxy::start(broker.address())?;
    let run = runs + 1;
    runtime.block_on(relayed(broker.as_ref(), &maker, counted, run, proxy.port()))?;
    measured.round_trips = as_f64(proxy.round_trips()) * 1_000.0 / as_f64(counted);
    Ok(measured)
}

/// The client library by itself.
async fn alone(broker: &dyn Broker, events: &[Event], run: usize) -> Result<Cost> {
    let name = format!("alone-{run}");
    broker.make(&name).await?;
    let cost = broker.send(&name, events).await?;
    finish(broker, &name, u64::try_from(events.len())?).await?;
    Ok(cost)
}

/// A relay from memory.
async fn relayed(
    broker: &dyn Broker,
    maker: &Maker,
    events: u64,
    run: usize,
    port: u16,
) -> Result<Cost> {
    let name = format!("relayed-{run}");
    broker.make(&name).await?;
    let store = Arc::new(MemoryStore::new(PARTITIONS, clock()));
    store.append(&maker.dealt(0, events, KEYS)?)?;
    let sink = broker.sink(&name, port)?;
    // Connected before the time begins, as the baseline is.
    sink.check().await?;
    // It outlives the measurement, which is not to count how it is freed.
    let relay = relay(Arc::clone(&store), sink)?;
    let before = cpu();
    let took = drain(relay, events).await?;
    let cost = Cost { took, cpu: cpu().saturating_sub(before) };
    finish(broker, &name, events).await?;
    Ok(cost)
}

async fn finish(broker: &dyn Broker, name: &str, events: u64) -> Result<()> {
    let held = broker.end(name).await?;
    ensure!(held == events, "{held} of {events} events are in {name}");
    Ok(())
}

/// What a piece of work costs.
async fn timed(work: impl Future<Output = Result<()>>) -> Result<Cost> {
    let (began, before) = (Instant::now(), cpu());
    work.await?;
    Ok(Cost { took: began.elapsed(), cpu: cpu().saturating_sub(before) })
}
