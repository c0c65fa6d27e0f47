//! The figures of `cargo xtask bench postgres-wal`.
//!
//! What lives here: their list, and what can be set. What does not: measuring, one idea a file.
//! Invariant: each figure has a fresh database on one server, which this process starts and ends;
//! what is measured is the real relay, with its leases and checkpoints in that database.

pub(crate) mod backlog;
pub(crate) mod child;
mod drain;
mod large;
mod latency;
mod recovery;
mod start;

use anyhow::Result;

use crate::figure::Report;
use crate::postgres::Postgres;
use crate::postgres::server::{Measured, WalLevel};
use crate::world::runtime;

pub(crate) use child::{DrainArgs, drain_and_tell};

/// What can be set.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Version of the server.
    #[arg(long, default_value = "15")]
    postgres: Postgres,
    /// How many events a backlog has, and how many rows are recovered; the large transaction has
    /// five times as many.
    #[arg(long, default_value_t = 1_000_000)]
    events: u64,
}

/// How much to measure.
pub(crate) struct Setting {
    runs: usize,
    smoke: bool,
    events: u64,
}

pub(crate) fn run(report: &mut Report, args: &Args, runs: usize, smoke: bool) -> Result<()> {
    let setting = Setting {
        runs: if smoke { 1 } else { runs },
        smoke,
        events: if smoke { args.events.min(20_000) } else { args.events },
    };
    let measured = Measured::launch(args.postgres.into(), WalLevel::Logical)?;
    runtime()?.block_on(async {
        for shape in drain::SHAPES {
            if report.wants(shape.figure) {
                drain::measure(report, &measured, &setting, shape).await?;
            }
        }
        for pace in latency::PACES {
            if report.wants(pace.figure) {
                latency::measure(report, &measured, &setting, pace).await?;
            }
        }
        if report.wants("start") {
            start::measure(report, &measured, &setting).await?;
        }
        if report.wants("recovery") {
            recovery::measure(report, &measured, &setting).await?;
        }
        if report.wants("large") {
            large::measure(report, &measured, &setting).await?;
        }
        Ok(())
    })
}
