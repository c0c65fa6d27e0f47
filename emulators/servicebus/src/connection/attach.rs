//! Attaching links: to an entity, to its management, to where tokens are put.
//!
//! What lives here: which link becomes what, and refusing those that can't be. What does not: what
//! they do afterwards.
//! Invariant: an answer has the client's own source and target, addresses spelled as they came; a
//! refused link is answered by an attach without the refused end and a detach that says why.

use fe2o3_amqp_types::definitions::{Role, SenderSettleMode};
use fe2o3_amqp_types::messaging::{Source, TargetArchetype};
use fe2o3_amqp_types::performatives::{Attach, Detach};
use serde_amqp::Value;
use serde_amqp::primitives::Symbol;

use super::Hands;
use super::egress::{Egress, WAIT_DEFAULT_MS};
use super::ingress::{Ingress, Requests};
use super::replies::Answers;
use super::session::{Link, Node, Session, entity_key};
use crate::address::{self, Place};
use crate::broker::not_found;
use crate::broker::queue::{Kind, Mode};
use crate::refusal::{Refusal, condition};

/// How many transfers a sender may have in flight.
pub(super) const SENDER_CREDIT: u32 = 1_000;
/// The filter that names a session, or asks for any.
pub(super) const SESSION_FILTER: &str = "com.microsoft:session-filter";
const TIMEOUT: &str = "com.microsoft:timeout";
/// The longest that a receiver may wait for a session.
const WAIT_MAX_MS: i64 = 24 * 60 * 60 * 1_000;
/// The largest request to a management node, and message to any other that has no limit of its own.
const REQUEST_BYTES_MAX: u64 = 4 * 1024 * 1024;

impl Session {
    pub(super) fn attach(&mut self, attach: Attach, hands: &mut Hands) -> Result<(), Refusal> {
        let made = match attach.role {
            Role::Sender => self.take_sender(&attach, hands),
            Role::Receiver => self.take_receiver(&attach, hands),
        };
        match made {
            Ok(()) => Ok(()),
            Err(refusal) => self.refuse(&attach, &refusal, hands),
        }
    }

    /// The peer sends.
    fn take_sender(&mut self, attach: &Attach, hands: &mut Hands) -> Result<(), Refusal> {
        let place = address::place(target_address(attach).unwrap_or_default());
        let (node, limit) = match place {
            Place::Cbs => (Node::Requests(Requests::cbs()), REQUEST_BYTES_MAX),
            Place::Management(path) => {
                check_token(&management_of(&path), hands)?;
                hands.shared.broker.find(&path).ok_or_else(|| not_found(&path))?;
                (Node::Requests(Requests::management(path)), REQUEST_BYTES_MAX)
            }
            Place::Entity(path) => {
                let ingress = ingress(&path, hands)?;
                let limit = ingress.message_bytes_max;
                (Node::Ingress(ingress), limit)
            }
        };
        let mut answer = mirror(attach, Role::Receiver);
        answer.max_message_size = Some(limit);
        let handle = attach.handle.0;
        hands.out.frame(self.channel, &answer, &[])?;
        let id = hands.shared.next_link();
        let delivery_count = attach.initial_delivery_count.unwrap_or(0);
        let credit = match &node {
            Node::Ingress(ingress) if hands.shared.faults.withholds_credit(&ingress.key) => 0,
            _ => SENDER_CREDIT,
        };
        let link = Link { id, delivery_count, credit, drain: false, node };
        self.links.insert(handle, link);
        self.send_flow(handle, hands)
    }

    /// The peer receives.
    fn take_receiver(&mut self, attach: &Attach, hands: &mut Hands) -> Result<(), Refusal> {
        let place = address::place(source_address(attach).unwrap_or_default());
        let reply_to = || target_address(attach).unwrap_or_default().to_owned();
        let node = match place {
            Place::Cbs => Node::Answers(Answers::new(None, reply_to())),
            Place::Management(path) => {
                check_token(&management_of(&path), hands)?;
                hands.shared.broker.find(&path).ok_or_else(|| not_found(&path))?;
                Node::Answers(Answers::new(Some(entity_key(&path)), reply_to()))
            }
            Place::Entity(path) => Node::Egress(egress(&path, attach, hands)?),
        };
        let handle = attach.handle.0;
        let id = hands.shared.next_link();
        // A receiver that waits for a session is answered when it has one.
        if !matches!(&node, Node::Egress(egress) if egress.waits_until_ms().is_some()) {
            let answer = mirror(attach, Role::Sender);
            hands.out.frame(self.channel, &answer, &[])?;
        }
        let link = Link { id, delivery_count: 0, credit: 0, drain: false, node };
        self.links.insert(handle, link);
        self.pump_link(handle, hands)
    }

    /// An attach without the end that can't be had, and a detach that says why.
    pub(super) fn refuse(
        &mut self,
        attach: &Attach,
        refusal: &Refusal,
        hands: &mut Hands,
    ) -> Result<(), Refusal> {
        tracing::debug!(condition = %refusal.condition, why = %refusal.description, "refusing");
        let mut answer = match attach.role {
            Role::Sender => mirror(attach, Role::Receiver),
            Role::Receiver => mirror(attach, Role::Sender),
        };
        match attach.role {
            Role::Sender => answer.target = None,
            Role::Receiver => answer.source = None,
        }
        hands.out.frame(self.channel, &answer, &[])?;
        let detach =
            Detach { handle: attach.handle.clone(), closed: true, error: Some(refusal.error()) };
        hands.out.frame(self.channel, &detach, &[])
    }
}

fn ingress(path: &str, hands: &Hands) -> Result<Ingress, Refusal> {
    check_token(path, hands)?;
    let (kind, settings) = hands.shared.broker.find(path).ok_or_else(|| not_found(path))?;
    if !matches!(kind, Kind::Queue | Kind::Topic) {
        let text = format!("Messages can't be sent to {path}.");
        return Err(Refusal::new(condition::NOT_ALLOWED, text));
    }
    let key = entity_key(path);
    hands.shared.faults.may_send(&key)?;
    hands.shared.count(&key, |counts| counts.sender_links += 1);
    Ok(Ingress::new(key, settings.max_message_bytes))
}

fn egress(path: &str, attach: &Attach, hands: &Hands) -> Result<Egress, Refusal> {
    check_token(path, hands)?;
    let (kind, settings) = hands.shared.broker.find(path).ok_or_else(|| not_found(path))?;
    if kind == Kind::Topic {
        let text = format!("{path} is a topic: receive from its subscriptions.");
        return Err(Refusal::new(condition::NOT_ALLOWED, text));
    }
    let key = entity_key(path);
    hands.shared.faults.may_receive(&key)?;
    let mode = match attach.snd_settle_mode {
        SenderSettleMode::Settled => Mode::Delete,
        SenderSettleMode::Unsettled | SenderSettleMode::Mixed => Mode::PeekLock,
    };
    let asked = attach.source.as_deref().and_then(session_filter);
    let mut egress = Egress::new(key.clone(), mode);
    match (settings.requires_session, asked) {
        // The Python SDK sends the filter without a session everywhere.
        (false, None | Some(None)) => {}
        (false, Some(Some(_))) => {
            let text = format!("{path} has no sessions: it can't be received from by session.");
            return Err(Refusal::new(condition::NOT_ALLOWED, text));
        }
        (true, None) => {
            let text = "It is not possible for an entity that requires sessions to create a \
                non-sessionful message receiver.";
            return Err(Refusal::new(condition::NOT_ALLOWED, text));
        }
        (true, Some(asked)) => {
            let waits_ms = timeout_ms(attach).unwrap_or(WAIT_DEFAULT_MS).clamp(0, WAIT_MAX_MS);
            let until_ms = hands.shared.broker.clock.now_ms().saturating_add(waits_ms);
            egress.wait_for_session(asked, attach.clone(), until_ms);
        }
    }
    hands.shared.count(&key, |counts| counts.receiver_links += 1);
    Ok(egress)
}

fn check_token(path: &str, hands: &Hands) -> Result<(), Refusal> {
    hands.tokens.check(&entity_key(path), hands.shared.broker.clock.now_ms())
}

/// The JavaScript SDK has a token for this node alone.
fn management_of(path: &str) -> String {
    format!("{path}/$management")
}

/// The client's own attach, from the other side.
pub(super) fn mirror(attach: &Attach, role: Role) -> Attach {
    let initial_delivery_count = match role {
        Role::Sender => Some(0),
        Role::Receiver => None,
    };
    Attach {
        role,
        unsettled: None,
        incomplete_unsettled: false,
        initial_delivery_count,
        max_message_size: None,
        offered_capabilities: None,
        desired_capabilities: None,
        ..attach.clone()
    }
}

fn target_address(attach: &Attach) -> Option<&str> {
    match attach.target.as_deref()? {
        TargetArchetype::Target(target) => target.address.as_deref(),
    }
}

fn source_address(attach: &Attach) -> Option<&str> {
    attach.source.as_deref()?.address.as_deref()
}

/// Nothing without the filter; of the filter, the session or none.
fn session_filter(source: &Source) -> Option<Option<String>> {
    let value = source.filter.as_ref()?.get(&Symbol::from(SESSION_FILTER))?;
    let value = match value {
        Value::Described(described) => &described.value,
        value => value,
    };
    Some(match value {
        Value::String(id) => Some(id.clone()),
        _ => None,
    })
}

fn timeout_ms(attach: &Attach) -> Option<i64> {
    match attach.properties.as_ref()?.get(&Symbol::from(TIMEOUT))? {
        Value::Uint(ms) => Some(i64::from(*ms)),
        Value::Ulong(ms) => i64::try_from(*ms).ok(),
        Value::Int(ms) => Some(i64::from(*ms)),
        Value::Long(ms) => Some(*ms),
        _ => None,
    }
}
