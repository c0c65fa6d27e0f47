//! The sink itself.
//!
//! What lives here: `JsonLines` and its capabilities. What does not: writing (`writer.rs`).
//! Invariant: the events of one call share one fate, since they share one write.

use std::fmt;
use std::io::Write;
use std::sync::Arc;

use async_trait::async_trait;
use postrider_core::limits::BUDGET_BYTES;
use postrider_core::{Capabilities, Chain, Clock, Outcome, Publish, Result, Sink};

use crate::config::JsonlConfig;
use crate::error::share;
use crate::writer::{Output, WriterThread, file, standard_output};

/// Large, because each call costs one write and one sync; four times as many gained nothing.
const MAX_BATCH_RECORDS: usize = 2_048;
/// An eighth of the relay's budget, so that reading goes on while a batch is on its way to disk.
const MAX_BATCH_BYTES: usize = BUDGET_BYTES / 8;
/// While one group of batches is synced, the next ones gather.
const MAX_IN_FLIGHT: usize = 2;

/// Writes each event as one line of JSON.
///
/// # Ordering
/// Lines stand in the order in which `publish` was called; within a call, in the order given.
/// # Cancellation
/// A dropped `publish` may or may not have written its lines: unknown, so delivered again.
pub struct JsonLines {
    writer: WriterThread,
    target: &'static str,
}

impl JsonLines {
    /// The sink of a configuration. A file is opened by `check` or by the first `publish`.
    ///
    /// # Errors
    /// [`ErrorKind::Permanent`](postrider_core::ErrorKind::Permanent) for impossible settings.
    pub fn new(config: &JsonlConfig, clock: Arc<dyn Clock>) -> Result<Self> {
        config.check()?;
        let (output, target) = match config.is_standard_output() {
            true => (standard_output(), "standard output"),
            false => (file(config.clone(), clock), "file"),
        };
        Ok(Self { writer: WriterThread::start(output)?, target })
    }

    /// Lines to any writer, for example a pipe; flushed after each batch.
    ///
    /// # Errors
    /// [`ErrorKind::Transient`](postrider_core::ErrorKind::Transient) if no thread can be started.
    pub fn to_writer(writer: impl Write + Send + 'static) -> Result<Self> {
        let output = Output::Stream { writer: Box::new(writer), torn: false };
        Ok(Self { writer: WriterThread::start(output)?, target: "writer" })
    }
}

impl fmt::Debug for JsonLines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JsonLines({})", self.target)
    }
}

#[async_trait]
impl Sink for JsonLines {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            max_event_bytes: None,
            max_batch_records: MAX_BATCH_RECORDS,
            max_batch_bytes: MAX_BATCH_BYTES,
            max_in_flight: MAX_IN_FLIGHT,
            chain: Chain::Many,
            dedup_window: None,
        }
    }

    async fn publish(&self, batch: Publish<'_>) -> Vec<Outcome> {
        let records = batch.records();
        let Err(error) = self.writer.append(batch.partition(), records).await else {
            return records.iter().map(|_| Outcome::Confirmed).collect();
        };
        records.iter().map(|_| Outcome::Failed(share(&error))).collect()
    }

    async fn check(&self) -> Result<()> {
        self.writer.check().await
    }

    async fn close(&self) -> Result<()> {
        self.writer.close().await
    }
}
