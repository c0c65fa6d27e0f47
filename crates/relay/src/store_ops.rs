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
    Clock, ConsumerName, DeadLetterId, DeadLetterState, ErrorKind, HeldLease, Key, NewDeadLetter,
    Position, RelayStore, Result, Successor, Tally,
};

use crate::failpoint::failpoint;
use crate::window::Seq;

/// Wait before a failed write is tried again; doubles up to `MAX_WAIT`.
const FIRST_WAIT: Duration = Duration::from_millis(20);
const MAX_WAIT: Duration = Duration::from_secs(1);
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
        let mut wait = FIRST_WAIT;
        loop {
            let error = match self.once(&op).await {
                Ok(()) => return (op, Ok(())),
                Err(error) => error,
            };
            match error.kind() {
                ErrorKind::Transient | ErrorKind::Throttled { .. } => {}
                ErrorKind::Permanent
                | ErrorKind::Fenced
                | ErrorKind::Unsupported
                | ErrorKind::Corrupt => return (op, Err(error)),
            }
            tracing::warn!(
                partition = %self.lease.partition(), sink = %self.consumer,
                epoch = self.lease.epoch().get(), error = %error.chain(),
                "the database refused a write for now; trying again"
            );
            self.clock.sleep(wait).await;
            wait = (wait * 2).min(MAX_WAIT);
        }
    }
}

type Write = Pin<Box<dyn Future<Output = (StoreOp, Result<()>)> + Send>>;

pub(crate) struct StoreOps {
    desk: Desk,
    queue: VecDeque<StoreOp>,
    writing: Option<Write>,
}

impl StoreOps {
    pub(crate) fn new(desk: Desk) -> Self {
        Self { desk, queue: VecDeque::new(), writing: None }
    }

    /// Queues a write; letters join the last queued write of letters, ids that of ids.
    pub(crate) fn push(&mut self, op: StoreOp) {
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
        done
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.writing.is_none() && self.queue.is_empty()
    }
}
