//! The SQLite store against real files: one binary for all of its tests.

mod append;
mod errors;
mod feed;
mod plain_sql;
mod relay;
mod support;
