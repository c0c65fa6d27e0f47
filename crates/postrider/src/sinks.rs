//! Sinks: where a relay delivers to.
//!
//! What lives here: one module for each sink whose feature is on. What does not: the seam, which
//! is [`Sink`](crate::Sink).
//! Invariant: every sink waits for the other side's own confirmation.

#[cfg(feature = "jsonl")]
#[doc(inline)]
pub use postrider_sink_jsonl as jsonl;
#[cfg(feature = "kafka")]
#[doc(inline)]
pub use postrider_sink_kafka as kafka;
#[cfg(feature = "nats")]
#[doc(inline)]
pub use postrider_sink_nats as nats;
#[cfg(feature = "rabbitmq")]
#[doc(inline)]
pub use postrider_sink_rabbitmq as rabbitmq;
#[cfg(feature = "redis")]
#[doc(inline)]
pub use postrider_sink_redis as redis;
#[cfg(feature = "servicebus")]
#[doc(inline)]
pub use postrider_sink_servicebus as servicebus;
#[cfg(feature = "webhook")]
#[doc(inline)]
pub use postrider_sink_webhook as webhook;
