//! The documents of dead letters.
//!
//! What lives here: what a letter's document says, its id, its number, and the writes that park it.
//! What does not: the seam (`dead_letters.rs`).
//! Invariant: numbers only grow; one event has one letter of a consumer, wherever in the feed it
//! was met again.

use std::collections::HashSet;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use postrider_core::{
    ConsumerName, DeadLetter, DeadLetterId, DeadLetterState, Entry, Error, HeldLease, Key,
    Malformed, NewDeadLetter, PartitionId, Result, Timestamp, Topic,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::checkpoints::{Change, decode, encode};
use crate::control::{Control, Kept, Write, id};
use crate::event_document;
use crate::letter_parts::MAX_PART_BYTES;
use crate::position::Place;

pub(crate) const LETTER: &str = "letter";
const NUMBERS: &str = "numbers";

/// The last number given.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Numbers {
    last: u64,
}

/// A letter as it is kept.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Letter {
    /// Its document's.
    pub(crate) id: String,
    pub(crate) number: u64,
    pub(crate) consumer: String,
    pub(crate) partition: String,
    pub(crate) position: String,
    pub(crate) state: String,
    pub(crate) reason: String,
    pub(crate) attempts: u32,
    pub(crate) parked_ms: Option<u64>,
    pub(crate) at_ms: u64,
    pub(crate) key: Option<String>,
    /// Why it is unreadable, where it is.
    pub(crate) malformed: Option<String>,
    /// The event's document.
    pub(crate) event: Option<Value>,
    /// The bytes as found, of an unreadable one.
    pub(crate) raw: Option<String>,
    /// In how many documents its content is instead, where one does not hold it.
    #[serde(default)]
    pub(crate) parts: u32,
    /// What its entry costs a reader, as entries are counted.
    #[serde(default)]
    pub(crate) bytes: usize,
}

/// What is needed of a letter to choose it.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Head {
    pub(crate) id: String,
    pub(crate) number: u64,
    position: String,
    pub(crate) state: String,
    pub(crate) key: Option<String>,
    malformed: Option<String>,
    #[serde(default)]
    pub(crate) parts: u32,
    #[serde(default)]
    pub(crate) bytes: usize,
}

/// The properties of a [`Head`].
pub(crate) const HEAD: &str = "c.id, c.number, c.position, c.state, c.key, c.malformed, c.parts, \
    c.bytes, c._etag, c._ts";

impl Head {
    pub(crate) fn is_malformed(&self) -> bool {
        self.malformed.is_some()
    }

    pub(crate) fn ordinal(&self) -> Result<u64> {
        Ok(Place::read(&decode(&self.position)?)?.ordinal())
    }
}

/// A letter to be written, and what its document can't hold.
pub(crate) struct Made {
    pub(crate) letter: Letter,
    pub(crate) beside: Option<Vec<u8>>,
}

pub(crate) const fn state_text(state: DeadLetterState) -> &'static str {
    match state {
        DeadLetterState::Parked => "parked",
        DeadLetterState::Waiting => "waiting",
        DeadLetterState::Requeued => "requeued",
        DeadLetterState::Skipped => "skipped",
    }
}

fn state_of(text: &str) -> Result<DeadLetterState> {
    match text {
        "parked" => Ok(DeadLetterState::Parked),
        "waiting" => Ok(DeadLetterState::Waiting),
        "requeued" => Ok(DeadLetterState::Requeued),
        "skipped" => Ok(DeadLetterState::Skipped),
        _ => Err(Error::corrupt(format!("a dead letter has the unknown state {text:?}"))),
    }
}

/// One event has one letter of a consumer: an event is met at another place when the page it
/// stands on is cut differently.
fn letter_id(consumer: &str, entry: &Entry) -> String {
    match entry {
        Entry::Record(record) => {
            let (key, event) = (record.event.key().as_str(), record.event.id().to_string());
            id(LETTER, &[consumer.as_bytes(), key.as_bytes(), event.as_bytes()])
        }
        Entry::Malformed(malformed) => {
            let key = malformed.key.as_ref().map_or("", Key::as_str);
            id(LETTER, &[consumer.as_bytes(), b"malformed", key.as_bytes(), &malformed.raw])
        }
    }
}

impl Letter {
    pub(crate) fn made(consumer: &str, partition: &str, new: &NewDeadLetter) -> Made {
        let (at, malformed, content) = match &new.entry {
            Entry::Record(record) => {
                // No topic is the usual one here: the letter names its own.
                let event = event_document::document(&record.event, -1, 0, "");
                (record.appended_at, None, event.to_string().into_bytes())
            }
            Entry::Malformed(malformed) => {
                let reason = Some(malformed.reason.clone());
                (malformed.appended_at, reason, malformed.raw.to_vec())
            }
        };
        let letter = Self {
            id: letter_id(consumer, &new.entry),
            number: 0,
            consumer: consumer.to_owned(),
            partition: partition.to_owned(),
            position: encode(new.entry.position()),
            state: state_text(new.state).to_owned(),
            reason: new.reason.clone(),
            attempts: new.attempts,
            parked_ms: None,
            at_ms: at.as_millis(),
            key: new.entry.key().map(|key| key.as_str().to_owned()),
            malformed,
            event: None,
            raw: None,
            parts: 0,
            bytes: new.entry.cost_bytes(),
        };
        if content.len() <= MAX_PART_BYTES {
            return Made { letter: letter.with_content(&content), beside: None };
        }
        let parts = u32::try_from(content.len().div_ceil(MAX_PART_BYTES)).unwrap_or(u32::MAX);
        Made { letter: Self { parts, ..letter }, beside: Some(content) }
    }

    /// The same with its content in itself.
    pub(crate) fn with_content(self, content: &[u8]) -> Self {
        if self.malformed.is_some() {
            return Self { raw: Some(BASE64.encode(content)), ..self };
        }
        Self { event: serde_json::from_slice(content).ok(), ..self }
    }

    /// How many bytes its document has.
    pub(crate) fn size(&self) -> usize {
        // Names of the partition and what the store adds: less than two names may have.
        serde_json::to_vec(self).map_or(usize::MAX, |bytes| bytes.len() + 1_024)
    }

    fn entry(&self) -> Result<Entry> {
        let position = decode(&self.position)?;
        let appended_at = Timestamp::from_millis(self.at_ms);
        if let Some(event) = &self.event {
            // Not met: a letter names its own.
            let usual = Topic::new("events")?;
            return Ok(match event_document::entry(event, position, &usual) {
                Entry::Record(record) => {
                    Entry::Record(postrider_core::Record { appended_at, ..record })
                }
                Entry::Malformed(malformed) => {
                    Entry::Malformed(Malformed { appended_at, ..malformed })
                }
            });
        }
        let raw = BASE64.decode(self.raw.as_deref().unwrap_or_default());
        let raw = raw.map_err(|error| {
            Error::corrupt("a dead letter's bytes are no base64").with_source(error)
        })?;
        let key = self.key.as_deref().map(Key::new).transpose()?;
        let reason = self.malformed.clone().unwrap_or_default();
        Ok(Entry::Malformed(Malformed {
            position,
            appended_at,
            key,
            reason,
            raw: Bytes::from(raw),
        }))
    }
}

/// What a letter says; its content has to be in it.
pub(crate) fn letter(kept: &Kept<Letter>) -> Result<DeadLetter> {
    let body = &kept.body;
    Ok(DeadLetter {
        id: DeadLetterId::new(body.number),
        consumer: ConsumerName::new(body.consumer.as_str())?,
        partition: PartitionId::new(body.partition.as_str())?,
        entry: body.entry()?,
        state: state_of(&body.state)?,
        reason: body.reason.clone(),
        attempts: body.attempts,
        parked_at: body.parked_ms.map_or(kept.written_at, Timestamp::from_millis),
        updated_at: kept.written_at,
    })
}

/// Whether anybody's letter is to be sent again.
pub(crate) async fn is_any_requeued(control: &Control) -> Result<bool> {
    let clause = "AND c.state = 'requeued'";
    Ok(!control.texts(LETTER, "c.id", clause, &[], 1).await?.is_empty())
}

/// The letter with a change, to be written back.
pub(crate) fn changed(control: &Control, kept: &Kept<Letter>, next: Letter) -> Result<Write> {
    // When it was first written is known once it was: the database told with it.
    let parked_ms = next.parked_ms.or(Some(kept.written_at.as_millis()));
    let id = next.id.clone();
    // Content that is beside it stays there.
    let next = match next.parts {
        0 => next,
        _ => Letter { event: None, raw: None, ..next },
    };
    let document = control.document(LETTER, &id, &Letter { parked_ms, ..next })?;
    Ok(Write::Replace(document, kept.etag.clone()))
}

/// The writes that park letters, and how many of them are new. One that is there already has its
/// place brought up to date, by which it is released.
pub(crate) async fn park(
    control: &Control,
    lease: &HeldLease,
    consumer: &ConsumerName,
    letters: &[NewDeadLetter],
) -> Result<(Vec<Write>, u64)> {
    let partition = lease.partition().as_str();
    let mut writes = Vec::new();
    // From its first letter on, the consumer is known.
    let standing = Change::read(control, consumer.as_str(), partition).await?;
    if standing.is_new() {
        writes.push(standing.write(control)?);
    }
    let numbers_id = id(NUMBERS, &[]);
    let numbers = control.read::<Numbers>(&numbers_id).await?;
    let first = numbers.as_ref().map_or(0, |found| found.body.last);
    let mut last = first;
    let mut met = HashSet::new();
    for new in letters {
        let id = letter_id(consumer.as_str(), &new.entry);
        if !met.insert(id.clone()) {
            continue;
        }
        if let Some(there) = control.read::<Letter>(&id).await? {
            let position = encode(new.entry.position());
            if there.body.position != position {
                let next = Letter { position, ..there.body.clone() };
                writes.push(changed(control, &there, next)?);
            }
            continue;
        }
        last += 1;
        let made = Letter::made(consumer.as_str(), partition, new).letter;
        let letter = Letter { number: last, ..made };
        writes.push(Write::Create(control.document(LETTER, &id, &letter)?));
    }
    if last > first {
        let document = control.document(NUMBERS, &numbers_id, &Numbers { last })?;
        writes.push(match numbers {
            Some(found) => Write::Replace(document, found.etag),
            None => Write::Create(document),
        });
    }
    Ok((writes, last - first))
}
