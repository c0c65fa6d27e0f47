//! The figures of `cargo xtask bench end-to-end`: from PostgreSQL's log into brokers.
//!
//! What lives here: their list, and what can be set. What does not: the relay's process
//! (`wal/child.rs`) and measuring, one idea a file.
//! Invariant: both sides of a pair read the same rows from the same log by slots that are copies of
//! one, into empty streams of one server, and wait for every confirmation; what is in the streams
//! afterwards is counted by ids.

mod drain;
mod latency;
mod peer;
mod places;

use std::path::PathBuf;

use anyhow::{Context, Result};
use postrider_store_postgres::{PayloadType, PostgresOptions, PostgresStore};

use crate::figure::Report;
use crate::postgres::Postgres;
use crate::postgres::server::{Measured, WalLevel};
use crate::wal::backlog::Backlog;
use crate::world::runtime;

use peer::Peer;
pub(crate) use places::sink;

/// What can be set.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Version of the server.
    #[arg(long, default_value = "15")]
    postgres: Postgres,
    /// How many events a backlog has.
    #[arg(long, default_value_t = 200_000)]
    events: u64,
    /// A Python that has mq-bridge 1.2.0, the other side of each pair. Without it
    /// $PEERS/venv/mqbridge/bin/python is looked for.
    #[arg(long)]
    peer: Option<PathBuf>,
}

/// How much to measure, and against what.
struct Setting {
    runs: usize,
    smoke: bool,
    events: u64,
    peer: Option<Peer>,
}

pub(crate) fn run(report: &mut Report, args: &Args, runs: usize, smoke: bool) -> Result<()> {
    let setting = Setting {
        runs: if smoke { 1 } else { runs },
        smoke,
        events: if smoke { args.events.min(5_000) } else { args.events },
        peer: Peer::find(args.peer.clone()),
    };
    if setting.peer.is_none() {
        eprintln!("{}", peer::NOT_INSTALLED);
    }
    let measured = Measured::launch(args.postgres.into(), WalLevel::Logical)?;
    runtime()?.block_on(async {
        for place in drain::PLACES {
            if report.wants(place.figure) {
                drain::measure(report, &measured, &setting, place).await?;
            }
        }
        if report.wants(latency::FIGURE) {
            latency::measure(report, &measured, &setting).await?;
        }
        Ok(())
    })
}

/// A database whose payloads are JSON, which any reader of the log gets as text.
async fn outbox(measured: &Measured) -> Result<Backlog> {
    let database = measured.database()?;
    let options = PostgresOptions::new(database.url()).payload(PayloadType::Json);
    PostgresStore::open(options).await.context("make the outbox")?;
    Backlog::of(database).await
}
