//! The store against real servers, PostgreSQL 15 and 18.

mod by_sql;
mod cut;
mod inbox;
mod leases;
mod progress;
mod race;
mod support;
