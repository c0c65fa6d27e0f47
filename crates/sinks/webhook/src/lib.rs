//! Events as signed HTTP requests.
//!
//! What lives here: the sink `Webhook`, its configuration, Standard Webhooks signatures for senders
//! and receivers, and the guard against private addresses. What does not: retries and order across
//! calls, which are the relay's.
//! Invariant: only a 2xx confirms; no secret and no payload ever reaches a log or an error.

mod address;
mod concurrency;
mod config;
mod encode;
mod error;
mod publish;
mod resolve;
mod signature;
mod target;
pub mod verify;

pub use config::WebhookConfig;
pub use publish::Webhook;
pub use signature::{SIGNATURE_HEADER, SigningKey, TIMESTAMP_HEADER, WEBHOOK_ID_HEADER};
