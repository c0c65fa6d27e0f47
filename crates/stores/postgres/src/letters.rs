//! What a dead letter looks like in a row, and in a statement that writes some.
//!
//! What lives here: both forms. What does not: any statement (`dead_letters.rs`).
//! Invariant: a letter reads back as it was written, an unreadable one with its bytes as found.

use bytes::Bytes;
use postrider_core::{
    ConsumerName, DeadLetter, DeadLetterId, DeadLetterState, Entry, Error, Key, Malformed,
    NewDeadLetter, PartitionId, Position, Result,
};
use tokio_postgres::Row;
use tokio_postgres::types::Type;
use uuid::Uuid;

use crate::checkpoints::{timestamp, whole};
use crate::connections::Param;
use crate::error::failed;
use crate::row::{Decoder, headers_text};

/// A letter `d`, in the order in which [`read_letter`] takes it.
macro_rules! letter_columns {
    () => {
        "d.number, d.consumer, d.partition, d.position, d.state, d.reason, d.attempts,
            (extract(epoch FROM d.parked_at) * 1000)::bigint,
            (extract(epoch FROM d.updated_at) * 1000)::bigint, d.appended_ms, d.malformed,
            d.id, d.key, d.topic, d.type, d.content_type, d.headers::text, d.payload"
    };
}
pub(crate) use letter_columns;
/// Where the event's own columns begin in [`letter_columns!`].
const EVENT_AT: usize = 11;

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

/// PostgreSQL's texts hold any character but NUL, which a broker's answer may bring.
pub(crate) fn storable(reason: &str) -> String {
    reason.replace('\0', "\u{fffd}")
}

fn attempts_of(attempts: u32) -> i32 {
    i32::try_from(attempts).unwrap_or(i32::MAX)
}

fn read_letter(row: &Row, decoder: &mut Decoder) -> Result<DeadLetter> {
    let place = "read a dead letter";
    let position = Position::from_bytes(row.get(3))?;
    let appended_at = timestamp(row.get(9));
    let entry = match row.get::<_, Option<&str>>(10) {
        None => decoder.entry(row, EVENT_AT, position, appended_at).map_err(failed(place))?,
        Some(reason) => Entry::Malformed(Malformed {
            position,
            appended_at,
            key: row.get::<_, Option<&str>>(EVENT_AT + 1).map(Key::new).transpose()?,
            reason: reason.to_owned(),
            raw: Bytes::copy_from_slice(row.get(EVENT_AT + 6)),
        }),
    };
    Ok(DeadLetter {
        id: DeadLetterId::new(row.get::<_, i64>(0).unsigned_abs()),
        consumer: ConsumerName::new(row.get::<_, &str>(1))?,
        partition: PartitionId::new(row.get::<_, &str>(2))?,
        entry,
        state: state_of(row.get(4))?,
        reason: row.get(5),
        attempts: row.get::<_, i32>(6).unsigned_abs(),
        parked_at: timestamp(row.get(7)),
        updated_at: timestamp(row.get(8)),
    })
}

pub(crate) fn read_letters(rows: &[Row]) -> Result<Vec<DeadLetter>> {
    let mut decoder = Decoder::default();
    rows.iter().map(|row| read_letter(row, &mut decoder)).collect()
}

/// New letters, a column each, as the statement that parks them takes them.
#[derive(Default)]
pub(crate) struct Columns<'a> {
    positions: Vec<&'a [u8]>,
    states: Vec<&'static str>,
    reasons: Vec<String>,
    attempts: Vec<i32>,
    appended: Vec<i64>,
    malformed: Vec<Option<String>>,
    ids: Vec<Option<Uuid>>,
    keys: Vec<Option<&'a str>>,
    topics: Vec<Option<&'a str>>,
    types: Vec<Option<&'a str>>,
    content_types: Vec<Option<&'a str>>,
    headers: Vec<Option<String>>,
    payloads: Vec<&'a [u8]>,
}

impl<'a> Columns<'a> {
    pub(crate) fn of(letters: &'a [NewDeadLetter]) -> Self {
        let mut columns = Self::default();
        for letter in letters {
            columns.positions.push(letter.entry.position().as_bytes());
            columns.states.push(state_text(letter.state));
            columns.reasons.push(storable(&letter.reason));
            columns.attempts.push(attempts_of(letter.attempts));
            columns.push_entry(&letter.entry);
        }
        columns
    }

    fn push_entry(&mut self, entry: &'a Entry) {
        let event = match entry {
            Entry::Record(record) => Some(&record.event),
            Entry::Malformed(_) => None,
        };
        let (appended_at, malformed, payload) = match entry {
            Entry::Record(record) => (record.appended_at, None, record.event.payload()),
            Entry::Malformed(found) => (found.appended_at, Some(&found.reason), &found.raw),
        };
        self.appended.push(whole(appended_at.as_millis()));
        self.malformed.push(malformed.map(|reason| storable(reason)));
        self.ids.push(event.map(|event| *event.id().as_uuid()));
        self.keys.push(entry.key().map(Key::as_str));
        self.topics.push(event.map(|event| event.topic().as_str()));
        self.types.push(event.map(|event| event.event_type().as_str()));
        self.content_types.push(event.map(|event| event.content_type().as_str()));
        self.headers.push(event.and_then(|event| headers_text(event.headers())));
        self.payloads.push(payload);
    }

    pub(crate) fn params(&self) -> [Param<'_>; 13] {
        [
            (&self.positions, Type::BYTEA_ARRAY),
            (&self.states, Type::TEXT_ARRAY),
            (&self.reasons, Type::TEXT_ARRAY),
            (&self.attempts, Type::INT4_ARRAY),
            (&self.appended, Type::INT8_ARRAY),
            (&self.malformed, Type::TEXT_ARRAY),
            (&self.ids, Type::UUID_ARRAY),
            (&self.keys, Type::TEXT_ARRAY),
            (&self.topics, Type::TEXT_ARRAY),
            (&self.types, Type::TEXT_ARRAY),
            (&self.content_types, Type::TEXT_ARRAY),
            (&self.headers, Type::TEXT_ARRAY),
            (&self.payloads, Type::BYTEA_ARRAY),
        ]
    }
}
