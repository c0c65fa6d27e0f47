//! A writer on PostgreSQL: an application with one connection that it loses now and then.
//!
//! What lives here: the body of a writer's process, and of one that holds a transaction open. What
//! does not: starting and killing it.
//! Invariant: an event and its row of truth are written in one transaction, the row while the
//! append holds the key's lock. Whether a commit with an unknown end took place is told by the
//! truth alone, and what did not is appended again under the same ids.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use postrider_core::{ContentType, EventId, EventType, Headers, Key, NewEvent, Topic};
use postrider_store_postgres::Outbox;
use postrider_store_postgres::tokio_postgres::types::{ToSql, Type};
use postrider_store_postgres::tokio_postgres::{Client, NoTls, Transaction, connect};
use rand::RngExt;
use rand::rngs::StdRng;
use uuid::Uuid;

use super::{LARGEST, TOPIC, key, payload, what};
use crate::world::WRITER_HEADER;

/// Longest that an application waits for a transaction of its own.
const GIVE_UP: Duration = Duration::from_secs(4);
/// Pause before a lost connection is opened again.
const RECONNECT_AFTER: Duration = Duration::from_millis(20);
/// Longest that a writer goes on until it has committed as many events as it was told.
const GIVE_UP_EVENTS: Duration = Duration::from_secs(180);
/// How long somebody tries to commit what is prepared.
const INSIST: Duration = Duration::from_secs(20);

/// Writes the row of truth of an event of this very transaction.
const TRUTH: &str = "INSERT INTO fault.truth
        (id, key, topic, type, content_type, writer, payload, xid, seq)
    SELECT o.id, o.key, o.topic, o.type, o.content_type, $2, o.payload, o.xid, o.seq
    FROM postrider.outbox AS o WHERE o.xid = pg_current_xact_id() AND o.id = $1";

/// As people append who have no library.
const APPEND_BY_SQL: &str = "SELECT postrider.append($1, $2, $3, $4::bytea, $5, $6::json, $7)";

/// Takes no key lock: right only under a key that nobody else writes at the same time.
const INSERT: &str = "INSERT INTO postrider.outbox (id, key, topic, type, content_type, headers,
    payload) VALUES ($7, $1, $2, $3, $5, $6::json, $4)";

/// What a writer is told.
#[derive(Debug, Clone, Copy)]
pub struct Task<'a> {
    /// Where it writes.
    pub url: &'a str,
    /// Its own name, for the events' headers.
    pub name: &'a str,
    /// How long.
    pub length: Duration,
    /// Whether it appends again what a commit with an unknown end may have lost.
    pub retries: bool,
    /// How many events it commits before it ends, however long that takes; otherwise as many as
    /// come.
    pub events: Option<u64>,
    /// The largest payload, in bytes.
    pub largest: usize,
}

/// How an event is appended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Library,
    Function,
    Insert,
}

/// An event that is to be written.
#[derive(Debug, Clone)]
struct Draft {
    way: Way,
    id: Uuid,
    /// Whether the library is given the id.
    given: bool,
    key: String,
    json: bool,
    payload: Vec<u8>,
}

/// A business transaction.
#[derive(Debug, Clone)]
struct Plan {
    drafts: Vec<Draft>,
    /// From which draft on a savepoint is rolled back, and to which.
    undone: Option<(usize, usize)>,
    /// Whether all of them are appended in one call.
    at_once: bool,
    hold: Duration,
    rolls_back: bool,
}

/// Writes until the time is over. Refusals undo a transaction; lost connections are opened again.
///
/// # Errors
/// When there is no runtime.
pub fn run(task: Task<'_>, rng: StdRng) -> Result<()> {
    runtime()?.block_on(write(task, rng));
    Ok(())
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().build().context("start the runtime")
}

async fn open(url: &str) -> Result<Client> {
    let (client, connection) = connect(url, NoTls).await.context("connect")?;
    #[expect(clippy::disallowed_methods, reason = "it ends with its client")]
    tokio::spawn(connection);
    Ok(client)
}

/// What takes too long has failed.
async fn within<T>(attempt: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(GIVE_UP, attempt).await.context("wait for the database")?
}

async fn write(task: Task<'_>, mut rng: StdRng) {
    let begun = Instant::now();
    let mut client: Option<Client> = None;
    let (mut number, mut committed) = (0_u64, 0_u64);
    while match task.events {
        Some(events) => committed < events && begun.elapsed() < GIVE_UP_EVENTS,
        None => begun.elapsed() < task.length,
    } {
        number += 1;
        let connected = match client.take().filter(|client| !client.is_closed()) {
            Some(client) => Ok(client),
            None => within(open(task.url)).await,
        };
        let Ok(mut connected) = connected else {
            tokio::time::sleep(RECONNECT_AFTER).await;
            continue;
        };
        let plan = plan(task.largest, &mut rng);
        let tried = transaction(&mut connected, task.name, &plan);
        // What was refused, an application tells its user; then it goes on.
        let tried = tokio::time::timeout(GIVE_UP, tried).await;
        committed += if matches!(tried, Ok(Ok(()))) { plan.committed() } else { 0 };
        let known = tried.is_ok() && !connected.is_closed();
        client = match known {
            true => Some(connected),
            false if task.retries => settle(&task, &plan).await.ok(),
            false => None,
        };
        let pause = if number.is_multiple_of(40) { 60 } else { rng.random_range(1..12) };
        tokio::time::sleep(Duration::from_millis(pause)).await;
    }
}

/// Looks into the truth for a transaction whose end is unknown, and does it again unless it is
/// there.
async fn settle(task: &Task<'_>, plan: &Plan) -> Result<Client> {
    let mut client = within(open(task.url)).await?;
    let again = plan.again();
    let Some(first) = again.drafts.first().filter(|_| !plan.rolls_back) else { return Ok(client) };
    let found = async {
        let look = "SELECT FROM fault.truth WHERE id = $1";
        Ok(!client.query_typed(look, &[(&first.id, Type::UUID)]).await?.is_empty())
    };
    if !within(found).await? {
        // The old commit may still be under way: then it wins, and this is refused as a repetition.
        within(transaction(&mut client, task.name, &again)).await?;
    }
    Ok(client)
}

impl Plan {
    /// How many events are there if it ends as planned.
    fn committed(&self) -> u64 {
        let undone = self.undone.map_or(0, |(first, last)| last + 1 - first);
        if self.rolls_back { 0 } else { (self.drafts.len() - undone) as u64 }
    }

    /// What of it can be done again and be told from what was done before.
    fn again(&self) -> Self {
        let kept = |(at, draft): &(usize, &Draft)| {
            let undone = self.undone.is_some_and(|(first, last)| (first..=last).contains(at));
            !undone && (draft.given || draft.way != Way::Library)
        };
        let drafts = self.drafts.iter().enumerate().filter(kept);
        Self {
            drafts: drafts.map(|(_, draft)| draft.clone()).collect(),
            undone: None,
            hold: Duration::ZERO,
            ..*self
        }
    }
}

fn plan(largest: usize, rng: &mut StdRng) -> Plan {
    let events = if rng.random_bool(0.02) { 40 } else { rng.random_range(1..=4) };
    let mut drafts: Vec<Draft> = (0..events).map(|_| draft(largest, rng)).collect();
    let undone = (rng.random_bool(0.15)).then(|| {
        let first = rng.random_range(0..drafts.len());
        (first, rng.random_range(first..drafts.len()))
    });
    if rng.random_bool(0.7) {
        // In one order for all, as an application does that wants no deadlocks.
        drafts.sort_by(|a, b| a.key.cmp(&b.key));
    }
    let long = if rng.random_bool(0.1) { 250 } else { 15 };
    let holds = rng.random_bool(0.25);
    Plan {
        drafts,
        undone,
        at_once: rng.random_bool(0.6),
        hold: Duration::from_millis(if holds { rng.random_range(1..long) } else { 0 }),
        rolls_back: rng.random_bool(0.1),
    }
}

fn draft(largest: usize, rng: &mut StdRng) -> Draft {
    let id = Uuid::now_v7();
    let json = rng.random_bool(0.3);
    let way = match rng.random_range(0..10) {
        0 | 1 => Way::Function,
        2 => Way::Insert,
        _ => Way::Library,
    };
    let key = if way == Way::Insert { format!("alone {id}") } else { key(rng) };
    let payload = payload(id, json, largest, rng);
    Draft { way, id, given: rng.random_bool(0.5), key, json, payload }
}

/// One business transaction.
async fn transaction(client: &mut Client, writer: &str, plan: &Plan) -> Result<()> {
    let mut tx = client.transaction().await?;
    let mut at = 0;
    while at < plan.drafts.len() {
        match plan.undone {
            Some((first, last)) if first == at => {
                let savepoint = tx.savepoint("part").await?;
                append(&savepoint, writer, &plan.drafts[first..=last], false).await?;
                savepoint.rollback().await?;
                at = last + 1;
            }
            undone => {
                let before = undone.map(|(first, _)| first).filter(|first| *first > at);
                let until = before.unwrap_or(plan.drafts.len());
                append(&tx, writer, &plan.drafts[at..until], plan.at_once).await?;
                at = until;
            }
        }
    }
    tokio::time::sleep(plan.hold).await;
    match plan.rolls_back {
        true => tx.rollback().await.context("roll back"),
        false => tx.commit().await.context("commit"),
    }
}

/// Appends the drafts in their order, each with its row of truth.
async fn append(tx: &Transaction<'_>, writer: &str, drafts: &[Draft], at_once: bool) -> Result<()> {
    let by_library = drafts.iter().all(|draft| draft.way == Way::Library);
    if at_once && by_library {
        let events = drafts.iter().map(|draft| event(draft, writer)).collect::<Result<Vec<_>>>()?;
        for id in Outbox::default().append(tx, &events).await? {
            truth(tx, *id.as_uuid(), writer).await?;
        }
        return Ok(());
    }
    for draft in drafts {
        let id = match draft.way {
            Way::Library => {
                let ids = Outbox::default().append(tx, &[event(draft, writer)?]).await?;
                *ids.first().context("an append returns its id")?.as_uuid()
            }
            Way::Function => by_sql(tx, APPEND_BY_SQL, draft, writer).await?,
            Way::Insert => by_sql(tx, INSERT, draft, writer).await?,
        };
        truth(tx, id, writer).await?;
    }
    Ok(())
}

fn event(draft: &Draft, writer: &str) -> Result<NewEvent> {
    let (event_type, content_type) = what(draft.json);
    let mut headers = Headers::new();
    headers.insert(WRITER_HEADER, writer)?;
    let (key, topic) = (Key::new(draft.key.as_str())?, Topic::new(TOPIC)?);
    let mut event = NewEvent::builder(key, topic, EventType::new(event_type)?)
        .headers(headers)
        .payload(ContentType::new(content_type)?, draft.payload.clone());
    if draft.given {
        event = event.id(EventId::from_uuid(draft.id));
    }
    Ok(event.build()?)
}

async fn by_sql(tx: &Transaction<'_>, sql: &str, draft: &Draft, writer: &str) -> Result<Uuid> {
    let (event_type, content_type) = what(draft.json);
    let headers = format!("{{\"{WRITER_HEADER}\":\"{writer}\"}}");
    let params: [(&(dyn ToSql + Sync), Type); 7] = [
        (&draft.key, Type::TEXT),
        (&TOPIC, Type::TEXT),
        (&event_type, Type::TEXT),
        (&draft.payload, Type::BYTEA),
        (&content_type, Type::TEXT),
        (&headers, Type::TEXT),
        (&draft.id, Type::UUID),
    ];
    tx.query_typed(sql, &params).await?;
    Ok(draft.id)
}

async fn truth(tx: &Transaction<'_>, id: Uuid, writer: &str) -> Result<()> {
    let written = tx.execute_typed(TRUTH, &[(&id, Type::UUID), (&writer, Type::TEXT)]).await?;
    anyhow::ensure!(written == 1, "event {id} is not in the outbox after its append");
    Ok(())
}

/// Writes a few events in a transaction that stays open, or prepared, for a while, and commits it.
///
/// # Errors
/// When it can't be committed for as long as anybody would try.
pub fn hold_open(url: &str, length: Duration, prepared: bool, mut rng: StdRng) -> Result<()> {
    runtime()?.block_on(async {
        let mut client = open(url).await?;
        let drafts: Vec<Draft> = (0..3).map(|_| draft(LARGEST, &mut rng)).collect();
        let tx = client.transaction().await?;
        append(&tx, "holder", &drafts, false).await?;
        if !prepared {
            tokio::time::sleep(length).await;
            return tx.commit().await.context("commit");
        }
        let name = format!("fault-{}", Uuid::now_v7());
        tx.batch_execute(&format!("PREPARE TRANSACTION '{name}'")).await?;
        // The transaction is no more the session's: this ends nothing.
        tx.commit().await.context("leave the prepared transaction")?;
        tokio::time::sleep(length).await;
        commit_prepared(url, &name).await
    })
}

/// Asks again until it is committed, or was never prepared in the database that is there now.
async fn commit_prepared(url: &str, name: &str) -> Result<()> {
    let until = Instant::now() + INSIST;
    loop {
        let committed = async {
            let client = open(url).await?;
            let open = "SELECT FROM pg_prepared_xacts WHERE gid = $1";
            if client.query_typed(open, &[(&name, Type::TEXT)]).await?.is_empty() {
                return Ok(());
            }
            let commit = format!("COMMIT PREPARED '{name}'");
            client.batch_execute(&commit).await.context("commit what is prepared")
        };
        match tokio::time::timeout(GIVE_UP, committed).await {
            Ok(Ok(())) => return Ok(()),
            failed if Instant::now() > until => return failed?,
            _ => tokio::time::sleep(RECONNECT_AFTER).await,
        }
    }
}
