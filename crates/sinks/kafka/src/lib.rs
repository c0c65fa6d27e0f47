//! A sink that publishes events to Apache Kafka, or a broker that speaks its protocol.
//!
//! What lives here: the settings (`config.rs`, `overrides.rs`, `login.rs`), the producer
//! (`connect.rs`), the record (`encode.rs`), what brokers say of topics (`look.rs`), the way of an
//! event (`publish.rs`, `call.rs`), by itself or in a transaction (`transact.rs`, `seen.rs`), and
//! what an answer means (`error.rs`). What does not: making topics.
//! Invariant: an event counts as confirmed only once every in-sync replica has it, and of one key
//! at most one event, or one transaction, is under way.

mod call;
mod config;
mod connect;
mod encode;
mod error;
mod login;
mod look;
mod missing;
mod overrides;
mod publish;
mod seen;
mod transact;
mod wait;

pub use config::{KafkaConfig, RecordTime, Sasl, Unroutable};
pub use publish::Kafka;
