//! Streams with publishing ids: events over RabbitMQ's stream protocol, each stored once.
//!
//! What lives here: the sink (`publish.rs`), a partition's producer (`lane.rs`, `numbers.rs`), what
//! is known to be stored (`seen.rs`), and the protocol: connection (`connect.rs`), frames
//! (`wire.rs`, `incoming.rs`), messages (`encode.rs`), chunks (`chunk.rs`). What does not:
//! exchanges and queues,
//! which are spoken to over AMQP 0-9-1.
//! Invariant: a publishing id belongs to one event, for good; why and how far that makes each event
//! be stored once is told in `docs/design/rabbitmq-streams.md`.

mod chunk;
mod config;
mod connect;
mod encode;
mod error;
mod incoming;
mod lane;
mod murmur;
mod numbers;
mod publish;
mod seen;
mod wire;

pub use config::RabbitMqStreamConfig;
pub use publish::RabbitMqStream;
