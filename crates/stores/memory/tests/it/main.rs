//! The memory store under the shared suites, and what is particular to it.
//!
//! What lives here: the harness and the list of files. What does not: behaviours of every store.
//! Invariant: time moves by hand, so that no test waits for a clock.

mod faulty;
mod harness;
mod particular;

use harness::MemoryHarness;

postrider_conformance::store_suite!(MemoryHarness);
postrider_conformance::source_suite!(postrider_conformance::source::FeedHarness<MemoryHarness>);
