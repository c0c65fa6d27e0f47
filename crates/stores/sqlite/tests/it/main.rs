//! The SQLite store against real files: one binary for all of its tests.

mod append;
mod conformance;
mod documents;
mod errors;
mod feed;
mod inbox;
mod load;
mod plain_sql;
mod processes;
mod relay;
mod support;
mod wakeup;
#[cfg(feature = "sqlx")]
mod with_sqlx;
