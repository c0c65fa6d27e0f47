//! Messages by their numbers: looking without taking, and taking what was deferred.
//!
//! What lives here: peek and receive-by-sequence-number. What does not: the usual way to a receiver
//! (`queue.rs`).
//! Invariant: an answer never holds more than [`PEEK_BYTES_MAX`] and the one message that crosses
//! it.

use bytes::Bytes;

use super::queue::{Delivery, Kind, Mode, Queue, State};
use super::sessions::session_lost;
use crate::refusal::{Refusal, condition};

/// The most messages that one look shows.
const PEEK_MESSAGES_MAX: usize = 250;
/// After so many bytes a look ends; the client looks on from there.
const PEEK_BYTES_MAX: usize = 1024 * 1024;

impl Queue {
    /// Shows messages from a number on, of one session or of all.
    pub(crate) fn peek(
        &self,
        from: i64,
        count: usize,
        session: Option<&str>,
    ) -> Result<Vec<Bytes>, Refusal> {
        self.holds_messages()?;
        let mut shown = Vec::new();
        let mut bytes = 0;
        for stored in self.messages.range(from..).map(|(_, stored)| stored) {
            if session.is_some_and(|id| stored.message.session_id() != Some(id)) {
                continue;
            }
            if shown.len() == count.min(PEEK_MESSAGES_MAX) || bytes > PEEK_BYTES_MAX {
                break;
            }
            let encoded = stored.message.encode(&stored.envelope(None));
            let encoded = encoded
                .map_err(|error| Refusal::new(condition::DECODE_ERROR, error.to_string()))?;
            bytes += encoded.len();
            shown.push(encoded);
        }
        Ok(shown)
    }

    /// Gives deferred messages to a receiver: all of them or none.
    pub(crate) fn receive_deferred(
        &mut self,
        sequence_numbers: &[i64],
        session: Option<&str>,
        mode: Mode,
        now_ms: i64,
    ) -> Result<Vec<Delivery>, Refusal> {
        self.holds_messages()?;
        if let Some(id) = session
            && self.sessions.get(id).and_then(|session| session.held_until_ms()).is_none()
        {
            return Err(session_lost(id));
        }
        for number in sequence_numbers {
            let stored = self.messages.get(number);
            let found = stored.is_some_and(|stored| {
                stored.state == State::Deferred
                    && (session.is_none() || stored.message.session_id() == session)
            });
            if !found {
                let text = "Failed to lock one or more specified messages: not found.";
                return Err(Refusal::new(condition::MESSAGE_NOT_FOUND, text));
            }
        }
        let take = |number: &i64| self.take(*number, session, mode, now_ms);
        Ok(sequence_numbers.iter().filter_map(take).collect())
    }

    fn holds_messages(&self) -> Result<(), Refusal> {
        if self.kind == Kind::Topic {
            let text = format!("{} is a topic: look at its subscriptions.", self.path);
            return Err(Refusal::new(condition::NOT_ALLOWED, text));
        }
        Ok(())
    }
}
