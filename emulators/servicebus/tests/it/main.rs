//! The emulator as clients meet it.
//!
//! What lives here: Microsoft's own SDKs and a client in Rust against it, its faults, its program,
//! its page.
//! Invariant: each test has an emulator of its own on a free port, and leaves nothing behind.

mod client;
mod durability;
mod program;
mod sdk;
mod steps;
