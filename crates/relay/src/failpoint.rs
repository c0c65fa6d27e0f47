//! Named places where a fault test may kill the process.
//!
//! What lives here: one macro over the `fail` crate, compiled to nothing without the feature.
//! Invariant: a failpoint never changes what the code does, unless a test asks for it.

/// Marks a place by name; a no-op unless the feature `failpoints` is on and a test set it.
macro_rules! failpoint {
    ($name:literal) => {
        fail::fail_point!($name);
    };
}
pub(crate) use failpoint;
