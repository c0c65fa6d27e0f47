//! The store against real servers, PostgreSQL 15 and 18.

#![expect(
    clippy::disallowed_methods,
    reason = "tests drive connections and tasks as an application does"
)]

mod adopted;
mod advice;
mod ahead;
mod any_table;
mod append;
mod by_sql;
mod conformance;
mod connections;
mod cut;
mod documents;
mod errors;
mod failover;
mod inbox;
mod leases;
mod pooler;
mod progress;
mod quiet;
mod race;
mod restore;
mod retention;
mod review;
mod roles;
mod segments;
mod serialised;
mod support;
mod tls;
mod values;
mod wal;
mod wal_acknowledged;
mod wal_adopted;
mod wal_bulk;
mod wal_connection;
mod wal_copies;
mod wal_messages;
mod wal_mirror;
mod wal_progress;
mod wal_quiet;
mod wal_retention;
mod wal_schedules;
mod wal_support;
mod wal_taker;
mod wal_trouble;
