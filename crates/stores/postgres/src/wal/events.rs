//! From an outbox row in the log to an event.
//!
//! What lives here: which column is which, by the server's description of the table, and reading
//! one row. What does not: the bytes of messages (`pgoutput.rs`), transactions (`assembly.rs`),
//! tables of the application (`mapped.rs`).
//! Invariant: a row that can't be read as an event is handed out as what it is; it stops nothing.

use postrider_core::{Entry, Error, Position, Result, Timestamp};
use uuid::Uuid;

use super::mapped::Mapped;
use super::pgoutput::Relation;
use super::tuple::{Tuple, Value};
use crate::row::{Columns, Decoder};

/// Microseconds from 1970 to 2000, where PostgreSQL's time begins.
const EPOCH_2000_US: i64 = 946_684_800_000_000;

/// What a column of the outbox is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Xid,
    Seq,
    CreatedAt,
    Id,
    Key,
    Topic,
    Type,
    ContentType,
    Headers,
    Payload,
}

const ROLES: [(&str, Role); 10] = [
    ("xid", Role::Xid),
    ("seq", Role::Seq),
    ("created_at", Role::CreatedAt),
    ("id", Role::Id),
    ("key", Role::Key),
    ("topic", Role::Topic),
    ("type", Role::Type),
    ("content_type", Role::ContentType),
    ("headers", Role::Headers),
    ("payload", Role::Payload),
];

/// How the rows of the outbox are laid out at present.
#[derive(Debug)]
pub(super) enum Layout {
    /// A table that `init` made: what each column is for.
    Own(Vec<Option<Role>>),
    /// One of the application's.
    Adopted(Box<Mapped>),
}

impl Layout {
    /// # Errors
    /// `Permanent` when the table, or what the publication shows of it, lacks a column.
    pub(super) fn of_own(relation: &Relation) -> Result<Self> {
        let role = |name: &str| ROLES.iter().find(|(own, _)| *own == name).map(|(_, role)| *role);
        let roles: Vec<_> = relation.columns.iter().map(|column| role(&column.name)).collect();
        for (name, role) in ROLES {
            if !roles.contains(&Some(role)) {
                return Err(Error::permanent(format!(
                    "the publication shows the outbox without its column {name}; publish the whole \
                     table, without a list of columns"
                )));
            }
        }
        Ok(Self::Own(roles))
    }
}

/// A row's own numbers, and its event.
pub(super) struct Found {
    pub(super) xid: Option<u64>,
    pub(super) seq: i64,
    pub(super) entry: Entry,
}

/// The values as they arrived.
#[derive(Default)]
struct Values<'a> {
    xid: Option<u64>,
    seq: Option<i64>,
    at: Option<Timestamp>,
    columns: Columns<'a>,
}

impl<'a> Values<'a> {
    fn take(&mut self, role: Role, value: &'a [u8]) {
        let number = || value.try_into().ok().map(i64::from_be_bytes);
        let text = || std::str::from_utf8(value).ok();
        match role {
            Role::Xid => self.xid = number().map(i64::cast_unsigned),
            Role::Seq => self.seq = number(),
            Role::CreatedAt => self.at = number().map(timestamp),
            Role::Id => self.columns.id = value.try_into().ok().map(Uuid::from_bytes),
            Role::Key => self.columns.key = text(),
            Role::Topic => self.columns.topic = text(),
            Role::Type => self.columns.event_type = text(),
            Role::ContentType => self.columns.content_type = text(),
            Role::Headers => self.columns.headers = text(),
            Role::Payload => self.columns.payload = Some(value),
        }
    }
}

pub(super) fn timestamp(micros_since_2000: i64) -> Timestamp {
    let millis = micros_since_2000.saturating_add(EPOCH_2000_US).div_euclid(1_000);
    Timestamp::from_millis(u64::try_from(millis).unwrap_or(0))
}

/// Reads one row, which came in the binary format if the outbox is Postrider's own.
///
/// # Errors
/// `Corrupt` when the message is cut short, or the row has no number.
pub(super) fn read(
    decoder: &mut Decoder,
    layout: &Layout,
    tuple: &Tuple,
    position: Position,
    committed_at: Timestamp,
) -> Result<Found> {
    let roles = match layout {
        Layout::Own(roles) => roles,
        Layout::Adopted(mapped) => return Ok(mapped.read(decoder, tuple, position, committed_at)),
    };
    let mut values = Values::default();
    for (role, value) in roles.iter().zip(tuple.values()) {
        // An inserted row has no unchanged column; a text only comes where binary was not asked.
        if let (Some(role), Value::Binary(value)) = (role, value) {
            values.take(*role, value);
        }
    }
    let seq = values.seq.ok_or_else(|| Error::corrupt("a row of the outbox has no seq"))?;
    let at = values.at.unwrap_or_default();
    let entry = decoder.entry_of(&values.columns, position, at);
    Ok(Found { xid: values.xid, seq, entry })
}
