//! One connection that speaks the stream protocol.
//!
//! What lives here: making it, requests and their answers, and sending messages until each is
//! answered. What does not: the login (`../login.rs`), frames (`wire.rs`), holding what comes
//! (`incoming.rs`), which messages get which ids (`lane.rs`).
//! Invariant: it belongs to one task at a time and has one frame of messages under way. A call that
//! fails, or is given up halfway, leaves it useless: whoever has it drops it, which cuts it.

use std::collections::HashSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use bytes::BytesMut;
use futures_util::FutureExt;
use lapin::auth::AuthProvider;
use postrider_core::{Error, ErrorKind, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::chunk::{Chunk, Entry, Head};
use super::encode::{ID_WITHIN, id_of};
use super::error::{self, garbled, lost, silent};
use super::incoming::Incoming;
use super::wire::{self, Code, Frame, From, Input, Node, OK, Request};
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
/// Longest time between two signs of life, in seconds, as over AMQP. Each side gives one twice in
/// it
/// at least, and takes the other for dead that gives none twice as long.
const HEARTBEAT_S: u32 = 10;
/// A stream that sends nothing for so long is empty; it is not told otherwise.
const QUIET: Duration = Duration::from_secs(1);

/// So often it is looked whether a sign of life is due: half of the shortest time in which a server
/// can want one.
pub(crate) const BEAT: Duration = Duration::from_millis(500);

/// A connection.
pub(crate) struct Link {
    /// Cuts the connection when it is dropped; so before the stream, which would end it in order,
    /// with what is still on its way.
    _cutter: Cutter,
    stream: Stream,
    ended: CancellationToken,
    incoming: Incoming,
    outgoing: BytesMut,
    number: u32,
    subscriptions: u8,
    frame_max: usize,
    patience: Duration,
    /// What is waited for has to come by then.
    until: Instant,
    /// What was agreed on. Long before that, so that logging in has but its own time.
    heartbeat: Duration,
    /// When something was sent last, and came last.
    sent: Instant,
    heard: Instant,
    /// Which node it leads to, if that says so.
    node: Option<Node>,
    /// Its place among the connections that a sink may have.
    _permit: OwnedSemaphorePermit,
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
        connections: &Arc<Semaphore>,
    ) -> Result<Self> {
        let to = |address| Self::to(address, login, patience, connections);
        reach::first(login, next, within, to).await
    }

    /// Connects and logs in to one server.
    ///
    /// # Errors
    /// `Transient`.
    pub(crate) async fn to(
        address: &Address,
        login: &Login,
        patience: Duration,
        connections: &Arc<Semaphore>,
    ) -> Result<Self> {
        let permit = Arc::clone(connections).try_acquire_owned();
        let permit = permit.map_err(|_| error::no_connection_left())?;
        let (stream, cutter) = reach::line(address, login).await?;
        let mut link = Self::over(stream, cutter, patience, permit);
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

    fn over(
        stream: Stream,
        cutter: Cutter,
        patience: Duration,
        permit: OwnedSemaphorePermit,
    ) -> Self {
        Self {
            ended: cutter.token(),
            _cutter: cutter,
            stream,
            incoming: Incoming::default(),
            outgoing: BytesMut::new(),
            number: 0,
            subscriptions: 0,
            frame_max: FRAME_MAX as usize,
            patience,
            until: Instant::now() + patience,
            heartbeat: Duration::from_secs(u64::from(u16::MAX)),
            sent: Instant::now(),
            heard: Instant::now(),
            node: None,
            _permit: permit,
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
        self.wait_anew();
        let (proposed, heartbeat_s) = loop {
            match self.frame().await? {
                Frame::Tune { frame_max, heartbeat_s } => break (frame_max, heartbeat_s),
                Frame::Close { reason } => return Err(error::closed(&reason)),
                _ => {}
            }
        };
        let frame_max = match proposed {
            0 => FRAME_MAX,
            proposed => proposed.min(MOST_FRAME_MAX),
        };
        self.frame_max = usize::try_from(frame_max).unwrap_or(usize::MAX);
        // A server that wants none gets them all the same: it has to be noticed when it is dead.
        let heartbeat_s = match heartbeat_s {
            0 => HEARTBEAT_S,
            proposed => proposed.min(HEARTBEAT_S),
        };
        self.heartbeat = Duration::from_secs(u64::from(heartbeat_s));
        wire::tune(&mut self.outgoing, frame_max, heartbeat_s);
        self.flush().await?;
        let open = Request::Open { vhost: &address.vhost };
        let opened = self.ask(open, |input| Some(wire::node(input))).await?;
        self.node = opened.map_err(error::connect_error)?;
        Ok(())
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
        self.wait_anew();
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

    /// The node that leads a stream.
    pub(crate) async fn leader(&mut self, stream: &str) -> Result<Node, Refusal> {
        let asked = self.ask(Request::Metadata { stream }, wire::leader).await?;
        asked.and_then(|leader| leader).map_err(Refusal::Answer)
    }

    /// Whether it leads to a node, for all that is known.
    pub(crate) fn is_to(&self, node: &Node) -> bool {
        self.node.as_ref().is_none_or(|own| own == node)
    }

    /// Begins to read a stream; the chunks come by [`chunk`](Self::chunk).
    pub(crate) async fn subscribe(&mut self, stream: &str, from: From) -> Result<(), Refusal> {
        // Under a number that no other has: what still comes of an earlier one is passed.
        self.subscriptions = self.subscriptions.wrapping_add(1);
        let subscription = self.subscriptions;
        let request = Request::Subscribe { subscription, stream, from, credit: CREDIT };
        self.ask(request, |_| Some(())).await?.map_err(Refusal::Answer)
    }

    /// The next chunk of the stream that is read. It may be of any size: it is never held.
    pub(crate) async fn chunk(&mut self) -> Result<Chunk, Refusal> {
        let current = self.subscriptions;
        self.wait_anew();
        let head = loop {
            match self.frame().await? {
                Frame::Delivered { subscription, head } if subscription == current => {
                    break Head::read(head).ok_or_else(garbled)?;
                }
                Frame::Close { reason } => return Err(error::closed(&reason).into()),
                Frame::StreamChanged => return Err(error::stream_changed().into()),
                _ => {}
            }
        };
        let mut ids = Vec::new();
        for _ in 0..head.entries {
            ids.extend(self.entry().await?);
        }
        wire::credit(&mut self.outgoing, current, 1);
        self.flush().await?;
        Ok(Chunk { end: head.end, ids })
    }

    /// The id of the next entry of a chunk, if it is a message that has one.
    async fn entry(&mut self) -> Result<Option<Uuid>> {
        let mut head = [0; Entry::MAX_HEAD_BYTES];
        let first = *self.piece(1).await?.first().ok_or_else(garbled)?;
        let head = &mut head[..Entry::head_bytes(first)];
        head[0] = first;
        let rest = head.len() - 1;
        head[1..].copy_from_slice(self.piece(rest).await?);
        let (id, mut rest) = match Entry::read(head).ok_or_else(garbled)? {
            Entry::Message(bytes) => {
                let begin = bytes.min(ID_WITHIN);
                (id_of(self.piece(begin).await?), bytes - begin)
            }
            Entry::Packed(bytes) => (None, bytes),
        };
        while !self.incoming.pass(&mut rest) {
            self.more_of_a_chunk().await?;
        }
        Ok(id)
    }

    /// The next piece of a chunk.
    async fn piece(&mut self, bytes: usize) -> Result<&[u8]> {
        while !self.incoming.piece(bytes)? {
            self.more_of_a_chunk().await?;
        }
        Ok(self.incoming.told())
    }

    /// However long a chunk takes, each piece of it has the time that an answer has.
    async fn more_of_a_chunk(&mut self) -> Result<()> {
        self.wait_anew();
        self.fill().await
    }

    /// Whether a stream has messages. A server that is slow to send one has none, as it seems.
    pub(crate) async fn has_messages(&mut self, stream: &str) -> Result<bool, Refusal> {
        self.subscribe(stream, From::Last).await?;
        let came = match timeout(QUIET, self.chunk()).await {
            Ok(came) => came.map(|_| true)?,
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
        self.wait_anew();
        while !open.is_empty() {
            match self.frame().await? {
                Frame::Confirmed(ids) => {
                    for id in ids {
                        open.remove(&id);
                    }
                    self.wait_anew();
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
            match self.incoming.next() {
                Err(_) => return false,
                Ok(true) => match self.incoming.frame() {
                    Some(Frame::Close { .. } | Frame::StreamChanged) | None => return false,
                    Some(_) => {}
                },
                Ok(false) => match self.stream.read_buf(self.incoming.room()).now_or_never() {
                    None => return !self.ended.is_cancelled(),
                    Some(Ok(0) | Err(_)) => return false,
                    Some(Ok(_)) => self.heard = Instant::now(),
                },
            }
        }
    }

    /// Looks after a connection that nobody uses, without waiting: to be called twice in a second.
    /// Whether it is still of use.
    pub(crate) fn keep_up(&mut self) -> bool {
        if !self.is_up() || self.is_dead() {
            return false;
        }
        if self.sent.elapsed() < self.heartbeat / 2 {
            return true;
        }
        wire::heartbeat(&mut self.outgoing);
        // Outside of Tokio's budget, which would let it seem that there is no room.
        let sent = tokio::task::unconstrained(self.flush()).now_or_never();
        sent.is_some_and(|sent| sent.is_ok())
    }

    /// Keeps the connection while something else is waited for.
    ///
    /// # Errors
    /// The connection is of no use any more.
    pub(crate) async fn meanwhile<T>(&mut self, wait: impl Future<Output = T>) -> Result<T> {
        let mut wait = std::pin::pin!(wait);
        loop {
            match timeout(BEAT, &mut wait).await {
                Ok(done) => return Ok(done),
                Err(_) if self.keep_up() => {}
                Err(_) => return Err(lost(io::ErrorKind::TimedOut.into())),
            }
        }
    }

    /// Whether the server gave no sign of life for too long.
    fn is_dead(&self) -> bool {
        self.heard.elapsed() >= self.heartbeat * 2
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
        timeout(self.patience, write).await.map_err(|_| silent(self.patience))?.map_err(lost)?;
        self.sent = Instant::now();
        Ok(())
    }

    /// What is waited for from now on has its time from now on.
    fn wait_anew(&mut self) {
        self.until = Instant::now() + self.patience;
    }

    /// The next frame, if it comes in time.
    async fn frame(&mut self) -> Result<Frame<'_>> {
        while !self.incoming.next()? {
            if self.incoming.is_passing() {
                self.wait_anew();
            }
            self.fill().await?;
        }
        self.incoming.frame().ok_or_else(garbled)
    }

    /// Reads something, and gives signs of life meanwhile.
    async fn fill(&mut self) -> Result<()> {
        loop {
            let beat = Instant::now() + BEAT;
            let read = self.stream.read_buf(self.incoming.room());
            match timeout_at(self.until.min(beat), read).await {
                Ok(Ok(0)) => return Err(lost(io::ErrorKind::UnexpectedEof.into())),
                Ok(Ok(_)) => break,
                Ok(Err(error)) => return Err(lost(error)),
                Err(_) if Instant::now() >= self.until => return Err(silent(self.patience)),
                Err(_) if self.is_dead() => return Err(lost(io::ErrorKind::TimedOut.into())),
                Err(_) if self.sent.elapsed() < self.heartbeat / 2 => {}
                Err(_) => {
                    wire::heartbeat(&mut self.outgoing);
                    self.flush().await?;
                }
            }
        }
        self.heard = Instant::now();
        Ok(())
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
    use super::super::chunk::tests::chunk;
    use super::super::incoming::{MAX_FRAME_BYTES, MAX_HELD_BYTES, SIZE_BYTES};
    use super::*;
    use crate::line::Line;
    use tokio::net::{TcpListener, TcpStream};

    /// A connection, and its other end.
    async fn pair(patience: Duration) -> (Link, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let (ours, theirs) = tokio::join!(TcpStream::connect(address), listener.accept());
        let (line, cutter) = Line::new(ours.expect("connected"));
        let permit = Arc::new(Semaphore::new(1)).try_acquire_owned().expect("one");
        (Link::over(Stream::Plain(line), cutter, patience, permit), theirs.expect("accepted").0)
    }

    /// A delivery up to its chunk's entries, which have so many bytes.
    fn delivery(entries: u16, bytes: usize) -> Vec<u8> {
        let chunk = chunk(0, entries, 9, b"");
        let size = u32::try_from(5 + chunk.len() + bytes).expect("less than 4 GiB");
        [&size.to_be_bytes()[..], &[0, 8, 0, 1, 0], &chunk].concat()
    }

    /// The head of an entry, and of a message with an id.
    fn message(id: &Uuid, bytes: u32) -> Vec<u8> {
        [&bytes.to_be_bytes()[..], b"\0\x53\x73\xc0\x12\x01\x98", id.as_bytes()].concat()
    }

    /// Whatever the size of a chunk and of the messages in it, no more is held than the bound.
    #[tokio::test]
    async fn a_chunk_above_256_mib_is_read_in_bounded_memory() {
        let (mut link, mut theirs) = pair(Duration::from_secs(20)).await;
        let [first, last] = [Uuid::from_u128(1), Uuid::from_u128(2)];
        tokio::join!(
            async {
                let large = 300 << 20;
                let packed = b"\x80\0\x03\0\0\0\0\x02\0\0\0";
                let first = message(&first, large);
                let last = message(&last, 23);
                let rest = (large as usize) - 23;
                let bytes = first.len() + rest + packed.len() + (32 << 20) + last.len();
                theirs.write_all(&delivery(3, bytes)).await.expect("sent");
                let zeros = vec![0; 4 << 20];
                for (head, rest) in [(&first[..], rest), (packed, 32 << 20), (&last, 0)] {
                    theirs.write_all(head).await.expect("sent");
                    let mut rest = rest;
                    while rest > 0 {
                        let now = rest.min(zeros.len());
                        theirs.write_all(&zeros[..now]).await.expect("sent");
                        rest -= now;
                    }
                }
            },
            async {
                let read = link.chunk().await.expect("a chunk");
                assert_eq!(read, Chunk { end: 16, ids: vec![first, last] });
                assert!(link.incoming.held() <= MAX_HELD_BYTES, "{}", link.incoming.held());
            }
        );
    }

    /// What nobody reads any more is passed, and so is what nobody can: both without being held.
    #[tokio::test]
    async fn other_chunks_are_passed_and_lies_of_a_chunk_are_no_messages() {
        let (mut link, mut theirs) = pair(Duration::from_secs(20)).await;
        link.subscriptions = 1;
        let late = [delivery(1, 8 << 20), vec![0; 8 << 20]].concat();
        let mut lie = delivery(1, 23);
        lie.extend(message(&Uuid::nil(), 24));
        // Its subscription.
        lie[8] = 1;
        let sending = async {
            theirs.write_all(&late).await.expect("sent");
            theirs.write_all(&lie).await.expect("sent");
        };
        let sending = async {
            sending.await;
            std::future::pending::<()>().await;
        };
        let read = tokio::select! {
            read = link.chunk() => read,
            () = sending => unreachable!("it is read"),
        };
        assert!(matches!(read, Err(Refusal::Lost(_))), "{read:?}");
        assert!(link.incoming.held() <= MAX_HELD_BYTES, "{}", link.incoming.held());
    }

    /// An answer is held whole, and there is a limit to it.
    #[tokio::test]
    async fn an_answer_that_is_too_large_is_named_with_the_limit() {
        for (size, taken) in [(MAX_FRAME_BYTES, true), (MAX_FRAME_BYTES + 1, false)] {
            let (mut link, mut theirs) = pair(Duration::from_secs(20)).await;
            let size = u32::try_from(size).expect("small").to_be_bytes();
            let mut frame = [&size[..], &[0, 0x17, 0, 1]].concat();
            frame.resize(SIZE_BYTES + MAX_FRAME_BYTES, 0);
            let send = async {
                // What is not read any more can't be sent.
                let _ = theirs.write_all(&frame).await;
            };
            let read = async {
                let read = link.frame().await.map(|frame| frame == Frame::Other);
                (read, link.incoming.held())
            };
            let ((read, held), ()) = tokio::join!(read, send);
            assert!(held <= MAX_HELD_BYTES, "{held}");
            match read {
                Ok(other) => assert!(other && taken),
                Err(error) => assert!(!taken && error.to_string().contains("1048576"), "{error}"),
            }
        }
    }

    /// Events that were given up must not reach the server behind those of a later connection.
    #[tokio::test]
    async fn what_was_not_sent_when_a_connection_is_dropped_is_never_sent() {
        let (mut link, mut theirs) = pair(Duration::from_millis(500)).await;
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
        let mut buffer = vec![0; 1 << 16];
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
