//! Real servers start, obey, and leave nothing behind.

mod postgres;
#[cfg(feature = "proxy")]
mod proxy;
