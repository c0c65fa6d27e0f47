//! The thread that does the blocking work.
//!
//! What lives here: the queue to the thread, the grouping of waiting batches into one write, and
//! the two kinds of output. What does not: the file's locks and repairs (`log_file.rs`).
//! Invariant: a batch is answered `Ok` only after the write and flush (and sync) that covered it.

use std::io::{self, Write};
use std::sync::Arc;
use std::thread;

use postrider_core::{Error, PartitionId, Record, Result};
use tokio::sync::{mpsc, oneshot};

use crate::encode::LineEncoder;
use crate::error::Failure;
use crate::log_file::LogFile;

/// Batches that may wait; more callers wait for a place.
const QUEUE_BATCHES: usize = 64;
/// Waiting batches are joined into one write and one sync up to about this size.
const GROUP_BYTES: usize = 8 * 1024 * 1024;

type Reply = oneshot::Sender<Result<(), Failure>>;

enum Command {
    Append { partition: PartitionId, records: Vec<Record>, reply: Reply },
    Check(Reply),
    Close(Reply),
}

/// Where lines go.
pub(crate) enum Output {
    File(LogFile),
    Stream { writer: Box<dyn Write + Send>, torn: bool },
}

impl Output {
    fn append(&mut self, lines: &[u8]) -> Result<(), Failure> {
        match self {
            Self::File(file) => {
                file.append(lines).map_err(|cause| Failure::new("append to the file", cause))
            }
            Self::Stream { writer, torn } => write_stream(writer, torn, lines)
                .map_err(|cause| Failure::new("write to the output", cause)),
        }
    }

    fn check(&mut self) -> Result<(), Failure> {
        match self {
            Self::File(file) => file.check().map_err(|cause| Failure::new("open the file", cause)),
            Self::Stream { writer, .. } => {
                writer.flush().map_err(|cause| Failure::new("write to the output", cause))
            }
        }
    }
}

/// Writes and flushes whole lines; `torn` tells whether the last byte that went out is within one.
/// A line left unfinished by a failure is ended first.
fn write_stream(writer: &mut dyn Write, torn: &mut bool, lines: &[u8]) -> io::Result<()> {
    if *torn {
        writer.write_all(b"\n")?;
        *torn = false;
    }
    let mut rest = lines;
    while !rest.is_empty() {
        match writer.write(rest) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => {
                *torn = rest[..count].last() != Some(&b'\n');
                rest = &rest[count..];
            }
            Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
            Err(cause) => return Err(cause),
        }
    }
    writer.flush()
}

/// The way to the thread, which ends when this is dropped.
#[derive(Clone)]
pub(crate) struct WriterThread(mpsc::Sender<Command>);

impl WriterThread {
    /// Starts the thread.
    pub(crate) fn start(output: Output) -> Result<Self> {
        let (sender, queue) = mpsc::channel(QUEUE_BATCHES);
        thread::Builder::new()
            .name("postrider-jsonl".into())
            .spawn(move || run(output, queue))
            .map_err(|cause| Error::transient("start the writing thread").with_source(cause))?;
        Ok(Self(sender))
    }

    /// Appends one batch and waits until it counts.
    pub(crate) async fn append(&self, partition: &PartitionId, records: &[Record]) -> Result<()> {
        let (partition, records) = (partition.clone(), records.to_vec());
        self.ask(|reply| Command::Append { partition, records, reply }).await
    }

    /// Opens the output.
    pub(crate) async fn check(&self) -> Result<()> {
        self.ask(Command::Check).await
    }

    /// Waits until all before it is written, and ends the thread.
    pub(crate) async fn close(&self) -> Result<()> {
        let (reply, answer) = oneshot::channel();
        if self.0.send(Command::Close(reply)).await.is_err() {
            return Ok(());
        }
        // No answer: somebody else's close came first, and all that was written stands.
        answer.await.unwrap_or(Ok(())).map_err(|failure| failure.to_error())
    }

    async fn ask(&self, command: impl FnOnce(Reply) -> Command) -> Result<()> {
        let closed = || Error::transient("the output is closed");
        let (reply, answer) = oneshot::channel();
        self.0.send(command(reply)).await.map_err(|_| closed())?;
        answer.await.map_err(|_| closed())?.map_err(|failure| failure.to_error())
    }
}

fn run(mut output: Output, mut queue: mpsc::Receiver<Command>) {
    let mut encoder = LineEncoder::default();
    let mut lines = Vec::new();
    let mut waiting: Vec<Reply> = Vec::new();
    while let Some(first) = queue.blocking_recv() {
        let mut next = Some(first);
        let mut other = None;
        while let Some(command) = next.take() {
            match command {
                Command::Append { partition, records, reply } => {
                    // Nobody waits for a batch whose call was dropped; it will come again.
                    if !reply.is_closed() {
                        records.iter().for_each(|r| encoder.write(&mut lines, &partition, r));
                        waiting.push(reply);
                    }
                    if lines.len() < GROUP_BYTES {
                        next = queue.try_recv().ok();
                    }
                }
                Command::Check(_) | Command::Close(_) => other = Some(command),
            }
        }
        if !waiting.is_empty() {
            let result = output.append(&lines);
            waiting.drain(..).for_each(|reply| answer(reply, result.clone()));
        }
        lines.clear();
        lines.shrink_to(GROUP_BYTES);
        match other {
            Some(Command::Check(reply)) => answer(reply, output.check()),
            Some(Command::Close(reply)) => return answer(reply, Ok(())),
            Some(Command::Append { .. }) | None => {}
        }
    }
}

/// A caller that went away needs no answer.
fn answer(reply: Reply, result: Result<(), Failure>) {
    let _ = reply.send(result);
}

/// Standard output, written in whole batches under its lock.
pub(crate) fn standard_output() -> Output {
    Output::Stream { writer: Box::new(io::stdout()), torn: false }
}

/// The file of a configuration.
pub(crate) fn file(config: crate::JsonlConfig, clock: Arc<dyn postrider_core::Clock>) -> Output {
    Output::File(LogFile::new(config, clock))
}
