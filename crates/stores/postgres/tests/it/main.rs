//! The store against real servers, PostgreSQL 15 and 18.

#![expect(
    clippy::disallowed_methods,
    reason = "tests drive connections and tasks as an application does"
)]

mod adopted;
mod advice;
mod any_table;
mod append;
mod by_sql;
mod conformance;
mod connections;
mod cut;
mod documents;
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
mod serialised;
mod support;
mod tls;
mod values;
