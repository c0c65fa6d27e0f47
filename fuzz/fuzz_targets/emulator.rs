//! Random bytes where a client of the Service Bus emulator should speak.
//!
//! What lives here: the call. What does not: what is looked for, which
//! `emulators/servicebus/src/fuzzing.rs` says.
//! Invariant: no bytes make a connection panic, loop, or write what is no frame.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| postrider_servicebus_emulator::fuzzing::connection(
    bytes
));
