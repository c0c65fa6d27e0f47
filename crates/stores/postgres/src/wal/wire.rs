//! One connection that speaks replication: slots, and the stream of a log.
//!
//! What lives here: commands and their answers, the stream, statuses, and an orderly end. What does
//! not: being let in (`login.rs`), cutting bytes (`frames.rs`), what the stream's messages mean
//! (`pgoutput.rs`), and when to do any of it.
//! Invariant: a command that was given up leaves a connection that refuses the next one, rather
//! than take one answer for another; and of the statuses only the newest waits to be sent.

use std::time::Duration;

use postgres_protocol::message::frontend;
use postrider_core::{Error, Result};
use tokio::io::{AsyncRead, AsyncWrite};

use super::frames::{self, Broken, Frames, Message};
use super::login::{self, Login, Stream, behind_a_pooler, speaks_no_replication};
use super::lsn::Lsn;
use crate::error::replication_error;
use crate::server::Servers;

pub(crate) use super::frames::Frame;

/// No command of this crate has more rows.
const ROWS_MAX: usize = 1_000;
/// For the server's last word after ours; data that is still under way comes before it.
const FINISH_WITHIN: Duration = Duration::from_secs(5);
const PLACE: &str = "read the log";

/// One connection. Dropping it closes the socket: the server ends its side once it notices, and a
/// temporary slot goes with it.
pub(crate) struct Walsender {
    wire: Wire<Box<dyn Stream>>,
    version: u32,
    pid: u32,
}

/// Which cluster answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct System {
    pub(crate) system: u64,
    pub(crate) timeline: u32,
    pub(crate) flushed: Lsn,
}

/// Where a new slot begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Seam {
    /// The stream has what is committed from here on, and the snapshot the rest.
    pub(crate) consistent: Lsn,
    /// For `SET TRANSACTION SNAPSHOT`, until the next command on this connection. Whoever has
    /// imported it by then keeps it.
    pub(crate) snapshot: String,
}

/// How long a slot lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SlotKind {
    /// Until it is dropped. `failover` asks that standbys keep a copy; before version 17 there is
    /// no such thing, and it is left out.
    Permanent { failover: bool },
    /// As long as the connection.
    Temporary,
}

impl Walsender {
    /// Connects to the first server that lets it in; one that takes no writes is passed over, as
    /// for all of the store's connections.
    ///
    /// # Errors
    /// As for the store's other connections, and `Permanent` behind a pooler that does not know
    /// replication, or without the privilege for it (42501).
    ///
    /// # Cancellation
    /// Safe: the socket is closed.
    pub(crate) async fn connect(servers: &Servers) -> Result<Self> {
        servers
            .first(|host| {
                Box::pin(async move {
                    let Login { frames, version, pid } = login::login(host).await?;
                    let mut made = Self { wire: Wire::new(frames), version, pid };
                    made.identify().await.map_err(|error| match speaks_no_replication(&error) {
                        true => behind_a_pooler(&host.place.name).with_source(error),
                        false => error,
                    })?;
                    let answer = made.query("SELECT pg_is_in_recovery()").await?;
                    let writable = cell(&answer, 0)? == "f";
                    Ok((made, writable))
                })
            })
            .await
    }

    /// Which cluster answers, and how far its log is on disk.
    ///
    /// # Errors
    /// As [`Self::query`].
    pub(crate) async fn identify(&mut self) -> Result<System> {
        let rows = self.query("IDENTIFY_SYSTEM").await?;
        let wrong = |_| Error::corrupt("read the log: the server does not say who it is");
        Ok(System {
            system: cell(&rows, 0)?.parse().map_err(wrong)?,
            timeline: cell(&rows, 1)?.parse().map_err(wrong)?,
            flushed: Lsn::parse(cell(&rows, 2)?)?,
        })
    }

    /// The rows of a statement, or of a command of replication, by the simple protocol: all values
    /// are text.
    ///
    /// # Errors
    /// The server's by its code (`code_of`); `Permanent` for more than 1,000 rows; `Transient` when
    /// the connection failed, or is in the middle of something else.
    ///
    /// # Cancellation
    /// The connection is of no more use, and whether the statement was done is unknown.
    pub(crate) async fn query(&mut self, sql: &str) -> Result<Vec<Vec<Option<String>>>> {
        self.wire.query(sql).await
    }

    /// Creates a slot for `pgoutput` and exports the snapshot from which its stream goes on.
    ///
    /// Waits for every transaction that writes at this moment; meanwhile the slot is listed and has
    /// no confirmed place.
    ///
    /// # Errors
    /// As [`Self::query`]: 42710 if there is one of that name, 53400 if there is none left.
    ///
    /// # Cancellation
    /// As [`Self::query`]. The server may go on waiting: end it by its process, [`Self::pid`].
    pub(crate) async fn create_slot(&mut self, slot: &str, kind: SlotKind) -> Result<Seam> {
        let rows = self.query(&creation(slot, kind, self.version)).await?;
        let consistent = Lsn::parse(cell(&rows, 1)?)?;
        Ok(Seam { consistent, snapshot: cell(&rows, 2)?.to_owned() })
    }

    /// Begins the stream at a place, or where the slot stands if that is further. Returns once the
    /// server agrees.
    ///
    /// # Errors
    /// As [`Self::query`]: 42704 without a slot, 55000 if it can't be used, 55006 while another
    /// session reads from it (the cause names its process).
    ///
    /// # Cancellation
    /// As [`Self::query`].
    pub(crate) async fn start(
        &mut self,
        slot: &str,
        from: Lsn,
        options: &[(&str, String)],
    ) -> Result<()> {
        self.wire.start(&beginning(slot, from, options)).await
    }

    /// The next of the stream. Sends what waits to be sent meanwhile. Returns without a wait while
    /// something is buffered, so a loop over it should yield now and then.
    ///
    /// # Errors
    /// The server's by its code; `Transient` when the connection failed; `Corrupt` for bytes that
    /// are no message. The connection is of no more use then.
    ///
    /// # Cancellation
    /// Safe.
    pub(crate) async fn next(&mut self) -> Result<Frame> {
        self.wire.next().await
    }

    /// The next of the stream if it has been read already.
    ///
    /// # Errors
    /// As [`Self::next`].
    pub(crate) fn buffered(&mut self) -> Result<Option<Frame>> {
        self.wire.buffered()
    }

    /// Tells the server that everything before `flushed` is needed no more. Returns at once, also
    /// when the server does not read: then the newest status goes out with one of the next calls.
    /// With `ask` the server is to say at once that it is there.
    ///
    /// # Errors
    /// `Transient` when the connection failed.
    ///
    /// # Cancellation
    /// Safe.
    pub(crate) async fn status(&mut self, flushed: Lsn, ask: bool) -> Result<()> {
        self.wire.status(flushed, ask).await
    }

    /// A last status, and an end that both sides know of. Within five seconds.
    ///
    /// # Errors
    /// `Transient` when the server did not answer in time or the connection failed: whether the
    /// status arrived is unknown.
    pub(crate) async fn finish(self, flushed: Lsn) -> Result<()> {
        self.wire.finish(flushed).await
    }

    /// As `server_version_num` has it: 150018.
    pub(crate) fn version(&self) -> u32 {
        self.version
    }

    /// The server's process, for `pg_terminate_backend`.
    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }
}

/// What the connection is in the middle of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Ready,
    /// An answer is under way that nobody may wait for any more.
    Asked,
    Streaming,
    /// The server ended the stream, or the connection.
    Ended,
}

/// The protocol over any stream of bytes.
struct Wire<S> {
    frames: Frames<S>,
    state: State,
    /// The newest status, while an older one is still on its way out.
    waiting: Option<(Lsn, bool)>,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Wire<S> {
    fn new(frames: Frames<S>) -> Self {
        Self { frames, state: State::Ready, waiting: None }
    }

    async fn ask(&mut self, sql: &str) -> Result<()> {
        if self.state != State::Ready {
            return Err(Error::transient(
                "read the log: the connection is in the middle of something; make another one",
            ));
        }
        self.state = State::Asked;
        if frontend::query(sql, self.frames.output()).is_err() {
            self.state = State::Ready;
            return Err(Error::permanent("read the log: a name has a zero byte"));
        }
        self.frames.flush().await.map_err(|error| Broken::from(error).during(PLACE))
    }

    async fn message(&mut self) -> Result<Message> {
        let message = self.frames.message().await;
        message.map_err(|broken| {
            self.state = State::Ended;
            broken.during(PLACE)
        })
    }

    async fn query(&mut self, sql: &str) -> Result<Vec<Vec<Option<String>>>> {
        self.ask(sql).await?;
        let mut answer = Ok(Vec::new());
        loop {
            let (tag, body) = match self.message().await {
                Ok(message) => message,
                // After a fatal error the server hangs up, and the error is what counts.
                Err(broken) => return Err(answer.err().unwrap_or(broken)),
            };
            match (tag, &mut answer) {
                (frames::DATA_ROW, Ok(rows)) if rows.len() == ROWS_MAX => {
                    answer = Err(Error::permanent("read the log: an answer has too many rows"));
                }
                (frames::DATA_ROW, Ok(rows)) => match row(&body) {
                    Ok(row) => rows.push(row),
                    Err(error) => answer = Err(error),
                },
                (frames::ERROR, _) => answer = Err(refusal(&body)),
                (frames::READY, _) => {
                    self.state = State::Ready;
                    return answer;
                }
                (frames::COPY_BOTH, _) => return Err(unexpected(tag)),
                _ => {}
            }
        }
    }

    async fn start(&mut self, sql: &str) -> Result<()> {
        self.ask(sql).await?;
        let mut refused = None;
        loop {
            let (tag, body) = match self.message().await {
                Ok(message) => message,
                Err(broken) => return Err(refused.unwrap_or(broken)),
            };
            match tag {
                frames::COPY_BOTH => {
                    self.state = State::Streaming;
                    return Ok(());
                }
                frames::ERROR => refused = Some(refusal(&body)),
                frames::READY => {
                    self.state = State::Ready;
                    return Err(refused.unwrap_or_else(|| unexpected(tag)));
                }
                frames::NOTICE | frames::NOTIFICATION | frames::PARAMETER => {}
                _ => return Err(unexpected(tag)),
            }
        }
    }

    async fn next(&mut self) -> Result<Frame> {
        loop {
            if let Some(frame) = self.buffered()? {
                return Ok(frame);
            }
            let message = self.message().await?;
            if let Some(frame) = self.taken(message)? {
                return Ok(frame);
            }
            self.put_waiting();
        }
    }

    fn buffered(&mut self) -> Result<Option<Frame>> {
        match self.state {
            State::Streaming => {}
            State::Ended => return Ok(Some(Frame::End)),
            State::Ready | State::Asked => {
                return Err(Error::transient("read the log: no stream was begun"));
            }
        }
        while let Some(message) = self.frames.buffered()? {
            if let Some(frame) = self.taken(message)? {
                return Ok(Some(frame));
            }
        }
        Ok(None)
    }

    /// What a message means in a stream; nothing for those that say nothing of it.
    fn taken(&mut self, (tag, body): Message) -> Result<Option<Frame>> {
        match tag {
            frames::COPY_DATA => frames::frame(body).map(Some),
            // A server that stops sends no end of the copy, but the end of the command.
            frames::COPY_DONE | frames::COMMAND_COMPLETE => {
                self.state = State::Ended;
                Ok(Some(Frame::End))
            }
            frames::ERROR => {
                self.state = State::Ended;
                Err(refusal(&body))
            }
            frames::NOTICE | frames::NOTIFICATION | frames::PARAMETER => Ok(None),
            _ => Err(unexpected(tag)),
        }
    }

    /// Lets the newest status out once the one before is gone.
    fn put_waiting(&mut self) {
        if self.frames.output().is_empty()
            && let Some((flushed, ask)) = self.waiting.take()
        {
            frames::put_status(self.frames.output(), flushed, 0, ask);
        }
    }

    async fn status(&mut self, flushed: Lsn, ask: bool) -> Result<()> {
        // A question that has not gone out yet is still asked.
        let ask = ask || self.waiting.is_some_and(|(_, asked)| asked);
        self.waiting = Some((flushed, ask));
        // Once for the rest of the one before, once for this one.
        for _ in 0..2 {
            self.put_waiting();
            let sent = self.frames.try_flush().await;
            sent.map_err(|error| Broken::from(error).during(PLACE))?;
        }
        Ok(())
    }

    async fn finish(mut self, flushed: Lsn) -> Result<()> {
        let end = async {
            if self.state == State::Streaming {
                self.waiting = None;
                frames::put_status(self.frames.output(), flushed, 0, false);
                frontend::copy_done(self.frames.output());
                while self.message().await?.0 != frames::READY {}
            }
            frontend::terminate(self.frames.output());
            self.frames.flush().await.map_err(|error| Broken::from(error).during(PLACE))
        };
        let late = || Error::transient("read the log: the server did not end the stream in time");
        tokio::time::timeout(FINISH_WITHIN, end).await.unwrap_or_else(|_| Err(late()))
    }
}

fn creation(slot: &str, kind: SlotKind, version: u32) -> String {
    let slot = name(slot);
    let temporary = match kind {
        SlotKind::Temporary => " TEMPORARY",
        SlotKind::Permanent { .. } => "",
    };
    let how = match kind {
        _ if version < 150_000 => "EXPORT_SNAPSHOT",
        SlotKind::Permanent { failover: true } if version >= 170_000 => {
            "(SNAPSHOT 'export', FAILOVER)"
        }
        SlotKind::Permanent { .. } | SlotKind::Temporary => "(SNAPSHOT 'export')",
    };
    format!("CREATE_REPLICATION_SLOT {slot}{temporary} LOGICAL \"pgoutput\" {how}")
}

fn beginning(slot: &str, from: Lsn, options: &[(&str, String)]) -> String {
    let words: Vec<_> =
        options.iter().map(|(key, value)| format!("{} {}", name(key), literal(value))).collect();
    format!("START_REPLICATION SLOT {} LOGICAL {from} ({})", name(slot), words.join(", "))
}

/// The grammar of replication quotes as SQL does, but knows no backslash.
fn name(text: &str) -> String {
    format!("\"{}\"", text.replace('"', "\"\""))
}

fn literal(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

fn refusal(body: &[u8]) -> Error {
    match frames::server_error(body) {
        Ok(error) => replication_error(PLACE, error),
        Err(error) => error,
    }
}

fn unexpected(tag: u8) -> Error {
    Error::corrupt(format!("read the log: a message of tag {tag:#04x} stands where none can"))
}

/// The values of a row, as text.
pub(super) fn row(mut body: &[u8]) -> Result<Vec<Option<String>>> {
    let cut = || Error::corrupt("read the log: a row is cut short");
    let mut values = Vec::new();
    let (count, rest) = body.split_first_chunk().ok_or_else(cut)?;
    body = rest;
    for _ in 0..u16::from_be_bytes(*count) {
        let (length, rest) = body.split_first_chunk().ok_or_else(cut)?;
        body = rest;
        values.push(match i32::from_be_bytes(*length) {
            -1 => None,
            length => {
                let length = usize::try_from(length).map_err(|_| cut())?;
                let (value, rest) = body.split_at_checked(length).ok_or_else(cut)?;
                body = rest;
                let text = String::from_utf8(value.to_vec());
                Some(text.map_err(|_| Error::corrupt("read the log: a value is no text"))?)
            }
        });
    }
    Ok(values)
}

/// A value of the only row.
fn cell(rows: &[Vec<Option<String>>], number: usize) -> Result<&str> {
    let value = rows.first().and_then(|row| row.get(number)).and_then(Option::as_deref);
    value.ok_or_else(|| Error::corrupt("read the log: an answer lacks a value"))
}

#[cfg(test)]
mod by_hand;
#[cfg(test)]
mod tests;
