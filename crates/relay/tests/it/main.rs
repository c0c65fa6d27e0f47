//! The relay over the memory store and sink, in virtual time.

mod cases;
mod delivery;
mod failures;
mod groups;
mod readiness;
mod replaying;
mod subscribing;
mod world;
