//! Real servers for tests: PostgreSQL, PgBouncer, NATS, RabbitMQ, Redis, a broker that speaks
//! Kafka's protocol, and a TCP proxy that misbehaves on demand.
//!
//! What lives here: finding a server's programs, starting it on a free port in a folder of its own,
//! ending it. What does not: installing anything (`cargo xtask services install`), and the tests.
//! Invariant: a server and its folder are gone once its value is dropped, and also when the process
//! that started it ends in any other way; a program that is missing is an error, never a skip.
//!
//! For Unix alone. Everything but the proxy blocks its thread while a server starts or stops, which
//! takes about a second; a test that runs something else meanwhile needs a thread for it.

mod address;
mod certificate;
pub mod cosmos;
pub mod cosmos_sdk;
mod error;
mod folder;
pub mod kafka;
pub mod nats;
pub mod pgbouncer;
pub mod postgres;
mod programs;
#[cfg(feature = "proxy")]
pub mod proxy;
pub mod rabbitmq;
pub mod redis;
pub mod servicebus_sdk;
pub mod tsql_parser;

pub use error::{Error, Result};
