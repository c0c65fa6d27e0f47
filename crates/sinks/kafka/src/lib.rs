//! A sink that publishes events to Apache Kafka, or a broker that speaks its protocol.
//!
//! What lives here: the settings (`config.rs`, `overrides.rs`, `login.rs`), the producer
//! (`connect.rs`), the record (`encode.rs`), what brokers say of topics (`look.rs`), the way of an
//! event (`publish.rs`) and what an answer means (`error.rs`). What does not: making topics, and
//! transactions.
//! Invariant: an event counts as confirmed only once every in-sync replica has it, and of one key
//! at most one event is under way.

mod config;
mod connect;
mod encode;
mod error;
mod login;
mod look;
mod overrides;
mod publish;

pub use config::{KafkaConfig, RecordTime, Sasl, Unroutable};
pub use publish::Kafka;
