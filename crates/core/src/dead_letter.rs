//! Dead letters: events that a sink refused, and the ones that wait behind them.
//!
//! What lives here: the seam. What does not: the decision to park (`retry.rs`).
//! Invariant: within a key, letters leave in the order in which they came; while a key has any
//! letter that is not skipped, later events of the key join them.
//!
//! ```text
//!            requeue             confirmed
//!  Parked ───────────▶ Requeued ───────────▶ (gone, counted as published)
//!    │  ▲                  │ refused again
//!    │  └──────────────────┘
//!    │ skip                  drop
//!    └──────▶ Skipped ───────────▶ (gone, counted as dropped)
//!  Waiting: behind a parked one of its key; released when that one has left or is skipped
//! ```

use async_trait::async_trait;

use crate::{
    BatchLimit, ConsumerName, Entry, HeldLease, Key, PartitionId, Position, Result, Timestamp,
};

/// Numbers dead letters within a store, in the order in which they were written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeadLetterId(u64);

impl DeadLetterId {
    /// From a store's number.
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The number.
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// Where a dead letter stands; see the diagram at the head of this file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DeadLetterState {
    /// The sink refused it; its key waits for a person.
    Parked,
    /// Behind a parked one of its key.
    Waiting,
    /// A person asked to send it again.
    Requeued,
    /// Given up, kept to be seen; holds nothing back.
    Skipped,
}

/// A dead letter to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewDeadLetter {
    /// The event with its position, or the unreadable bytes.
    pub entry: Entry,
    /// How it begins. A relay that sets a key aside between two attempts begins with `Requeued`.
    pub state: DeadLetterState,
    /// Why, for a person. Without payload or secret.
    pub reason: String,
    /// Attempts that were made.
    pub attempts: u32,
}

/// A dead letter as it is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeadLetter {
    /// Its number.
    pub id: DeadLetterId,
    /// Whose sink refused it.
    pub consumer: ConsumerName,
    /// The partition it came from.
    pub partition: PartitionId,
    /// The event with its position, or the unreadable bytes.
    pub entry: Entry,
    /// Where it stands.
    pub state: DeadLetterState,
    /// Why, for a person.
    pub reason: String,
    /// Attempts that were made, over all requeues.
    pub attempts: u32,
    /// When it was first written, in the database's time.
    pub parked_at: Timestamp,
    /// When its state or reason last changed, in the database's time.
    pub updated_at: Timestamp,
}

/// Which dead letters a person means. All given parts must match; none given means all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeadLetterFilter {
    /// By number.
    pub ids: Vec<DeadLetterId>,
    /// Of one consumer.
    pub consumer: Option<ConsumerName>,
    /// Of one key.
    pub key: Option<Key>,
    /// In one state.
    pub state: Option<DeadLetterState>,
}

/// Dead letters, in the source's own database.
#[async_trait]
pub trait DeadLetters: Send + Sync {
    /// Writes letters in the given order, in one fenced write. A letter whose consumer, partition
    /// and position are already there is left as it is, so that a repetition after a crash adds
    /// none. Returns how many were added.
    ///
    /// # Errors
    /// `Fenced` when the lease was taken over; then nothing was written.
    async fn park(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        letters: &[NewDeadLetter],
    ) -> Result<u64>;

    /// Which of `keys` have letters that hold later events back (any state but `Skipped`).
    async fn blocked(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        keys: &[Key],
    ) -> Result<Vec<Key>>;

    /// How many letters hold keys back in this partition: `Skipped` ones do not count.
    async fn blocking(&self, consumer: &ConsumerName, partition: &PartitionId) -> Result<u64>;

    /// Letters that may be sent now, oldest first: of each key, those before its first `Parked`
    /// one, `Skipped` ones left out. Unreadable ones never come, and none before the consumer's
    /// checkpoint has passed its place: until then its event may be read again, and once the
    /// letter was sent and removed nothing would tell that it was.
    async fn released(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        limit: BatchLimit,
    ) -> Result<Vec<DeadLetter>>;

    /// Removes letters that the sink confirmed and counts them as published, in one fenced write.
    async fn resolve(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        ids: &[DeadLetterId],
    ) -> Result<()>;

    /// Parks a released letter again (or skips it, by `state`), with the new reason and attempts
    /// added, in one fenced write.
    async fn refuse(
        &self,
        lease: &HeldLease,
        id: DeadLetterId,
        state: DeadLetterState,
        reason: &str,
        attempts: u32,
    ) -> Result<()>;

    /// The letters that match, by number, after `after`, at most `limit`.
    async fn list(
        &self,
        filter: &DeadLetterFilter,
        after: Option<DeadLetterId>,
        limit: usize,
    ) -> Result<Vec<DeadLetter>>;

    /// Marks `Parked` and `Skipped` letters that match as `Requeued`. Returns how many changed.
    async fn requeue(&self, filter: &DeadLetterFilter) -> Result<u64>;

    /// Gives up `Parked` and `Requeued` letters that match: they stay visible and hold nothing
    /// back. Returns how many changed.
    async fn skip(&self, filter: &DeadLetterFilter) -> Result<u64>;

    /// Deletes letters that match for good and counts them as dropped. Returns how many.
    async fn discard(&self, filter: &DeadLetterFilter) -> Result<u64>;

    /// The letter at a place, if one is there.
    async fn at(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        position: &Position,
    ) -> Result<Option<DeadLetter>>;
}
