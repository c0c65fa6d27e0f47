//! Events into NATS JetStream, confirmed by the stream's own acknowledgement.
//!
//! What lives here: the sink, its settings, and how an event becomes a message. What does not:
//! making streams, which belongs to whoever owns the broker; retries, which are the relay's.
//! Invariant: an event counts as confirmed only after a stream said that it has stored it, or that
//! it had it already.

mod config;
mod connect;
mod encode;
mod error;
mod login;
mod look;
mod publish;
mod singles;

pub use config::{NatsConfig, Unroutable};
pub use publish::Nats;
