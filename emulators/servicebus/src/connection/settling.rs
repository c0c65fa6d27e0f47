//! What receivers say of the messages that they hold.
//!
//! What lives here: reading dispositions, and answering them. What does not: what becomes of the
//! message (`broker/queue.rs`).
//! Invariant: a receiver that waits for an answer gets its own state back, or a rejection that says
//! that its lock was lost.

use fe2o3_amqp_types::definitions::Role;
use fe2o3_amqp_types::messaging::{DeliveryState, Modified, Rejected};
use fe2o3_amqp_types::performatives::Disposition;
use fe2o3_amqp_types::primitives::SimpleValue;
use serde_amqp::Value;
use serde_amqp::primitives::Symbol;

use super::Hands;
use super::session::Session;
use crate::broker::message::text;
use crate::broker::queue::{Changes, Settlement};
use crate::refusal::{Refusal, condition, name};

pub(crate) const REASON: &str = "DeadLetterReason";
pub(crate) const DESCRIPTION: &str = "DeadLetterErrorDescription";

impl Session {
    pub(super) fn disposition(
        &mut self,
        disposition: &Disposition,
        hands: &mut Hands,
    ) -> Result<(), Refusal> {
        // A sender that settles what was settled here already says nothing new.
        if disposition.role == Role::Sender {
            return Ok(());
        }
        let (first, last) = (disposition.first, disposition.last.unwrap_or(disposition.first));
        if last < first {
            return Ok(());
        }
        let named: Vec<u32> = self.unsettled.range(first..=last).map(|(id, _)| *id).collect();
        for id in named {
            self.settle(id, disposition, hands)?;
        }
        Ok(())
    }

    fn settle(
        &mut self,
        id: u32,
        disposition: &Disposition,
        hands: &mut Hands,
    ) -> Result<(), Refusal> {
        let settlement = disposition.state.as_ref().and_then(settlement);
        // Without an outcome it is only forgotten: the lock ends by itself.
        if settlement.is_none() && !disposition.settled {
            return Ok(());
        }
        let Some(unsettled) = self.unsettled.remove(&id) else { return Ok(()) };
        let mut state = disposition.state.clone().map(confirmed);
        if let Some(settlement) = settlement {
            let broker = &hands.shared.broker;
            let wakes = !matches!(settlement, Settlement::Complete);
            let settled = broker.with(&unsettled.key, |queue, now_ms| {
                queue.settle(unsettled.token, settlement, now_ms)
            });
            if let Err(refusal) = settled {
                state = Some(refusal.rejected());
            } else if wakes {
                broker.wake();
            }
        }
        if disposition.settled {
            return Ok(());
        }
        let answer = Disposition {
            role: Role::Sender,
            first: id,
            last: Some(id),
            settled: true,
            state,
            batchable: false,
        };
        hands.out.frame(self.channel, &answer, &[])
    }
}

/// The outcome as it is confirmed: an error in it would say that it could not be had.
fn confirmed(state: DeliveryState) -> DeliveryState {
    match state {
        DeliveryState::Rejected(_) => DeliveryState::Rejected(Rejected { error: None }),
        other => other,
    }
}

/// What an outcome asks for; nothing if it is none.
fn settlement(state: &DeliveryState) -> Option<Settlement> {
    Some(match state {
        DeliveryState::Accepted(_) => Settlement::Complete,
        DeliveryState::Released(_) => Settlement::Release,
        DeliveryState::Rejected(rejected) => dead_letter(rejected),
        DeliveryState::Modified(modified) => {
            let changes = changes(modified);
            if modified.undeliverable_here == Some(true) {
                Settlement::Defer(changes)
            } else {
                Settlement::Abandon(changes)
            }
        }
        DeliveryState::Received(_) => return None,
    })
}

fn dead_letter(rejected: &Rejected) -> Settlement {
    let Some(error) = &rejected.error else {
        return Settlement::DeadLetter { reason: None, description: None, changes: Vec::new() };
    };
    let mut changes = Vec::new();
    let (mut reason, mut description) = (None, None);
    for (name, value) in error.info.iter().flat_map(|info| info.iter()) {
        match name.as_str() {
            REASON => reason = text(value).map(str::to_owned),
            DESCRIPTION => description = text(value).map(str::to_owned),
            name => changes.extend(simple(value).map(|value| (name.to_owned(), value))),
        }
    }
    let name = name(&error.condition);
    if reason.is_none() && name != condition::DEAD_LETTER {
        reason = Some(name);
        description = description.or_else(|| error.description.clone());
    }
    Settlement::DeadLetter { reason, description, changes }
}

fn changes(modified: &Modified) -> Changes {
    let annotations = modified.message_annotations.iter().flat_map(|map| map.iter());
    let named =
        annotations.filter_map(|(Symbol(name), value)| Some((name.clone(), simple(value)?)));
    named.collect()
}

/// A value as an application property may have it.
pub(crate) fn simple(value: &Value) -> Option<SimpleValue> {
    Some(match value.clone() {
        Value::Null => SimpleValue::Null,
        Value::Bool(value) => SimpleValue::Bool(value),
        Value::Ubyte(value) => SimpleValue::Ubyte(value),
        Value::Ushort(value) => SimpleValue::Ushort(value),
        Value::Uint(value) => SimpleValue::Uint(value),
        Value::Ulong(value) => SimpleValue::Ulong(value),
        Value::Byte(value) => SimpleValue::Byte(value),
        Value::Short(value) => SimpleValue::Short(value),
        Value::Int(value) => SimpleValue::Int(value),
        Value::Long(value) => SimpleValue::Long(value),
        Value::Float(value) => SimpleValue::Float(value),
        Value::Double(value) => SimpleValue::Double(value),
        Value::Char(value) => SimpleValue::Char(value),
        Value::Timestamp(value) => SimpleValue::Timestamp(value),
        Value::Uuid(value) => SimpleValue::Uuid(value),
        Value::Binary(value) => SimpleValue::Binary(value),
        Value::String(value) => SimpleValue::String(value),
        Value::Symbol(value) => SimpleValue::Symbol(value),
        _ => return None,
    })
}
