//! What the façade promises to applications.
//!
//! What lives here: one test binary: examples and their output, and the README's first program.
//! What does not: behaviour, which each crate tests itself, and programs that must not compile,
//! which stand beside the derives.
//! Invariant: every example of this crate is run by a test.
#![cfg(all(feature = "jsonl", feature = "relay", feature = "sqlite"))]
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

mod examples;
mod hello;
#[cfg(feature = "postgres")]
mod on_postgres;
