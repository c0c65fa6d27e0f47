//! The engine that moves records from a source to sinks.
