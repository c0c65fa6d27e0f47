//! The emulator as a program.
//!
//! What lives here: its arguments, and its end by a signal. What does not: what it does (the
//! library).
//! Invariant: standard output has the connection string as its first line, once clients can
//! connect.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use postrider_servicebus_emulator::{Config, Emulator, Entity};
use tokio::signal::unix::{SignalKind, signal};

const EXAMPLES: &str = "\
Examples:
  # Two queues on the port that clients expect
  postrider-servicebus-emulator --queue orders --queue invoices

  # A queue with sessions, on a free port
  postrider-servicebus-emulator --session-queue contacts --listen 127.0.0.1:0

  # Queues, topics and subscriptions from a file
  postrider-servicebus-emulator --config emulator.toml

  # A queue whose messages are still there when it is started again
  postrider-servicebus-emulator --queue orders --data orders.db

The first line of its output is the connection string for clients. Ctrl-C or SIGTERM ends it, and
without --data all messages with it.";

/// A local Azure Service Bus for development and tests, in memory or in a file.
#[derive(Parser)]
#[command(version, after_help = EXAMPLES)]
struct Args {
    /// A TOML file with the entities and their settings.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Where to listen; port 0 takes a free one [default: the file's, or 127.0.0.1:5672].
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<SocketAddr>,
    /// One more queue, with default settings.
    #[arg(long, value_name = "NAME")]
    queue: Vec<String>,
    /// One more queue whose messages belong to sessions.
    #[arg(long, value_name = "NAME")]
    session_queue: Vec<String>,
    /// The SQLite file that keeps messages, sessions' states and known ids from one start to the
    /// next [default: the file's, or nothing is kept].
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// Tells more of what happens, on standard error.
    #[arg(long, short)]
    verbose: bool,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let args = Args::parse();
    let level = if args.verbose { "debug" } else { "warn" };
    tracing_subscriber::fmt().with_env_filter(level).with_writer(std::io::stderr).init();
    match run(args).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("postrider-servicebus-emulator: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: Args) -> Result<()> {
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let emulator = Emulator::start(configuration(args)?).await.context("start")?;
    println!("{}", emulator.connection_string());
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    emulator.stop().await;
    Ok(())
}

fn configuration(args: Args) -> Result<Config> {
    let mut config = match &args.config {
        Some(path) => {
            let text = std::fs::read_to_string(path)
                .with_context(|| format!("read {}", path.display()))?;
            Config::from_toml(&text).with_context(|| format!("read {}", path.display()))?
        }
        None => Config { listen: SocketAddr::from(([127, 0, 0, 1], 5672)), ..Config::default() },
    };
    if let Some(listen) = args.listen {
        config.listen = listen;
    }
    if let Some(data) = args.data {
        config.data = Some(data);
    }
    for name in args.queue {
        config = config.with_queue(name, Entity::default());
    }
    for name in args.session_queue {
        config = config.with_queue(name, Entity { requires_session: true, ..Entity::default() });
    }
    Ok(config)
}
