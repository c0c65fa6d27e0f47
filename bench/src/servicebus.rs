//! Azure Service Bus as a sink, against the emulator in this process.
//!
//! What lives here: batches by session against one message awaited after another, and both with
//! latency added. What does not: Azure itself, which is not in reach.
//! Invariant: what is counted is what the emulator stored, and every run has a queue of its own.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use bytes::Bytes;
use futures_util::stream::{StreamExt, iter};
use postrider_core::{
    ContentType, EventId, EventType, Key, NewEvent, Outcome, PartitionId, Position, Publish,
    Record, Secret, Sink, Timestamp, Topic,
};
use postrider_relay::SystemClock;
use postrider_servicebus_emulator::{Config, Counts, Emulator, Entity};
use postrider_sink_servicebus::{ServiceBus, ServiceBusConfig};
use tokio::runtime::Builder;
use uuid::Uuid;

use crate::figure::{Goal, Report, Samples};

const QUEUE: &str = "events";
const ADDED_LATENCY: Duration = Duration::from_millis(20);

/// How much is sent.
#[derive(Clone, Copy)]
struct Amount {
    events: usize,
    sessions: usize,
    /// By the baseline, which needs longer for each.
    alone: usize,
}

/// What a run took, and what arrived in it.
struct Run {
    events_per_second: f64,
    counts: Counts,
}

/// Measures all figures.
///
/// # Errors
/// When the emulator can't be started, or an event is not confirmed.
pub(crate) fn run(report: &mut Report, runs: usize, smoke: bool) -> Result<()> {
    let amount = match smoke {
        true => Amount { events: 500, sessions: 50, alone: 50 },
        false => Amount { events: 10_000, sessions: 1_000, alone: 2_000 },
    };
    let runs = if smoke { 1 } else { runs };
    Builder::new_multi_thread().enable_all().build()?.block_on(measure(report, amount, runs))
}

async fn measure(report: &mut Report, amount: Amount, runs: usize) -> Result<()> {
    let Amount { events, sessions, .. } = amount;
    let batched = format!("{events} events over {sessions} sessions, in batches");
    if report.wants(&batched) {
        let (mut pairs, mut last) = (Vec::new(), Counts::default());
        for _ in 0..runs {
            let alone = one_by_one(amount.alone, Duration::ZERO).await?;
            let batches = in_batches(amount, Duration::ZERO).await?;
            pairs.push((batches.events_per_second, alone.events_per_second));
            last = batches.counts;
        }
        report.ratio(&batched, &pairs, "events/s", Goal::AtLeast(5.0));
        for (what, count) in [
            ("transfers of them", last.transfers),
            ("batches among these", last.batches),
            ("round trips of them", last.round_trips),
        ] {
            report.absolute(what, &Samples(vec![count as f64]), "", None);
        }
    }
    let late = "the same with 20 ms of latency added";
    if report.wants(late) {
        let mut pairs = Vec::new();
        for _ in 0..runs {
            let near = in_batches(amount, Duration::ZERO).await?;
            let far = in_batches(amount, ADDED_LATENCY).await?;
            pairs.push((far.events_per_second, near.events_per_second));
        }
        report.ratio(late, &pairs, "events/s", Goal::AtLeast(0.5));
    }
    Ok(())
}

/// As a relay calls: a few calls at a time, each with many keys.
async fn in_batches(amount: Amount, latency: Duration) -> Result<Run> {
    let Amount { events, sessions, .. } = amount;
    let (emulator, sink) = open(latency).await?;
    let records: Vec<Record> = (0..events).map(|n| record(n, n % sessions)).collect();
    let limits = sink.capabilities();
    // Keys in flight are each in one call alone, as the relay has it.
    let calls: Vec<Vec<Record>> = (0..limits.max_in_flight)
        .map(|call| {
            let mine = |n: &usize| n % sessions % limits.max_in_flight == call;
            (0..events).filter(mine).map(|n| records[n].clone()).collect()
        })
        .collect();
    let begin = Instant::now();
    let done: Vec<Result<()>> = iter(&calls)
        .map(|records| publish(&sink, records))
        .buffer_unordered(limits.max_in_flight)
        .collect()
        .await;
    let took = begin.elapsed();
    done.into_iter().collect::<Result<()>>()?;
    finish(emulator, &sink, events, took).await
}

/// The baseline: one message in each transfer, and the next one after its settlement.
async fn one_by_one(events: usize, latency: Duration) -> Result<Run> {
    let (emulator, sink) = open(latency).await?;
    let records: Vec<Record> = (0..events).map(|n| record(n, n % 1_000)).collect();
    let begin = Instant::now();
    for record in &records {
        publish(&sink, std::slice::from_ref(record)).await?;
    }
    let took = begin.elapsed();
    finish(emulator, &sink, events, took).await
}

async fn open(latency: Duration) -> Result<(Emulator, ServiceBus)> {
    let entity = Entity { requires_session: true, ..Entity::default() };
    let emulator = Emulator::start(Config::default().with_queue(QUEUE, entity)).await?;
    let mut config = ServiceBusConfig::new(Secret::new(emulator.connection_string()));
    config.entity = Some(QUEUE.to_owned());
    let sink = ServiceBus::new(&config, Arc::new(SystemClock))?;
    sink.check().await?;
    emulator.faults().set_latency(latency);
    Ok((emulator, sink))
}

async fn finish(
    emulator: Emulator,
    sink: &ServiceBus,
    events: usize,
    took: Duration,
) -> Result<Run> {
    let counts = emulator.entity(QUEUE).counts();
    ensure!(counts.messages == events as u64, "{} of {events} arrived", counts.messages);
    sink.close().await?;
    emulator.stop().await;
    Ok(Run { events_per_second: events as f64 / took.as_secs_f64(), counts })
}

async fn publish(sink: &ServiceBus, records: &[Record]) -> Result<()> {
    let partition = PartitionId::numbered(0, 1);
    for outcome in sink.publish(Publish::new(&partition, records)).await {
        ensure!(matches!(outcome, Outcome::Confirmed), "{outcome:?}");
    }
    Ok(())
}

fn record(number: usize, session: usize) -> Record {
    let event = NewEvent::builder(
        Key::new(format!("customer-{session}")).expect("valid"),
        Topic::new("orders").expect("valid"),
        EventType::new("OrderPlaced").expect("valid"),
    )
    .payload(ContentType::new("application/json").expect("valid"), Bytes::from(vec![b' '; 250]))
    .build()
    .expect("valid")
    .identified(|| EventId::from_uuid(Uuid::from_u128(number as u128 + 1)));
    Record { position: Position::START, appended_at: Timestamp::from_millis(0), event }
}
