//! The engine: moves records from a source to sinks.
//!
//! What lives here: leases and the trust window, lanes per key, publishing, retries, parking,
//! checkpoints, hand-over, retention, replay and subscriptions. What does not: any store or broker.
//! Invariant: a checkpoint covers only what a sink confirmed or what is among the dead letters.
//!
//! ```text
//! coordinator: join ▸ acquire ▸ [worker per partition] ▸ hand over
//! worker:      one pipeline per sink, all under one lease
//! pipeline:    read ▸ lanes per key ▸ publish ▸ confirm ▸ window ▸ checkpoint
//! ```

mod clock;
mod coordinator;
mod failpoint;
mod health;
mod keeper;
mod lanes;
mod metrics;
mod options;
mod pipeline;
mod reading;
mod relay;
mod replay;
mod retaining;
mod status;
mod store_ops;
mod subscription;
mod told;
mod trust;
mod window;

pub use clock::SystemClock;
pub use options::{Keeper, RelayOptions, Retain, SinkOptions};
pub use relay::{Relay, RelayBuilder};
pub use replay::{Replay, ReplayProgress, ReplayReport};
pub use status::{RelayStatus, SinkSnapshot, SinkState, Snapshot};
pub use subscription::{Delivery, Subscription, SubscriptionOptions};
