//! `demo`: a service, a relay and a receiver in one process, without any server.
//!
//! What lives here: starting the three, showing what arrives, ending them in order. What does not:
//! the service (the Contacts sample), the delivery, which is what `run` does, and the Service Bus
//! that can be had besides (`demo/servicebus.rs`).
//! Invariant: at the end the relay drains while its receiver still listens, and a temporary folder
//! is gone when the process is.

mod servicebus;

use std::future::Future;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use postrider_core::Secret;
use postrider_sample_contacts as contacts;
use rand::TryRng;
use rand::rngs::SysRng;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use servicebus::Bus;

use super::open_with;
use super::run::{build, open_sinks};
use crate::admin;
use crate::args::DemoArgs;
use crate::compose::OnSchema;
use crate::config::{self as configuration, AdminConfig, Config};
use crate::logging;
use crate::output::{Output, Tone, escape};
use crate::signals;

/// Where the service listens when nothing is said and the port is free.
const USUAL: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 8080);

/// Runs the demonstration until a signal.
///
/// # Errors
/// When the address is taken, or the folder or the database can't be made.
pub(super) fn run(args: &DemoArgs, output: Output) -> Result<ExitCode> {
    let (folder, temporary) = folder(args.data.as_deref())?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("start the runtime")?;
    let tracing = logging::start(&logging::quiet(), None)?;
    let result = runtime.block_on(show(args, &folder, temporary.is_some(), output));
    // Blocking reads may still hold the database open; they end at once.
    runtime.shutdown_timeout(Duration::from_secs(5));
    tracing.finish();
    if let Some(temporary) = temporary {
        temporary.close().with_context(|| format!("remove {}", folder.display()))?;
    }
    result.map(|()| ExitCode::SUCCESS)
}

fn folder(given: Option<&Path>) -> Result<(PathBuf, Option<tempfile::TempDir>)> {
    match given {
        Some(path) => {
            let made = std::fs::create_dir_all(path).and_then(|()| path.canonicalize());
            Ok((made.with_context(|| format!("make the folder {}", path.display()))?, None))
        }
        None => {
            let made = tempfile::Builder::new().prefix("postrider-demo-").tempdir();
            let folder = made.context("make a temporary folder")?;
            Ok((folder.path().to_owned(), Some(folder)))
        }
    }
}

/// Binds as asked or fails; unasked, takes the usual port or a free one.
async fn bind(asked: Option<SocketAddr>) -> Result<TcpListener> {
    if let Some(address) = asked {
        let bound = TcpListener::bind(address).await;
        return bound.with_context(|| format!("listen on {address}: choose another --listen"));
    }
    match TcpListener::bind(USUAL).await {
        Ok(listener) => Ok(listener),
        Err(_) => TcpListener::bind(SocketAddr::new(USUAL.ip(), 0))
            .await
            .context("listen on a free port of 127.0.0.1"),
    }
}

/// A fresh secret for each start: sender and receiver are in this process.
fn signing_key() -> Result<Secret> {
    let mut bytes = [0; 32];
    SysRng.try_fill_bytes(&mut bytes).context("get random bytes from the system")?;
    Ok(Secret::new(format!("whsec_{}", BASE64.encode(bytes))))
}

/// What a person would write into `postrider.toml`.
fn relay_config(
    database: &Path,
    receiver: SocketAddr,
    key: &Secret,
    bus: Option<&Bus>,
) -> Result<Config> {
    let path = toml::Value::from(database.to_string_lossy().into_owned());
    let key = key.expose();
    let mut text = format!(
        "[source]\nkind = \"sqlite\"\nurl = {path}\n\n[[sink]]\nkind = \"webhook\"\n\
         url = \"http://{receiver}/webhooks/contacts\"\nallow_private = true\n\
         signing_keys = [\"{key}\"]\n"
    );
    if let Some(bus) = bus {
        let (string, queue) = (bus.connection_string(), servicebus::QUEUE);
        let window = servicebus::DEDUP_WINDOW;
        text.push_str(&format!(
            "\n[[sink]]\nkind = \"servicebus\"\nconnection_string = \"{string}\"\n\
             entity = \"{queue}\"\ndedup_window = \"{window}\"\n"
        ));
    }
    Ok(configuration::of_text(&text, "demo")?)
}

async fn show(args: &DemoArgs, folder: &Path, temporary: bool, output: Output) -> Result<()> {
    let mut tasks = JoinSet::new();
    let stop = signals::stop_token(&mut tasks)?;
    let listener = bind(args.listen).await?;
    let address = listener.local_addr().context("read the listener's address")?;
    // A service that listens everywhere is reached by its own receiver's sender on loopback.
    let own = match address.ip().is_unspecified() {
        true => SocketAddr::new(Ipv4Addr::LOCALHOST.into(), address.port()),
        false => address,
    };
    let key = signing_key()?;
    let database = folder.join("contacts.db");
    let mut service = contacts::Config::new(contacts::StoreConfig::sqlite(&database));
    service.webhook_secrets = vec![key.clone()];
    let service = contacts::open(service).await.context("open the contacts service")?;

    // Ends only after the relay: the last deliveries need their receiver, and a probe its answer.
    let over = CancellationToken::new();
    let mut bus = match args.servicebus {
        true => Some(Bus::start(&over).await?),
        false => None,
    };
    let config = relay_config(&database, own, &key, bus.as_ref())?;
    let opened = open_with(&config, OnSchema::Create).await?;
    let sinks = open_sinks(&config)?;
    let metrics = admin::record_metrics()?;
    let relay = build(&config, &opened, &sinks)?;
    let admin_listener = admin::bind(AdminConfig::Usual).await?;
    let admin_address = admin_listener.as_ref().and_then(|bound| bound.local_addr().ok());
    if let Some(listener) = admin_listener {
        admin::spawn(&mut tasks, listener, metrics.clone(), relay.status(), over.clone());
    }
    let watched = admin::Watched { store: Arc::clone(&opened.store), log: None };
    tasks.spawn(admin::watch_standing(watched, metrics, stop.clone()));
    greet(own, admin_address, folder, temporary, output)?;
    if let Some(bus) = bus.as_ref().filter(|_| !output.json) {
        output.line(format!("  bus      {}", bus.connection_string()))?;
        output.line("")?;
    }
    let mut serving = JoinSet::new();
    let received = service.received();
    let end = over.clone();
    serving.spawn(async move { service.serve(listener, end.cancelled_owned()).await });
    let printing = async {
        match &mut bus {
            Some(bus) => bus.print(output).await,
            None => print_events(received, output).await,
        }
    };
    let shown = deliver(relay.run(stop.clone()), printing, &stop, &over).await;
    while serving.join_next().await.is_some() {}
    tasks.shutdown().await;
    shown?;
    if let Some(bus) = &bus {
        bus.judge(&*opened.feed, output).await?;
    }
    if !output.json {
        output.line("Stopped: everything under way was delivered.")?;
    }
    Ok(())
}

/// Delivers until the end and prints until all of it was received.
async fn deliver(
    delivering: impl Future<Output = postrider_core::Result<()>>,
    printing: impl Future<Output = Result<()>>,
    stop: &CancellationToken,
    over: &CancellationToken,
) -> Result<()> {
    let (mut delivering, mut printing) = (std::pin::pin!(delivering), std::pin::pin!(printing));
    let mut printed = None;
    let delivered = tokio::select! {
        delivered = &mut delivering => delivered,
        closed = &mut printing => {
            // Nobody reads our output any more: a reason to end, not to lose anything.
            printed = Some(closed);
            stop.cancel();
            delivering.await
        }
    };
    over.cancel();
    // What is received ends with the service, after the last event.
    let printed = match printed {
        Some(printed) => printed,
        None => printing.await,
    };
    delivered.context("deliver").and(printed)
}

fn greet(
    address: SocketAddr,
    admin: Option<SocketAddr>,
    folder: &Path,
    temporary: bool,
    output: Output,
) -> Result<()> {
    if output.json {
        let admin = admin.map(|admin| format!("http://{admin}"));
        output.json_line(&serde_json::json!({
            "url": format!("http://{address}/"),
            "admin": admin,
            "data": folder.display().to_string(),
        }))?;
        return Ok(());
    }
    let strong = |text: String| output.paint(Tone::Strong, text);
    output
        .line("A contacts service runs here, and Postrider delivers its events to a receiver.")?;
    output.line("")?;
    output.line(format!("  page     {}", strong(format!("http://{address}/"))))?;
    output.line(format!("  API      {}", strong(format!("http://{address}/docs"))))?;
    if let Some(admin) = admin {
        output.line(format!("  metrics  {}", strong(format!("http://{admin}/metrics"))))?;
    }
    output.line(format!("  data     {}", escape(&folder.to_string_lossy())))?;
    if temporary {
        output.line("           (removed at the end; keep it with --data FOLDER)")?;
    }
    output.line("")?;
    output.line("Create a contact on the page, or with")?;
    output.line("")?;
    output.line(format!(
        "  curl -i http://{address}/api/contacts -H 'content-type: application/json' \\\n    \
         -d '{{\"firstName\":\"Ada\",\"lastName\":\"Lovelace\",\"email\":\"ada@example.com\",\
         \"companyName\":\"Analytical Engines\"}}'"
    ))?;
    output.line("")?;
    output
        .line(output.paint(Tone::Faint, "Its events appear here as they arrive. Ctrl-C stops."))?;
    output.line("")?;
    Ok(())
}

/// Prints each event when the receiver has it.
async fn print_events(mut received: contacts::EventStream, output: Output) -> Result<()> {
    loop {
        let event = match received.next().await {
            Ok(Some(event)) => event,
            Ok(None) => return Ok(()),
            Err(error) => {
                tracing::warn!(error = error.chain(), "the received events can't be read");
                tokio::time::sleep(Duration::from_secs(1)).await;
                continue;
            }
        };
        if output.json {
            output.json_line(&serde_json::to_value(&event).context("show the event")?)?;
        } else {
            output.line(format!(
                "arrived  {}  key={}  id={}",
                output.paint(Tone::Good, escape(&event.event_type)),
                escape(&event.key),
                event.id
            ))?;
        }
    }
}
