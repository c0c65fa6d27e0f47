//! Frames that wait to be written.
//!
//! What lives here: their order, the added latency, and counting what is still unanswered. What
//! does not: sockets.
//! Invariant: frames leave in the order in which they came, none before its time.

use std::collections::{HashMap, VecDeque};

use bytes::Bytes;
use serde::Serialize;
use tokio::time::Instant;

use crate::broker::LinkId;
use crate::refusal::{Refusal, condition};
use crate::wire::frame::{self, Kind};

/// With so many bytes waiting, nothing is read and nothing is delivered.
pub(crate) const WAITING_BYTES_MAX: usize = 4 * 1024 * 1024;

/// One frame, when it may leave, and the transfers of a link that it answers.
#[derive(Debug)]
struct Waiting {
    bytes: Bytes,
    due: Instant,
    answers: Option<(LinkId, u32)>,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    frames: VecDeque<Waiting>,
    bytes: usize,
    /// What every frame is held back for.
    pub latency: std::time::Duration,
    unanswered: HashMap<LinkId, u32>,
}

impl Outbox {
    /// Adds bytes that are no frame.
    pub(crate) fn raw(&mut self, bytes: &[u8]) {
        self.push(Bytes::copy_from_slice(bytes), None);
    }

    /// Adds a frame of SASL.
    pub(crate) fn sasl<T: Serialize>(&mut self, performative: &T) -> Result<(), Refusal> {
        let bytes = frame::write(Kind::Sasl, 0, performative, &[]).map_err(internal)?;
        self.push(bytes, None);
        Ok(())
    }

    /// Adds a frame.
    pub(crate) fn frame<T: Serialize>(
        &mut self,
        channel: u16,
        performative: &T,
        payload: &[u8],
    ) -> Result<(), Refusal> {
        let bytes = frame::write(Kind::Amqp, channel, performative, payload).map_err(internal)?;
        self.push(bytes, None);
        Ok(())
    }

    /// Adds a frame that answers so many transfers of a link.
    pub(crate) fn answer<T: Serialize>(
        &mut self,
        channel: u16,
        performative: &T,
        link: LinkId,
        count: u32,
    ) -> Result<(), Refusal> {
        let bytes = frame::write(Kind::Amqp, channel, performative, &[]).map_err(internal)?;
        self.push(bytes, Some((link, count)));
        Ok(())
    }

    pub(crate) fn heartbeat(&mut self) {
        self.push(frame::heartbeat(), None);
    }

    fn push(&mut self, bytes: Bytes, answers: Option<(LinkId, u32)>) {
        self.bytes += bytes.len();
        let due = Instant::now() + self.latency;
        // A latency that was lowered must not let later frames overtake.
        let due = self.frames.back().map_or(due, |last| last.due.max(due));
        self.frames.push_back(Waiting { bytes, due, answers });
    }

    /// The next frame whose time has come.
    pub(crate) fn pop_due(&mut self, now: Instant) -> Option<Bytes> {
        if self.frames.front()?.due > now {
            return None;
        }
        let frame = self.frames.pop_front()?;
        self.bytes -= frame.bytes.len();
        if let Some((link, count)) = frame.answers
            && let Some(unanswered) = self.unanswered.get_mut(&link)
        {
            *unanswered = unanswered.saturating_sub(count);
            if *unanswered == 0 {
                self.unanswered.remove(&link);
            }
        }
        Some(frame.bytes)
    }

    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.frames.front().map(|frame| frame.due)
    }

    pub(crate) fn is_full(&self) -> bool {
        self.bytes > WAITING_BYTES_MAX
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Notes a transfer; whether all before it on its link were answered.
    pub(crate) fn begins_round_trip(&mut self, link: LinkId) -> bool {
        let unanswered = self.unanswered.entry(link).or_default();
        *unanswered += 1;
        *unanswered == 1
    }

    /// A transfer will never be answered.
    pub(crate) fn forget_transfer(&mut self, link: LinkId) {
        if let Some(unanswered) = self.unanswered.get_mut(&link) {
            *unanswered = unanswered.saturating_sub(1);
        }
    }

    /// A link is gone.
    pub(crate) fn forget_link(&mut self, link: LinkId) {
        self.unanswered.remove(&link);
    }
}

fn internal(error: crate::wire::Malformed) -> Refusal {
    Refusal::new(condition::INTERNAL_ERROR, error.to_string())
}
