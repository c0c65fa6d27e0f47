//! `run`: deliver events until a signal.
//!
//! What lives here: the start checks, the life of the process, its end. What does not: delivering
//! (the relay), the listener (`admin.rs`).
//! Invariant: nothing is connected to before the configuration is known to be possible, and one
//! sink that can't be reached never keeps the others from flowing.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use postrider_core::{RelayId, RetentionPolicy, Sink};
use postrider_relay::{Relay, RelayOptions, Retain, SinkOptions};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::{full_config, open_with, status};
use crate::admin;
use crate::args::{Global, RunArgs};
use crate::compose::{self, OnSchema, Opened};
use crate::config::{AdminConfig, Config, Problems, SinkConfig};
use crate::exit::NotReady;
use crate::failpoints;
use crate::logging;
use crate::signals;

/// A sink's check may take this long before it is reported.
const CHECK_TIMEOUT: Duration = Duration::from_secs(10);

/// Delivers until SIGTERM or SIGINT.
///
/// # Errors
/// The configuration's problems; a source that is not ready; a listener that can't be bound; the
/// relay's own failure.
pub(super) fn run(global: &Global, args: &RunArgs) -> Result<ExitCode> {
    let mut config = full_config(global)?;
    if let Some(address) = args.admin {
        config.admin = AdminConfig::At(address);
    }
    let sinks = open_sinks(&config)?;
    failpoints::arm()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("start the runtime")?;
    let result = runtime.block_on(async {
        // Within the runtime: the exporter may need it.
        let tracing = logging::start(&config.log, Some(&config.trace))?;
        let traced = |(config, sink): OpenSink| {
            let sink = tracing.traced(config.name.as_str(), sink);
            (config, sink)
        };
        let sinks = sinks.into_iter().map(traced).collect();
        let schema = if args.init { OnSchema::Create } else { OnSchema::Require };
        let result = deliver(&config, sinks, schema).await;
        let _ = tokio::task::spawn_blocking(move || tracing.finish()).await;
        result
    });
    runtime.shutdown_timeout(Duration::from_secs(1));
    result.map(|()| ExitCode::SUCCESS)
}

/// A configured sink and what was made of it.
pub(super) type OpenSink = (SinkConfig, Arc<dyn Sink>);

/// Makes every sink; nothing is connected to.
///
/// # Errors
/// All problems of all sinks.
pub(super) fn open_sinks(config: &Config) -> Result<Vec<OpenSink>> {
    let mut problems = Vec::new();
    let mut sinks = Vec::new();
    for sink in &config.sinks {
        match compose::open_sink(sink) {
            Ok(open) => sinks.push((sink.clone(), open)),
            Err(problem) => problems.push(problem),
        }
    }
    if problems.is_empty() { Ok(sinks) } else { Err(Problems::new(&config.file, problems).into()) }
}

async fn deliver(config: &Config, sinks: Vec<OpenSink>, schema: OnSchema) -> Result<()> {
    let mut tasks = JoinSet::new();
    let stop = signals::stop_token(&mut tasks)?;
    let opened = open_with(config, schema).await?;
    if let Some(log) = &opened.log {
        log.ready().await.with_context(|| NotReady(format!("read {}", opened.shown)))?;
    }
    let metrics = admin::record_metrics()?;
    let listener = admin::bind(config.admin).await?;
    let relay = build(config, &opened, &sinks)?;
    check_sinks(&sinks, &mut tasks);
    match opened.store.progress().await {
        Ok(progress) => {
            status::strays(&progress, config).iter().for_each(|text| tracing::warn!("{text}"));
        }
        // The relay says the same and goes on trying.
        Err(error) => tracing::warn!(error = error.chain(), "checkpoints can't be read yet"),
    }
    let advice = opened.advice().await;
    advice.attention.iter().chain(&advice.weaker).for_each(|text| tracing::warn!("{text}"));
    let watched = admin::Watched { store: Arc::clone(&opened.store), log: opened.log.clone() };
    tasks.spawn(admin::watch_standing(watched, metrics.clone(), stop.clone()));
    // The listener answers until the drain is over, so that a probe sees the truth to the end.
    let over = CancellationToken::new();
    if let Some(listener) = listener {
        admin::spawn(&mut tasks, listener, metrics, relay.status(), over.clone());
    }
    let names: Vec<_> = sinks.iter().map(|(sink, _)| sink.name.as_str()).collect();
    tracing::info!(
        source = opened.shown,
        sinks = names.join(","),
        group = config.relay.group.as_str(),
        "delivering"
    );
    let result = relay.run(stop).await.context("deliver");
    over.cancel();
    tasks.shutdown().await;
    if result.is_ok() {
        tracing::info!("drained and stopped");
    }
    result
}

/// The relay of a configuration.
///
/// # Errors
/// When its options can't be run.
pub(super) fn build(config: &Config, opened: &Opened, sinks: &[OpenSink]) -> Result<Relay> {
    let mut options = RelayOptions::new(config.relay.group.clone(), relay_id()?);
    options.lease_ttl = config.relay.lease_ttl;
    options.drain_timeout = config.relay.drain_timeout;
    options.checkpoint_every = config.relay.checkpoint_every;
    options.retention = config.relay.retention.map(|keep| Retain {
        every: config.relay.prune_every,
        policy: RetentionPolicy { keep, batch: config.relay.prune_batch, dry_run: false },
    });
    let mut builder =
        Relay::builder(Arc::clone(&opened.source), Arc::clone(&opened.store), options);
    for (config, sink) in sinks {
        builder = builder.sink(sink_options(config), Arc::clone(sink));
    }
    builder.build().context("build the relay")
}

/// What the relay has to know of a sink.
fn sink_options(config: &SinkConfig) -> SinkOptions {
    let mut options = SinkOptions::new(config.name.clone());
    options.from = config.from.clone();
    options.retry = config.retry.clone();
    options.publish_timeout = config.publish_timeout;
    options.budget_bytes = config.budget_bytes;
    options
}

/// Host, process and a random part: unique for each start, and readable in `status`.
fn relay_id() -> Result<RelayId> {
    let system = rustix::system::uname();
    let host: String =
        system.nodename().to_string_lossy().chars().filter(|c| !c.is_control()).take(64).collect();
    let random = uuid::Uuid::new_v4().simple().to_string();
    let id = format!("{host}-{}-{}", std::process::id(), &random[..8]);
    RelayId::new(id).context("name this relay")
}

/// Checks every sink beside the delivery: a sink that hangs must not hold up the start.
fn check_sinks(sinks: &[OpenSink], tasks: &mut JoinSet<()>) {
    for (config, sink) in sinks {
        let (name, sink) = (config.name.clone(), Arc::clone(sink));
        tasks.spawn(async move {
            let name = name.as_str();
            match tokio::time::timeout(CHECK_TIMEOUT, sink.check()).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    let error = error.chain();
                    tracing::warn!(sink = name, error, "the sink is not usable yet; trying on");
                }
                Err(_) => {
                    tracing::warn!(sink = name, "the sink did not answer within 10 s; trying on")
                }
            }
        });
    }
}
