//! The store against real servers, PostgreSQL 15 and 18.

mod adopted;
mod advice;
mod any_table;
mod by_sql;
mod connections;
mod cut;
mod failover;
mod inbox;
mod leases;
mod pooler;
mod progress;
mod quiet;
mod race;
mod serialised;
mod support;
mod tls;
