//! The relay and subscriptions, and the short way to run them inside the application.
//!
//! What lives here: the engine's names, and what fills in the choices that an application rarely
//! makes: `embedded`, `feed_of`, `run_until`. What does not: the engine.
//! Invariant: nothing here does what the engine's own names can't.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;

pub use postrider_relay::*;
pub use tokio_util::sync::CancellationToken;

use crate::{
    ConsumerName, Feed, FeedSource, GroupName, PollInterval, RelayId, RelayStore, Result, Sink,
    Source,
};

/// The group of relays that are embedded in an application.
const EMBEDDED_GROUP: &str = "embedded";

/// Starts a relay over `store` inside this process: add a sink and run it.
///
/// Every process of an application may run one: they share the partitions between them.
///
/// # Examples
/// ```
/// use postrider::relay::embedded;
/// use postrider::sinks::jsonl::JsonLines;
/// use postrider::sqlite::{SqliteOptions, SqliteStore};
///
/// # #[tokio::main]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("shop.db");
/// let store = SqliteStore::open(SqliteOptions::new(path)).await?;
/// let log = JsonLines::to_writer(std::io::stdout())?;
/// let stop = async { /* for example `tokio::signal::ctrl_c().await` */ };
/// embedded(store).sink("log", log)?.run_until(stop).await?;
/// # Ok(())
/// # }
/// ```
pub fn embedded<S: Feed + RelayStore + Clone + 'static>(store: S) -> EmbeddedRelay {
    let group = GroupName::new(EMBEDDED_GROUP).expect("the group's name is within the limits");
    let options = RelayOptions::new(group, this_process());
    EmbeddedRelay { builder: Relay::builder(feed_of(store.clone()), Arc::new(store), options) }
}

/// A relay with all defaults, waiting for its sinks.
#[must_use]
pub struct EmbeddedRelay {
    builder: RelayBuilder,
}

impl EmbeddedRelay {
    /// Adds a sink with all defaults. Its checkpoints stand under `name`, over restarts too.
    ///
    /// # Errors
    /// `Permanent` for a name that is empty, too long or has control characters.
    pub fn sink(self, name: &str, sink: impl Sink + 'static) -> Result<Self> {
        let options = SinkOptions::new(ConsumerName::new(name)?);
        Ok(Self { builder: self.builder.sink(options, Arc::new(sink)) })
    }

    /// Adds a sink with options.
    pub fn sink_with(self, options: SinkOptions, sink: Arc<dyn Sink>) -> Self {
        Self { builder: self.builder.sink(options, sink) }
    }

    /// The relay, to look at its status or to stop it by a token.
    ///
    /// # Errors
    /// As [`RelayBuilder::build`].
    pub fn build(self) -> Result<Relay> {
        self.builder.build()
    }

    /// Builds it and runs it as [`run_until`] does.
    ///
    /// # Errors
    /// As [`RelayBuilder::build`] and [`Relay::run`].
    pub async fn run_until(self, stop: impl Future) -> Result<()> {
        run_until(self.build()?, stop).await
    }
}

/// A store's feed as a relay or a [`Subscription`] reads it, polling by the system's clock.
pub fn feed_of<S: Feed + 'static>(store: S) -> Arc<dyn Source> {
    Arc::new(FeedSource::new(Arc::new(store), Arc::new(SystemClock), PollInterval::default()))
}

/// A name for this process that no other process and no other start of it has.
pub fn this_process() -> RelayId {
    let name = format!("{}-{}", std::process::id(), uuid::Uuid::new_v4().simple());
    RelayId::new(name).expect("a process id and a UUID are within the limits")
}

/// Runs `relay` until `stop` completes, and drains it.
///
/// # Errors
/// As [`Relay::run`].
///
/// # Cancellation
/// Dropping the future is like a crash, as for [`Relay::run`].
pub async fn run_until(relay: Relay, stop: impl Future) -> Result<()> {
    let token = CancellationToken::new();
    let mut running = pin!(relay.run(token.clone()));
    tokio::select! {
        ended = &mut running => return ended,
        _ = stop => token.cancel(),
    }
    running.await
}
