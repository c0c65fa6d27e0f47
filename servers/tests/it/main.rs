//! Real servers start, obey, and leave nothing behind.

mod postgres;
mod proxy;
