//! Appending events inside the caller's own transaction.
//!
//! What lives here: `Outbox`, the handle that needs no store, and what one call sends. What does
//! not: the order of locks and inserts (`sql/append.sql`), reading.
//! Invariant: a call takes all its key locks, in one order for all writers, before it inserts the
//! first event; what needs no server to be refused is refused before any I/O.

use std::collections::HashSet;

use futures_util::io::{AsyncRead, AsyncWrite};
use postrider_core::limits::MAX_APPEND_EVENTS;
use postrider_core::{Error, Event, EventId, NewEvent, Result, key_hash};
use serde::Serialize;
use tiberius::Client;
use tiberius::error::Error as DriverError;
use tracing::Dispatch;
use tracing::instrument::WithSubscriber;
use uuid::Uuid;

use crate::SqlServerStore;
use crate::config::check_schema;
use crate::connections::Param;
use crate::error::{is_duplicate, sqlserver_error};
use crate::names::Names;
use crate::row::headers_text;
use crate::sql;

/// What `append` does with an event whose id was appended before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnDuplicate {
    /// Fails with `Permanent`.
    #[default]
    Fail,
    /// Leaves the first one as it is.
    Ignore,
}

/// Most bytes of payloads in one statement (32 MiB): the server holds them several times over.
const MAX_STATEMENT_BYTES: usize = 32 * 1024 * 1024;

pub(crate) const PLACE: &str = "append events";

/// The outbox of a schema, for applications that append and read nothing.
///
/// It holds no connection and does no check: what is missing is told by the first append.
///
/// ```no_run
/// # async fn f(
/// #     client: &mut postrider_store_sqlserver::SqlServerClient,
/// #     event: postrider_core::NewEvent,
/// # ) -> Result<(), Box<dyn std::error::Error>> {
/// use postrider_store_sqlserver::Outbox;
///
/// client.begin_transaction().await?;
/// // … the change that the event tells of, in the same transaction …
/// Outbox::default().append(client, &[event]).await?;
/// client.commit_transaction().await?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Outbox {
    pub(crate) names: Names,
}

impl Default for Outbox {
    fn default() -> Self {
        Self { names: Names::new("postrider") }
    }
}

impl Outbox {
    /// The outbox of that schema; the name is always quoted.
    ///
    /// # Errors
    /// `Permanent` for a name that no such schema can have.
    pub fn new(schema: &str) -> Result<Self> {
        check_schema(schema)?;
        Ok(Self { names: Names::new(schema) })
    }

    /// Appends events in the given order, in the transaction that `client` has open, and returns
    /// their ids; they appear in the feed when it commits and never if it does not. One round trip,
    /// unless the payloads have more than 32 MiB.
    ///
    /// Until the transaction ends the events' keys are locked: another one that appends under one
    /// of them waits, so that a key's order in the feed is the order of its commits. Two
    /// transactions that each append twice, under the same keys in opposite order, can wait for
    /// each other; the server then ends one of them, with `Transient`.
    ///
    /// # Errors
    /// `Permanent` for an id that was appended before, too many events, or when no transaction is
    /// open; `Transient` for a deadlock, a lock that was not free in time, or a lost connection.
    /// The server has rolled the whole transaction back then, and nothing of it stays.
    ///
    /// # Cancellation
    /// After a dropped future the connection is of no more use: drop it, which rolls back.
    pub async fn append<S>(
        &self,
        client: &mut Client<S>,
        events: &[NewEvent],
    ) -> Result<Vec<EventId>>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send,
    {
        append_in(client, &self.names, events, OnDuplicate::Fail).await
    }

    /// [`Outbox::append`], with a choice for ids that were appended before.
    ///
    /// # Errors
    /// As [`Outbox::append`].
    pub async fn append_with<S>(
        &self,
        client: &mut Client<S>,
        events: &[NewEvent],
        on_duplicate: OnDuplicate,
    ) -> Result<Vec<EventId>>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send,
    {
        append_in(client, &self.names, events, on_duplicate).await
    }
}

impl SqlServerStore {
    /// The outbox of this store, for appending to it elsewhere.
    pub fn outbox(&self) -> Outbox {
        Outbox { names: self.inner.names.clone() }
    }
}

/// One event as `append.sql` reads it.
#[derive(Serialize)]
struct Row<'a> {
    n: usize,
    i: Uuid,
    g: u8,
    k: &'a str,
    h: u32,
    t: &'a str,
    e: &'a str,
    c: &'a str,
    d: Option<String>,
    o: usize,
    l: usize,
}

/// One key to be locked.
#[derive(Serialize)]
struct KeyRow<'a> {
    n: usize,
    k: &'a str,
}

/// What goes in one statement: the events as JSON, and their payloads.
struct Part {
    json: String,
    payloads: Vec<u8>,
}

/// The events in as few parts as their payloads allow, in order.
fn parts(events: &[(Event, bool)]) -> Vec<Part> {
    let mut parts = Vec::new();
    let mut rest = events;
    while !rest.is_empty() {
        let mut bytes = 0;
        let fits = |(event, _): &&(Event, bool)| {
            bytes += event.payload().len();
            bytes <= MAX_STATEMENT_BYTES
        };
        let count = rest.iter().take_while(fits).count().max(1);
        let (now, later) = rest.split_at(count);
        parts.push(part(now));
        rest = later;
    }
    parts
}

fn part(events: &[(Event, bool)]) -> Part {
    let mut payloads = Vec::new();
    let rows: Vec<Row<'_>> = events
        .iter()
        .enumerate()
        .map(|(n, (event, given))| {
            let o = payloads.len();
            payloads.extend_from_slice(event.payload());
            Row {
                n,
                i: *event.id().as_uuid(),
                g: u8::from(*given),
                k: event.key().as_str(),
                h: key_hash(event.key()),
                t: event.topic().as_str(),
                e: event.event_type().as_str(),
                c: event.content_type().as_str(),
                d: headers_text(event.headers()),
                o,
                l: event.payload().len(),
            }
        })
        .collect();
    Part { json: serde_json::to_string(&rows).expect("texts always serialise"), payloads }
}

/// Every key once, in the order in which SQL Server sorts texts bytewise: by UTF-16.
fn keys(events: &[(Event, bool)]) -> String {
    let mut keys: Vec<&str> = events.iter().map(|(event, _)| event.key().as_str()).collect();
    keys.sort_by(|a, b| a.encode_utf16().cmp(b.encode_utf16()));
    keys.dedup();
    let rows: Vec<KeyRow<'_>> = keys.iter().enumerate().map(|(n, k)| KeyRow { n, k }).collect();
    serde_json::to_string(&rows).expect("texts always serialise")
}

/// The events with their ids, and whether the caller gave them. With `Ignore`, the first of several
/// with one id.
fn identified(
    events: &[NewEvent],
    on_duplicate: OnDuplicate,
) -> (Vec<EventId>, Vec<(Event, bool)>) {
    let mut seen = HashSet::new();
    let mut ids = Vec::with_capacity(events.len());
    let mut all = Vec::with_capacity(events.len());
    for new in events {
        let given = new.id().is_some();
        let event = new.clone().identified(|| EventId::from_uuid(Uuid::now_v7()));
        ids.push(event.id());
        if !given || on_duplicate == OnDuplicate::Fail || seen.insert(event.id()) {
            all.push((event, given));
        }
    }
    (ids, all)
}

pub(crate) fn append_error(error: DriverError, on_duplicate: OnDuplicate) -> Error {
    if !is_duplicate(&error) {
        return sqlserver_error(PLACE, error);
    }
    match on_duplicate {
        OnDuplicate::Fail => Error::permanent(format!(
            "{PLACE}: an event of this id was appended before; give each event an id of its own"
        )),
        // Between the look and the insert.
        OnDuplicate::Ignore => Error::transient(format!(
            "{PLACE}: an event of this id was appended by another at this moment; begin again"
        )),
    }
}

pub(crate) async fn append_in<S>(
    client: &mut Client<S>,
    names: &Names,
    events: &[NewEvent],
    on_duplicate: OnDuplicate,
) -> Result<Vec<EventId>>
where
    S: AsyncRead + AsyncWrite + Unpin + Send,
{
    if events.len() > MAX_APPEND_EVENTS {
        return Err(Error::permanent(format!(
            "{} events in one append; {MAX_APPEND_EVENTS} are allowed: append in parts",
            events.len()
        )));
    }
    let (ids, events) = identified(events, on_duplicate);
    let mut locks = keys(&events);
    let ignore = i32::from(on_duplicate == OnDuplicate::Ignore);
    let text = names.fill(sql::APPEND);
    for part in parts(&events) {
        let params: [Param<'_>; 4] = [&part.json, &part.payloads, &ignore, &locks];
        let asked = Box::pin(async { client.query(&*text, &params).await?.into_results().await });
        let answer = asked.with_subscriber(Dispatch::none()).await;
        answer.map_err(|error| append_error(error, on_duplicate))?;
        // The first part took them all.
        locks = "[]".to_owned();
    }
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_core::{ContentType, EventType, Key, Topic};

    fn event(key: &str, bytes: usize) -> NewEvent {
        let topic = Topic::new("t").expect("valid");
        let event_type = EventType::new("E").expect("valid");
        let octets = ContentType::new("application/octet-stream").expect("valid");
        NewEvent::builder(Key::new(key).expect("valid"), topic, event_type)
            .payload(octets, vec![7; bytes])
            .build()
            .expect("within the limits")
    }

    #[test]
    fn keys_are_locked_once_each_and_in_one_order() {
        // In UTF-16 the astral one comes before U+FF5E, in UTF-8 after it.
        let events: Vec<NewEvent> =
            ["b", "\u{ff5e}", "a", "b", "\u{1f600}"].map(|key| event(key, 0)).to_vec();
        let (_, events) = identified(&events, OnDuplicate::Fail);
        assert_eq!(
            keys(&events),
            "[{\"n\":0,\"k\":\"a\"},{\"n\":1,\"k\":\"b\"},{\"n\":2,\"k\":\"\u{1f600}\"},\
             {\"n\":3,\"k\":\"\u{ff5e}\"}]"
        );
    }

    #[test]
    fn large_payloads_go_in_parts_and_small_ones_together() {
        let large = 12 * 1024 * 1024;
        let events = [event("a", 10), event("b", large), event("c", large), event("d", large)];
        let (ids, events) = identified(&events, OnDuplicate::Fail);
        assert_eq!(ids.len(), 4);
        let parts = parts(&events);
        assert_eq!(
            parts.iter().map(|part| part.payloads.len()).collect::<Vec<_>>(),
            [10 + 2 * large, large]
        );
        assert!(parts[0].json.contains(&format!("\"o\":{},\"l\":{large}", 10 + large)));
        assert!(parts[1].json.contains(&format!("\"n\":0,\"i\":\"{}\"", ids[3])));
    }

    #[test]
    fn a_repeated_id_is_sent_once_where_repeats_are_ignored() {
        let id = EventId::from_uuid(Uuid::from_u128(7));
        let topic = Topic::new("t").expect("valid");
        let again = |key: &str| {
            let kind = EventType::new("E").expect("valid");
            let key = Key::new(key).expect("valid");
            NewEvent::builder(key, topic.clone(), kind).id(id).build().expect("valid")
        };
        let events = [again("a"), again("b"), event("c", 1)];
        assert_eq!(identified(&events, OnDuplicate::Ignore).1.len(), 2);
        assert_eq!(identified(&events, OnDuplicate::Fail).1.len(), 3);
        assert_eq!(identified(&events, OnDuplicate::Ignore).0[..2], [id, id]);
    }
}
