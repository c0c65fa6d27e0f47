//! Messages that go out to receivers.
//!
//! What lives here: waiting for a session, credit, cutting a message into frames, drain. What does
//! not: what receivers do with them (`settling.rs`).
//! Invariant: a message is locked for the link before its first frame is written, and a drain is
//! answered only when nothing that could go out is left behind.

use bytes::Bytes;
use fe2o3_amqp_types::definitions::{Handle, Role};
use fe2o3_amqp_types::messaging::Source;
use fe2o3_amqp_types::performatives::{Attach, Transfer};
use serde_amqp::Value;
use serde_amqp::primitives::{OrderedMap, Symbol};
use serde_bytes::ByteBuf;
use uuid::Uuid;

use super::Hands;
use super::attach::{SESSION_FILTER, mirror};
use super::session::{Node, Session, Unsettled};
use crate::broker::LinkId;
use crate::broker::queue::{Delivery, Mode};
use crate::broker::sessions::{Granted, session_lost};
use crate::refusal::{Refusal, condition};
use crate::wire;

/// How long a receiver waits for a session if it does not say.
pub(super) const WAIT_DEFAULT_MS: i64 = 60_000;
const LOCKED_UNTIL: &str = "com.microsoft:locked-until-utc";
/// From the first day of the year 1 to 1970, in units of 100 ns.
const TICKS_TO_1970: i64 = 621_355_968_000_000_000;
const TICKS_PER_MS: i64 = 10_000;
/// A frame's head, and what the flag of further frames adds to a transfer.
const FRAME_OVERHEAD_BYTES: usize = 8 + 8;

/// Where a receiver's messages come from.
#[derive(Debug)]
pub(super) struct Egress {
    pub key: String,
    pub mode: Mode,
    hold: Hold,
}

/// What a receiver has of a session.
#[derive(Debug)]
enum Hold {
    /// Its entity has none.
    None,
    /// It waits; its attach is not answered yet.
    Waiting { asked: Option<String>, attach: Box<Attach>, until_ms: i64 },
    /// It holds this one.
    Held(String),
}

/// Where a waiting receiver stands.
enum Wait {
    Over(Granted),
    Refused(Refusal),
    GoesOn,
}

impl Egress {
    pub(super) fn new(key: String, mode: Mode) -> Self {
        Self { key, mode, hold: Hold::None }
    }

    pub(super) fn wait_for_session(
        &mut self,
        asked: Option<String>,
        attach: Attach,
        until_ms: i64,
    ) {
        self.hold = Hold::Waiting { asked, attach: Box::new(attach), until_ms };
    }

    pub(super) fn waits_until_ms(&self) -> Option<i64> {
        match &self.hold {
            Hold::Waiting { until_ms, .. } => Some(*until_ms),
            Hold::None | Hold::Held(_) => None,
        }
    }

    pub(super) fn session(&self) -> Option<&str> {
        match &self.hold {
            Hold::Held(id) => Some(id),
            Hold::None | Hold::Waiting { .. } => None,
        }
    }

    /// Gives a session back. Messages without one stay locked until their time is over, so that a
    /// receiver can settle them by their tokens after its link is gone.
    pub(super) fn release(&self, link: LinkId, hands: &Hands) {
        let Some(id) = self.session() else { return };
        let broker = &hands.shared.broker;
        // The entity can't be gone: none ever is.
        let _ = broker.with(&self.key, |queue, now_ms| {
            queue.release_session(id, link, now_ms);
            Ok(())
        });
        broker.wake();
    }

    fn try_session(&self, link: LinkId, hands: &Hands) -> Wait {
        let Hold::Waiting { asked, until_ms, .. } = &self.hold else { return Wait::GoesOn };
        let granted = hands.shared.broker.with(&self.key, |queue, now_ms| match asked {
            Some(id) => queue.accept_session(id, link, now_ms).map(Some),
            None => Ok(queue.accept_next_session(link, now_ms)),
        });
        match granted {
            Ok(Some(granted)) => Wait::Over(granted),
            Ok(None) if hands.shared.broker.clock.now_ms() < *until_ms => Wait::GoesOn,
            Ok(None) => {
                let text = "No session became available within the time that was given.";
                Wait::Refused(Refusal::new(condition::TIMEOUT, text))
            }
            Err(refusal) => Wait::Refused(refusal),
        }
    }
}

impl Session {
    /// Sends what a link can send now.
    pub(super) fn pump_link(&mut self, handle: u32, hands: &mut Hands) -> Result<(), Refusal> {
        let waits = match self.links.get(&handle).map(|link| &link.node) {
            Some(Node::Egress(egress)) => egress.waits_until_ms().is_some(),
            Some(Node::Answers(_)) => false,
            _ => return Ok(()),
        };
        if waits && !self.wait(handle, hands)? {
            return Ok(());
        }
        while !self.is_blocked(hands) {
            if !self.send_next(handle, hands)? {
                break;
            }
        }
        self.drained(handle, hands)
    }

    /// Looks for a session; whether the link has one now.
    fn wait(&mut self, handle: u32, hands: &mut Hands) -> Result<bool, Refusal> {
        let Some(link) = self.links.get_mut(&handle) else { return Ok(false) };
        let Node::Egress(egress) = &mut link.node else { return Ok(false) };
        let outcome = egress.try_session(link.id, hands);
        if matches!(outcome, Wait::GoesOn) {
            return Ok(false);
        }
        let Hold::Waiting { attach, .. } = std::mem::replace(&mut egress.hold, Hold::None) else {
            return Ok(false);
        };
        match outcome {
            Wait::Over(granted) => {
                hands.out.frame(self.channel, &with_session(&attach, &granted), &[])?;
                egress.hold = Hold::Held(granted.id);
                Ok(true)
            }
            Wait::Refused(refusal) => {
                self.links.remove(&handle);
                self.refuse(&attach, &refusal, hands)?;
                Ok(false)
            }
            Wait::GoesOn => Ok(false),
        }
    }

    /// Sends one message or one answer; whether there was one and credit for it.
    fn send_next(&mut self, handle: u32, hands: &mut Hands) -> Result<bool, Refusal> {
        let Some(link) = self.links.get_mut(&handle) else { return Ok(false) };
        let (bytes, unsettled) = match &mut link.node {
            Node::Egress(egress) => {
                if let Some(id) = egress.session()
                    && !holds(&egress.key, id, link.id, hands)
                {
                    let refusal = session_lost(id);
                    self.detach_with(handle, &refusal, hands)?;
                    return Ok(false);
                }
                if link.credit == 0 {
                    return Ok(false);
                }
                let (session, mode, key) = (egress.session(), egress.mode, &egress.key);
                let next = hands
                    .shared
                    .broker
                    .with(key, |queue, now_ms| Ok(queue.next(link.id, session, mode, now_ms)))?;
                let Some(Delivery { token, bytes }) = next else { return Ok(false) };
                hands.shared.count(key, |counts| counts.deliveries += 1);
                let unsettled = Unsettled { handle, key: key.clone(), token };
                (bytes, Some(unsettled).filter(|_| mode == Mode::PeekLock))
            }
            Node::Answers(answers) if link.credit > 0 => match answers.pop() {
                Some(bytes) => (bytes, None),
                None => return Ok(false),
            },
            _ => return Ok(false),
        };
        link.credit -= 1;
        link.delivery_count = link.delivery_count.wrapping_add(1);
        let delivery_id = self.next_delivery_id;
        self.next_delivery_id = delivery_id.wrapping_add(1);
        let tag = unsettled.as_ref().map_or_else(Uuid::new_v4, |unsettled| unsettled.token);
        let settled = unsettled.is_none();
        if let Some(unsettled) = unsettled {
            self.unsettled.insert(delivery_id, unsettled);
        }
        let first = Transfer {
            handle: Handle(handle),
            delivery_id: Some(delivery_id),
            delivery_tag: Some(ByteBuf::from(tag.to_bytes_le())),
            message_format: Some(0),
            settled: Some(settled),
            more: false,
            rcv_settle_mode: None,
            state: None,
            resume: false,
            aborted: false,
            batchable: true,
        };
        self.send_in_frames(first, bytes, hands)?;
        Ok(true)
    }

    /// Cuts a delivery into frames that the peer takes.
    fn send_in_frames(
        &mut self,
        transfer: Transfer,
        mut bytes: Bytes,
        hands: &mut Hands,
    ) -> Result<(), Refusal> {
        let head = wire::encode(&transfer)
            .map_err(|error| Refusal::new(condition::INTERNAL_ERROR, error.to_string()))?;
        let taken = head.len() + FRAME_OVERHEAD_BYTES;
        let room = hands.frame_bytes_max.saturating_sub(taken).max(1);
        loop {
            let more = bytes.len() > room;
            let payload = bytes.split_to(room.min(bytes.len()));
            self.send_transfer(Transfer { more, ..transfer.clone() }, payload, hands)?;
            if !more {
                return Ok(());
            }
        }
    }

    /// Answers a drain once nothing can go out any more.
    fn drained(&mut self, handle: u32, hands: &mut Hands) -> Result<(), Refusal> {
        let blocked = self.is_blocked(hands);
        let Some(link) = self.links.get_mut(&handle) else { return Ok(()) };
        if !link.drain || blocked {
            return Ok(());
        }
        link.delivery_count = link.delivery_count.wrapping_add(link.credit);
        link.credit = 0;
        self.send_flow(handle, hands)?;
        if let Some(link) = self.links.get_mut(&handle) {
            link.drain = false;
        }
        Ok(())
    }
}

fn holds(key: &str, id: &str, link: LinkId, hands: &Hands) -> bool {
    let holds = hands.shared.broker.with(key, |queue, _| Ok(queue.holds_session(id, link)));
    holds.unwrap_or(false)
}

/// The answer to an attach whose session was found.
fn with_session(attach: &Attach, granted: &Granted) -> Attach {
    let mut answer = mirror(attach, Role::Sender);
    let source = answer.source.get_or_insert_with(|| Box::new(Source::default()));
    let filter = source.filter.get_or_insert_with(OrderedMap::new);
    let name = Symbol::from(SESSION_FILTER);
    match filter.get_mut(&name) {
        Some(Value::Described(described)) => described.value = Value::String(granted.id.clone()),
        _ => {
            filter.insert(name, Value::String(granted.id.clone()));
        }
    }
    let ticks = granted.until_ms.saturating_mul(TICKS_PER_MS).saturating_add(TICKS_TO_1970);
    let properties = answer.properties.get_or_insert_with(OrderedMap::new);
    properties.insert(Symbol::from(LOCKED_UNTIL), Value::Long(ticks));
    answer
}
