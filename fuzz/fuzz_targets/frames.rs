//! Random bytes where a server's messages should be.
//!
//! What lives here: the call. What does not: what is looked for, which
//! `crates/stores/postgres/src/wal/fuzzing.rs` says.
//! Invariant: no bytes make the wire's own decoder panic or take memory beyond theirs.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| postrider_store_postgres::fuzzing::frames(bytes));
