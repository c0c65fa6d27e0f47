//! The sample service through real HTTP, on a real SQLite file.

mod browser;
mod concurrency;
mod endpoints;
mod events;
mod harness;
mod page;
mod readme;
mod receiver;
mod refusals;
mod server;
