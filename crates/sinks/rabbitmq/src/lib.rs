//! Events into RabbitMQ over AMQP 0-9-1, confirmed by the broker and never dropped as unroutable.
//!
//! What lives here: the sink, its settings, and how an event becomes a message. What does not:
//! policies, clusters and users of the broker; streams with publishing ids; retries, which are the
//! relay's.
//! Invariant: an event counts as confirmed only after the broker confirmed it *and* did not return
//! it as unroutable.

mod config;
mod connect;
mod encode;
mod error;
mod line;
mod login;
mod publish;
mod runtime;
mod topology;
mod under_way;

pub use config::{ExchangeType, QueueType, RabbitMqConfig, Unroutable};
pub use publish::RabbitMq;
