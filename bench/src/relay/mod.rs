//! The figures of `cargo xtask bench relay`.
//!
//! What lives here: throughput, memory and growth. What does not: the writer's cost (`append.rs`)
//! and one poisoned key (`poison.rs`).
//! Invariant: each run has a fresh store and a fresh relay.

mod append;
mod poison;

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use postrider_sink_jsonl::{JsonLines, JsonlConfig};
use postrider_sink_memory::MemorySink;
use postrider_store_memory::MemoryStore;
use postrider_store_sqlite::{SqliteOptions, SqliteStore};

use crate::figure::{Goal, Report, Samples};
use crate::world::{
    Maker, clock, drain, peak_kib, per_second, relay, runtime, sqlite_with_backlog,
};

pub(crate) fn run(report: &mut Report, runs: usize, smoke: bool) -> Result<()> {
    let runs = if smoke { 1 } else { runs };
    let scale = if smoke { 50 } else { 1 };
    if report.wants("engine alone") {
        let events = 1_000_000 / scale;
        let rates = (0..runs).map(|_| engine(events, 10_000)).collect::<Result<_>>()?;
        let goal = Some(Goal::AtLeast(300_000.0));
        report.absolute("engine alone, 10,000 keys", &Samples(rates), "events/s", goal);
    }
    if report.wants("engine at 1,000,000 keys") {
        let events = 1_000_000 / scale;
        let pair = || Ok((engine(events, 1_000_000)?, engine(events, 1_000)?));
        let pairs = (0..runs).map(|_| pair()).collect::<Result<Vec<_>>>()?;
        let goal = Goal::AtLeast(0.8);
        report.ratio("engine at 1,000,000 keys against 1,000", &pairs, "events/s", goal);
    }
    if report.wants("sqlite to jsonl") {
        let events = 500_000 / scale;
        let rates = (0..runs).map(|_| sqlite_to_jsonl(events)).collect::<Result<_>>()?;
        let goal = Some(Goal::AtLeast(100_000.0));
        report.absolute("sqlite to jsonl, synced", &Samples(rates), "events/s", goal);
    }
    if report.wants("resident memory") {
        let events = 2_000_000 / scale;
        let runs = runs.min(3);
        let peaks = (0..runs).map(|_| peak_memory(events)).collect::<Result<_>>()?;
        let goal = Some(Goal::AtMost(64.0));
        report.absolute("resident memory, backlog of 2,000,000", &Samples(peaks), "MiB", goal);
    }
    if report.wants("append in the same transaction") {
        append::measure(report, runs, if smoke { 20 } else { 400 })?;
    }
    if report.wants("p99 of other keys") {
        poison::measure(report, runs, smoke)?;
    }
    Ok(())
}

/// Memory to memory: everything but a store and a broker.
fn engine(events: u64, keys: u64) -> Result<f64> {
    let store = Arc::new(MemoryStore::new(4, clock()));
    let maker = Maker::new()?;
    let mut at = 0;
    while at < events {
        let to = (at + 10_000).min(events);
        store.append(&maker.dealt(at, to, keys)?)?;
        at = to;
    }
    let relay = relay(store, Arc::new(MemorySink::counting(clock())))?;
    Ok(per_second(events, runtime()?.block_on(drain(relay, events))?))
}

fn sqlite_to_jsonl(events: u64) -> Result<f64> {
    let folder = tempfile::tempdir()?;
    let database = folder.path().join("bench.db");
    sqlite_with_backlog(&database, events, 10_000)?;
    runtime()?.block_on(async {
        let store = SqliteStore::open(SqliteOptions::new(&database)).await?;
        let config = JsonlConfig::file(folder.path().join("events.jsonl"));
        let sink = Arc::new(JsonLines::new(&config, clock())?);
        let took = drain(relay(Arc::new(store), sink)?, events).await?;
        Ok(per_second(events, took))
    })
}

/// Peak resident memory, in MiB, of a process that drains a backlog.
fn peak_memory(events: u64) -> Result<f64> {
    let folder = tempfile::tempdir()?;
    let database = folder.path().join("bench.db");
    sqlite_with_backlog(&database, events, 10_000)?;
    let output = std::process::Command::new(std::env::current_exe()?)
        .arg("drain")
        .arg(&database)
        .arg(folder.path().join("events.jsonl"))
        .arg(events.to_string())
        .output()
        .context("run a draining process")?;
    anyhow::ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let kib: f64 = String::from_utf8(output.stdout)?.trim().parse()?;
    Ok(kib / 1_024.0)
}

/// Drains and prints the process's peak memory in KiB.
pub(crate) fn drain_and_tell(database: &Path, file: &Path, events: u64) -> Result<()> {
    runtime()?.block_on(async {
        let store = SqliteStore::open(SqliteOptions::new(database)).await?;
        let sink = Arc::new(JsonLines::new(&JsonlConfig::file(file), clock())?);
        drain(relay(Arc::new(store), sink)?, events).await
    })?;
    println!("{}", peak_kib()?);
    Ok(())
}
