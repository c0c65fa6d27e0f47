//! One behavioural suite for stores, one for sources, one for sinks; faulty wrappers; the oracle.
//!
//! What lives here: behaviours as async functions that panic when a promise is broken, the harness
//! traits that hide how each implementation is set up, and macros that list one test a behaviour.
//! What does not: any store or sink, or the relay.
//! Invariant: a behaviour speaks through the seams of `postrider-core` and its harness alone, so
//! that it says the same of every implementation; every behaviour is listed by its macro.

pub mod clock;
pub mod faulty;
pub mod oracle;
pub mod samples;
pub mod sink;
pub mod source;
pub mod store;

mod listing;
