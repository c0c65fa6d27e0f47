//! The SQLite store against real files: one binary for all of its tests.

mod append;
mod support;
