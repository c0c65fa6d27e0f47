//! SIGINT and SIGTERM: the first drains, the second ends the process at once.
//!
//! What lives here: turning signals into a token. What does not: the drain.
//! Invariant: after the first signal a person can always get out with a second one.

use std::time::Duration;

use anyhow::{Context, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::exit::INTERRUPTED;

/// Programs such as `timeout` tell the process and its group: one wish, heard twice at once. No
/// person presses a key again this fast.
const ECHO: Duration = Duration::from_millis(200);

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
        let first = next(&mut interrupt, &mut terminate).await;
        tracing::info!(signal = first, "stopping: finishing what is under way");
        told.cancel();
        let mut echo = std::pin::pin!(tokio::time::sleep(ECHO));
        let name = loop {
            tokio::select! {
                () = &mut echo => break next(&mut interrupt, &mut terminate).await,
                name = next(&mut interrupt, &mut terminate) => {
                    if name != first {
                        break name;
                    }
                }
            }
        };
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
