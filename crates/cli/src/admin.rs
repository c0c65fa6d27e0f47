//! The admin listener: `/metrics`, `/healthz`, `/readyz`.
//!
//! What lives here: HTTP for machines that watch a relay. What does not: what ready means, which is
//! the relay's status.
//! Invariant: read only, and never waits for the relay: a stalled one still answers.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use postrider_core::{Clock, RelayStore};
use postrider_relay::{RelayStatus, SystemClock};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::compose::{Log, STATES};
use crate::config::AdminConfig;

/// Where the listener is when nothing is said.
const USUAL: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 9180);
/// How often the database is asked for lag; counting a long backlog is not free.
const STANDING_EVERY: Duration = Duration::from_secs(10);
/// How often the metrics' own housekeeping runs.
const UPKEEP_EVERY: Duration = Duration::from_secs(5);
/// Buckets for every duration in seconds: 1 ms to 1 minute.
const SECONDS: &[f64] =
    &[0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0];

/// Binds as configured: an address that was asked for or an error; else the usual one, or a free
/// port beside it. None when the listener is off.
///
/// # Errors
/// When the address can't be bound.
pub(crate) async fn bind(config: AdminConfig) -> Result<Option<TcpListener>> {
    let listener = match config {
        AdminConfig::Off => return Ok(None),
        AdminConfig::At(address) => TcpListener::bind(address).await.with_context(|| {
            format!("listen on {address}: choose another address with [admin] listen or --admin")
        })?,
        AdminConfig::Usual => match TcpListener::bind(USUAL).await {
            Ok(listener) => listener,
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
                let any_port = SocketAddr::new(USUAL.ip(), 0);
                TcpListener::bind(any_port).await.context("listen on a free port of 127.0.0.1")?
            }
            Err(error) => return Err(error).with_context(|| format!("listen on {USUAL}")),
        },
    };
    let address = listener.local_addr().context("read the listener's address")?;
    if !address.ip().is_loopback() {
        tracing::warn!(%address, "the admin listener is open to the network, without a password");
    }
    tracing::info!("metrics and health at http://{address}/metrics, /healthz, /readyz");
    Ok(Some(listener))
}

/// Makes this process record metrics. Call once, before the relay is made.
///
/// # Errors
/// When a recorder is installed already.
pub(crate) fn record_metrics() -> Result<PrometheusHandle> {
    let builder = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), SECONDS)
        .context("set the histogram buckets")?;
    builder.install_recorder().context("record metrics")
}

#[derive(Clone)]
struct Admin {
    metrics: PrometheusHandle,
    status: RelayStatus,
}

/// Serves beside the relay, until `stop`.
pub(crate) fn spawn(
    tasks: &mut JoinSet<()>,
    listener: TcpListener,
    metrics: PrometheusHandle,
    status: RelayStatus,
    stop: CancellationToken,
) {
    tasks.spawn(async move {
        if let Err(error) = serve(listener, metrics, status, stop).await {
            tracing::error!(error = format!("{error:#}"), "the admin listener ended");
        }
    });
}

async fn serve(
    listener: TcpListener,
    metrics: PrometheusHandle,
    status: RelayStatus,
    stop: CancellationToken,
) -> Result<()> {
    let router = Router::new()
        .route("/metrics", get(render))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .with_state(Admin { metrics, status });
    axum::serve(listener, router)
        .with_graceful_shutdown(stop.cancelled_owned())
        .await
        .context("serve the admin listener")
}

async fn render(State(admin): State<Admin>) -> Response {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    (kind, admin.metrics.render()).into_response()
}

/// 200 when events can flow; else 503 with the reasons, a line each.
async fn ready(State(admin): State<Admin>) -> Response {
    let snapshot = admin.status.snapshot();
    if snapshot.ready {
        return (StatusCode::OK, "ready\n").into_response();
    }
    let mut text = String::from("not ready\n");
    for reason in &snapshot.reasons {
        text.push_str(reason);
        text.push('\n');
    }
    (StatusCode::SERVICE_UNAVAILABLE, text).into_response()
}

/// What only the database knows.
pub(crate) struct Watched {
    /// What is pending, and for how long.
    pub(crate) store: Arc<dyn RelayStore>,
    /// How the log stands, where the source is read from one.
    pub(crate) log: Option<Arc<dyn Log>>,
}

/// Keeps the metrics that only the database knows.
pub(crate) async fn watch_standing(
    watched: Watched,
    metrics: PrometheusHandle,
    stop: CancellationToken,
) {
    let mut upkeep = tokio::time::interval(UPKEEP_EVERY);
    let mut standing = tokio::time::interval(STANDING_EVERY);
    standing.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let (mut known, mut log_known) = (true, true);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = upkeep.tick() => metrics.run_upkeep(),
            _ = standing.tick() => {
                if let Some(log) = &watched.log {
                    record_mirror(&**log);
                }
                known = record_standing(&*watched.store, known).await;
                if let Some(log) = watched.log.as_ref().filter(|_| known) {
                    log_known = record_log(&**log, log_known).await;
                }
            }
        }
    }
}

/// Whether the database answered. `known`: whether it did so last time; the relay itself says how
/// long a trouble lasts, so its begin is enough here.
async fn record_standing(store: &dyn RelayStore, known: bool) -> bool {
    let progress = match store.progress().await {
        Ok(progress) => progress,
        Err(error) => {
            if known {
                tracing::warn!(error = error.chain(), "lag is not known for now");
            }
            return false;
        }
    };
    let now = SystemClock.now();
    for one in progress {
        let labels = [
            ("sink", one.consumer.as_str().to_owned()),
            ("partition", one.partition.as_str().to_owned()),
        ];
        let lag = one.oldest_pending_at.map_or(0.0, |oldest| now.since(oldest).as_secs_f64());
        gauge("postrider_pending_events", &labels, to_f64(one.pending));
        gauge("postrider_dead_letters", &labels, to_f64(one.parked));
        gauge("postrider_dropped_events", &labels, to_f64(one.dropped));
        gauge("postrider_confirmed_events", &labels, to_f64(one.checkpoint.published));
        gauge("postrider_lag_seconds", &labels, lag);
    }
    true
}

/// As [`record_standing`].
async fn record_log(log: &dyn Log, known: bool) -> bool {
    let standing = match log.standing().await {
        Ok(standing) => standing,
        Err(error) => {
            if known {
                tracing::warn!(error = error.chain(), "how the log stands is not known for now");
            }
            return false;
        }
    };
    let state = STATES.iter().position(|state| *state == standing.state).unwrap_or(STATES.len());
    metrics::gauge!("postrider_wal_slot_state").set(to_f64(state as u64));
    // What is not known, such as the room where nothing bounds it, has no value.
    let bytes = |bytes: Option<u64>| bytes.map_or(f64::NAN, to_f64);
    metrics::gauge!("postrider_wal_retained_bytes").set(bytes(standing.retained_bytes));
    metrics::gauge!("postrider_wal_safe_bytes").set(bytes(standing.safe_bytes));
    let lost_in = standing.lost_in.map_or(f64::NAN, |left| left.as_secs_f64());
    metrics::gauge!("postrider_wal_lost_in_seconds").set(lost_in);
    for one in &standing.consumers {
        let label = [("sink", one.name.clone())];
        metrics::gauge!("postrider_wal_lag_bytes", &label).set(bytes(one.lag_bytes));
    }
    metrics::counter!("postrider_wal_catch_ups_total").absolute(standing.catch_ups);
    metrics::counter!("postrider_wal_reconnects_total").absolute(standing.reconnects);
    metrics::counter!("postrider_wal_unknown_messages_total").absolute(standing.unknown_messages);
    true
}

/// Known without the database.
fn record_mirror(log: &dyn Log) {
    for (sink, behind) in log.mirror_behind() {
        let name = "postrider_wal_mirror_behind_seconds";
        metrics::gauge!(name, "sink" => sink).set(behind.as_secs_f64());
    }
}

fn gauge(name: &'static str, labels: &[(&'static str, String); 2], value: f64) {
    metrics::gauge!(name, labels).set(value);
}

/// Counts beyond 2^53 lose their last digits; a metric may.
#[expect(clippy::cast_precision_loss, reason = "a metric is a float")]
fn to_f64(count: u64) -> f64 {
    count as f64
}
