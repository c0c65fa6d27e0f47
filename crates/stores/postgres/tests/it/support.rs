//! What the tests share: a store in a fresh database, on each server version, and short ways to
//! make its values.

use std::time::Duration;

use postrider_core::*;
use postrider_servers::postgres::{Database, Version, shared};
use postrider_store_postgres::{PostgresOptions, PostgresStore};
use tokio_postgres::{Client, NoTls};

/// Lists each of the tests, functions of a version, for both versions of the server.
macro_rules! on_both_versions {
    ($($name:ident)*) => {
        mod on_15 {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                super::$name(postrider_servers::postgres::Version::V15).await;
            })*
        }
        mod on_18 {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                super::$name(postrider_servers::postgres::Version::V18).await;
            })*
        }
    };
}
pub(crate) use on_both_versions;

pub(crate) struct World {
    pub(crate) database: Database,
    pub(crate) store: PostgresStore,
}

pub(crate) const LIMIT: BatchLimit = BatchLimit { records: 1_000, bytes: 64 << 20 };
pub(crate) const TTL: Duration = Duration::from_secs(60);

/// A fresh database. Making it blocks, so it is done off the test's runtime.
pub(crate) async fn database(version: Version) -> Database {
    let made = tokio::task::spawn_blocking(move || shared(version).expect("a server")).await;
    made.expect("it does not panic")
}

impl World {
    pub(crate) async fn new(version: Version, partitions: u32) -> Self {
        Self::with(version, |options| options.partitions(partitions)).await
    }

    pub(crate) async fn with(
        version: Version,
        set: impl FnOnce(PostgresOptions) -> PostgresOptions,
    ) -> Self {
        let database = database(version).await;
        let options = PostgresOptions::new(database.url()).tick_interval(Duration::ZERO);
        let store = PostgresStore::open(set(options)).await.expect("open");
        Self { database, store }
    }

    /// A connection of the application's own.
    pub(crate) async fn session(&self) -> Client {
        session(&self.database.url()).await
    }

    pub(crate) async fn append(&self, events: Vec<NewEvent>) -> Vec<EventId> {
        let outbox = self.store.outbox();
        let appended = self
            .store
            .transaction(move |tx| Box::pin(async move { outbox.append(tx, &events).await }));
        appended.await.expect("append")
    }

    pub(crate) async fn held(&self, partition: &PartitionId, relay: &str) -> HeldLease {
        self.held_for(partition, relay, TTL).await
    }

    pub(crate) async fn held_for(
        &self,
        partition: &PartitionId,
        relay: &str,
        ttl: Duration,
    ) -> HeldLease {
        match self.store.acquire(&group(), partition, &relay_id(relay), ttl).await {
            Ok(Acquired::Held(lease)) => lease,
            other => panic!("not granted: {other:?}"),
        }
    }

    pub(crate) async fn page(&self, partition: &PartitionId, after: &Position) -> FeedPage {
        Feed::read(&self.store, partition, after, LIMIT).await.expect("read")
    }

    /// All records of a partition, in feed order.
    pub(crate) async fn records(&self, partition: &PartitionId) -> Vec<Record> {
        let mut found = Vec::new();
        let mut after = Position::START;
        loop {
            let page = self.page(partition, &after).await;
            if page.entries.is_empty() {
                return found;
            }
            after = page.position.clone();
            found.extend(page.entries.iter().map(|entry| record(entry).clone()));
        }
    }
}

pub(crate) async fn session(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("connect");
    tokio::spawn(connection);
    client
}

/// One value of a query.
pub(crate) async fn one<T>(client: &Client, sql: &str) -> T
where
    T: for<'a> tokio_postgres::types::FromSql<'a>,
{
    client.query_one(sql, &[]).await.expect("a row").get(0)
}

/// Waits until a session waits for a lock of another one, so that a schedule goes on from there.
pub(crate) async fn until_one_waits(client: &Client) {
    let waiting = "SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND wait_event_type = 'Lock'";
    let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
    while one::<i64>(client, waiting).await == 0 {
        assert!(tokio::time::Instant::now() < deadline, "nobody waits");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub(crate) fn record(entry: &Entry) -> &Record {
    match entry {
        Entry::Record(record) => record,
        Entry::Malformed(malformed) => panic!("unreadable: {malformed:?}"),
    }
}

pub(crate) fn key(text: &str) -> Key {
    Key::new(text).expect("a valid key")
}

pub(crate) fn builder(key_text: &str) -> NewEventBuilder {
    let topic = Topic::new("orders").expect("valid");
    let event_type = EventType::new("OrderPlaced").expect("valid");
    NewEvent::builder(key(key_text), topic, event_type)
}

pub(crate) fn event(key_text: &str, payload: &str) -> NewEvent {
    let json = ContentType::new("application/json").expect("valid");
    builder(key_text).payload(json, payload.to_owned()).build().expect("within the limits")
}

pub(crate) fn p(index: u32, count: u32) -> PartitionId {
    PartitionId::numbered(index, count)
}

pub(crate) fn consumer(name: &str) -> ConsumerName {
    ConsumerName::new(name).expect("valid")
}

pub(crate) fn group() -> GroupName {
    GroupName::new("group").expect("valid")
}

pub(crate) fn relay_id(name: &str) -> RelayId {
    RelayId::new(name).expect("valid")
}

pub(crate) fn payloads(records: &[Record]) -> Vec<String> {
    let text = |record: &Record| String::from_utf8(record.event.payload().to_vec());
    records.iter().map(|record| text(record).expect("text")).collect()
}

/// Thirty thousand events of many transactions, so that statistics show how ids grow with numbers.
pub(crate) const FILL: &str = "DO $$ BEGIN FOR n IN 1..300 LOOP
        INSERT INTO postrider.outbox (key, topic, type, payload)
        SELECT 'k' || i, 't', 'T', '' FROM generate_series(1, 100) AS i;
        COMMIT;
    END LOOP; END $$";

/// Two open transactions: one with another's end behind it, so that a snapshot lists it, and one
/// behind all that have ended.
pub(crate) async fn open_two(world: &World) -> [tokio_postgres::Client; 2] {
    let open = [world.session().await, world.session().await];
    let begin = "BEGIN; SELECT pg_current_xact_id()";
    open[0].batch_execute(begin).await.expect("begun");
    world.append(vec![event("b", "1")]).await;
    open[1].batch_execute(begin).await.expect("begun");
    open
}

/// How many rows of the outbox the server read for `work`, as it counts them itself.
pub(crate) async fn rows_read(
    client: &tokio_postgres::Client,
    work: impl Future<Output = ()>,
) -> i64 {
    rows_read_of(client, "outbox_s%", work).await
}

/// The same of the tables with such names.
pub(crate) async fn rows_read_of(
    client: &tokio_postgres::Client,
    tables: &str,
    work: impl Future<Output = ()>,
) -> i64 {
    let read = &format!(
        "SELECT sum(idx_tup_read + coalesce(seq_tup_read, 0))::bigint
        FROM pg_stat_user_indexes JOIN pg_stat_user_tables USING (relid)
        WHERE pg_stat_user_tables.relname LIKE '{tables}'"
    );
    // Its counts come after a while; those of the steps before must not be taken for the work's.
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    let before: i64 = one(client, read).await;
    work.await;
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    let after: i64 = one(client, read).await;
    after - before
}
