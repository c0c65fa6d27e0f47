//! The sample service through real HTTP, on a real SQLite file, and what its clients see of it also
//! on a real PostgreSQL server and on Microsoft's emulator of Azure Cosmos DB.
#![allow(clippy::duplicate_mod, reason = "the same tests run on each store")]

mod browser;
mod concurrency;
mod endpoints;
mod events;
mod harness;
#[cfg(feature = "cosmos")]
mod on_cosmos;
mod on_postgres;
mod page;
mod readme;
mod receiver;
mod refusals;
mod server;
