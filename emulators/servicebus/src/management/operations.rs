//! The operations of an entity's management node.
//!
//! What lives here: reading an operation's arguments, doing it, its result. What does not: the
//! request around it (`mod.rs`), and what it does to a queue (`broker/`).
//! Invariant: an argument that is missing or has another type is refused by its name.

use bytes::Bytes;
use serde_amqp::Value;
use serde_amqp::primitives::Array;
use serde_bytes::ByteBuf;
use uuid::Uuid;

use super::{Outcome, unknown};
use crate::broker::message::{Message, text, time};
use crate::broker::queue::{Changes, Mode, Settlement};
use crate::connection::simple;
use crate::refusal::{Refusal, condition};
use crate::request::{Request, binary, elements, field, integer, map};
use crate::shared::Shared;

/// The most messages, numbers or tokens of one request.
const ELEMENTS_MAX: usize = 4_500;

/// What an operation works on.
struct Call<'a> {
    path: &'a str,
    request: &'a Request,
    shared: &'a Shared,
}

pub(super) fn perform(operation: &str, path: &str, request: &Request, shared: &Shared) -> Outcome {
    let call = Call { path, request, shared };
    match operation {
        "com.microsoft:schedule-message" => call.schedule(),
        "com.microsoft:cancel-scheduled-message" => call.cancel(),
        "com.microsoft:peek-message" => call.peek(),
        "com.microsoft:receive-by-sequence-number" => call.receive_deferred(),
        "com.microsoft:renew-lock" => call.renew_locks(),
        "com.microsoft:update-disposition" => call.settle(),
        "com.microsoft:renew-session-lock" => call.renew_session(),
        "com.microsoft:get-session-state" => call.session_state(),
        "com.microsoft:set-session-state" => call.set_session_state(),
        _ => Err(unknown(operation)),
    }
}

impl Call<'_> {
    fn schedule(&self) -> Outcome {
        let Some((_, settings)) = self.shared.broker.find(self.path) else {
            return Err(crate::broker::not_found(self.path));
        };
        let mut messages = Vec::new();
        for entry in self.elements("messages")? {
            let bytes = match entry {
                Value::Map(entry) => field(entry, "message"),
                _ => None,
            };
            let Some(Value::Binary(bytes)) = bytes else { return Err(argument("messages")) };
            if bytes.len() as u64 > settings.max_message_bytes {
                let text = format!("A message has {} bytes.", bytes.len());
                return Err(Refusal::new(condition::MESSAGE_SIZE, text));
            }
            let message = Message::decode(bytes);
            let decoded =
                message.map_err(|error| Refusal::new(condition::DECODE_ERROR, error.to_string()));
            messages.push(decoded?);
        }
        let key = crate::broker::key(self.path);
        self.shared.faults.may_send(&key)?;
        let count = messages.len() as u64;
        let submitted = self.shared.broker.submit(self.path, messages)?;
        self.shared.count(&key, |counts| {
            counts.messages += count - submitted.duplicates;
            counts.duplicates += submitted.duplicates;
        });
        let numbers = submitted.sequence_numbers.into_iter().map(Value::Long).collect();
        Ok(Some(map([("sequence-numbers", Value::Array(Array(numbers)))])))
    }

    fn cancel(&self) -> Outcome {
        let numbers = self.numbers()?;
        self.shared.broker.with(self.path, |queue, _| queue.cancel(&numbers))?;
        Ok(Some(map([])))
    }

    fn peek(&self) -> Outcome {
        let from = self.field("from-sequence-number").and_then(|value| number(value, "from"))?;
        let count = self.field("message-count").and_then(|value| number(value, "message-count"))?;
        let session = self.session();
        let shown = self.shared.broker.with(self.path, |queue, _| {
            queue.peek(from, usize::try_from(count).unwrap_or(0), session)
        })?;
        if shown.is_empty() {
            return Ok(None);
        }
        let messages = shown.iter().map(|bytes| map([("message", binary(bytes))]));
        Ok(Some(map([("messages", Value::List(messages.collect()))])))
    }

    fn receive_deferred(&self) -> Outcome {
        let numbers = self.numbers()?;
        self.shared.faults.may_receive(&crate::broker::key(self.path))?;
        // 0 is the receiver that settles by receiving.
        let mode = match self.request.field("receiver-settle-mode").and_then(integer) {
            Some(0) => Mode::Delete,
            _ => Mode::PeekLock,
        };
        let session = self.session();
        let taken = self.shared.broker.with(self.path, |queue, now_ms| {
            queue.receive_deferred(&numbers, session, mode, now_ms)
        })?;
        let messages = taken.iter().map(|delivery| {
            let token = Value::Uuid((*delivery.token.as_bytes()).into());
            map([("message", binary(&delivery.bytes)), ("lock-token", token)])
        });
        Ok(Some(map([("messages", Value::List(messages.collect()))])))
    }

    fn renew_locks(&self) -> Outcome {
        let tokens = self.tokens()?;
        let until = self.shared.broker.with(self.path, |queue, now_ms| {
            let renewed = tokens.iter().map(|token| queue.renew(*token, now_ms));
            renewed.collect::<Result<Vec<i64>, Refusal>>()
        })?;
        let until = until.into_iter().map(time).collect();
        Ok(Some(map([("expirations", Value::Array(Array(until)))])))
    }

    fn settle(&self) -> Outcome {
        let tokens = self.tokens()?;
        let settlement = self.settlement()?;
        let settled = self.shared.broker.with(self.path, |queue, now_ms| {
            let mut settled =
                tokens.iter().map(|token| queue.settle(*token, settlement.clone(), now_ms));
            settled.try_for_each(std::convert::identity)
        });
        self.shared.broker.wake();
        settled.map(|()| Some(map([])))
    }

    fn settlement(&self) -> Result<Settlement, Refusal> {
        let text_of = |name: &str| self.request.field(name).and_then(text).map(str::to_owned);
        let changes = self.changes();
        Ok(match text(self.field("disposition-status")?) {
            Some("completed") => Settlement::Complete,
            Some("abandoned") => Settlement::Abandon(changes),
            // The service's own spelling.
            Some("defered") => Settlement::Defer(changes),
            Some("suspended") => Settlement::DeadLetter {
                reason: text_of("deadletter-reason"),
                description: text_of("deadletter-description"),
                changes,
            },
            _ => return Err(argument("disposition-status")),
        })
    }

    fn changes(&self) -> Changes {
        let Some(Value::Map(changes)) = self.request.field("properties-to-modify") else {
            return Vec::new();
        };
        let named = changes
            .iter()
            .filter_map(|(name, value)| Some((text(name)?.to_owned(), simple(value)?)));
        named.collect()
    }

    fn renew_session(&self) -> Outcome {
        let id = self.named_session()?;
        let until =
            self.shared.broker.with(self.path, |queue, now_ms| queue.renew_session(id, now_ms))?;
        Ok(Some(map([("expiration", time(until))])))
    }

    fn session_state(&self) -> Outcome {
        let id = self.named_session()?;
        let state = self.shared.broker.with(self.path, |queue, _| Ok(queue.session_state(id)))?;
        let state = state.map_or(Value::Null, |state| binary(&state));
        Ok(Some(map([("session-state", state)])))
    }

    fn set_session_state(&self) -> Outcome {
        let id = self.named_session()?;
        let state = match self.request.field("session-state") {
            None | Some(Value::Null) => None,
            Some(Value::Binary(state)) => Some(Bytes::copy_from_slice(state)),
            Some(_) => return Err(argument("session-state")),
        };
        self.shared.broker.with(self.path, |queue, _| queue.set_session_state(id, state))?;
        Ok(Some(map([])))
    }

    fn field(&self, name: &str) -> Result<&Value, Refusal> {
        self.request.field(name).ok_or_else(|| argument(name))
    }

    fn elements(&self, name: &str) -> Result<&[Value], Refusal> {
        let found = elements(self.field(name)?).filter(|found| found.len() <= ELEMENTS_MAX);
        found.ok_or_else(|| argument(name))
    }

    fn numbers(&self) -> Result<Vec<i64>, Refusal> {
        let name = "sequence-numbers";
        self.elements(name)?.iter().map(|value| number(value, name)).collect()
    }

    fn tokens(&self) -> Result<Vec<Uuid>, Refusal> {
        let token = |value: &Value| match value {
            Value::Uuid(id) => Ok(Uuid::from_bytes(*id.as_inner())),
            Value::Binary(bytes) => guid(bytes).ok_or_else(|| argument("lock-tokens")),
            _ => Err(argument("lock-tokens")),
        };
        self.elements("lock-tokens")?.iter().map(token).collect()
    }

    fn session(&self) -> Option<&str> {
        self.request.field("session-id").and_then(text)
    }

    fn named_session(&self) -> Result<&str, Refusal> {
        self.session().ok_or_else(|| argument("session-id"))
    }
}

/// A token as a delivery's tag has it.
fn guid(bytes: &ByteBuf) -> Option<Uuid> {
    Uuid::from_slice_le(bytes).ok()
}

fn number(value: &Value, name: &str) -> Result<i64, Refusal> {
    integer(value).ok_or_else(|| argument(name))
}

fn argument(name: &str) -> Refusal {
    let text = format!("The argument '{name}' is missing, too long or of another type.");
    Refusal::new(condition::ARGUMENT_ERROR, text)
}
