//! Events into RabbitMQ: to exchanges over AMQP 0-9-1, and to streams over the stream protocol.
//!
//! What lives here: the two sinks, their settings, and how an event becomes a message. What does
//! not: policies, clusters and users of the broker; retries, which are the relay's.
//! Invariant: an event counts as confirmed only after the broker confirmed it *and* did not return
//! it as unroutable; in a stream, only after it is known that it was not dropped as a repetition.

mod config;
mod connect;
mod encode;
mod error;
mod line;
mod login;
mod publish;
mod reach;
mod runtime;
mod stream;
mod topology;
mod under_way;

pub use config::{ExchangeType, QueueType, RabbitMqConfig, Unroutable};
pub use publish::RabbitMq;
pub use stream::{RabbitMqStream, RabbitMqStreamConfig};
