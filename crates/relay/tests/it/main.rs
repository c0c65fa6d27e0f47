//! The relay over the memory store and sink, in virtual time.

mod beginning;
mod cases;
mod delivery;
mod destinations;
mod failures;
mod groups;
mod hooked;
mod idle;
mod letters;
mod readiness;
mod replaying;
mod subscribing;
mod world;
