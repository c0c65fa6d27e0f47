//! The emulator as a program.
//!
//! What lives here: its arguments, its listeners, and its end. What does not: how a request is
//! answered (`service.rs`), which Microsoft's own emulator does.
//! Invariant: standard output has the connection string as its first line, once clients can
//! connect.

mod admin;
mod by_time;
mod counts;
mod faults;
mod places;
mod request;
mod service;
mod signature;

use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result};
use azure_data_cosmos_driver::in_memory_emulator::{
    ConsistencyLevel, InMemoryEmulatorHttpClient, ReplicationConfig, VirtualAccountConfig,
    VirtualRegion,
};
use clap::Parser;
use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use url::Url;

use crate::service::{Door, Service};

const EXAMPLES: &str = "\
Examples:
  # On a free port
  postrider-cosmos-emulator

  # An account with two regions; the first one takes writes
  postrider-cosmos-emulator --port 8081 --region 'East US' --region 'West US'

The first line of its output is the connection string for clients. Ctrl-C or SIGTERM ends it, and
everything in it is gone then.";

/// The key that Microsoft's own emulators take, and publish.
const WELL_KNOWN_KEY: &str =
    "C2y6yDjf5/R+ob0N8A7Cgv30VRDJIWEHLM+4QDU5DE2nQ9nDuVTqobD4b8mGGyPMbIZnqyMsEcaGQy67XIw/Jw==";

/// Microsoft's in-memory emulator of Azure Cosmos DB behind an HTTP port, for development and
/// tests.
#[derive(Parser)]
#[command(version, after_help = EXAMPLES)]
struct Args {
    /// Where the account listens; 0 takes a free port. Several regions have ports of their own.
    #[arg(long, default_value_t = 0)]
    port: u16,
    /// A region; may be given several times.
    #[arg(long, value_name = "NAME", default_value = "East US")]
    region: Vec<String>,
    /// The account's key, in base64.
    #[arg(long, default_value = WELL_KNOWN_KEY)]
    key: String,
    /// Answers 429 above the throughput that a container was created with.
    #[arg(long)]
    throttling: bool,
    /// Ends when standard input is closed, and so with the process that started it.
    #[arg(long)]
    with_parent: bool,
}

#[tokio::main]
async fn main() -> ExitCode {
    match run(Args::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("postrider-cosmos-emulator: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: Args) -> Result<()> {
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let (listener, first) = listen(args.port).await?;
    let (mut doors, mut regions) = (Vec::new(), Vec::new());
    if let [only] = &args.region[..] {
        regions.push(VirtualRegion::new(only, first.clone()));
        doors.push((listener, Door::Region(first.clone())));
    } else {
        // As at the service, the account's address outlives each region's.
        doors.push((listener, Door::Account));
        for name in &args.region {
            let (listener, base) = listen(0).await?;
            regions.push(VirtualRegion::new(name, base.clone()));
            doors.push((listener, Door::Region(base)));
        }
    }
    let account = VirtualAccountConfig::new(regions)
        .context("make the account")?
        .with_consistency(ConsistencyLevel::Session)
        // What a fail-over loses of late replication is not what tests look for.
        .with_replication_config(ReplicationConfig::immediate())
        .with_throttling_enabled(args.throttling);
    let emulator = InMemoryEmulatorHttpClient::try_new(account).context("make the account")?;
    let service = Arc::new(Service::new(emulator, &args.key));
    let mut listening = JoinSet::new();
    for (listener, door) in doors {
        listening.spawn(service::listen(listener, door, Arc::clone(&service)));
    }
    println!("AccountEndpoint={first};AccountKey={};", args.key);
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
        () = parent_ends(args.with_parent) => {}
        _ = listening.join_next() => {}
    }
    Ok(())
}

async fn listen(port: u16) -> Result<(TcpListener, Url)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))
        .await
        .with_context(|| format!("listen on port {port}"))?;
    let address = listener.local_addr().context("see which port was taken")?;
    let base = Url::parse(&format!("http://{address}/")).context("make an address")?;
    Ok((listener, base))
}

/// Waits for the end of standard input, or for ever.
async fn parent_ends(wanted: bool) {
    if !wanted {
        return std::future::pending().await;
    }
    let (mut input, mut rest) = (tokio::io::stdin(), [0u8; 64]);
    // What is written there has no meaning; an error is an end, too.
    while input.read(&mut rest).await.is_ok_and(|bytes| bytes > 0) {}
}
