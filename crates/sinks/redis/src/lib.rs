//! Events into Redis Streams, confirmed by the server's own reply.
//!
//! What lives here: the sink, its settings, and how an event becomes an entry. What does not:
//! trimming streams, which belongs to whoever knows their consumers; retries: the relay's.
//! Invariant: an event counts as confirmed only after the server said that it has appended it, or
//! that it did so within the duplicate window.

mod append;
mod bundle;
mod config;
mod connect;
mod encode;
mod error;
mod login;
mod look;
mod publish;

pub use config::{RedisConfig, Unroutable};
pub use publish::Redis;
