//! The real binary, as a person or a program meets it.
//!
//! What lives here: tests that start `postrider` and look at its output, exit code and effects.
//! Invariant: each test has a folder and ports of its own, and leaves nothing behind.

#[cfg(feature = "webhook")]
mod admin;
mod config;
#[cfg(feature = "demo")]
mod demo;
#[cfg(feature = "demo")]
mod demo_browser;
mod feed;
mod harness;
#[cfg(feature = "webhook")]
mod letters;
#[cfg(feature = "postgres")]
mod postgres;
mod run;
#[cfg(feature = "otlp")]
mod traces;
mod trouble;
mod usage;
