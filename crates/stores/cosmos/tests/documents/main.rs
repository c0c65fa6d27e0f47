//! Documents and their events, on Microsoft's in-memory emulator over HTTP.
//!
//! What lives here: what the document seam and `append` promise, and what becomes of a commit that
//! fails at each of its steps. What does not: the change feed and what a relay keeps (`it/`).
//! Invariant: each test has an account of its own.

mod append;
mod charges;
mod failures;
mod migrate;
mod regions;
mod saving;
mod world;
