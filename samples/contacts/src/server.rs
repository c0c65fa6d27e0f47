//! The listener: connections in, answers out, and a clean end.
//!
//! What lives here: accepting connections within limits, and draining them. What does not: what is
//! answered (`api`, `receiver`, `page`).
//! Invariant: no client can hold more than one connection's share, no slow one can hold a
//! connection for ever, and a stop waits for the requests under way but never for an idle client.

use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

/// Most connections at a time; further ones wait in the listener's queue.
const MAX_CONNECTIONS: usize = 512;
/// Longest time for a request's head to arrive, and for a connection to be idle.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest wait for requests under way after a stop.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after a failed accept, which is mostly for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves until `stop` completes, then drains. `draining` is cancelled in between, so that
/// answers without an end (the event stream) end.
pub(crate) async fn serve(
    listener: TcpListener,
    router: Router,
    draining: CancellationToken,
    stop: impl Future<Output = ()>,
) {
    let mut stop = pin!(stop);
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            () = &mut stop => break,
            Some(_) = connections.join_next(), if !connections.is_empty() => {}
            accepted = listener.accept(), if connections.len() < MAX_CONNECTIONS => {
                match accepted {
                    Ok((socket, _)) => {
                        connections.spawn(connection(socket, router.clone(), draining.clone()));
                    }
                    Err(error) => {
                        tracing::warn!(%error, "accept failed");
                        sleep(ACCEPT_PAUSE).await;
                    }
                }
            }
        }
    }
    drop(listener);
    draining.cancel();
    let drained =
        timeout(DRAIN_TIMEOUT, async { while connections.join_next().await.is_some() {} });
    if drained.await.is_err() {
        tracing::warn!(open = connections.len(), "connections cut after the drain timeout");
    }
}

async fn connection(socket: TcpStream, router: Router, draining: CancellationToken) {
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .serve_connection(TokioIo::new(socket), TowerToHyperService::new(router));
    let mut serving = pin!(serving);
    let ended = tokio::select! {
        ended = serving.as_mut() => ended,
        () = draining.cancelled() => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    // A client that went away, sent no HTTP or was too slow: nothing to answer and nothing lost.
    if let Err(error) = ended {
        tracing::debug!(%error, "connection ended early");
    }
}
