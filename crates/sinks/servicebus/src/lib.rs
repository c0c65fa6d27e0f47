//! Events as Azure Service Bus messages, over AMQP 1.0.
//!
//! What lives here: the sink `ServiceBus`, its configuration, tokens, and batches by session. What
//! does not: receiving, managing entities, retries and parking, which are the relay's.
//! Invariant: only the disposition `accepted` confirms; no key, token or payload ever reaches a log
//! or an error.

mod batch;
mod config;
mod connect;
mod connection_string;
mod doubts;
mod encode;
#[cfg(feature = "entra")]
mod entra;
mod error;
mod frames;
mod line;
mod publish;
mod tls;
mod token;
mod worker;

pub use config::{Auth, EntraCredential, LongKeys, ServiceBusConfig};
pub use encode::{KEY_PROPERTY, TOPIC_PROPERTY};
pub use publish::ServiceBus;
pub use token::{JWT, Token, TokenSource};
