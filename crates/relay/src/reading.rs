//! Reads ahead of a pipeline, on a task of its own.
//!
//! What lives here: the reader's task, its retries, and the channel to the pipeline. What does not:
//! what becomes of a batch.
//! Invariant: at most one batch waits in the channel and one in hand, so that reading ahead is
//! bounded by two pages.

use std::sync::Arc;
use std::time::Duration;

use postrider_core::{
    BatchLimit, Clock, ConsumerName, Error, ErrorKind, PartitionId, Position, ReadOutcome, Reader,
    Result, Source, StartFrom,
};
use tokio::sync::{mpsc, watch};

use crate::told::Told;

/// One page: large enough that its fixed cost disappears, small enough to share a budget.
pub(crate) const PAGE: BatchLimit = BatchLimit { records: 1_024, bytes: 1024 * 1024 };
/// The first wait after a failure; each one after it is twice as long.
const FIRST_WAIT: Duration = Duration::from_millis(50);
const MAX_WAIT: Duration = Duration::from_secs(5);

/// The pipeline's end of the reading.
pub(crate) struct Reading {
    pub(crate) batches: mpsc::Receiver<Result<ReadOutcome>>,
    confirmed: watch::Sender<Position>,
}

impl Reading {
    /// Tells the source that everything up to `position` is durable.
    pub(crate) fn confirm(&self, position: Position) {
        self.confirmed.send_replace(position);
    }
}

/// What is read, by whom, and from where.
pub(crate) struct ReadFrom {
    pub(crate) source: Arc<dyn Source>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) consumer: ConsumerName,
    pub(crate) partition: PartitionId,
    pub(crate) from: StartFrom,
}

/// Starts reading; the future must be run on a task, and ends when `Reading` is dropped.
pub(crate) fn start(what: ReadFrom) -> (Reading, impl Future<Output = ()> + Send) {
    let (sender, batches) = mpsc::channel(1);
    let (confirmed, confirmed_here) = watch::channel(Position::START);
    (Reading { batches, confirmed }, read(what, sender, confirmed_here))
}

async fn read(
    what: ReadFrom,
    batches: mpsc::Sender<Result<ReadOutcome>>,
    mut confirmed: watch::Receiver<Position>,
) {
    let mut trouble = Trouble::default();
    let Some(mut reader) = open(&what, &batches, &mut trouble).await else { return };
    loop {
        let outcome = tokio::select! {
            biased;
            () = batches.closed() => return,
            changed = confirmed.changed() => {
                if changed.is_err() {
                    return;
                }
                reader.confirmed(&confirmed.borrow_and_update());
                continue;
            }
            outcome = reader.next(PAGE) => outcome,
        };
        match outcome {
            Ok(outcome) => {
                trouble.over(&what);
                let ended = matches!(outcome, ReadOutcome::Ended(_));
                if batches.send(Ok(outcome)).await.is_err() || ended {
                    return;
                }
            }
            Err(error) if may_pass(&error) => {
                trouble.pause(&what, &error).await;
            }
            Err(error) => {
                // A closed channel means that nobody wants to hear it any more.
                let _ = batches.send(Err(error)).await;
                return;
            }
        }
    }
}

async fn open(
    what: &ReadFrom,
    batches: &mpsc::Sender<Result<ReadOutcome>>,
    trouble: &mut Trouble,
) -> Option<Box<dyn Reader>> {
    loop {
        let opened = what.source.open(&what.consumer, &what.partition, what.from.clone()).await;
        match opened {
            Ok(reader) => return Some(reader),
            Err(error) if may_pass(&error) && !batches.is_closed() => {
                trouble.pause(what, &error).await;
            }
            Err(error) => {
                let _ = batches.send(Err(error)).await;
                return None;
            }
        }
    }
}

fn may_pass(error: &Error) -> bool {
    match error.kind() {
        ErrorKind::Transient | ErrorKind::Throttled { .. } => true,
        ErrorKind::Permanent | ErrorKind::Fenced | ErrorKind::Unsupported | ErrorKind::Corrupt => {
            false
        }
    }
}

/// Failures in a row, of one partition and sink.
#[derive(Default)]
struct Trouble {
    attempts: u32,
    told: Told,
}

impl Trouble {
    /// Tells of it, unless that was done just now, and waits: longer each time.
    async fn pause(&mut self, what: &ReadFrom, error: &Error) {
        let text = error.chain();
        let wait = FIRST_WAIT.saturating_mul(1 << self.attempts.min(16)).min(MAX_WAIT);
        self.attempts = self.attempts.saturating_add(1);
        if self.told.is_news(&text, what.clock.elapsed()) {
            tracing::warn!(
                partition = %what.partition, sink = %what.consumer, attempt = self.attempts,
                error = text, "the source can't be read for now; trying again"
            );
        }
        what.clock.sleep(wait).await;
    }

    fn over(&mut self, what: &ReadFrom) {
        self.attempts = 0;
        if self.told.is_over() {
            tracing::info!(
                partition = %what.partition, sink = %what.consumer,
                "the source can be read again"
            );
        }
    }
}
