//! A local Azure Service Bus for development and tests.
//!
//! What lives here: a server that speaks AMQP 1.0 as far as Microsoft's own clients need it, with
//! queues, topics and subscriptions in memory, or in a file too, and faults on demand. What does
//! not: the service's HTTP interfaces.
//! Invariant: what comes in over the wire can end its own connection, but nothing else.
//!
//! ```
//! use postrider_servicebus_emulator::{Config, Emulator, Entity};
//!
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
//! let orders = Entity { requires_session: true, ..Entity::default() };
//! let emulator = Emulator::start(Config::default().with_queue("orders", orders)).await?;
//! assert!(emulator.connection_string().starts_with("Endpoint=sb://127.0.0.1:"));
//! assert!(emulator.entity("orders").messages().is_empty());
//! emulator.stop().await;
//! # Ok::<(), postrider_servicebus_emulator::Error>(())
//! # }).unwrap();
//! ```

mod address;
mod broker;
mod cbs;
mod clock;
mod config;
mod connection;
mod emulator;
mod error;
mod faults;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod inspect;
mod management;
mod refusal;
mod request;
mod shared;
mod store;
mod tokens;
mod wire;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Page;

pub use config::{
    Config, ENTITY_BYTES_DEFAULT, Entity, MESSAGE_BYTES_MAX, MESSAGE_BYTES_PREMIUM,
    MESSAGE_BYTES_STANDARD, NAME_CHARS_MAX, Topic,
};
pub use emulator::Emulator;
pub use error::{Error, Result};
pub use faults::{Faults, Status};
pub use inspect::{EntityView, MessageState, PropertyValue, StoredMessage};
pub use refusal::condition;
pub use shared::Counts;
