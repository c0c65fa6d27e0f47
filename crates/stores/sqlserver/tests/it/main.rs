//! The SQL Server store without a server: against a stand-in that speaks its wire protocol.
//!
//! What lives here: how the client reads every answer, and what it makes of every fault. What does
//! not: whether SQL Server gives those answers (`tests/server`, where one is named).
//! Invariant: each statement of the store is asked for and answered here at least once.

mod answers;
mod encryption;
mod faults;
mod others;
mod support;
mod tds;
mod ulids;
