//! The producer of one partition's events in one stream.
//!
//! What lives here: its connection, the ids that it gives to events, and what became of an event
//! that was given one. What does not: parts of an id (`numbers.rs`), which events are known to be
//! stored (`seen.rs`), which events come here (`publish.rs`).
//! Invariant: an id that may have left this process belongs to one event, for good: until the
//! server has said that all of them are stored, nothing else is sent than the same events under
//! the same ids in the same order. Only a producer with higher ids, which has read what is stored,
//! gives an event another id. And no answer counts before the server has told that the last id of
//! the reference is the one that was sent last: it confirms in silence what it drops.
//!
//! ```text
//! declare ─ last id ─┬─ higher than ours, or none of ours: read back, ids above the last one,
//!                    │    one event alone (nothing of an earlier producer is stored after it),
//!                    │    read on ─▶ ready
//!                    └─ ours: what is unknown again, under its ids ─▶ ready
//! ready: [frame ─ confirmed ─ last id is ours] …
//! ```

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use bytes::Bytes;
use postrider_core::{Clock, Result};
use tokio::sync::Semaphore;
use uuid::Uuid;

use super::connect::{Link, Refusal};
use super::error::{self, Doing};
use super::numbers::Numbers;
use super::seen::Seen;
use super::wire::{From, MESSAGE_OVERHEAD, Node, PUBLISH_OVERHEAD};
use crate::config::Unroutable;
use crate::login::Login;
use crate::reach;

/// So often a producer looks for the first event that it stored before another one begins: it may
/// have been removed by the stream's own limits.
const MOST_MISSED: u32 = 3;

/// So often the leader's node is looked for behind one address before the call fails: of three
/// nodes
/// it is missed once in 25 times.
const LEADER_TRIES: usize = 8;
/// Most connections that a sink has at a time: a partition has one for each stream that it
/// publishes
/// to. Each is a process and a file at the server, and up to 3 MiB here.
pub(crate) const MAX_CONNECTIONS: usize = 256;
/// The remedy.
pub(crate) const FEWER: &str =
    "let more relays share the partitions, or have fewer partitions or fewer streams";

/// What all lanes of a sink have in common.
pub(crate) struct Shared {
    pub(crate) login: Login,
    /// The server of the list that is tried next.
    pub(crate) next_server: AtomicUsize,
    pub(crate) seen: Seen,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) unroutable: Unroutable,
    pub(crate) timeout: Duration,
    pub(crate) connect_timeout: Duration,
    /// The connections that it may still open.
    pub(crate) connections: Arc<Semaphore>,
}

impl Shared {
    pub(crate) async fn connect(&self) -> Result<Link> {
        let (within, patience) = (self.connect_timeout, self.timeout);
        Link::open(&self.login, &self.next_server, within, patience, &self.connections).await
    }
}

impl Shared {
    /// A connection to the node that leads a stream: only that one knows all that is stored. It is
    /// looked for behind the servers of the list, of which one may stand for many nodes, and once
    /// where it says itself that it is.
    pub(crate) async fn connect_to_leader(&self, stream: &str) -> Result<Link, Refusal> {
        let mut is_told = true;
        let mut tries = 0;
        loop {
            let mut link = self.connect().await?;
            let leader = link.leader(stream).await?;
            if link.is_to(&leader) {
                return Ok(link);
            }
            link.close().await;
            if std::mem::take(&mut is_told)
                && let Ok(link) = self.connect_to(&leader).await
                && link.is_to(&leader)
            {
                return Ok(link);
            }
            tries += 1;
            if tries >= LEADER_TRIES.max(self.login.addresses().len()) {
                return Err(error::leader_out_of_reach(stream, &leader).into());
            }
        }
    }

    async fn connect_to(&self, (host, port): &Node) -> Result<Link> {
        let none = || postrider_core::Error::transient("connect to RabbitMQ: not to this node");
        let port = u16::try_from(*port).map_err(|_| none())?;
        let address = self.login.beside(host, port).ok_or_else(none)?;
        let (within, patience) = (self.connect_timeout, self.timeout);
        let link = Link::to(&address, &self.login, patience, &self.connections);
        reach::in_time(within, link).await
    }
}

/// An event's message.
#[derive(Clone)]
pub(crate) struct Parcel {
    pub(crate) id: Uuid,
    pub(crate) message: Bytes,
}

impl Parcel {
    /// What it takes in a frame.
    fn frame_bytes(&self) -> usize {
        self.message.len() + MESSAGE_OVERHEAD
    }
}

/// A producer. It outlives its connections.
pub(crate) struct Lane {
    stream: String,
    reference: String,
    /// None until it has begun.
    numbers: Option<Numbers>,
    /// Nothing of an earlier producer is stored any more, and what was is known.
    has_fenced: bool,
    /// The event that was sent first.
    first: Option<Uuid>,
    /// How often it was not found in the stream.
    missed: u32,
    /// What was sent and is not known to be stored, with its ids, in order.
    unknown: Vec<(u64, Parcel)>,
    /// None while it is used, so that a call that is given up leaves none behind.
    link: Option<Link>,
}

impl Lane {
    pub(crate) fn new(stream: String, reference: String) -> Self {
        let (unknown, link) = (Vec::new(), None);
        let (numbers, has_fenced, first, missed) = (None, false, None, 0);
        Self { stream, reference, numbers, has_fenced, first, missed, unknown, link }
    }

    /// A connection on which nothing is unknown, and on which ids can be given.
    ///
    /// # Errors
    /// Why there is none; nothing new was sent.
    pub(crate) async fn ready(&mut self, shared: &Shared) -> Result<Link> {
        let kept = self.link.take();
        if let Some(mut link) = kept
            && self.unknown.is_empty()
            // Whoever sent nothing yet is not the last one to have begun, for all it knows.
            && self.has_fenced
            && self.numbers.is_some_and(|numbers| !numbers.run_short())
            && link.is_up()
        {
            return Ok(link);
        }
        let connected = shared.connect_to_leader(&self.stream).await;
        let mut link =
            connected.map_err(|refusal| self.refused(shared, refusal, Doing::Publish))?;
        let declared = link.declare(&self.reference, &self.stream).await;
        declared.map_err(|refusal| self.refused(shared, refusal, Doing::Publish))?;
        let mut unknown = self.unknown.iter();
        if unknown.any(|(_, parcel)| self.check_size(&link, parcel).is_err()) {
            // This server takes less than the one before; what it has of them is looked up.
            self.give_up();
        }
        self.look_back(&mut link, shared).await?;
        if !self.unknown.is_empty() {
            self.deliver(&mut link, shared).await?;
        }
        self.fence(&mut link, shared).await?;
        Ok(link)
    }

    /// Goes on as the same producer, if nobody outranked it, or begins as another, which knows what
    /// is stored.
    async fn look_back(&mut self, link: &mut Link, shared: &Shared) -> Result<()> {
        let last = self.last(link, shared).await?;
        let mut has_messages = last > 0;
        if let Some(numbers) = self.numbers {
            if last == 0 && numbers.are_used() {
                // The stream was made anew, or the server forgot the reference.
                let asked = link.has_messages(&self.stream).await;
                has_messages =
                    asked.map_err(|refusal| self.refused(shared, refusal, Doing::Read))?;
                shared.seen.forget(&self.stream);
                self.give_up();
            } else if !numbers.are_used() || numbers.are_below(last) {
                // Another one may have stored something since this one read.
                self.give_up();
            } else if self.unknown.is_empty() && numbers.run_short() {
                self.give_up();
            }
        }
        if self.numbers.is_none() {
            if has_messages {
                self.read_back(link, shared, None).await?;
            }
            self.numbers = Some(Numbers::after(last, shared.clock.now())?);
            (self.has_fenced, self.first, self.missed) = (false, None, 0);
        }
        Ok(())
    }

    /// Reads what an earlier producer stored until this one stored something: nothing comes to it.
    async fn fence(&mut self, link: &mut Link, shared: &Shared) -> Result<()> {
        if self.has_fenced || !self.numbers.is_some_and(|numbers| numbers.are_used()) {
            return Ok(());
        }
        let read = self.read_back(link, shared, self.first).await;
        self.has_fenced = read.is_ok();
        if read.is_err() {
            self.missed += 1;
            if self.missed >= MOST_MISSED {
                self.give_up();
            }
        }
        read
    }

    /// Keeps a connection for the next call.
    pub(crate) fn keep(&mut self, link: Link) {
        self.link = Some(link);
    }

    /// Whether it has one.
    pub(crate) fn is_connected(&self) -> bool {
        self.link.is_some()
    }

    /// Looks after its connection while no call does.
    pub(crate) fn keep_up(&mut self) {
        if self.link.as_mut().is_some_and(|link| !link.keep_up()) {
            self.link = None;
        }
    }

    /// Ends it, and gives its connection back to be closed.
    pub(crate) fn end(&mut self) -> Option<Link> {
        self.link.take()
    }

    /// How many of these events, from the first on, may be sent together now: at least one.
    pub(crate) fn together<'p>(
        &self,
        link: &Link,
        parcels: impl Iterator<Item = &'p Parcel>,
    ) -> usize {
        if !self.has_fenced {
            return 1;
        }
        let mut bytes = PUBLISH_OVERHEAD;
        let fit = parcels.take_while(|parcel| {
            bytes += parcel.frame_bytes();
            bytes <= link.frame_max()
        });
        fit.count().max(1)
    }

    /// Whether an event fits a frame.
    ///
    /// # Errors
    /// `Permanent` with the limit if it does not.
    pub(crate) fn check_size(&self, link: &Link, parcel: &Parcel) -> Result<()> {
        let most = link.frame_max().saturating_sub(PUBLISH_OVERHEAD + MESSAGE_OVERHEAD);
        match parcel.message.len() {
            bytes if bytes > most => Err(error::too_large(bytes, most)),
            _ => Ok(()),
        }
    }

    /// Gives these events ids and stores them. They are [`together`](Self::together).
    ///
    /// # Errors
    /// It is unknown then which are stored; the next [`ready`](Self::ready) finds out.
    pub(crate) async fn send(
        &mut self,
        link: &mut Link,
        shared: &Shared,
        parcels: impl Iterator<Item = &Parcel>,
    ) -> Result<()> {
        for parcel in parcels {
            if self.numbers.is_some_and(|numbers| !numbers.are_used()) {
                self.first = Some(parcel.id);
            }
            let Some(id) = self.numbers.as_mut().and_then(Numbers::next) else {
                // What was given an id in vain was not sent.
                self.give_up();
                return Err(error::ids_used_up());
            };
            self.unknown.push((id, parcel.clone()));
        }
        self.deliver(link, shared).await?;
        self.fence(link, shared).await
    }

    /// Sends what is unknown, under its ids, until all of it is stored.
    async fn deliver(&mut self, link: &mut Link, shared: &Shared) -> Result<()> {
        let most = link.frame_max();
        let mut rest = &self.unknown[..];
        let mut refused = None;
        while !rest.is_empty() {
            let mut bytes = PUBLISH_OVERHEAD;
            let fit = rest.iter().take_while(|(_, parcel)| {
                bytes += parcel.frame_bytes();
                bytes <= most
            });
            let (now, later) = rest.split_at(fit.count().max(1));
            let messages = now.iter().map(|(id, parcel)| (*id, &parcel.message[..]));
            match link.publish(messages).await {
                Ok(()) => rest = later,
                Err(Refusal::Answer(code)) => {
                    refused = Some(Refusal::Answer(code));
                    break;
                }
                Err(Refusal::Lost(error)) => return Err(error),
            }
        }
        if let Some(refusal) = refused {
            // Later ids may be stored: those that were refused can't be used again.
            self.give_up();
            return Err(self.refused(shared, refusal, Doing::Publish));
        }
        let last = self.last(link, shared).await?;
        if self.numbers.map(|numbers| numbers.last()) != Some(last) {
            self.give_up();
            return Err(error::overtaken(&self.reference));
        }
        for (_, parcel) in self.unknown.drain(..) {
            // The first one is known when it was read: two may have drawn the same number.
            if self.has_fenced {
                shared.seen.add(&self.stream, &parcel.id);
            }
        }
        Ok(())
    }

    /// Ends this producer: another begins, which finds out what is stored.
    fn give_up(&mut self) {
        self.numbers = None;
        self.unknown.clear();
    }

    async fn last(&self, link: &mut Link, shared: &Shared) -> Result<u64> {
        // The server wants the permission to read for it.
        let last = link.sequence(&self.reference, &self.stream).await;
        last.map_err(|refusal| self.refused(shared, refusal, Doing::Read))
    }

    /// Reads the stream to its end, from where reading ended before, and on until `sought` was
    /// read: another node may be behind the one that stored it. There is at least one message.
    async fn read_back(
        &self,
        link: &mut Link,
        shared: &Shared,
        sought: Option<Uuid>,
    ) -> Result<()> {
        // Where one partition read, another does not read again.
        let reader = shared.seen.reader(&self.stream);
        let _reading = link.meanwhile(reader.lock()).await?;
        let read = self.read_to_the_end(link, &shared.seen, sought).await;
        read.map_err(|refusal| self.refused(shared, refusal, Doing::Read))
    }

    async fn read_to_the_end(
        &self,
        link: &mut Link,
        seen: &Seen,
        sought: Option<Uuid>,
    ) -> Result<(), Refusal> {
        let is_open = || sought.is_some_and(|id| !seen.has_read(&self.stream, &id));
        let before = seen.read_to(&self.stream);
        link.subscribe(&self.stream, From::Last).await?;
        let end = link.chunk().await?.end;
        link.unsubscribe().await?;
        let begin = seen.begin(&self.stream, before, end);
        if begin >= end && !is_open() {
            return Ok(());
        }
        link.subscribe(&self.stream, From::Offset(begin)).await?;
        let mut reached = begin;
        while reached < end || is_open() {
            let chunk = link.chunk().await?;
            seen.reached(&self.stream, chunk.end, chunk.ids.iter().copied());
            reached = chunk.end;
        }
        link.unsubscribe().await
    }

    fn refused(&self, shared: &Shared, refusal: Refusal, what: Doing) -> postrider_core::Error {
        error::refused(refusal, &self.stream, what, shared.unroutable)
    }
}
