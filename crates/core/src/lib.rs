//! Vocabulary and seams of Postrider.
//!
//! What lives here: the words (event, key, partition, position, record) and the traits that stores
//! and sinks implement. What does not: input and output, a runtime, reading a clock, serialisation.
//! Invariant: this crate knows no store, no broker and no relay, and everything else may use it.

mod checkpoint;
mod clock;
mod dead_letter;
mod document;
mod error;
mod event;
mod feed;
mod feed_source;
mod key;
mod lease;
pub mod limits;
mod names;
mod partition;
mod position;
mod record;
mod retention;
mod retry;
mod secret;
mod sink;
mod source;
mod timestamp;
mod trace;
pub mod ulid;

pub use checkpoint::{Checkpoint, Checkpoints, ConsumerProgress, Tally};
pub use clock::Clock;
pub use dead_letter::{
    DeadLetter, DeadLetterFilter, DeadLetterId, DeadLetterState, DeadLetters, NewDeadLetter,
};
pub use document::{
    Document, DocumentBatch, DocumentError, DocumentOperation, DocumentPage, DocumentRead,
    DocumentStore, ETag, PageRequest, SavedDocument,
};
pub use error::{Error, ErrorKind, Result};
pub use event::{Event, EventId, Headers, NewEvent, NewEventBuilder};
pub use feed::{Feed, FeedPage};
pub use feed_source::{FeedSource, PollInterval};
pub use key::Key;
pub use lease::{Acquired, Epoch, Heartbeat, HeldLease, LeaseInfo, Leases, News, Renewal};
pub use names::{ConsumerName, ContentType, EventType, GroupName, RelayId, Topic};
pub use partition::{PartitionId, key_hash};
pub use position::Position;
pub use record::{Batch, BatchLimit, Entry, Malformed, Record};
pub use retention::{Pruned, Retention, RetentionPolicy};
pub use retry::{Attempt, Jitter, MAX_RETRY_AFTER, OnFailure, Reaction, RetryPolicy, react};
pub use secret::Secret;
pub use sink::{Capabilities, Chain, Outcome, Publish, Sink, by_key};
pub use source::{ReadOutcome, Reader, Source, StartFrom, Successor};
pub use timestamp::Timestamp;
pub use trace::{TRACEPARENT, TRACESTATE, TraceContext};

/// Everything a relay keeps beside the events: one bundle for a source's own database.
pub trait RelayStore: Leases + Checkpoints + DeadLetters + Retention {}
impl<S: Leases + Checkpoints + DeadLetters + Retention + ?Sized> RelayStore for S {}
