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

/// One page: large enough that its fixed cost disappears, small enough to share a budget.
pub(crate) const PAGE: BatchLimit = BatchLimit { records: 1_024, bytes: 1024 * 1024 };
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
    let Some(mut reader) = open(&what, &batches).await else { return };
    let mut wait = FIRST_WAIT;
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
                wait = FIRST_WAIT;
                let ended = matches!(outcome, ReadOutcome::Ended(_));
                if batches.send(Ok(outcome)).await.is_err() || ended {
                    return;
                }
            }
            Err(error) if may_pass(&error) => {
                pause(&what, &error, &mut wait).await;
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
) -> Option<Box<dyn Reader>> {
    let mut wait = FIRST_WAIT;
    loop {
        let opened = what.source.open(&what.consumer, &what.partition, what.from.clone()).await;
        match opened {
            Ok(reader) => return Some(reader),
            Err(error) if may_pass(&error) && !batches.is_closed() => {
                pause(what, &error, &mut wait).await;
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

async fn pause(what: &ReadFrom, error: &Error, wait: &mut Duration) {
    tracing::warn!(
        partition = %what.partition, sink = %what.consumer, error = %error.chain(),
        "the source can't be read for now; trying again"
    );
    what.clock.sleep(*wait).await;
    *wait = (*wait * 2).min(MAX_WAIT);
}
