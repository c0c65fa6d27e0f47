//! Writes to the source's database, one at a time and in order.
//!
//! What lives here: the queue of parkings, releases and checkpoints of one pipeline, and the retry
//! of each. What does not: deciding them.
//! Invariant: writes take effect in the order in which they were asked for, so that a letter is
//! durable before the checkpoint passes it; every write can be repeated after an unknown outcome.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use postrider_core::{
    Clock, ConsumerName, DeadLetterId, DeadLetterState, Error, ErrorKind, HeldLease, Key,
    NewDeadLetter, Position, RelayStore, Result, Successor, Tally,
};

use crate::failpoint::failpoint;
use crate::status::PipelineStatus;
use crate::told::Told;
use crate::window::{self, Seq};

/// Wait before a failed write is tried again; doubles up to `MAX_WAIT`.
const FIRST_WAIT: Duration = Duration::from_millis(20);
const MAX_WAIT: Duration = Duration::from_secs(1);
/// A database's own wish is honoured up to this; longer, and the lease's trust would end first.
const MAX_ASKED_WAIT: Duration = Duration::from_secs(4);
/// Letters in one write at most.
const MAX_LETTERS: usize = 1_000;

#[derive(Debug)]
pub(crate) enum StoreOp {
    /// Letters to write; the records (by number) and keys that they settle.
    Park {
        letters: Vec<NewDeadLetter>,
        seqs: Vec<Seq>,
        keys: Vec<Key>,
    },
    Resolve {
        ids: Vec<DeadLetterId>,
    },
    Refuse {
        id: DeadLetterId,
        state: DeadLetterState,
        reason: String,
        attempts: u32,
    },
    Advance {
        to: Position,
        tally: Tally,
    },
    Finish {
        successors: Vec<Successor>,
    },
}

/// Where a pipeline's writes go, and under which lease.
#[derive(Clone)]
pub(crate) struct Desk {
    pub(crate) store: Arc<dyn RelayStore>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) lease: Arc<HeldLease>,
    pub(crate) consumer: ConsumerName,
    pub(crate) status: Arc<PipelineStatus>,
}

impl Desk {
    async fn once(&self, op: &StoreOp) -> Result<()> {
        let (lease, consumer) = (&self.lease, &self.consumer);
        match op {
            StoreOp::Park { letters, .. } => {
                failpoint!("relay::before_park");
                self.store.park(lease, consumer, letters).await?;
                failpoint!("relay::after_park");
                Ok(())
            }
            StoreOp::Resolve { ids } => {
                failpoint!("relay::before_resolve");
                self.store.resolve(lease, consumer, ids).await
            }
            StoreOp::Refuse { id, state, reason, attempts } => {
                self.store.refuse(lease, *id, *state, reason, *attempts).await
            }
            StoreOp::Advance { to, tally } => {
                failpoint!("relay::before_checkpoint");
                self.store.advance(lease, consumer, to, *tally).await?;
                failpoint!("relay::after_checkpoint");
                Ok(())
            }
            StoreOp::Finish { successors } => self.store.finish(lease, consumer, successors).await,
        }
    }

    /// Repeats a write until it is done or can't be.
    async fn write(self, op: StoreOp) -> (StoreOp, Result<()>) {
        let (mut patience, mut told) = (Patience::new(), Told::default());
        loop {
            let error = match self.once(&op).await {
                Ok(()) => {
                    self.status.written();
                    return (op, Ok(()));
                }
                Err(error) => error,
            };
            let Some(wait) = patience.after(&error) else {
                self.status.written();
                return (op, Err(error));
            };
            let text = error.chain();
            self.status.unwritten(self.clock.elapsed(), &text);
            if told.is_news(&text, self.clock.elapsed()) {
                tracing::warn!(
                    partition = %self.lease.partition(), sink = %self.consumer,
                    epoch = self.lease.epoch().get(), error = text,
                    "the database refused a write for now; trying again"
                );
            }
            self.clock.sleep(wait).await;
        }
    }
}

/// How a call to the database that failed for now is repeated.
pub(crate) struct Patience(Duration);

impl Patience {
    pub(crate) fn new() -> Self {
        Self(FIRST_WAIT)
    }

    /// How long to wait before the next try; nothing when no try can succeed.
    pub(crate) fn after(&mut self, error: &Error) -> Option<Duration> {
        let asked = match error.kind() {
            ErrorKind::Transient => Duration::ZERO,
            ErrorKind::Throttled { retry_after } => {
                retry_after.unwrap_or_default().min(MAX_ASKED_WAIT)
            }
            ErrorKind::Permanent
            | ErrorKind::Fenced
            | ErrorKind::Unsupported
            | ErrorKind::Corrupt => return None,
        };
        let wait = self.0.max(asked);
        self.0 = (self.0 * 2).min(MAX_WAIT);
        Some(wait)
    }
}

type Write = Pin<Box<dyn Future<Output = (StoreOp, Result<()>)> + Send>>;

pub(crate) struct StoreOps {
    desk: Desk,
    queue: VecDeque<StoreOp>,
    writing: Option<Write>,
    /// Of the letters that wait to be written or are being written.
    bytes: usize,
    /// Records up to the checkpoints that wait or are being written.
    records: u64,
}

fn cost_bytes(op: &StoreOp) -> usize {
    match op {
        StoreOp::Park { letters, .. } => {
            letters.iter().map(|letter| letter.entry.cost_bytes()).sum()
        }
        StoreOp::Resolve { .. }
        | StoreOp::Refuse { .. }
        | StoreOp::Advance { .. }
        | StoreOp::Finish { .. } => 0,
    }
}

/// The records that a checkpoint passes.
fn passed(op: &StoreOp) -> u64 {
    match op {
        StoreOp::Advance { tally, .. } => window::records(tally),
        StoreOp::Park { .. }
        | StoreOp::Resolve { .. }
        | StoreOp::Refuse { .. }
        | StoreOp::Finish { .. } => 0,
    }
}

impl StoreOps {
    pub(crate) fn new(desk: Desk) -> Self {
        Self { desk, queue: VecDeque::new(), writing: None, bytes: 0, records: 0 }
    }

    /// Queues a write; letters join the last queued write of letters, ids that of ids, and a
    /// checkpoint takes the place of the one before it.
    pub(crate) fn push(&mut self, op: StoreOp) {
        self.bytes += cost_bytes(&op);
        self.records += passed(&op);
        match (self.queue.back_mut(), op) {
            (
                Some(StoreOp::Park { letters, seqs, keys }),
                StoreOp::Park { letters: more, seqs: more_seqs, keys: more_keys },
            ) if letters.len() + more.len() <= MAX_LETTERS => {
                letters.extend(more);
                seqs.extend(more_seqs);
                keys.extend(more_keys);
            }
            (Some(StoreOp::Resolve { ids }), StoreOp::Resolve { ids: more })
                if ids.len() + more.len() <= MAX_LETTERS =>
            {
                ids.extend(more);
            }
            (
                Some(StoreOp::Advance { to, tally }),
                StoreOp::Advance { to: further, tally: more },
            ) => {
                *to = further;
                tally.published += more.published;
                tally.parked += more.parked;
            }
            (_, op) => self.queue.push_back(op),
        }
    }

    /// Ends when the write under way is done; for ever pending when there is none. Cancel-safe.
    pub(crate) async fn done(&mut self) -> (StoreOp, Result<()>) {
        if self.writing.is_none() {
            let Some(op) = self.queue.pop_front() else { return std::future::pending().await };
            self.writing = Some(Box::pin(self.desk.clone().write(op)));
        }
        let writing = self.writing.as_mut().expect("set above");
        let done = writing.await;
        self.writing = None;
        self.bytes -= cost_bytes(&done.0);
        self.records -= passed(&done.0);
        done
    }

    /// What the letters that are not written yet cost of the byte budget.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Records that were finished and are not behind a durable checkpoint, but for those that no
    /// write was asked for.
    pub(crate) fn records(&self) -> usize {
        usize::try_from(self.records).unwrap_or(usize::MAX)
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.writing.is_none() && self.queue.is_empty()
    }
}
