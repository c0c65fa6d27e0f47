//! A store in memory: the model that the real ones are compared with.
//!
//! What lives here: the store and its locks. What does not: durability, other processes, a clock of
//! its own (time comes in by [`Clock`]).
//! Invariant: locks are taken in the order documents, ledger, outbox, none is held across an await,
//! and each holds only for as long as it takes to copy a page or to write one change.

mod append;
mod checkpoints;
mod dead_letters;
mod documents;
mod feed;
mod leases;
mod outbox;
mod partitions;
mod retention;

use std::sync::{Arc, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

use postrider_core::{Clock, EventId, limits::MAX_PARTITIONS};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::sync::Notify;
use uuid::Uuid;

pub use append::{MemoryTransaction, OnDuplicate};
pub use documents::{MAX_BATCH_BYTES, MAX_BATCH_OPERATIONS};

use checkpoints::Ledger;
use documents::Documents;
use outbox::Outbox;

/// Events, leases, checkpoints, dead letters and documents in memory. Clones share one store.
///
/// It implements every seam that a source's own database has, exactly by the words of the seams.
#[derive(Clone)]
pub struct MemoryStore {
    inner: Arc<Inner>,
}

struct Inner {
    identity: String,
    clock: Arc<dyn Clock>,
    random: Mutex<StdRng>,
    documents: Mutex<Documents>,
    ledger: Mutex<Ledger>,
    outbox: RwLock<Outbox>,
    news: Notify,
}

impl MemoryStore {
    /// An empty store with `partitions` partitions. Leases run by `clock.elapsed()`, positions by
    /// `clock.now()`.
    ///
    /// # Panics
    /// If `partitions` is 0 or above [`MAX_PARTITIONS`].
    pub fn new(partitions: u32, clock: Arc<dyn Clock>) -> Self {
        let (seed, _) = Uuid::new_v4().as_u64_pair();
        Self::seeded(partitions, clock, seed)
    }

    /// The same, with ids and positions that repeat for the same seed and clock.
    ///
    /// # Panics
    /// As [`new`](Self::new).
    pub fn seeded(partitions: u32, clock: Arc<dyn Clock>, seed: u64) -> Self {
        assert!(
            (1..=MAX_PARTITIONS).contains(&partitions),
            "a store has 1 to {MAX_PARTITIONS} partitions, not {partitions}"
        );
        let mut random = StdRng::seed_from_u64(seed);
        let identity = format!("memory-{:016x}", random.next_u64());
        Self {
            inner: Arc::new(Inner {
                identity,
                clock,
                random: Mutex::new(random),
                documents: Mutex::default(),
                ledger: Mutex::default(),
                outbox: RwLock::new(Outbox::new(partitions)),
                news: Notify::new(),
            }),
        }
    }
}

impl Inner {
    fn documents(&self) -> MutexGuard<'_, Documents> {
        self.documents.lock().expect("no holder of the documents lock panics")
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().expect("no holder of the ledger lock panics")
    }

    fn outbox(&self) -> RwLockReadGuard<'_, Outbox> {
        self.outbox.read().expect("no writer of the outbox panics")
    }

    fn outbox_mut(&self) -> RwLockWriteGuard<'_, Outbox> {
        self.outbox.write().expect("no writer of the outbox panics")
    }

    /// Ten bytes for a UUIDv7 or a fresh ULID; the last bit is set, so that they are never all
    /// zero and a fresh ULID never equals the plain time.
    fn ten_random_bytes(&self) -> [u8; 10] {
        let mut bytes = [0; 10];
        self.random.lock().expect("drawing bytes never panics").fill_bytes(&mut bytes);
        bytes[9] |= 1;
        bytes
    }

    fn fresh_id(&self) -> EventId {
        let ms = self.clock.now().as_millis();
        let bytes = self.ten_random_bytes();
        EventId::from_uuid(uuid::Builder::from_unix_timestamp_millis(ms, &bytes).into_uuid())
    }
}
