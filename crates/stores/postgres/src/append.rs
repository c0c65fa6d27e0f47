//! Appending events inside the caller's own transaction.
//!
//! What lives here: `Outbox`, the handle that needs no store, and its append for `tokio-postgres`
//! and `deadpool`. What does not: `sqlx` (`append_sqlx.rs`), the order of locks, transaction id and
//! seq (`migrations/0002_append.sql`), reading.
//! Invariant: a call takes all its key locks before it draws the first seq; what needs no server to
//! be refused is refused before any I/O.

use std::collections::HashSet;

use postrider_core::limits::MAX_APPEND_EVENTS;
use postrider_core::{Error, Event, EventId, NewEvent, Result};
use tokio_postgres::Transaction;
use tokio_postgres::types::Type;
use uuid::Uuid;

use crate::PostgresStore;
use crate::config::{PayloadType, PostgresOptions};
use crate::connections::Param;
use crate::error::append_error;
use crate::names::Names;
use crate::row::headers_text;

/// What `append` does with an event whose id was appended before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnDuplicate {
    /// Fails with `Permanent`.
    #[default]
    Fail,
    /// Leaves the first one as it is.
    Ignore,
}

impl OnDuplicate {
    pub(crate) fn as_sql(self) -> &'static str {
        match self {
            Self::Fail => "fail",
            Self::Ignore => "ignore",
        }
    }
}

/// One event: locks its key until the transaction ends, then inserts.
pub(crate) const APPEND_ONE: &str =
    "SELECT {schema}.{outbox_append_one}($1, $2, $3, $4, $5, $6, $7::json, $8, $9)";

/// Several events: locks their keys in one order for all writers until the transaction ends, then
/// inserts in the order given.
pub(crate) const APPEND_ALL: &str =
    "SELECT {schema}.{outbox_append_all}($1, $2, $3, $4, $5, $6, $7, $8, $9)";

/// Takes the locks of the keys, for events that go in several statements.
pub(crate) const LOCK_KEYS: &str = "SELECT {schema}.{outbox_lock_keys}($1)";

/// Most bytes in one statement (32 MiB): a server takes 1 GiB, but holds it several times over.
const MAX_STATEMENT_BYTES: usize = 32 * 1024 * 1024;

/// What an event costs of a statement beside its payload, in bytes: an estimate of its texts.
const EVENT_BYTES: usize = 256;

pub(crate) const PLACE: &str = "append events";

/// An outbox by its name, for applications that append and read nothing. The default is the outbox
/// `postrider.outbox`.
///
/// It holds no connection and does no check: what is missing is told by the first append.
///
/// ```no_run
/// # async fn f(client: &mut postrider_store_postgres::tokio_postgres::Client,
/// #     event: postrider_core::NewEvent) -> Result<(), Box<dyn std::error::Error>> {
/// use postrider_store_postgres::Outbox;
///
/// let tx = client.transaction().await?;
/// // … the change that the event tells of, in the same transaction …
/// Outbox::default().append(&tx, &[event]).await?;
/// tx.commit().await?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Outbox {
    pub(crate) names: Names,
}

impl Default for Outbox {
    fn default() -> Self {
        let names = Names::new("postrider", "outbox", PayloadType::default());
        Self { names }
    }
}

impl Outbox {
    /// The outbox of that name in that schema; any names, they are always quoted.
    ///
    /// # Errors
    /// `Permanent` for a name that no outbox can have.
    pub fn new(schema: &str, outbox: &str) -> Result<Self> {
        PostgresOptions::new("").schema(schema).outbox(outbox).check_names()?;
        Ok(Self { names: Names::new(schema, outbox, PayloadType::default()) })
    }

    /// Appends events in the given order and returns their ids; they appear in the feed when `tx`
    /// commits and never if it does not.
    ///
    /// Until then the events' keys are locked: another transaction that appends under one of them
    /// waits, so that a key's order in the feed is the order of its commits. Two transactions that
    /// each append twice, under the same keys in opposite order, can wait for each other; the
    /// server then ends one of them, with `Transient`.
    ///
    /// A transaction of `deadpool` is passed in the same way: `append(&tx, …)`.
    ///
    /// # Errors
    /// `Permanent` for an id that was appended before, too many events, a value that the outbox
    /// refuses, a transaction that is READ ONLY or has failed; `Transient` for a deadlock or a lost
    /// connection. PostgreSQL fails the whole transaction with the call: roll it back, or to a
    /// savepoint, and nothing of the call stays.
    ///
    /// # Cancellation
    /// A dropped future may leave some of the events in the transaction: roll it back, as dropping
    /// it does.
    pub async fn append(&self, tx: &Transaction<'_>, events: &[NewEvent]) -> Result<Vec<EventId>> {
        append_in(tx, &self.names, events, OnDuplicate::Fail).await
    }

    /// [`Outbox::append`], with a choice for ids that were appended before.
    ///
    /// # Errors
    /// As [`Outbox::append`].
    pub async fn append_with(
        &self,
        tx: &Transaction<'_>,
        events: &[NewEvent],
        on_duplicate: OnDuplicate,
    ) -> Result<Vec<EventId>> {
        append_in(tx, &self.names, events, on_duplicate).await
    }
}

impl PostgresStore {
    /// The outbox of this store, for appending to it elsewhere.
    pub fn outbox(&self) -> Outbox {
        Outbox { names: self.inner.names.clone() }
    }

    /// Appends to this store's outbox: [`Outbox::append_with`].
    ///
    /// # Errors
    /// As [`Outbox::append`].
    pub async fn append(
        &self,
        tx: &Transaction<'_>,
        events: &[NewEvent],
        on_duplicate: OnDuplicate,
    ) -> Result<Vec<EventId>> {
        append_in(tx, &self.inner.names, events, on_duplicate).await
    }
}

/// Refuses what needs no server to be refused.
pub(crate) fn check_count(events: &[NewEvent]) -> Result<()> {
    if events.len() > MAX_APPEND_EVENTS {
        return Err(Error::permanent(format!(
            "{} events in one append; {MAX_APPEND_EVENTS} are allowed: append in parts",
            events.len()
        )));
    }
    Ok(())
}

/// An event with its id, and whether the caller gave that.
pub(crate) struct Identified {
    pub(crate) event: Event,
    pub(crate) given: bool,
}

/// The events, each with its own id or a fresh one.
pub(crate) fn identified(events: &[NewEvent]) -> Vec<Identified> {
    let identify = |event: &NewEvent| Identified {
        given: event.id().is_some(),
        event: event.clone().identified(|| EventId::from_uuid(Uuid::now_v7())),
    };
    events.iter().map(identify).collect()
}

/// The events in parts that fit a statement each.
pub(crate) fn parts(events: &[Identified]) -> Vec<&[Identified]> {
    let mut parts = Vec::new();
    let mut first = 0;
    let mut bytes = 0;
    for (n, Identified { event, .. }) in events.iter().enumerate() {
        let cost = event.payload().len() + EVENT_BYTES;
        if bytes + cost > MAX_STATEMENT_BYTES && n > first {
            parts.push(&events[first..n]);
            (first, bytes) = (n, 0);
        }
        bytes += cost;
    }
    parts.push(&events[first..]);
    parts
}

/// The distinct keys of the events.
pub(crate) fn keys_of(events: &[Identified]) -> Vec<&str> {
    let keys: HashSet<&str> = events.iter().map(|e| e.event.key().as_str()).collect();
    keys.into_iter().collect()
}

pub(crate) fn ids_of(events: &[Identified]) -> Vec<EventId> {
    events.iter().map(|e| e.event.id()).collect()
}

/// What [`APPEND_ALL`] takes, column by column.
pub(crate) struct Columns<'a> {
    pub(crate) ids: Vec<Uuid>,
    pub(crate) given: Vec<bool>,
    pub(crate) keys: Vec<&'a str>,
    pub(crate) topics: Vec<&'a str>,
    pub(crate) types: Vec<&'a str>,
    pub(crate) content_types: Vec<&'a str>,
    pub(crate) headers: Vec<Option<String>>,
    pub(crate) payloads: Vec<&'a [u8]>,
}

impl<'a> Columns<'a> {
    pub(crate) fn of(events: &'a [Identified]) -> Self {
        let each = || events.iter().map(|e| &e.event);
        Self {
            ids: each().map(|event| *event.id().as_uuid()).collect(),
            given: events.iter().map(|e| e.given).collect(),
            keys: each().map(|event| event.key().as_str()).collect(),
            topics: each().map(|event| event.topic().as_str()).collect(),
            types: each().map(|event| event.event_type().as_str()).collect(),
            content_types: each().map(|event| event.content_type().as_str()).collect(),
            headers: each().map(|event| headers_text(event.headers())).collect(),
            payloads: each().map(|event| event.payload().as_ref()).collect(),
        }
    }
}

/// [`Outbox::append_with`] for the names of an open store: one round trip, unless the events are
/// too large for one statement.
pub(crate) async fn append_in(
    tx: &Transaction<'_>,
    names: &Names,
    events: &[NewEvent],
    on_duplicate: OnDuplicate,
) -> Result<Vec<EventId>> {
    check_count(events)?;
    let events = identified(events);
    match &events[..] {
        [] => {}
        [event] => append_one(tx, names, event, on_duplicate).await?,
        _ => {
            let parts = parts(&events);
            if parts.len() > 1 {
                let sql = names.fill(LOCK_KEYS);
                let keys = keys_of(&events);
                tx.query_typed(&sql, &[(&keys, Type::TEXT_ARRAY)]).await.map_err(append_error)?;
            }
            let sql = names.fill(APPEND_ALL);
            for part in parts {
                append_part(tx, &sql, &Columns::of(part), on_duplicate).await?;
            }
        }
    }
    Ok(ids_of(&events))
}

async fn append_one(
    tx: &Transaction<'_>,
    names: &Names,
    Identified { event, given }: &Identified,
    on_duplicate: OnDuplicate,
) -> Result<()> {
    let id = *event.id().as_uuid();
    let params: [Param<'_>; 9] = [
        (&id, Type::UUID),
        (given, Type::BOOL),
        (&event.key().as_str(), Type::TEXT),
        (&event.topic().as_str(), Type::TEXT),
        (&event.event_type().as_str(), Type::TEXT),
        (&event.content_type().as_str(), Type::TEXT),
        (&headers_text(event.headers()), Type::TEXT),
        (&event.payload().as_ref(), Type::BYTEA),
        (&on_duplicate.as_sql(), Type::TEXT),
    ];
    tx.query_typed(&names.fill(APPEND_ONE), &params).await.map_err(append_error)?;
    Ok(())
}

async fn append_part(
    tx: &Transaction<'_>,
    sql: &str,
    columns: &Columns<'_>,
    on_duplicate: OnDuplicate,
) -> Result<()> {
    let params: [Param<'_>; 9] = [
        (&columns.ids, Type::UUID_ARRAY),
        (&columns.given, Type::BOOL_ARRAY),
        (&columns.keys, Type::TEXT_ARRAY),
        (&columns.topics, Type::TEXT_ARRAY),
        (&columns.types, Type::TEXT_ARRAY),
        (&columns.content_types, Type::TEXT_ARRAY),
        (&columns.headers, Type::TEXT_ARRAY),
        (&columns.payloads, Type::BYTEA_ARRAY),
        (&on_duplicate.as_sql(), Type::TEXT),
    ];
    tx.query_typed(sql, &params).await.map_err(append_error)?;
    Ok(())
}
