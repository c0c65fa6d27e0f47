//! Reliable, ordered events out of a database.
//!
//! What lives here: the names that applications use, from every crate of the house, and the short
//! way to a relay inside the application. What does not: behaviour of its own.
//! Invariant: an application needs no other crate of ours, and the derives name this one.
//!
//! # Saying what happened
//!
//! An application changes its data and says what happened in *one* database transaction. What
//! happened is a [`DomainEvent`]: a struct with a topic, a name, a version, and one field whose
//! value is the key. Events that share a key keep their order.
//!
//! ```
//! use postrider::DomainEvent;
//!
//! #[derive(serde::Serialize, DomainEvent)]
//! #[event(topic = "orders", name = "OrderPlaced", version = 1)]
//! struct OrderPlaced {
//!     #[event(key)]
//!     order: u64,
//!     total: u64,
//! }
//!
//! # fn main() -> postrider::Result<()> {
//! let event = OrderPlaced { order: 42, total: 1999 }.to_event()?;
//! # assert!(event.id().is_none());
//! # Ok(())
//! # }
//! ```
//!
//! Each store has its own `append`, because each driver has its own transactions: for SQLite see
//! [`sqlite::append`], for PostgreSQL [`postgres::Outbox`](postgres), for SQL Server
//! [`sqlserver::Outbox`](sqlserver), for Azure Cosmos DB [`cosmos::CosmosStore::append`]. Where
//! entities are stored as documents, a [`UnitOfWork`] saves them and the events they raised in one
//! commit.
//!
//! # Delivering it
//!
//! A relay moves committed events to sinks, in order for each key, and never forgets one. It runs
//! as the program `postrider`, or inside the application: see [`relay::embedded`]. A
//! [`Subscription`] hands events to a closure instead, and an [inbox](sqlite::SqliteInbox) makes
//! their effect happen once.
//!
//! # Features
//!
//! | feature | default | gives |
//! |---|---|---|
//! | `sqlite` | yes | [`sqlite`]: outbox, feed, documents and inbox in SQLite, by `rusqlite` |
//! | `sqlx` | no | SQLite: append and inbox inside transactions of `sqlx` |
//! | `postgres` | no | [`postgres`]: the same in PostgreSQL, by `tokio-postgres` and `deadpool` |
//! | `postgres-sqlx` | no | append in transactions of `sqlx` |
//! | `sqlserver` | no | [`sqlserver`]: the same in SQL Server and Azure SQL, by `tiberius` |
//! | `sqlserver-entra` | no | the same with tokens of Microsoft Entra ID |
//! | `cosmos` | no | [`cosmos`]: documents, feed and inbox in Azure Cosmos DB, by Microsoft's SDK |
//! | `cosmos-entra` | no | the same with tokens of Microsoft Entra ID |
//! | `relay` | yes | [`relay`]: the relay and subscriptions |
//! | `jsonl` | yes | [`sinks::jsonl`]: events as JSON lines |
//! | `webhook` | no | [`sinks::webhook`](sinks): events as signed HTTP requests |
//! | `kafka` | no | [`sinks::kafka`](sinks): events as records of Apache Kafka; built with C |
//! | `nats` | no | [`sinks::nats`](sinks): events as messages of NATS JetStream |
//! | `rabbitmq` | no | [`sinks::rabbitmq`](sinks): events as messages of RabbitMQ |
//! | `redis` | no | [`sinks::redis`](sinks): events as entries of Redis streams |
//! | `servicebus` | no | [`sinks::servicebus`](sinks): events as Azure Service Bus messages |

extern crate self as postrider;

#[cfg(feature = "relay")]
pub mod relay;
pub mod sinks;

#[doc(inline)]
pub use postrider_core::*;
#[doc(inline)]
pub use postrider_macros::{DomainEvent, Entity};
#[cfg(feature = "cosmos")]
#[doc(inline)]
pub use postrider_store_cosmos as cosmos;
#[cfg(feature = "postgres")]
#[doc(inline)]
pub use postrider_store_postgres as postgres;
#[cfg(feature = "sqlite")]
#[doc(inline)]
pub use postrider_store_sqlite as sqlite;
#[cfg(feature = "sqlserver")]
#[doc(inline)]
pub use postrider_store_sqlserver as sqlserver;
#[doc(inline)]
pub use postrider_unit_of_work::*;
#[cfg(feature = "relay")]
#[doc(inline)]
pub use relay::{Relay, Subscription, SystemClock};

/// The guides' code blocks are compiled and run as tests.
#[cfg(all(doctest, feature = "relay", feature = "sqlite", feature = "jsonl"))]
#[doc = include_str!("../../../docs/unit-of-work.md")]
mod unit_of_work_guide {}

#[cfg(all(doctest, feature = "sqlite"))]
#[doc = include_str!("../../../docs/stores/sqlite.md")]
mod sqlite_guide {}

#[cfg(all(doctest, feature = "sqlserver"))]
#[doc = include_str!("../../../docs/stores/sqlserver-rust.md")]
mod sqlserver_guide {}

#[cfg(all(doctest, feature = "postgres", feature = "relay"))]
#[doc = include_str!("../../../docs/stores/postgres.md")]
mod postgres_guide {}
