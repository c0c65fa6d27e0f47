//! The store against real servers, PostgreSQL 15 and 18.

mod cut;
mod race;
