//! Sinks: where a relay delivers to.
//!
//! What lives here: one module for each sink whose feature is on. What does not: the seam, which
//! is [`Sink`](crate::Sink).
//! Invariant: every sink waits for the other side's own confirmation.

#[cfg(feature = "jsonl")]
#[doc(inline)]
pub use postrider_sink_jsonl as jsonl;
#[cfg(feature = "webhook")]
#[doc(inline)]
pub use postrider_sink_webhook as webhook;
