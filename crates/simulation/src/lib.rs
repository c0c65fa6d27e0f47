//! The real relay in a seeded world: fake clock, memory store and sink, injected faults.
//!
//! What lives here: one world's life and its judgement. What does not: the relay itself.
//! Invariant: a world is a function of its seed; the same seed repeats the same life, so that a
//! failure can be replayed.

mod checks;
mod life;
mod world;

pub use life::{Outcome, live};
