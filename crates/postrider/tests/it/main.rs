//! What the façade promises to applications.
//!
//! What lives here: one test binary: examples and their output, the README's first program, and
//! programs that must not compile. What does not: behaviour, which each crate tests itself.
//! Invariant: every example of this crate is run by a test.
#![cfg(all(feature = "jsonl", feature = "relay", feature = "sqlite"))]
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

mod examples;
mod hello;
mod misuse;
