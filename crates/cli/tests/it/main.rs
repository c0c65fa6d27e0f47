//! The real binary, as a person or a program meets it.
//!
//! What lives here: tests that start `postrider` and look at its output, exit code and effects.
//! Invariant: each test has a folder and ports of its own, and leaves nothing behind.

#[cfg(feature = "webhook")]
mod admin;
#[cfg(all(feature = "nats", feature = "rabbitmq", feature = "redis"))]
mod brokers;
mod config;
#[cfg(all(feature = "cosmos", feature = "servicebus"))]
mod cosmos;
#[cfg(feature = "demo")]
mod demo;
#[cfg(feature = "demo")]
mod demo_browser;
mod feed;
mod harness;
#[cfg(feature = "webhook")]
#[cfg(feature = "kafka")]
mod kafka;
mod letters;
#[cfg(feature = "nats")]
mod nats;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "postgres")]
mod postgres_wal;
#[cfg(feature = "postgres")]
mod postgres_wal_adopted;
#[cfg(feature = "rabbitmq")]
mod rabbitmq;
#[cfg(feature = "redis")]
mod redis;
mod run;
#[cfg(feature = "servicebus")]
mod servicebus;
#[cfg(feature = "sqlserver")]
mod sqlserver;
#[cfg(feature = "otlp")]
mod traces;
mod trouble;
mod usage;
