//! The Cosmos DB store against Microsoft's own emulator: one binary for all of its tests.

mod conformance;
mod control;
mod feed;
mod support;
