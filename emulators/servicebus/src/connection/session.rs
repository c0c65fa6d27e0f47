//! One session of a connection: its windows, its links, and what they have in flight.
//!
//! What lives here: who gets which frame, the session's windows, ending it. What does not:
//! attaching (`attach.rs`), messages coming in (`ingress.rs`) and going out (`egress.rs`), settling
//! (`settling.rs`).
//! Invariant: no frame goes out beyond the peer's window; what must wait goes out before anything
//! that came later.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use fe2o3_amqp_types::definitions::Handle;
use fe2o3_amqp_types::performatives::{Begin, Detach, End, Flow, Performative, Transfer};
use uuid::Uuid;

use super::Hands;
use super::egress::Egress;
use super::ingress::{Ingress, Requests};
use super::replies::Answers;
use crate::broker::{LinkId, key};
use crate::refusal::{Refusal, condition};

/// How many frames of transfers the peer may send before it hears of a new window.
const INCOMING_WINDOW: u32 = 5_000;
/// The highest handle, and so the most links of a session less one.
const HANDLE_MAX: u32 = 4_095;

/// A delivery that the peer has not settled.
#[derive(Debug)]
pub(super) struct Unsettled {
    pub handle: u32,
    pub key: String,
    pub token: Uuid,
}

/// What a link is for.
#[derive(Debug)]
pub(super) enum Node {
    /// Messages come in.
    Ingress(Ingress),
    /// Messages go out.
    Egress(Egress),
    /// Requests come in.
    Requests(Requests),
    /// Their answers go out.
    Answers(Answers),
    /// This side has detached it; the peer has not said so yet.
    Detached,
}

/// One link.
#[derive(Debug)]
pub(super) struct Link {
    pub id: LinkId,
    pub delivery_count: u32,
    pub credit: u32,
    pub drain: bool,
    pub node: Node,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Session {
    pub(super) channel: u16,
    pub(super) links: BTreeMap<u32, Link>,
    pub(super) unsettled: BTreeMap<u32, Unsettled>,
    pub(super) next_delivery_id: u32,
    next_incoming_id: u32,
    incoming_window: u32,
    next_outgoing_id: u32,
    peer_window: u32,
    waiting: VecDeque<(Transfer, Bytes)>,
    ended: bool,
}

impl Session {
    pub(super) fn begin(channel: u16, begin: &Begin, hands: &mut Hands) -> Result<Self, Refusal> {
        let answer = Begin {
            remote_channel: Some(channel),
            next_outgoing_id: 0,
            incoming_window: INCOMING_WINDOW,
            outgoing_window: u32::MAX,
            handle_max: Handle(HANDLE_MAX),
            offered_capabilities: None,
            desired_capabilities: None,
            properties: None,
        };
        hands.out.frame(channel, &answer, &[])?;
        Ok(Self {
            channel,
            links: BTreeMap::new(),
            unsettled: BTreeMap::new(),
            next_delivery_id: 0,
            next_incoming_id: begin.next_outgoing_id,
            incoming_window: INCOMING_WINDOW,
            next_outgoing_id: 0,
            peer_window: begin.incoming_window,
            waiting: VecDeque::new(),
            ended: false,
        })
    }

    pub(super) fn was_ended(&self) -> bool {
        self.ended
    }

    pub(super) fn handle(
        &mut self,
        performative: Performative,
        payload: Bytes,
        hands: &mut Hands,
    ) -> Result<(), Refusal> {
        match performative {
            Performative::Attach(attach) => {
                if attach.handle.0 > HANDLE_MAX || self.links.contains_key(&attach.handle.0) {
                    let text = "The handle is in use, or above handle-max.";
                    return Err(Refusal::new(condition::HANDLE_IN_USE, text));
                }
                self.attach(attach, hands)
            }
            Performative::Flow(flow) => self.flow(&flow, hands),
            Performative::Transfer(transfer) => {
                self.count_incoming(hands)?;
                self.transfer(transfer, &payload, hands)
            }
            Performative::Disposition(disposition) => self.disposition(&disposition, hands),
            Performative::Detach(detach) => self.detach(&detach, hands),
            Performative::Open(_)
            | Performative::Close(_)
            | Performative::Begin(_)
            | Performative::End(_) => {
                Err(Refusal::new(condition::NOT_ALLOWED, "This is no frame of a session."))
            }
        }
    }

    /// Counts a frame of a transfer, and tells the peer of a new window in time.
    fn count_incoming(&mut self, hands: &mut Hands) -> Result<(), Refusal> {
        self.next_incoming_id = self.next_incoming_id.wrapping_add(1);
        self.incoming_window = self.incoming_window.saturating_sub(1);
        if self.incoming_window < INCOMING_WINDOW / 2 {
            self.incoming_window = INCOMING_WINDOW;
            let flow = self.flow_frame(None);
            hands.out.frame(self.channel, &flow, &[])?;
        }
        Ok(())
    }

    /// A flow of the session, or of one of its links.
    pub(super) fn flow_frame(&self, link: Option<(u32, &Link)>) -> Flow {
        Flow {
            next_incoming_id: Some(self.next_incoming_id),
            incoming_window: self.incoming_window,
            next_outgoing_id: self.next_outgoing_id,
            outgoing_window: u32::MAX,
            handle: link.map(|(handle, _)| Handle(handle)),
            delivery_count: link.map(|(_, link)| link.delivery_count),
            link_credit: link.map(|(_, link)| link.credit),
            available: None,
            drain: link.is_some_and(|(_, link)| link.drain),
            echo: false,
            properties: None,
        }
    }

    /// Tells the peer how a link stands.
    pub(super) fn send_flow(&mut self, handle: u32, hands: &mut Hands) -> Result<(), Refusal> {
        let Some(link) = self.links.get(&handle) else { return Ok(()) };
        let flow = self.flow_frame(Some((handle, link)));
        hands.out.frame(self.channel, &flow, &[])
    }

    fn flow(&mut self, flow: &Flow, hands: &mut Hands) -> Result<(), Refusal> {
        let begin = flow.next_incoming_id.unwrap_or(0);
        self.peer_window =
            begin.wrapping_add(flow.incoming_window).wrapping_sub(self.next_outgoing_id);
        self.send_waiting(hands)?;
        let Some(Handle(handle)) = flow.handle else {
            if flow.echo {
                let answer = self.flow_frame(None);
                hands.out.frame(self.channel, &answer, &[])?;
            }
            return Ok(());
        };
        let Some(link) = self.links.get_mut(&handle) else { return Ok(()) };
        if matches!(link.node, Node::Egress(_) | Node::Answers(_)) {
            let count = flow.delivery_count.unwrap_or(0);
            let limit = count.wrapping_add(flow.link_credit.unwrap_or(0));
            let credit = limit.wrapping_sub(link.delivery_count);
            // A count from before some deliveries that crossed the flow may leave less than none.
            link.credit = if credit > u32::MAX / 2 { 0 } else { credit };
            link.drain = flow.drain;
        }
        if flow.echo && !flow.drain {
            self.send_flow(handle, hands)?;
        }
        self.pump(hands)
    }

    /// Sends a frame of a transfer, or keeps it until there is a window.
    pub(super) fn send_transfer(
        &mut self,
        transfer: Transfer,
        payload: Bytes,
        hands: &mut Hands,
    ) -> Result<(), Refusal> {
        self.waiting.push_back((transfer, payload));
        self.send_waiting(hands)
    }

    fn send_waiting(&mut self, hands: &mut Hands) -> Result<(), Refusal> {
        while self.peer_window > 0 {
            let Some((transfer, payload)) = self.waiting.pop_front() else { break };
            self.peer_window -= 1;
            self.next_outgoing_id = self.next_outgoing_id.wrapping_add(1);
            hands.out.frame(self.channel, &transfer, &payload)?;
        }
        Ok(())
    }

    /// Whether nothing more may go out now.
    pub(super) fn is_blocked(&self, hands: &Hands) -> bool {
        !self.waiting.is_empty() || hands.out.is_full()
    }

    /// Sends what has become possible to send.
    pub(super) fn pump(&mut self, hands: &mut Hands) -> Result<(), Refusal> {
        if self.ended {
            return Ok(());
        }
        let handles: Vec<u32> = self.links.keys().copied().collect();
        for handle in handles {
            self.pump_link(handle, hands)?;
        }
        Ok(())
    }

    fn detach(&mut self, detach: &Detach, hands: &mut Hands) -> Result<(), Refusal> {
        let handle = detach.handle.0;
        // A link that was refused is unknown here, and its detach needs no answer.
        let Some(link) = self.links.remove(&handle) else { return Ok(()) };
        let known = !matches!(link.node, Node::Detached);
        self.release(handle, &link, hands);
        if known {
            let answer = Detach { handle: Handle(handle), closed: detach.closed, error: None };
            hands.out.frame(self.channel, &answer, &[])?;
        }
        Ok(())
    }

    /// Gives back what a link holds.
    fn release(&mut self, handle: u32, link: &Link, hands: &mut Hands) {
        self.unsettled.retain(|_, unsettled| unsettled.handle != handle);
        self.waiting.retain(|(transfer, _)| transfer.handle.0 != handle);
        hands.out.forget_link(link.id);
        if let Node::Egress(egress) = &link.node {
            egress.release(link.id, hands);
        }
    }

    /// Gives back what all links hold.
    pub(super) fn release_links(&mut self, hands: &mut Hands) {
        for (handle, link) in std::mem::take(&mut self.links) {
            self.release(handle, &link, hands);
        }
    }

    /// Detaches a link from this side.
    pub(super) fn detach_with(
        &mut self,
        handle: u32,
        refusal: &Refusal,
        hands: &mut Hands,
    ) -> Result<(), Refusal> {
        let Some(mut link) = self.links.remove(&handle) else { return Ok(()) };
        self.release(handle, &link, hands);
        link.node = Node::Detached;
        self.links.insert(handle, link);
        tracing::debug!(condition = %refusal.condition, handle, "detaching a link");
        let detach = Detach { handle: Handle(handle), closed: true, error: Some(refusal.error()) };
        hands.out.frame(self.channel, &detach, &[])
    }

    /// Detaches the links to some entities.
    pub(super) fn detach_where(
        &mut self,
        refusal: &Refusal,
        affected: impl Fn(&str) -> bool,
        hands: &mut Hands,
    ) -> Result<(), Refusal> {
        let chosen = self.links.iter().filter(|(_, link)| link.key().is_some_and(&affected));
        let handles: Vec<u32> = chosen.map(|(handle, _)| *handle).collect();
        for handle in handles {
            self.detach_with(handle, refusal, hands)?;
        }
        Ok(())
    }

    /// Ends the session from this side.
    pub(super) fn end_with(&mut self, refusal: &Refusal, hands: &mut Hands) -> Result<(), Refusal> {
        self.release_links(hands);
        self.waiting.clear();
        self.ended = true;
        tracing::debug!(condition = %refusal.condition, "ending a session");
        hands.out.frame(self.channel, &End { error: Some(refusal.error()) }, &[])
    }

    /// The entities that its links use.
    pub(super) fn keys(&self) -> impl Iterator<Item = &str> {
        self.links.values().filter_map(Link::key)
    }

    /// When a link has waited long enough.
    pub(super) fn next_tick_ms(&self) -> Option<i64> {
        let waits = self.links.values().filter_map(|link| match &link.node {
            Node::Egress(egress) => egress.waits_until_ms(),
            _ => None,
        });
        waits.min()
    }
}

impl Link {
    /// The entity that it uses, if it needs a token.
    fn key(&self) -> Option<&str> {
        match &self.node {
            Node::Ingress(ingress) => Some(&ingress.key),
            Node::Egress(egress) => Some(&egress.key),
            Node::Requests(_) | Node::Answers(_) | Node::Detached => None,
        }
    }
}

/// A link's entity, by which it is found.
pub(super) fn entity_key(path: &str) -> String {
    key(path)
}
