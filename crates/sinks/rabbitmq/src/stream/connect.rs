//! One connection that speaks the stream protocol.
//!
//! What lives here: making it, requests and their answers, and sending messages until each is
//! answered. What does not: the login (`../login.rs`), frames (`wire.rs`), which messages get which
//! ids (`lane.rs`).
//! Invariant: it belongs to one task at a time and has one frame of messages under way. A call that
//! fails, or is given up halfway, leaves it useless: whoever has it drops it, which cuts it.

use std::collections::HashSet;
use std::io;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use bytes::{Buf, BytesMut};
use futures_util::FutureExt;
use lapin::auth::AuthProvider;
use postrider_core::{Error, ErrorKind, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use super::error::{self, garbled, lost, silent};
use super::wire::{self, Code, Frame, From, Input, OK, Request};
use crate::line::Cutter;
use crate::login::{Address, Login};
use crate::reach;
use crate::runtime::Stream;

/// The only producer of a connection.
const PUBLISHER: u8 = 1;
/// Chunks that the server may send ahead of being read.
const CREDIT: u16 = 4;
/// Largest frame to send, in bytes, where the server names no limit: its default.
const FRAME_MAX: u32 = 1 << 20;
/// The server's own proposals stay below: an event has at most 16 MiB.
const MOST_FRAME_MAX: u32 = 32 << 20;
/// Largest frame that is read. A chunk comes in one, whatever was agreed on, and holds what a busy
/// server stored at a time.
const MAX_FRAME_BYTES: usize = 256 << 20;
/// A stream that sends nothing for so long is empty; it is not told otherwise.
const QUIET: Duration = Duration::from_secs(1);
/// What is read at a time, at least.
const READ_BYTES: usize = 64 << 10;

/// A connection.
pub(crate) struct Link {
    /// Cuts the connection when it is dropped; so before the stream, which would end it in order,
    /// with what is still on its way.
    _cutter: Cutter,
    stream: Stream,
    ended: CancellationToken,
    incoming: BytesMut,
    /// Bytes of the frame that was read last, which are passed at the next look.
    read: usize,
    outgoing: BytesMut,
    number: u32,
    subscriptions: u8,
    frame_max: usize,
    patience: Duration,
}

/// What a server says before its answer comes.
enum Next {
    Frame,
    Nothing,
}

impl Link {
    /// Connects and logs in, to the first server that can be had of the list from its place `next`
    /// on, which moves on with each attempt. Answers are waited for `patience` each.
    ///
    /// # Errors
    /// `Transient`, the last server's.
    pub(crate) async fn open(
        login: &Login,
        next: &AtomicUsize,
        within: Duration,
        patience: Duration,
    ) -> Result<Self> {
        reach::first(login, next, within, |address| Self::to(address, login, patience)).await
    }

    async fn to(address: &Address, login: &Login, patience: Duration) -> Result<Self> {
        let (stream, cutter) = reach::line(address, login).await?;
        let mut link = Self::over(stream, cutter, patience);
        match link.log_in(address).await {
            Ok(()) => Ok(link),
            Err(error) if error.kind() == ErrorKind::Transient => Err(error),
            // Whatever it means elsewhere, here it is said of the way to the server.
            Err(error) => {
                let text = "connect to RabbitMQ: it does not answer as one that has streams does";
                Err(Error::transient(text).with_source(error.chain()))
            }
        }
    }

    fn over(stream: Stream, cutter: Cutter, patience: Duration) -> Self {
        Self {
            ended: cutter.token(),
            _cutter: cutter,
            stream,
            incoming: BytesMut::with_capacity(READ_BYTES),
            read: 0,
            outgoing: BytesMut::new(),
            number: 0,
            subscriptions: 0,
            frame_max: FRAME_MAX as usize,
            patience,
        }
    }

    async fn log_in(&mut self, address: &Address) -> Result<()> {
        let way = &address.way;
        let mechanism = way.mechanism();
        let data = way.auth_starter().map_err(Error::transient)?;
        self.begin(Request::PeerProperties { name: "postrider" }).await?;
        self.begin(Request::SaslHandshake).await?;
        self.begin(Request::SaslAuthenticate {
            mechanism: mechanism.as_str(),
            data: data.as_bytes(),
        })
        .await?;
        let proposed = loop {
            match self.frame().await? {
                Frame::Tune { frame_max } => break frame_max,
                Frame::Close { reason } => return Err(error::closed(&reason)),
                _ => {}
            }
        };
        let frame_max = match proposed {
            0 => FRAME_MAX,
            proposed => proposed.min(MOST_FRAME_MAX),
        };
        self.frame_max = usize::try_from(frame_max).unwrap_or(usize::MAX);
        // No heartbeats: a connection that is gone is noticed by whoever uses it next, and dropped.
        wire::tune(&mut self.outgoing, frame_max, 0);
        self.flush().await?;
        self.begin(Request::Open { vhost: &address.vhost }).await
    }

    /// A request of the login, which is refused only for what the login or the server is.
    async fn begin(&mut self, request: Request<'_>) -> Result<()> {
        match self.ask(request, |_| Some(())).await? {
            Ok(()) => Ok(()),
            Err(code) => Err(error::connect_error(code)),
        }
    }

    /// Sends a request and waits for its answer, passing what else comes.
    ///
    /// # Errors
    /// The connection is of no use any more. A refusal is no error here.
    async fn ask<T>(
        &mut self,
        request: Request<'_>,
        read: impl FnOnce(&mut Input<'_>) -> Option<T>,
    ) -> Result<Result<T, Code>> {
        self.number = self.number.wrapping_add(1);
        let asked = self.number;
        request.write(asked, &mut self.outgoing);
        self.flush().await?;
        loop {
            match self.frame().await? {
                Frame::Response { number, code, mut rest } if number == asked => {
                    return match code {
                        OK => read(&mut rest).map(Ok).ok_or_else(garbled),
                        code => Ok(Err(code)),
                    };
                }
                Frame::Close { reason } => return Err(error::closed(&reason)),
                Frame::StreamChanged => return Err(error::stream_changed()),
                _ => {}
            }
        }
    }

    /// Says under which reference it publishes to which stream from now on.
    pub(crate) async fn declare(&mut self, reference: &str, stream: &str) -> Result<(), Refusal> {
        let request = Request::DeclarePublisher { publisher: PUBLISHER, reference, stream };
        self.ask(request, |_| Some(())).await?.map_err(Refusal::Answer)
    }

    /// The last publishing id that was stored under a reference; 0 if none was.
    pub(crate) async fn sequence(&mut self, reference: &str, stream: &str) -> Result<u64, Refusal> {
        let request = Request::QuerySequence { reference, stream };
        self.ask(request, |input| input.u64()).await?.map_err(Refusal::Answer)
    }

    /// The streams of a super stream, in its order.
    pub(crate) async fn partitions(&mut self, super_stream: &str) -> Result<Vec<String>, Refusal> {
        let owned = |input: &mut Input<'_>| {
            Some(input.texts()?.into_iter().map(str::to_owned).collect::<Vec<_>>())
        };
        let request = Request::Partitions { super_stream };
        self.ask(request, owned).await?.map_err(Refusal::Answer)
    }

    /// Begins to read a stream; the chunks come by [`chunk`](Self::chunk).
    pub(crate) async fn subscribe(&mut self, stream: &str, from: From) -> Result<(), Refusal> {
        // Under a number that no other has: what still comes of an earlier one is passed.
        self.subscriptions = self.subscriptions.wrapping_add(1);
        let subscription = self.subscriptions;
        let request = Request::Subscribe { subscription, stream, from, credit: CREDIT };
        self.ask(request, |_| Some(())).await?.map_err(Refusal::Answer)
    }

    /// The next chunk of the stream that is read, which something is made of.
    pub(crate) async fn chunk<T>(
        &mut self,
        make: impl FnOnce(&[u8]) -> Option<T>,
    ) -> Result<T, Refusal> {
        let current = self.subscriptions;
        let made = loop {
            match self.frame().await? {
                Frame::Delivered { subscription, chunk } if subscription == current => {
                    break make(chunk).ok_or_else(garbled)?;
                }
                Frame::Close { reason } => return Err(error::closed(&reason).into()),
                Frame::StreamChanged => return Err(error::stream_changed().into()),
                _ => {}
            }
        };
        wire::credit(&mut self.outgoing, current, 1);
        self.flush().await?;
        Ok(made)
    }

    /// Whether a stream has messages. A server that is slow to send one has none, as it seems.
    pub(crate) async fn has_messages(&mut self, stream: &str) -> Result<bool, Refusal> {
        self.subscribe(stream, From::Last).await?;
        let came = match timeout(QUIET, self.chunk(|_| Some(()))).await {
            Ok(came) => came.map(|()| true)?,
            Err(_) => false,
        };
        self.unsubscribe().await?;
        Ok(came)
    }

    /// Ends reading.
    pub(crate) async fn unsubscribe(&mut self) -> Result<(), Refusal> {
        let request = Request::Unsubscribe { subscription: self.subscriptions };
        self.ask(request, |_| Some(())).await?.map_err(Refusal::Answer)
    }

    /// Sends messages under their ids, in one frame, and waits until all are confirmed.
    ///
    /// # Errors
    /// Which of them are stored is unknown then; a [`Refusal::Answer`] is the first that was
    /// refused.
    pub(crate) async fn publish<'a>(
        &mut self,
        messages: impl ExactSizeIterator<Item = (u64, &'a [u8])> + Clone,
    ) -> Result<(), Refusal> {
        let mut open: HashSet<u64> = messages.clone().map(|(id, _)| id).collect();
        wire::publish(&mut self.outgoing, PUBLISHER, messages);
        self.flush().await?;
        while !open.is_empty() {
            match self.frame().await? {
                Frame::Confirmed(ids) => {
                    for id in ids {
                        open.remove(&id);
                    }
                }
                Frame::Refused(ids) => {
                    let first = ids.first().ok_or_else(garbled)?;
                    return Err(Refusal::Answer(first.1));
                }
                Frame::Close { reason } => return Err(error::closed(&reason).into()),
                Frame::StreamChanged => return Err(error::stream_changed().into()),
                _ => {}
            }
        }
        Ok(())
    }

    /// Largest frame that the server takes, in bytes.
    pub(crate) fn frame_max(&self) -> usize {
        self.frame_max
    }

    /// Whether it is still of use: nothing came by itself that ends it. Looks without waiting.
    pub(crate) fn is_up(&mut self) -> bool {
        loop {
            match self.take().now_or_never() {
                None => return !self.ended.is_cancelled(),
                Some(Err(_)) => return false,
                Some(Ok(())) => match self.current() {
                    Some(Frame::Close { .. } | Frame::StreamChanged) | None => return false,
                    Some(_) => {}
                },
            }
        }
    }

    /// Says good-bye, to whoever hears it.
    pub(crate) async fn close(mut self) {
        // Whoever can't be told sees the connection end.
        let _ = self.ask(Request::Close, |_| Some(())).await;
    }

    async fn flush(&mut self) -> Result<()> {
        let write = async {
            self.stream.write_all_buf(&mut self.outgoing).await?;
            self.stream.flush().await
        };
        timeout(self.patience, write).await.map_err(|_| silent(self.patience))?.map_err(lost)
    }

    /// The next frame, if it comes in time.
    async fn frame(&mut self) -> Result<Frame<'_>> {
        let until = tokio::time::Instant::now() + self.patience;
        let patience = self.patience;
        timeout_at(until, self.take()).await.map_err(|_| silent(patience))??;
        self.current().ok_or_else(garbled)
    }

    /// The frame that was read last.
    fn current(&self) -> Option<Frame<'_>> {
        wire::read(self.incoming.get(4..self.read)?)
    }

    /// Reads until there is a whole frame. Given up, it has lost nothing.
    async fn take(&mut self) -> Result<()> {
        self.incoming.advance(std::mem::take(&mut self.read));
        loop {
            if let Next::Frame = self.cut_out()? {
                return Ok(());
            }
            self.incoming.reserve(READ_BYTES);
            if self.stream.read_buf(&mut self.incoming).await.map_err(lost)? == 0 {
                return Err(lost(io::ErrorKind::UnexpectedEof.into()));
            }
        }
    }

    fn cut_out(&mut self) -> Result<Next> {
        let mut input = Input(&self.incoming);
        let Some(size) = input.u32() else { return Ok(Next::Nothing) };
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        if size > MAX_FRAME_BYTES {
            return Err(error::too_much(size, MAX_FRAME_BYTES));
        }
        if input.take(size).is_none() {
            return Ok(Next::Nothing);
        }
        self.read = 4 + size;
        Ok(Next::Frame)
    }
}

/// Why something was not done.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// The server's answer. The connection goes on.
    Answer(Code),
    /// The connection is of no use any more.
    Lost(Error),
}

impl std::convert::From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self::Lost(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::line::Line;
    use tokio::net::{TcpListener, TcpStream};

    /// Events that were given up must not reach the server behind those of a later connection.
    #[tokio::test]
    async fn what_was_not_sent_when_a_connection_is_dropped_is_never_sent() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let (ours, theirs) = tokio::join!(TcpStream::connect(address), listener.accept());
        let (line, cutter) = Line::new(ours.expect("connected"));
        let mut link = Link::over(Stream::Plain(line), cutter, Duration::from_millis(500));
        // Nobody reads at the other end: in the end the buffers of both are full.
        let message = vec![7; 1 << 20];
        let mut sent = 0;
        while link.publish(std::iter::once((1, &message[..]))).await.is_err() && sent < 64 {
            sent += 1;
            if !link.outgoing.is_empty() {
                break;
            }
        }
        assert!(!link.outgoing.is_empty(), "the buffers are not full");
        drop(link);
        let (mut theirs, mut buffer) = (theirs.expect("accepted").0, vec![0; 1 << 16]);
        let end = loop {
            match theirs.read(&mut buffer).await {
                Ok(0) => break None,
                Ok(_) => {}
                Err(error) => break Some(error.kind()),
            }
        };
        assert_eq!(end, Some(io::ErrorKind::ConnectionReset));
    }
}
