//! Benchmarks of Postrider: `cargo xtask bench NAME`.
//!
//! What lives here: the command line. What does not: how figures are judged (`figure.rs`) and what
//! is measured (`relay/`, `postgres/`, `wal/`, `cosmos/`, `servicebus.rs`, `sinks/`,
//! `end_to_end/`).
//! Invariant: a goal is judged on a median, and a ratio's baseline is taken in the same run.

mod cosmos;
mod end_to_end;
mod figure;
mod postgres;
mod relay;
mod servicebus;
mod sinks;
mod wal;
mod world;

use anyhow::Result;
use clap::{Parser, Subcommand};
use figure::Report;

/// Measures Postrider on this machine.
///
/// Examples:
///   cargo xtask bench relay            a table
///   cargo xtask bench relay --json     a JSON line for each figure
///   cargo xtask bench relay --check    exit 1 when a goal is missed
///   cargo xtask bench postgres-feed --figure drain
#[derive(Parser)]
#[command(name = "cargo xtask bench", verbatim_doc_comment)]
struct Cli {
    #[command(subcommand)]
    bench: Bench,
    /// Print a JSON line for each figure.
    #[arg(long, global = true)]
    json: bool,
    /// Exit with 1 when a goal is missed.
    #[arg(long, global = true)]
    check: bool,
    /// Measure small amounts once: to see that everything runs, not to judge.
    #[arg(long, global = true)]
    smoke: bool,
    /// How many runs or pairs to take the median of.
    #[arg(long, global = true, default_value_t = 9)]
    runs: usize,
    /// Measure these figures only, by a part of their names.
    #[arg(long, global = true)]
    figure: Option<String>,
}

#[derive(Subcommand)]
enum Bench {
    /// The engine, SQLite to JSON lines, memory, keys, the cost of appending, a poisoned key.
    Relay,
    /// PostgreSQL, on a server that the benchmark starts: draining, latency, rest, the cost to
    /// writers, long transactions, ticks, pruning.
    PostgresFeed(postgres::Args),
    /// PostgreSQL's write-ahead log as a source: draining against pg_recvlogical, latency, start,
    /// recovery without the slot, one large transaction, memory.
    PostgresWal(wal::Args),
    /// Azure Cosmos DB as a source, against Microsoft's emulator: draining against the SDK's change
    /// feed by itself, what that is charged, what rest costs, what saving an event costs.
    Cosmos,
    /// Azure Service Bus as a sink, against the emulator: batches by session against one message
    /// awaited after another, and with latency added.
    Servicebus,
    /// NATS JetStream, RabbitMQ, Kafka and Redis Streams as sinks: a relay from memory against the
    /// same client library that sends the same messages in a tight loop; round trips.
    Sinks,
    /// PostgreSQL's write-ahead log into NATS JetStream and Kafka: draining, from commit to
    /// confirmation, what was lost or came again; against mq-bridge where it is installed.
    EndToEnd(end_to_end::Args),
    /// Part of `relay`: drains a database and prints its own peak memory.
    #[command(hide = true)]
    Drain {
        /// The database.
        database: std::path::PathBuf,
        /// The file to write.
        file: std::path::PathBuf,
        /// How many events it holds.
        events: u64,
    },
    /// Part of `postgres-wal` and `end-to-end`: a relay in a process of its own, which tells what
    /// it took.
    #[command(hide = true)]
    WalDrain(wal::DrainArgs),
}

fn main() -> Result<std::process::ExitCode> {
    let cli = Cli::parse();
    match cli.bench {
        Bench::Relay => {
            let mut report = Report::new("relay", cli.json, cli.figure);
            relay::run(&mut report, cli.runs, cli.smoke)?;
            Ok(report.end(cli.check && !cli.smoke))
        }
        Bench::PostgresFeed(args) => {
            let mut report = Report::new("postgres-feed", cli.json, cli.figure);
            postgres::run(&mut report, &args, cli.runs, cli.smoke)?;
            Ok(report.end(cli.check && !cli.smoke))
        }
        Bench::PostgresWal(args) => {
            let mut report = Report::new("postgres-wal", cli.json, cli.figure);
            wal::run(&mut report, &args, cli.runs, cli.smoke)?;
            Ok(report.end(cli.check && !cli.smoke))
        }
        Bench::Cosmos => {
            let mut report = Report::new("cosmos", cli.json, cli.figure);
            cosmos::run(&mut report, cli.runs, cli.smoke)?;
            Ok(report.end(cli.check && !cli.smoke))
        }
        Bench::Servicebus => {
            let mut report = Report::new("servicebus", cli.json, cli.figure);
            servicebus::run(&mut report, cli.runs, cli.smoke)?;
            Ok(report.end(cli.check && !cli.smoke))
        }
        Bench::Sinks => {
            let mut report = Report::new("sinks", cli.json, cli.figure);
            sinks::run(&mut report, cli.runs, cli.smoke)?;
            Ok(report.end(cli.check && !cli.smoke))
        }
        Bench::EndToEnd(args) => {
            let mut report = Report::new("end-to-end", cli.json, cli.figure);
            end_to_end::run(&mut report, &args, cli.runs, cli.smoke)?;
            Ok(report.end(cli.check && !cli.smoke))
        }
        Bench::WalDrain(args) => {
            wal::drain_and_tell(&args)?;
            Ok(std::process::ExitCode::SUCCESS)
        }
        Bench::Drain { database, file, events } => {
            relay::drain_and_tell(&database, &file, events)?;
            Ok(std::process::ExitCode::SUCCESS)
        }
    }
}
