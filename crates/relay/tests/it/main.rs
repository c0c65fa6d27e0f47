//! The relay over the memory store and sink, in virtual time.

mod delivery;
mod failures;
mod groups;
mod readiness;
mod replaying;
mod subscribing;
mod world;
