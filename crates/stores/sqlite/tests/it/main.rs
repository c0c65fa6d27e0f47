//! The SQLite store against real files: one binary for all of its tests.

mod append;
mod feed;
mod plain_sql;
mod support;
