//! The journal in PostgreSQL, beside the inbox, so that one transaction writes both.
//!
//! What lives here: two tables and their statements. What does not: verifying deliveries, and
//! following the journal.
//! Invariant: a number is drawn under a row's lock that is held to the commit, so that whoever sees
//! a number sees all smaller ones.

use async_trait::async_trait;
use postrider::postgres::tokio_postgres::{self, Row, Transaction};
use postrider::postgres::{Handled, InboxOptions, PostgresInbox, PostgresStore, postgres_error};
use postrider::{ConsumerName, Error, Result};
use serde_json::value::RawValue;
use uuid::Uuid;

use super::journal::{Arrival, Journal, KEPT_EVENTS, Receipt, ReceivedEvent};

/// Of several processes that open one database at the same time, one makes the tables, and the
/// first one's name stays.
const SCHEMA: &str = "
    SELECT pg_advisory_xact_lock(hashtext('contacts_journal'));
    CREATE TABLE IF NOT EXISTS contacts_journal (
        number  bigint PRIMARY KEY,
        id      uuid NOT NULL,
        type    text NOT NULL,
        key     text NOT NULL,
        payload text NOT NULL
    );
    CREATE TABLE IF NOT EXISTS contacts_journal_identity (
        one      integer PRIMARY KEY CHECK (one = 1),
        identity uuid NOT NULL DEFAULT gen_random_uuid(),
        last     bigint NOT NULL DEFAULT 0
    );
    INSERT INTO contacts_journal_identity (one) VALUES (1) ON CONFLICT DO NOTHING";

/// Locks the row: the next event waits for this one's commit.
const ADD: &str = "WITH next AS (
        UPDATE contacts_journal_identity SET last = last + 1 RETURNING last
    ), added AS (
        INSERT INTO contacts_journal (number, id, type, key, payload)
        SELECT last, $1::uuid, $2::text, $3::text, $4::text FROM next
    ), removed AS (
        DELETE FROM contacts_journal WHERE number <= (SELECT last FROM next) - $5::bigint
    )
    SELECT last FROM next";
/// Takes no lock: a snapshot.
const AFTER: &str = "SELECT number, id, type, key, payload FROM contacts_journal
    WHERE number > $1 ORDER BY number LIMIT $2";

/// The name under which this receiver's inbox remembers events.
const CONSUMER: &str = "contacts-page";
/// Remembered events that are forgotten at a time once they are old enough.
const PRUNE_BATCH: u32 = 1_000;

/// The journal and its inbox.
pub(crate) struct PostgresJournal {
    store: PostgresStore,
    inbox: PostgresInbox,
    consumer: ConsumerName,
    identity: Uuid,
    opened_at: u64,
}

impl PostgresJournal {
    /// Opens the journal in the store's own database.
    pub(crate) async fn open(store: PostgresStore) -> Result<Self> {
        let (identity, opened_at) = store.transaction(|tx| Box::pin(prepare(tx))).await?;
        let inbox = PostgresInbox::new(store.clone(), InboxOptions::default())?;
        let consumer = ConsumerName::new(CONSUMER)?;
        inbox.prune(&consumer, None, PRUNE_BATCH).await?;
        Ok(Self { store, inbox, consumer, identity, opened_at })
    }
}

#[async_trait]
impl Journal for PostgresJournal {
    fn identity(&self) -> Uuid {
        self.identity
    }

    fn opened_at(&self) -> u64 {
        self.opened_at
    }

    async fn receive(&self, arrival: Arrival) -> Result<Receipt> {
        let id = arrival.id;
        let add = self.inbox.handle(&self.consumer, id, |tx| Box::pin(add(tx, arrival)));
        match add.await? {
            Handled::Now(number) => {
                // Once in a thousand events, so that the inbox is bounded by its window.
                if number % i64::from(PRUNE_BATCH) == 0 {
                    self.inbox.prune(&self.consumer, None, 2 * PRUNE_BATCH).await?;
                }
                Ok(Receipt::First)
            }
            Handled::Before => Ok(Receipt::Repeated),
        }
    }

    async fn after(&self, number: u64, limit: u32) -> Result<Vec<ReceivedEvent>> {
        // Numbers are PostgreSQL's, so that one beyond them has nothing after it.
        let number = i64::try_from(number).unwrap_or(i64::MAX);
        let limit = i64::from(limit);
        self.store.transaction(move |tx| Box::pin(read(tx, number, limit))).await
    }
}

/// The journal's name and its last number.
async fn prepare(tx: &Transaction<'_>) -> Result<(Uuid, u64)> {
    tx.batch_execute(SCHEMA).await.map_err(failed("create the journal"))?;
    let sql = "SELECT identity, last FROM contacts_journal_identity";
    let row = tx.query_one(sql, &[]).await.map_err(failed("read the journal's name"))?;
    Ok((row.get(0), u64::try_from(row.get::<_, i64>(1)).unwrap_or_default()))
}

async fn add(tx: &Transaction<'_>, arrival: Arrival) -> Result<i64> {
    let Arrival { id, event_type, key, payload } = arrival;
    let row = tx
        .query_one(ADD, &[id.as_uuid(), &event_type, &key, &payload.get(), &KEPT_EVENTS])
        .await
        .map_err(failed("add to the journal"))?;
    Ok(row.get(0))
}

async fn read(tx: &Transaction<'_>, number: i64, limit: i64) -> Result<Vec<ReceivedEvent>> {
    let rows = tx.query(AFTER, &[&number, &limit]).await.map_err(failed("read the journal"))?;
    rows.iter().map(event).collect()
}

fn event(row: &Row) -> Result<ReceivedEvent> {
    let number = u64::try_from(row.get::<_, i64>(0)).unwrap_or_default();
    let payload = RawValue::from_string(row.get(4)).map_err(|error| {
        Error::corrupt(format!("event {number} of the journal is damaged")).with_source(error)
    })?;
    Ok(ReceivedEvent { number, id: row.get(1), event_type: row.get(2), key: row.get(3), payload })
}

fn failed(place: &'static str) -> impl Fn(tokio_postgres::Error) -> Error {
    move |error| postgres_error(place, error)
}
