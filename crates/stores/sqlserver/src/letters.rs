//! What a dead letter looks like in a row, and in a request that writes some.
//!
//! What lives here: both forms. What does not: any statement.
//! Invariant: a letter reads back as it was written, an unreadable one with its bytes as found.

use postrider_core::{
    BatchLimit, ConsumerName, DeadLetter, DeadLetterId, DeadLetterState, Entry, Error, Key,
    Malformed, NewDeadLetter, PartitionId, Result, key_hash,
};
use serde::Serialize;
use tiberius::Row;
use uuid::Uuid;

use crate::row::{Decoder, bytes, headers_text, maybe_text, ms, number, position, text, timestamp};

/// Most bytes of payloads in one statement (32 MiB), as for appends.
const MAX_STATEMENT_BYTES: usize = 32 * 1024 * 1024;
/// Where the event's own columns begin in an answer.
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

/// A letter as `dead_letter_park.sql` reads it.
#[derive(Serialize)]
struct LetterRow<'a> {
    n: usize,
    s: &'static str,
    r: &'a str,
    a: u32,
    m: i64,
    w: Option<&'a str>,
    h: Option<u32>,
    i: Option<Uuid>,
    k: Option<&'a str>,
    t: Option<&'a str>,
    e: Option<&'a str>,
    c: Option<&'a str>,
    d: Option<String>,
    o: usize,
    l: usize,
}

/// Letters of one statement.
pub(crate) struct Letters {
    pub(crate) json: String,
    pub(crate) payloads: Vec<u8>,
    pub(crate) positions: Vec<u8>,
}

fn payload(letter: &NewDeadLetter) -> &[u8] {
    match &letter.entry {
        Entry::Record(record) => record.event.payload(),
        Entry::Malformed(malformed) => &malformed.raw,
    }
}

impl Letters {
    /// The letters in as few parts as their payloads allow, in order; one part at least.
    pub(crate) fn parts(letters: &[NewDeadLetter]) -> Result<Vec<Self>> {
        let mut parts = Vec::new();
        let mut rest = letters;
        loop {
            let mut bytes = 0;
            let fits = |letter: &&NewDeadLetter| {
                bytes += payload(letter).len();
                bytes <= MAX_STATEMENT_BYTES
            };
            let count = rest.iter().take_while(fits).count().max(1).min(rest.len());
            let (now, later) = rest.split_at(count);
            parts.push(Self::of(now)?);
            if later.is_empty() {
                return Ok(parts);
            }
            rest = later;
        }
    }

    fn of(letters: &[NewDeadLetter]) -> Result<Self> {
        let (mut payloads, mut positions) = (Vec::new(), Vec::new());
        let mut rows = Vec::with_capacity(letters.len());
        for (n, letter) in letters.iter().enumerate() {
            positions.extend(letter.entry.position().to_ulid()?.to_bytes());
            rows.push(row(n, letter, payloads.len()));
            payloads.extend_from_slice(payload(letter));
        }
        let json = serde_json::to_string(&rows).expect("texts always serialise");
        Ok(Self { json, payloads, positions })
    }
}

fn row(n: usize, letter: &NewDeadLetter, o: usize) -> LetterRow<'_> {
    let key = letter.entry.key();
    let base = LetterRow {
        n,
        s: state_text(letter.state),
        r: &letter.reason,
        a: letter.attempts,
        m: 0,
        w: None,
        h: key.map(key_hash),
        i: None,
        k: key.map(Key::as_str),
        t: None,
        e: None,
        c: None,
        d: None,
        o,
        l: payload(letter).len(),
    };
    match &letter.entry {
        Entry::Record(record) => {
            let event = &record.event;
            LetterRow {
                m: ms(record.appended_at),
                i: Some(*event.id().as_uuid()),
                t: Some(event.topic().as_str()),
                e: Some(event.event_type().as_str()),
                c: Some(event.content_type().as_str()),
                d: headers_text(event.headers()),
                ..base
            }
        }
        Entry::Malformed(malformed) => {
            LetterRow { m: ms(malformed.appended_at), w: Some(&malformed.reason), ..base }
        }
    }
}

fn read_letter(row: &Row, decoder: &mut Decoder) -> Result<DeadLetter> {
    let at = position(row, 3, "position")?;
    let appended_at = timestamp(number(row, 9, "appended_ms")?);
    let entry = match maybe_text(row, 10, "malformed")? {
        None => decoder.entry(row, EVENT_AT, at, appended_at)?,
        Some(why) => Entry::Malformed(Malformed {
            position: at,
            appended_at,
            key: maybe_text(row, EVENT_AT + 1, "key")?.map(Key::new).transpose()?,
            reason: why.to_owned(),
            raw: bytes(row, EVENT_AT + 6, "payload")?.to_vec().into(),
        }),
    };
    let attempts = u32::try_from(number(row, 6, "attempts")?).unwrap_or(u32::MAX);
    Ok(DeadLetter {
        id: DeadLetterId::new(number(row, 0, "number")?.unsigned_abs()),
        consumer: ConsumerName::new(text(row, 1, "consumer")?)?,
        partition: PartitionId::new(text(row, 2, "partition")?)?,
        entry,
        state: state_of(text(row, 4, "state")?)?,
        reason: text(row, 5, "reason")?.to_owned(),
        attempts,
        parked_at: timestamp(number(row, 7, "parked_ms")?),
        updated_at: timestamp(number(row, 8, "updated_ms")?),
    })
}

/// The letters of an answer's first result set.
pub(crate) fn read_letters(sets: &[Vec<Row>]) -> Result<Vec<DeadLetter>> {
    let mut decoder = Decoder::default();
    let rows = sets.first().map_or(&[][..], Vec::as_slice);
    rows.iter().map(|row| read_letter(row, &mut decoder)).collect()
}

/// The letters up to the limit of bytes, one at least: the server counts a little less exactly.
pub(crate) fn page(letters: Vec<DeadLetter>, limit: BatchLimit) -> Vec<DeadLetter> {
    let mut bytes = 0usize;
    let mut page: Vec<DeadLetter> = Vec::with_capacity(letters.len());
    for letter in letters {
        bytes = bytes.saturating_add(letter.entry.cost_bytes());
        if !page.is_empty() && bytes > limit.bytes {
            break;
        }
        page.push(letter);
    }
    page
}
