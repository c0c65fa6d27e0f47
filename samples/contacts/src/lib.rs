//! A contacts service whose events are delivered by Postrider: what a user of the crate writes.
//!
//! What lives here: the service as a library, so that a demonstration can run it in its own
//! process. What does not: the relay that delivers its events, which runs beside it.
//! Invariant: of Postrider this crate names the façade `postrider` only.

mod api;
mod compose;
mod config;
mod domain;
mod page;
mod problem;
mod receiver;
mod server;
mod service;
mod trace;
mod values;

use std::future::Future;

use tokio::net::TcpListener;

pub use compose::open;
pub use config::{Config, Preconditions, StoreConfig};
pub use receiver::{EventStream, ReceivedEvent};
pub use service::Service;

/// Opens the service and serves it until `stop` completes; then drains: requests under way are
/// answered, and event streams end.
///
/// # Errors
/// The store cannot be opened.
pub async fn serve(
    listener: TcpListener,
    config: Config,
    stop: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let service = open(config).await?;
    service.serve(listener, stop).await;
    Ok(())
}
