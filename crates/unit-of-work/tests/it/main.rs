//! The unit of work over the model store, told as an application would use it.
//!
//! What lives here: one test binary; `contact.rs` is the application, `world.rs` the store and the
//! clock. What does not: the store's own behaviour (`conformance`).
//! Invariant: every test has a store of its own.

#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

mod commit;
mod contact;
mod envelope;
mod handlers;
mod pending;
mod repository;
mod world;
