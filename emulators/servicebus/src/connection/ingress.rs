//! Transfers that come in: messages from senders, and requests.
//!
//! What lives here: putting a delivery together from its frames, credit, and answering it. What
//! does not: what the broker does with messages, or what a request asks for.
//! Invariant: an accepted transfer is in the broker before the answer is written; a delivery never
//! takes more memory than its link allows for one message, envelope included, and what is larger is
//! rejected once it has passed.

use bytes::{Bytes, BytesMut};
use fe2o3_amqp_types::definitions::Role;
use fe2o3_amqp_types::messaging::{Accepted, DeliveryState};
use fe2o3_amqp_types::performatives::{Disposition, Transfer};

use super::Hands;
use super::attach::SENDER_CREDIT;
use super::session::{Link, Node, Session};
use crate::broker::message::Message;
use crate::broker::{LinkId, Submitted};
use crate::faults::{Answer, Verdict};
use crate::refusal::{Refusal, condition};
use crate::{cbs, management};

/// The format of a transfer whose data sections are messages.
const BATCH_FORMAT: u32 = 0x8001_3700;
/// The largest request, in bytes.
const REQUEST_BYTES_MAX: u64 = 4 * 1024 * 1024;

/// Where a sender's messages go.
#[derive(Debug)]
pub(super) struct Ingress {
    pub key: String,
    pub message_bytes_max: u64,
    partial: Option<Partial>,
}

/// Whose requests come.
#[derive(Debug)]
pub(super) struct Requests {
    /// The entity that they are about; none for tokens.
    path: Option<String>,
    partial: Option<Partial>,
}

/// A delivery of which frames are still to come.
#[derive(Debug)]
struct Partial {
    delivery_id: u32,
    format: u32,
    settled: bool,
    bytes: BytesMut,
    /// All that came, whether it was kept or not.
    size: u64,
}

/// A delivery that has come whole.
struct Whole {
    delivery_id: u32,
    format: u32,
    settled: bool,
    bytes: Bytes,
    /// Too large to be kept.
    refusal: Option<Refusal>,
}

impl Ingress {
    pub(super) fn new(key: String, message_bytes_max: u64) -> Self {
        Self { key, message_bytes_max, partial: None }
    }
}

impl Requests {
    pub(super) fn cbs() -> Self {
        Self { path: None, partial: None }
    }

    pub(super) fn management(path: String) -> Self {
        Self { path: Some(path), partial: None }
    }
}

impl Session {
    pub(super) fn transfer(
        &mut self,
        transfer: Transfer,
        payload: &Bytes,
        hands: &mut Hands,
    ) -> Result<(), Refusal> {
        let handle = transfer.handle.0;
        let Some(link) = self.links.get_mut(&handle) else {
            let text = "There is no link of this handle.";
            return Err(Refusal::new(condition::UNATTACHED_HANDLE, text));
        };
        let (partial, limit) = match &mut link.node {
            Node::Ingress(ingress) => (&mut ingress.partial, ingress.message_bytes_max),
            Node::Requests(requests) => (&mut requests.partial, REQUEST_BYTES_MAX),
            // It was on its way when the link was taken away.
            Node::Detached => return Ok(()),
            Node::Egress(_) | Node::Answers(_) => {
                let text = "Transfers don't come on a receiver's link.";
                return Err(Refusal::new(condition::NOT_ALLOWED, text));
            }
        };
        if partial.is_none() {
            if link.credit == 0 {
                let refusal = Refusal::new(condition::TRANSFER_LIMIT, "The link has no credit.");
                return self.detach_with(handle, &refusal, hands);
            }
            link.credit -= 1;
            link.delivery_count = link.delivery_count.wrapping_add(1);
        }
        let aborted = transfer.aborted;
        let whole = put_together(partial, transfer, payload, limit)?;
        if let Some(whole) = whole.filter(|_| !aborted) {
            self.arrived(handle, whole, hands)?;
        }
        self.top_up(handle, hands)
    }

    /// Gives a sender new credit when half of it is used.
    fn top_up(&mut self, handle: u32, hands: &mut Hands) -> Result<(), Refusal> {
        let Some(link) = self.links.get_mut(&handle) else { return Ok(()) };
        if link.credit > SENDER_CREDIT / 2 || matches!(link.node, Node::Detached) {
            return Ok(());
        }
        if let Node::Ingress(ingress) = &link.node
            && hands.shared.faults.withholds_credit(&ingress.key)
        {
            return Ok(());
        }
        link.credit = SENDER_CREDIT;
        self.send_flow(handle, hands)
    }

    /// Gives the senders of an entity the credit that was withheld.
    pub(super) fn give_credit(&mut self, key: &str, hands: &mut Hands) -> Result<(), Refusal> {
        let mine = |link: &Link| matches!(&link.node, Node::Ingress(ingress) if ingress.key == key);
        let links = self.links.iter().filter(|(_, link)| mine(link));
        let handles: Vec<u32> = links.map(|(handle, _)| *handle).collect();
        for handle in handles {
            self.top_up(handle, hands)?;
        }
        Ok(())
    }

    fn arrived(&mut self, handle: u32, whole: Whole, hands: &mut Hands) -> Result<(), Refusal> {
        let Some(link) = self.links.get(&handle) else { return Ok(()) };
        let id = link.id;
        match &link.node {
            Node::Ingress(ingress) => {
                let key = ingress.key.clone();
                let (answer, state) = take_messages(&key, id, &whole, hands);
                match answer {
                    Answer::Given if !whole.settled => self.answer(id, &whole, state, hands),
                    Answer::Given | Answer::Lost => {
                        hands.out.forget_transfer(id);
                        Ok(())
                    }
                    Answer::Dropped => {
                        hands.drop = true;
                        Ok(())
                    }
                }
            }
            Node::Requests(requests) => {
                let reply = match (&whole.refusal, &requests.path) {
                    (Some(refusal), _) => Err(refusal.clone()),
                    (None, None) => cbs::answer(&whole.bytes, hands),
                    (None, Some(path)) => management::answer(path, &whole.bytes, &hands.shared),
                };
                match reply {
                    Ok(reply) => {
                        hands.reply(reply);
                        let accepted = DeliveryState::Accepted(Accepted {});
                        self.answer(id, &whole, accepted, hands)
                    }
                    Err(refusal) => self.answer(id, &whole, refusal.rejected(), hands),
                }
            }
            Node::Egress(_) | Node::Answers(_) | Node::Detached => Ok(()),
        }
    }

    fn answer(
        &mut self,
        link: LinkId,
        whole: &Whole,
        state: DeliveryState,
        hands: &mut Hands,
    ) -> Result<(), Refusal> {
        if whole.settled {
            return Ok(());
        }
        let disposition = Disposition {
            role: Role::Receiver,
            first: whole.delivery_id,
            last: Some(whole.delivery_id),
            settled: true,
            state: Some(state),
            batchable: false,
        };
        hands.out.answer(self.channel, &disposition, link, 1)
    }
}

/// Adds a frame to its delivery; the delivery once it is whole, or once it was given up.
fn put_together(
    partial: &mut Option<Partial>,
    transfer: Transfer,
    payload: &Bytes,
    limit: u64,
) -> Result<Option<Whole>, Refusal> {
    let mut delivery = match partial.take() {
        Some(delivery) => delivery,
        None => Partial {
            delivery_id: transfer.delivery_id.ok_or_else(|| {
                Refusal::new(condition::DECODE_ERROR, "A delivery's first frame has no id.")
            })?,
            format: transfer.message_format.unwrap_or(0),
            settled: false,
            bytes: BytesMut::new(),
            size: 0,
        },
    };
    delivery.settled |= transfer.settled.unwrap_or(false);
    delivery.size = delivery.size.saturating_add(payload.len() as u64);
    let too_large = delivery.size > limit;
    if too_large {
        delivery.bytes = BytesMut::new();
    }
    if transfer.more && !transfer.aborted {
        if !too_large {
            delivery.bytes.extend_from_slice(payload);
        }
        *partial = Some(delivery);
        return Ok(None);
    }
    let refusal = too_large.then(|| size_exceeded(delivery.delivery_id, delivery.size, limit));
    let bytes = if too_large {
        Bytes::new()
    } else if delivery.bytes.is_empty() {
        payload.clone()
    } else {
        delivery.bytes.extend_from_slice(payload);
        delivery.bytes.freeze()
    };
    let Partial { delivery_id, format, settled, .. } = delivery;
    Ok(Some(Whole { delivery_id, format, settled, bytes, refusal }))
}

fn size_exceeded(delivery_id: u32, size: u64, limit: u64) -> Refusal {
    let text = format!(
        "The received message (delivery-id:{delivery_id}, size:{size} bytes) exceeds the limit \
         ({limit} bytes) currently allowed on the link."
    );
    Refusal::new(condition::MESSAGE_SIZE, text)
}

/// Takes a sender's transfer in, and says what it is to be told.
fn take_messages(
    key: &str,
    link: LinkId,
    whole: &Whole,
    hands: &mut Hands,
) -> (Answer, DeliveryState) {
    let shared = &hands.shared;
    let is_batch = whole.format == BATCH_FORMAT;
    let begins = hands.out.begins_round_trip(link);
    let (answer, result) = match shared.faults.judge(key, shared.broker.clock.now_ms()) {
        Verdict::Store { answer } => match &whole.refusal {
            Some(refusal) => (answer, Err(refusal.clone())),
            None => (answer, store(key, is_batch, &whole.bytes, hands)),
        },
        Verdict::Reject(refusal) => (Answer::Given, Err(refusal)),
    };
    shared.count(key, |counts| {
        counts.transfers += 1;
        counts.batches += u64::from(is_batch);
        counts.round_trips += u64::from(begins);
        match &result {
            Ok(submitted) => {
                counts.messages += submitted.sequence_numbers.len() as u64;
                counts.duplicates += submitted.duplicates;
            }
            Err(_) => counts.rejected += 1,
        }
    });
    match result {
        Ok(_) => (answer, DeliveryState::Accepted(Accepted {})),
        Err(refusal) => (answer, refusal.rejected()),
    }
}

fn store(key: &str, is_batch: bool, bytes: &Bytes, hands: &Hands) -> Result<Submitted, Refusal> {
    let messages = if is_batch {
        Message::decode_batch(bytes)?
    } else {
        let message = Message::decode(bytes);
        vec![message.map_err(|error| Refusal::new(condition::DECODE_ERROR, error.to_string()))?]
    };
    hands.shared.broker.submit(key, messages)
}
