//! The figures of `cargo xtask bench postgres-feed`.
//!
//! What lives here: their list, and what can be set. What does not: measuring, one idea a file.
//! Invariant: each figure has a fresh database on one server, which this process starts and ends.

mod drain;
mod held;
mod idle;
mod latency;
pub(crate) mod paced;
mod prune;
pub(crate) mod server;
pub(crate) mod tables;
mod writer;

use anyhow::Result;
use clap::ValueEnum;
use postrider_servers::postgres::Version;

use crate::figure::Report;
use crate::world::runtime;
use server::{Measured, WalLevel};

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Postgres {
    #[value(name = "15")]
    V15,
    #[value(name = "18")]
    V18,
}

impl From<Postgres> for Version {
    fn from(version: Postgres) -> Self {
        match version {
            Postgres::V15 => Self::V15,
            Postgres::V18 => Self::V18,
        }
    }
}

/// What can be set.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Version of the server.
    #[arg(long, default_value = "15")]
    postgres: Postgres,
    /// For how long transactions are held open, in seconds; their full length is 600.
    #[arg(long, default_value_t = 20)]
    held_seconds: u64,
    /// How many sent rows are pruned.
    #[arg(long, default_value_t = 10_000_000)]
    prune_rows: u64,
}

/// How much to measure.
pub(crate) struct Setting {
    runs: usize,
    smoke: bool,
    held_seconds: u64,
    prune_rows: u64,
}

impl Setting {
    /// A fiftieth for a trial.
    fn scaled(&self, count: u64) -> u64 {
        if self.smoke { count / 50 } else { count }
    }

    fn prune_rows(&self) -> u64 {
        if self.smoke { self.prune_rows.min(100_000) } else { self.prune_rows }
    }
}

pub(crate) fn run(report: &mut Report, args: &Args, runs: usize, smoke: bool) -> Result<()> {
    let setting = Setting {
        runs: if smoke { 1 } else { runs },
        smoke,
        held_seconds: args.held_seconds,
        prune_rows: args.prune_rows,
    };
    let measured = Measured::launch(args.postgres.into(), WalLevel::Replica)?;
    runtime()?.block_on(async {
        if report.wants("drain") {
            drain::measure(report, &measured, &setting).await?;
        }
        if report.wants("latency, ticks") {
            latency::measure(report, &measured, &setting).await?;
        }
        if report.wants("idle") {
            idle::measure(report, &measured, &setting).await?;
        }
        if report.wants("writer") {
            writer::measure(report, &measured, &setting).await?;
        }
        if report.wants("held open") {
            held::measure(report, &measured, &setting).await?;
        }
        if report.wants("prune") {
            prune::measure(report, &measured, &setting).await?;
        }
        Ok(())
    })
}
