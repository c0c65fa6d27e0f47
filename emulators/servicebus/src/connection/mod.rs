//! One connection, as a machine that takes bytes and makes bytes.
//!
//! What lives here: the way from the first header to the close, and handing frames to sessions.
//! What does not: sockets and time-outs (`driver.rs`), sessions and links (`session.rs`).
//!
//! ```text
//! Header ─SASL header─▶ SaslInit ─init─▶ HeaderAfterSasl ─header─▶ Open ─open─▶ Running ─▶ Closed
//!    └─────────────────── AMQP header ────────────────────────────▲
//! ```
//!
//! Invariant: bytes that are no AMQP, or frames out of order, end the connection with a condition
//! that says so; nothing that comes in can make it panic.

mod attach;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod client;
mod driver;
mod egress;
mod ingress;
mod outbox;
mod replies;
mod sasl;
mod session;
mod settling;
#[cfg(test)]
mod tests;

pub(crate) use driver::serve;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use fe2o3_amqp_types::performatives::{
    Begin, ChannelMax, Close, End, MaxFrameSize, Open, Performative,
};
use tokio::time::Instant;

use crate::faults::Command;
use crate::refusal::{Refusal, condition};
use crate::shared::Shared;
use crate::tokens::{self, Tokens};
use crate::wire::Malformed;
use crate::wire::frame::{self, AMQP_HEADER, FRAME_BYTES_MAX, FRAME_BYTES_MIN, Kind, SASL_HEADER};
use outbox::Outbox;
pub(crate) use replies::Reply;
use session::Session;
pub(crate) use settling::simple;

/// The highest number of a session on one connection.
const CHANNEL_MAX: u16 = 255;

/// How far a connection has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Header,
    SaslInit,
    HeaderAfterSasl,
    Open,
    Running,
    Closed,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Connection {
    phase: Phase,
    sessions: BTreeMap<u16, Session>,
    /// What the peer wants to hear something within.
    heartbeat: Option<Duration>,
    hands: Hands,
    /// End it at once, without another word.
    dropped: bool,
}

/// What sessions and links need of their connection.
#[derive(Debug)]
pub(crate) struct Hands {
    pub shared: Arc<Shared>,
    pub out: Outbox,
    pub tokens: Tokens,
    pub replies: Vec<Reply>,
    /// Answers to tokens that wait for the next one's.
    pub late_replies: Vec<Reply>,
    /// The largest frame that the peer takes, in bytes.
    pub frame_bytes_max: usize,
    /// A fault asks for the end of this connection.
    pub drop: bool,
}

impl Hands {
    /// Takes the answer to a request, which may have to wait for the next one about a token.
    pub(crate) fn reply(&mut self, reply: Reply) {
        if reply.node.is_none() {
            if self.shared.faults.is_token_answer_late() {
                self.late_replies.push(reply);
                return;
            }
            self.replies.append(&mut self.late_replies);
        }
        self.replies.push(reply);
    }
}

impl Connection {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        let hands = Hands {
            shared,
            out: Outbox::default(),
            tokens: Tokens::default(),
            replies: Vec::new(),
            late_replies: Vec::new(),
            frame_bytes_max: FRAME_BYTES_MIN as usize,
            drop: false,
        };
        Self {
            phase: Phase::Header,
            sessions: BTreeMap::new(),
            heartbeat: None,
            hands,
            dropped: false,
        }
    }

    /// Takes what has come; what is not whole yet stays in `input`.
    pub(crate) fn receive(&mut self, input: &mut BytesMut) {
        self.hands.out.latency = self.hands.shared.faults.latency();
        while !self.is_over() {
            match self.step(input) {
                Ok(true) => {}
                Ok(false) => break,
                Err(refusal) => self.close_with(&refusal),
            }
            if self.hands.drop {
                self.dropped = true;
            }
        }
        self.pump();
    }

    /// One header or frame; whether there was one.
    fn step(&mut self, input: &mut BytesMut) -> Result<bool, Refusal> {
        if matches!(self.phase, Phase::Header | Phase::HeaderAfterSasl) {
            let Some(header) = frame::header(input) else { return Ok(false) };
            return self.header(header).map(|()| true);
        }
        let Some(raw) = frame::next(input).map_err(framing)? else { return Ok(false) };
        match (self.phase, raw.kind) {
            (Phase::SaslInit, Kind::Sasl) => {
                sasl::authenticate(&mut self.hands, &raw.body)?;
                self.phase = Phase::HeaderAfterSasl;
            }
            (Phase::Open | Phase::Running, Kind::Amqp) => {
                if !raw.body.is_empty() {
                    self.frame(raw.channel, raw.body)?;
                }
            }
            _ => return Err(framing(Malformed("a frame of this kind does not come now"))),
        }
        Ok(true)
    }

    fn header(&mut self, header: [u8; 8]) -> Result<(), Refusal> {
        match (self.phase, header) {
            (Phase::Header, SASL_HEADER) => {
                self.hands.out.raw(&SASL_HEADER);
                sasl::offer(&mut self.hands)?;
                self.phase = Phase::SaslInit;
            }
            (_, AMQP_HEADER) => {
                self.hands.out.raw(&AMQP_HEADER);
                self.phase = Phase::Open;
            }
            // By the specification the answer is the header that would have been right.
            _ => {
                self.hands.out.raw(&SASL_HEADER);
                self.phase = Phase::Closed;
            }
        }
        Ok(())
    }

    fn frame(&mut self, channel: u16, body: Bytes) -> Result<(), Refusal> {
        let (performative, payload) = frame::performative(body).map_err(decoding)?;
        match (self.phase, performative) {
            (Phase::Open, Performative::Open(open)) => self.open(&open),
            (Phase::Open, _) => Err(not_now("the first frame is an open")),
            (_, Performative::Open(_)) => Err(not_now("a connection is opened once")),
            (_, Performative::Close(_)) => {
                self.close(None);
                Ok(())
            }
            (_, Performative::Begin(begin)) => self.begin(channel, &begin),
            (_, Performative::End(_)) => self.end(channel),
            (_, performative) => self.in_session(channel, performative, payload),
        }
    }

    fn open(&mut self, open: &Open) -> Result<(), Refusal> {
        let announced = open.max_frame_size.0.clamp(FRAME_BYTES_MIN, FRAME_BYTES_MAX);
        self.hands.frame_bytes_max = announced as usize;
        let within = open.idle_time_out.filter(|millis| *millis > 0);
        self.heartbeat = within.map(|millis| Duration::from_millis(u64::from(millis)) / 2);
        self.phase = Phase::Running;
        let answer = Open {
            container_id: "postrider-servicebus-emulator".to_owned(),
            hostname: None,
            max_frame_size: MaxFrameSize(FRAME_BYTES_MAX),
            channel_max: ChannelMax(CHANNEL_MAX),
            idle_time_out: None,
            outgoing_locales: None,
            incoming_locales: None,
            offered_capabilities: None,
            desired_capabilities: None,
            properties: None,
        };
        self.hands.out.frame(0, &answer, &[])
    }

    fn begin(&mut self, channel: u16, begin: &Begin) -> Result<(), Refusal> {
        if channel > CHANNEL_MAX || self.sessions.contains_key(&channel) {
            return Err(not_now("the channel is in use, or above channel-max"));
        }
        let session = Session::begin(channel, begin, &mut self.hands)?;
        self.sessions.insert(channel, session);
        Ok(())
    }

    fn end(&mut self, channel: u16) -> Result<(), Refusal> {
        let Some(mut session) = self.sessions.remove(&channel) else {
            return Err(not_now("there is no such session"));
        };
        session.release_links(&mut self.hands);
        if session.was_ended() {
            return Ok(());
        }
        self.hands.out.frame(channel, &End { error: None }, &[])
    }

    fn in_session(
        &mut self,
        channel: u16,
        performative: Performative,
        payload: Bytes,
    ) -> Result<(), Refusal> {
        let Some(session) = self.sessions.get_mut(&channel) else {
            return Err(not_now("there is no such session"));
        };
        if session.was_ended() {
            return Ok(());
        }
        if let Err(refusal) = session.handle(performative, payload, &mut self.hands) {
            session.end_with(&refusal, &mut self.hands)?;
        }
        for reply in std::mem::take(&mut self.hands.replies) {
            replies::enqueue(self.sessions.values_mut(), reply);
        }
        Ok(())
    }

    /// Sends what has become possible to send.
    pub(crate) fn pump(&mut self) {
        if self.phase != Phase::Running {
            return;
        }
        let mut failed = None;
        for session in self.sessions.values_mut() {
            if let Err(refusal) = session.pump(&mut self.hands) {
                failed = Some(refusal);
            }
        }
        if let Some(refusal) = failed {
            self.close_with(&refusal);
        }
    }

    /// Does what a fault, or the emulator's end, asks of every connection.
    pub(crate) fn obey(&mut self, command: &Command) {
        match command {
            Command::DetachLinks { key, refusal } => self.detach_where(refusal, |one| one == key),
            Command::GiveCredit { key } => self.give_credit(key),
            Command::ExpireTokens => {
                self.hands.tokens.forget();
                self.detach_where(&tokens::expired(), |_| true);
            }
            Command::Close(refusal) => self.close_with(refusal),
            Command::Drop => self.dropped = true,
        }
    }

    fn give_credit(&mut self, key: &str) {
        let mut failed = None;
        for session in self.sessions.values_mut() {
            if let Err(refusal) = session.give_credit(key, &mut self.hands) {
                failed = Some(refusal);
            }
        }
        if let Some(refusal) = failed {
            self.close_with(&refusal);
        }
    }

    /// Takes links away whose token has expired.
    fn detach_expired(&mut self) {
        let now_ms = self.hands.shared.broker.clock.now_ms();
        let mut expired = Vec::new();
        for key in self.sessions.values().flat_map(Session::keys) {
            if self.hands.tokens.check(key, now_ms).is_err() {
                expired.push(key.to_owned());
            }
        }
        if !expired.is_empty() {
            self.detach_where(&tokens::expired(), |key| expired.iter().any(|one| one == key));
        }
    }

    fn detach_where(&mut self, refusal: &Refusal, affected: impl Fn(&str) -> bool) {
        let mut failed = None;
        for session in self.sessions.values_mut() {
            if let Err(refusal) = session.detach_where(refusal, &affected, &mut self.hands) {
                failed = Some(refusal);
            }
        }
        if let Some(refusal) = failed {
            self.close_with(&refusal);
        }
    }

    /// Does what time asks for.
    pub(crate) fn tick(&mut self) {
        self.detach_expired();
        self.pump();
    }

    /// When to call [`Self::tick`] next.
    pub(crate) fn next_tick_ms(&self) -> Option<i64> {
        let now_ms = self.hands.shared.broker.clock.now_ms();
        let waits = self.sessions.values().filter_map(Session::next_tick_ms);
        let used = self.sessions.values().any(|session| session.keys().next().is_some());
        let expiry = self.hands.tokens.next_expiry_ms(now_ms).filter(|_| used);
        waits.chain(expiry).min()
    }

    fn close_with(&mut self, refusal: &Refusal) {
        tracing::debug!(condition = %refusal.condition, why = %refusal.description, "closing");
        self.close(Some(refusal));
    }

    fn close(&mut self, refusal: Option<&Refusal>) {
        self.release();
        let opened = matches!(self.phase, Phase::Open | Phase::Running);
        if opened {
            if self.phase == Phase::Open {
                // A close comes after an open, even if that is all there is.
                self.open_to_close();
            }
            let close = Close { error: refusal.map(Refusal::error) };
            // It can't fail: an error of two strings can be encoded.
            let _ = self.hands.out.frame(0, &close, &[]);
        }
        self.phase = Phase::Closed;
    }

    fn open_to_close(&mut self) {
        let open = Open {
            container_id: String::new(),
            hostname: None,
            max_frame_size: MaxFrameSize(FRAME_BYTES_MIN),
            channel_max: ChannelMax(0),
            idle_time_out: None,
            outgoing_locales: None,
            incoming_locales: None,
            offered_capabilities: None,
            desired_capabilities: None,
            properties: None,
        };
        let _ = self.hands.out.frame(0, &open, &[]);
    }

    /// Gives back what its links hold.
    pub(crate) fn release(&mut self) {
        for session in self.sessions.values_mut() {
            session.release_links(&mut self.hands);
        }
        self.sessions.clear();
    }

    /// Whether nothing more is read.
    pub(crate) fn is_over(&self) -> bool {
        self.phase == Phase::Closed || self.dropped
    }

    pub(crate) fn is_dropped(&self) -> bool {
        self.dropped
    }

    pub(crate) fn is_running(&self) -> bool {
        self.phase == Phase::Running
    }

    pub(crate) fn heartbeat(&self) -> Option<Duration> {
        self.heartbeat
    }

    pub(crate) fn out(&mut self) -> &mut Outbox {
        &mut self.hands.out
    }

    /// The next bytes to write, if it is time.
    pub(crate) fn pop_due(&mut self, now: Instant) -> Option<Bytes> {
        self.hands.out.pop_due(now)
    }
}

fn framing(error: Malformed) -> Refusal {
    Refusal::new(condition::FRAMING_ERROR, error.to_string())
}

fn decoding(error: Malformed) -> Refusal {
    Refusal::new(condition::DECODE_ERROR, error.to_string())
}

fn not_now(why: &str) -> Refusal {
    Refusal::new(condition::NOT_ALLOWED, why)
}
