//! SIGINT and SIGTERM: the first drains, the second ends the process at once.
//!
//! What lives here: turning signals into a token. What does not: the drain.
//! Invariant: after the first signal a person can always get out with a second one.

use anyhow::{Context, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::exit::INTERRUPTED;

/// Listens for both signals from now on; the token is cancelled by the first.
///
/// # Errors
/// When the system gives no signal handler.
pub(crate) fn stop_token(tasks: &mut JoinSet<()>) -> Result<CancellationToken> {
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let stop = CancellationToken::new();
    let told = stop.clone();
    tasks.spawn(async move {
        let name = next(&mut interrupt, &mut terminate).await;
        tracing::info!(signal = name, "stopping: finishing what is under way");
        told.cancel();
        let name = next(&mut interrupt, &mut terminate).await;
        tracing::warn!(signal = name, "second signal: ending at once");
        std::process::exit(i32::from(INTERRUPTED));
    });
    Ok(stop)
}

async fn next(interrupt: &mut Signal, terminate: &mut Signal) -> &'static str {
    tokio::select! {
        _ = interrupt.recv() => "SIGINT",
        _ = terminate.recv() => "SIGTERM",
    }
}
