//! The memory sink under the shared suite, and its scripts.
//!
//! What lives here: the harness and what is particular to this sink. What does not: behaviours of
//! every sink.
//! Invariant: the two harnesses differ in how many events of a key a call takes.

mod faulty;
mod harness;
mod scripts;

mod chains {
    use crate::harness::{Chains, MemorySinkHarness};
    postrider_conformance::sink_suite!(MemorySinkHarness<Chains>);
}

mod singles {
    use crate::harness::{MemorySinkHarness, Singles};
    postrider_conformance::sink_suite!(MemorySinkHarness<Singles>);
}
