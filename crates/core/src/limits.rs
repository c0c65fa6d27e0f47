//! Every limit that holds on all stores and sinks, with its unit in its name.
//!
//! What lives here: bounds that bad input meets. What does not: a broker's own limits, which its
//! sink reports in `Capabilities`.
//! Invariant: whatever passes these bounds can be stored and read back by every store.

/// Largest payload that `append` takes, in bytes (16 MiB): half of the relay's default byte
/// budget, so that one event never fills it.
pub const MAX_PAYLOAD_BYTES: usize = 16 * 1024 * 1024;
/// Longest key, in bytes of UTF-8. Brokers may allow less (Service Bus: 128 characters).
pub const MAX_KEY_BYTES: usize = 1_024;
/// Longest topic, event type, content type, consumer, group or relay name, in bytes of UTF-8.
pub const MAX_NAME_BYTES: usize = 255;
/// Most headers on one event.
pub const MAX_HEADERS: usize = 64;
/// Longest header name, in bytes.
pub const MAX_HEADER_NAME_BYTES: usize = 128;
/// Longest header value, in bytes of UTF-8.
pub const MAX_HEADER_VALUE_BYTES: usize = 8 * 1024;
/// Longest position, in bytes; SQL stores use 16, change feeds carry continuation tokens.
pub const MAX_POSITION_BYTES: usize = 4 * 1024;
/// Most events in one `append`.
pub const MAX_APPEND_EVENTS: usize = 100_000;
/// Most partitions of one outbox.
pub const MAX_PARTITIONS: u32 = 1_024;
/// Default byte budget of one sink in one relay: bytes read and not yet checkpointed (32 MiB).
pub const BUDGET_BYTES: usize = 32 * 1024 * 1024;
/// Most records read and not yet checkpointed, for one sink in one partition.
pub const WINDOW_RECORDS: usize = 65_536;
/// Default time to live of a lease, in milliseconds.
pub const LEASE_TTL_MS: u64 = 5_000;

const _: () = assert!(
    MAX_PAYLOAD_BYTES * 2 <= BUDGET_BYTES,
    "one event of the largest size must fit the relay's budget with room to spare"
);
