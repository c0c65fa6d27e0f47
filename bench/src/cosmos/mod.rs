//! Azure Cosmos DB as a source, against Microsoft's emulator.
//!
//! What lives here: draining a backlog against the SDK's change feed by itself, what either is
//! charged, what rest costs. What does not: the account and what it is asked (`account.rs`); the
//! service itself, which is not in reach.
//! Invariant: both sides of a pair read the same documents of the same container through the same
//! client, in pages of the same size; the relay is the real one, with its leases and checkpoints in
//! the account, and only its sink does nothing but count.

mod account;

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use postrider_core::{FeedSource, PollInterval};
use postrider_relay::Relay;
use postrider_sink_memory::MemorySink;
use tokio_util::sync::CancellationToken;

use crate::figure::{Goal, Report, Samples};
use crate::world::{clock, drain, per_second, relay_from, runtime};
use account::{Account, Asked};

/// Ranges of the container: partitions of the relay.
const RANGES: u32 = 4;
/// As `kind = "cosmos"` has it by default.
const POLL: PollInterval =
    PollInterval { busy: Duration::from_millis(50), idle: Duration::from_secs(1) };
/// Pages of the second baseline, as large as a loop without exact places might ask for.
const LARGE_PAGE: u32 = 1_000;
const DRAIN: &str = "drain against the SDK's change feed";
const DRAIN_LARGE: &str = "drain against the same in pages of 1,000";
const IDLE: &str = "an idle minute, reads per range";
const APPEND: &str = "a document with its event, request units";

/// Measures all figures.
///
/// # Errors
/// When the emulator can't be started, or an event does not arrive.
pub(crate) fn run(report: &mut Report, runs: usize, smoke: bool) -> Result<()> {
    let (events, runs) = if smoke { (900, 1) } else { (9_000, runs) };
    let runtime = runtime()?;
    if report.wants(DRAIN) {
        runtime.block_on(drained(report, events, runs))?;
    }
    if report.wants(IDLE) {
        runtime.block_on(idle(report, smoke))?;
    }
    if report.wants(APPEND) {
        runtime.block_on(append(report, runs))?;
    }
    Ok(())
}

/// For each thousand events.
#[expect(clippy::cast_precision_loss, reason = "counts here are far below 2^53")]
fn per_thousand(count: f64, events: u64) -> f64 {
    count * 1_000.0 / events as f64
}

/// One side's turn: how fast, and what it asked for.
struct Turn {
    rate: f64,
    asked: Asked,
}

async fn drained(report: &mut Report, events: u64, runs: usize) -> Result<()> {
    let account = Account::start(RANGES).await?;
    account.fill(events).await?;
    let (mut same, mut large, mut charges) = (Vec::new(), Vec::new(), Vec::new());
    let mut requests = Vec::new();
    // The first round finds everything cold.
    for round in 0..=runs {
        // First or last in turn, so that a drift of the machine favours neither.
        let ours_first = round % 2 == 0;
        let early = if ours_first { Some(relayed(&account, events, round).await?) } else { None };
        let bare = read(&account, events, account.page()).await?;
        let other = read(&account, events, LARGE_PAGE).await?;
        let ours = match early {
            Some(ours) => ours,
            None => relayed(&account, events, round).await?,
        };
        if round > 0 || runs == 1 {
            same.push((ours.rate, bare.rate));
            large.push((ours.rate, other.rate));
            let charge = |turn: &Turn| per_thousand(turn.asked.charge, events);
            charges.push((charge(&ours), charge(&bare)));
            requests.push(per_thousand(ours.asked.requests, events));
        }
    }
    report.ratio(DRAIN, &same, "events/s", Goal::AtLeast(0.7));
    report.ratio_without_goal(DRAIN_LARGE, &large, "events/s");
    report.ratio_without_goal("request units per 1,000 events", &charges, "RU");
    report.absolute("requests per 1,000 events", &Samples(requests), "", None);
    Ok(())
}

fn relay(account: &Account, name: &str) -> Result<Relay> {
    let store = account.store();
    let source = Arc::new(FeedSource::new(Arc::clone(&store), clock(), POLL));
    relay_from(name, source, store, Arc::new(MemorySink::counting(clock())))
}

async fn relayed(account: &Account, events: u64, round: usize) -> Result<Turn> {
    account.forget()?;
    let took = drain(relay(account, &format!("drain-{round}"))?, events).await?;
    Ok(Turn { rate: per_second(events, took), asked: account.asked()? })
}

async fn read(account: &Account, events: u64, page: u32) -> Result<Turn> {
    account.forget()?;
    let took = account.read(events, page).await?;
    Ok(Turn { rate: per_second(events, took), asked: account.asked()? })
}

/// What a relay asks for when nothing happens.
async fn idle(report: &mut Report, smoke: bool) -> Result<()> {
    let seconds = if smoke { 3 } else { 60 };
    let account = Account::start(RANGES).await?;
    account.fill(90).await?;
    let relay = relay(&account, "idle")?;
    let (stop, status) = (CancellationToken::new(), relay.status());
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(relay.run(stop.clone()));
    while status.snapshot().sinks.iter().map(|sink| sink.published).sum::<u64>() < 90 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // Until the pauses between two looks are as long as they get.
    tokio::time::sleep(4 * POLL.idle).await;
    account.forget()?;
    tokio::time::sleep(Duration::from_secs(seconds)).await;
    let asked = account.asked()?;
    stop.cancel();
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    let minute = |count: f64| 60.0 * count / Duration::from_secs(seconds).as_secs_f64();
    let one = |value| Samples(vec![value]);
    // A look each second, and one that was under way when the minute began.
    let most = Goal::AtMost(61.0);
    let reads = minute(asked.reads / f64::from(RANGES));
    report.absolute(IDLE, &one(reads), "", if smoke { None } else { Some(most) });
    report.absolute("an idle minute, all requests", &one(minute(asked.requests)), "", None);
    report.absolute("an idle minute, request units", &one(minute(asked.charge)), "RU", None);
    Ok(())
}

/// What saving costs, with an event and without.
async fn append(report: &mut Report, runs: usize) -> Result<()> {
    let account = Account::start(1).await?;
    let mut pairs = Vec::new();
    for round in 0..=runs {
        let charge = async |with_event| {
            account.forget()?;
            account.save(round, with_event).await?;
            anyhow::Ok(account.asked()?.charge)
        };
        let (without, with) = (charge(false).await?, charge(true).await?);
        // The first ones make the document.
        if round > 0 {
            pairs.push((with, without));
        }
    }
    report.ratio_without_goal(APPEND, &pairs, "RU");
    Ok(())
}
