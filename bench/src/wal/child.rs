//! A relay in a process of its own, so that its memory is nobody else's.
//!
//! What lives here: the process's work, what it tells, and starting it. What does not: what it
//! reads (`backlog.rs`), and judging.
//! Invariant: its time is from before anything is connected to until the last event was confirmed.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use postrider_relay::{Relay, RelayStatus};
use postrider_sink_memory::MemorySink;
use postrider_store_postgres::{PostgresOptions, PostgresStore, PostgresWal, WalOptions};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::world::{clock, peak_kib, relay_from, runtime};

/// The consumer whose checkpoint is put back for each run.
pub(super) const CONSUMER: &str = "bench";

/// Looking oneself takes time from what is looked at; a drain takes seconds.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// What such a process is told.
#[derive(clap::Args)]
pub(crate) struct DrainArgs {
    /// The database.
    url: String,
    /// The slot.
    slot: String,
    /// How many events there are.
    events: u64,
    /// The broker that they go to, and the stream or topic there; without it they are counted.
    #[arg(long)]
    to: Option<String>,
}

/// What such a process tells.
#[derive(Debug)]
pub(super) struct Drained {
    /// Up to the first event, and up to the last.
    pub(super) first: Duration,
    pub(super) all: Duration,
    pub(super) peak_mib: f64,
    pub(super) catch_ups: u64,
    pub(super) reconnects: u64,
}

/// A relay from the log.
pub(crate) fn relay(wal: &PostgresWal, sink: Arc<dyn postrider_core::Sink>) -> Result<Relay> {
    relay_from(CONSUMER, Arc::new(wal.clone()), Arc::new(wal.clone()), sink)
}

/// The outbox of a database, read by a slot.
pub(crate) async fn wal(url: &str, slot: &str) -> Result<PostgresWal> {
    let store = PostgresStore::open(PostgresOptions::new(url)).await.context("open the store")?;
    Ok(PostgresWal::new(store, WalOptions::new().slot(slot))?)
}

/// Drains and prints what it took, as JSON.
pub(crate) fn drain_and_tell(args: &DrainArgs) -> Result<()> {
    let began = Instant::now();
    let told = runtime()?.block_on(async {
        let wal = wal(&args.url, &args.slot).await?;
        let sink = match &args.to {
            Some(place) => crate::end_to_end::sink(place)?,
            None => Arc::new(MemorySink::counting(clock())) as _,
        };
        let relay = relay(&wal, sink)?;
        let (status, stop) = (relay.status(), CancellationToken::new());
        let mut tasks = JoinSet::new();
        tasks.spawn(relay.run(stop.clone()));
        published(&status, 1, Duration::from_millis(1)).await?;
        let first = began.elapsed();
        published(&status, args.events, LOOK_EVERY).await?;
        let all = began.elapsed();
        stop.cancel();
        while let Some(ended) = tasks.join_next().await {
            ended??;
        }
        let counts = wal.counts();
        let again = published_now(&status) - args.events;
        if again > 0 {
            eprintln!("{again} events came again: too busy a machine to renew a lease in time");
        }
        anyhow::Ok(serde_json::json!({
            "first_us": micros(first)?, "all_us": micros(all)?,
            "peak_kib": peak_kib()?, "catch_ups": counts.catch_ups,
            "reconnects": counts.reconnects,
        }))
    })?;
    println!("{told}");
    Ok(())
}

fn micros(time: Duration) -> Result<u64> {
    Ok(u64::try_from(time.as_micros())?)
}

fn published_now(status: &RelayStatus) -> u64 {
    status.snapshot().sinks.iter().map(|sink| sink.published).sum()
}

/// Waits for so many.
async fn published(status: &RelayStatus, events: u64, look_every: Duration) -> Result<()> {
    let give_up = Instant::now() + Duration::from_secs(1_800);
    while published_now(status) < events {
        ensure!(Instant::now() < give_up, "not drained within half an hour");
        tokio::time::sleep(look_every).await;
    }
    Ok(())
}

/// Runs such a process to its end.
pub(super) async fn drained(url: &str, slot: &str, events: u64) -> Result<Drained> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["wal-drain", url, slot, &events.to_string()]).stderr(Stdio::inherit());
    let output = tokio::task::spawn_blocking(move || command.output()).await?;
    let output = output.context("run a draining process")?;
    ensure!(output.status.success(), "a draining process ended with {}", output.status);
    let told: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let number = |name: &str| told[name].as_u64().with_context(|| format!("{name} is not told"));
    Ok(Drained {
        first: Duration::from_micros(number("first_us")?),
        all: Duration::from_micros(number("all_us")?),
        peak_mib: f64::from(u32::try_from(number("peak_kib")?)?) / 1_024.0,
        catch_ups: number("catch_ups")?,
        reconnects: number("reconnects")?,
    })
}
