//! The binary `contacts`: the sample service on its own.
//!
//! What lives here: flags, environment and signals. What does not: anything that the service does.
//! Invariant: it ends with 0 after a stop that was asked for, and with a reason otherwise.

use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Parser, ValueEnum};
use postrider::Secret;
use postrider_sample_contacts::{Config, Preconditions, StoreConfig, open};
use tokio::net::TcpListener;

/// Contacts, and events of their changes in an outbox that `postrider run` delivers.
#[derive(Debug, Parser)]
#[command(name = "contacts", version, about)]
struct Args {
    /// Where contacts and their events are kept.
    #[arg(long, value_enum, default_value_t = Store::Sqlite, env = "CONTACTS_STORE")]
    store: Store,
    /// The SQLite file; made when it is missing. With another store than SQLite and PostgreSQL it
    /// has what the receiver got.
    #[arg(long, default_value = "contacts.db", env = "CONTACTS_DATABASE")]
    database: PathBuf,
    /// The PostgreSQL database, for --store postgres: postgres://user:password@host/name; for
    /// --store sqlserver its connection string: Server=host,1433;Database=name;User ID=…; for
    /// --store cosmos the account: AccountEndpoint=…;AccountKey=….
    #[arg(
        long,
        env = "CONTACTS_DATABASE_URL",
        hide_env_values = true,
        required_if_eq_any([
            ("store", "postgres"),
            ("store", "sqlserver"),
            ("store", "cosmos"),
        ])
    )]
    database_url: Option<String>,
    /// The database of the Cosmos DB account; made when it is missing.
    #[cfg(feature = "cosmos")]
    #[arg(long, default_value = "contacts", env = "CONTACTS_COSMOS_DATABASE")]
    cosmos_database: String,
    /// The container in it; made when it is missing.
    #[cfg(feature = "cosmos")]
    #[arg(long, default_value = "contacts", env = "CONTACTS_COSMOS_CONTAINER")]
    cosmos_container: String,
    /// Address and port to listen on.
    #[arg(long, default_value = "127.0.0.1:8080", env = "CONTACTS_LISTEN")]
    listen: SocketAddr,
    /// A secret (whsec_…) that deliveries to /webhooks/contacts are signed with; several while
    /// they are rotated.
    #[arg(long, env = "CONTACTS_WEBHOOK_SECRET", value_delimiter = ',', hide_env_values = true)]
    webhook_secret: Vec<String>,
    /// Answer changes without the header If-Match with 428.
    #[arg(long, env = "CONTACTS_REQUIRE_IF_MATCH")]
    require_if_match: bool,
    /// Longest wait for another write, in milliseconds, before the answer is 503.
    #[arg(long, default_value_t = 5_000, env = "CONTACTS_BUSY_TIMEOUT_MS")]
    busy_timeout_ms: u64,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Store {
    Sqlite,
    Postgres,
    #[cfg(feature = "sqlserver")]
    #[value(name = "sqlserver")]
    SqlServer,
    #[cfg(feature = "cosmos")]
    Cosmos,
}

impl From<Args> for Config {
    fn from(args: Args) -> Self {
        let busy_timeout = Duration::from_millis(args.busy_timeout_ms);
        let store = match args.store {
            Store::Sqlite => StoreConfig::Sqlite { path: args.database, busy_timeout },
            Store::Postgres => StoreConfig::Postgres {
                url: Secret::new(args.database_url.unwrap_or_default()),
                busy_timeout,
            },
            #[cfg(feature = "sqlserver")]
            Store::SqlServer => StoreConfig::SqlServer {
                url: Secret::new(args.database_url.unwrap_or_default()),
                busy_timeout,
                journal: args.database,
            },
            #[cfg(feature = "cosmos")]
            Store::Cosmos => StoreConfig::Cosmos {
                url: Secret::new(args.database_url.unwrap_or_default()),
                database: args.cosmos_database,
                container: args.cosmos_container,
                journal: args.database,
            },
        };
        let preconditions =
            if args.require_if_match { Preconditions::Required } else { Preconditions::Optional };
        let secrets = args.webhook_secret.into_iter().filter(|secret| !secret.is_empty());
        let webhook_secrets = secrets.map(Secret::new).collect();
        Self { store, preconditions, webhook_secrets }
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let level = tracing_subscriber::EnvFilter::try_from_default_env();
    tracing_subscriber::fmt()
        .with_env_filter(level.unwrap_or_else(|_| "info".into()))
        .with_writer(std::io::stderr)
        .init();
    let listen = args.listen;
    let listener =
        TcpListener::bind(listen).await.with_context(|| format!("listen on {listen}"))?;
    let address = listener.local_addr().context("read the listener's address")?;
    let terminated = terminated()?;
    let stop = async {
        tokio::select! {
            () = terminated => {}
            _ = tokio::signal::ctrl_c() => {}
        }
    };
    let service = open(args.into()).await?;
    println!("contacts on http://{address}");
    service.serve(listener, stop).await;
    Ok(())
}

/// Completes when the process is asked to end by SIGTERM, as service supervisors do.
#[cfg(unix)]
fn terminated() -> anyhow::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    Ok(async move {
        terminate.recv().await;
    })
}

/// Other systems have no such signal.
#[cfg(not(unix))]
fn terminated() -> anyhow::Result<impl Future<Output = ()>> {
    Ok(std::future::pending())
}
