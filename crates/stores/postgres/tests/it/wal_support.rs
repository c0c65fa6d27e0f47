//! What the tests of the write-ahead log share: a server of their own, because making a slot waits
//! for every transaction of the cluster, and a consumer that takes, confirms and comes back.

use std::sync::Arc;
use std::time::Duration;

use postrider_core::*;
use postrider_servers::postgres::{Database, Options, Server, Version};
use postrider_store_postgres::{PostgresOptions, PostgresStore, PostgresWal, WalOptions};

use crate::support::*;

/// Longest time for anything that must come.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) struct Cluster {
    pub(crate) server: Arc<Server>,
    pub(crate) database: Database,
    pub(crate) store: PostgresStore,
}

impl Cluster {
    pub(crate) async fn new(version: Version) -> Self {
        Self::with(Options::new(version)).await
    }

    pub(crate) async fn with(options: Options) -> Self {
        let made = tokio::task::spawn_blocking(move || options.launch().expect("a server"));
        Self::on(Arc::new(made.await.expect("it does not panic"))).await
    }

    /// A database and its outbox on a server that is there.
    pub(crate) async fn on(server: Arc<Server>) -> Self {
        let home = Arc::clone(&server);
        let made = tokio::task::spawn_blocking(move || home.create_database().expect("a database"));
        let database = made.await.expect("it does not panic");
        let store = open_store(&database.url()).await;
        Self { server, database, store }
    }

    /// Another process's view of the same outbox.
    pub(crate) async fn wal(&self, options: WalOptions) -> PostgresWal {
        PostgresWal::new(open_store(&self.database.url()).await, options).expect("options")
    }

    /// A consumer in a process of its own.
    pub(crate) async fn rider(&self, name: &str) -> Rider {
        Rider::new(self.wal(WalOptions::new()).await, name).await
    }

    pub(crate) async fn append(&self, keys_and_payloads: &[(&str, &str)]) {
        let events: Vec<_> = keys_and_payloads.iter().map(|(key, text)| event(key, text)).collect();
        let outbox = self.store.outbox();
        let appended = self
            .store
            .transaction(move |tx| Box::pin(async move { outbox.append(tx, &events).await }));
        appended.await.expect("append");
    }

    pub(crate) async fn session(&self) -> tokio_postgres::Client {
        session(&self.database.url()).await
    }
}

pub(crate) async fn open_store(url: &str) -> PostgresStore {
    let options = PostgresOptions::new(url).tick_interval(Duration::ZERO);
    PostgresStore::open(options).await.expect("open")
}

pub(crate) struct Rider {
    pub(crate) wal: PostgresWal,
    pub(crate) lease: Arc<HeldLease>,
    pub(crate) consumer: ConsumerName,
    pub(crate) reader: Box<dyn Reader>,
}

pub(crate) fn partition() -> PartitionId {
    PartitionId::new("wal").expect("valid")
}

impl Rider {
    /// Begins at the oldest event, or where its checkpoint stands.
    pub(crate) async fn new(wal: PostgresWal, name: &str) -> Self {
        Self::from(wal, name, StartFrom::Oldest).await
    }

    pub(crate) async fn from(wal: PostgresWal, name: &str, from: StartFrom) -> Self {
        let lease = match wal.acquire(&group(), &partition(), &relay_id("one"), TTL).await {
            Ok(Acquired::Held(lease)) => Arc::new(lease),
            other => panic!("not granted: {other:?}"),
        };
        Self::under(lease, wal, name, from).await
    }

    /// Another consumer of the same process, which has the lease already.
    pub(crate) async fn beside(&self, name: &str, from: StartFrom) -> Self {
        Self::under(Arc::clone(&self.lease), self.wal.clone(), name, from).await
    }

    async fn under(lease: Arc<HeldLease>, wal: PostgresWal, name: &str, from: StartFrom) -> Self {
        let consumer = consumer(name);
        let stands = wal.checkpoint(&consumer, &partition()).await.expect("checkpoint");
        let from = stands.map_or(from, |stands| StartFrom::After(stands.position));
        let reader = wal.open(&consumer, &partition(), from).await.expect("open");
        Self { wal, lease, consumer, reader }
    }

    /// The next batch, whatever trouble passes meanwhile.
    pub(crate) async fn next(&mut self) -> Batch {
        let limit = BatchLimit { records: 512, bytes: 1 << 20 };
        let next = async {
            loop {
                match self.reader.next(limit).await {
                    Ok(ReadOutcome::Batch(batch)) => return batch,
                    Ok(ReadOutcome::Ended(_)) => panic!("the log never ends"),
                    Err(error) if error.kind() == ErrorKind::Transient => {
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                    Err(error) => panic!("{error}"),
                }
            }
        };
        tokio::time::timeout(PATIENCE, next).await.expect("nothing came")
    }

    pub(crate) async fn confirm(&mut self, to: &Position, published: usize) {
        let tally = Tally { published: published as u64, parked: 0 };
        self.wal.advance(&self.lease, &self.consumer, to, tally).await.expect("advance");
        self.reader.confirmed(to);
    }

    /// Takes and confirms batches until there were so many events; their payloads.
    pub(crate) async fn take(&mut self, count: usize) -> Vec<String> {
        let mut found = Vec::new();
        let mut came = tokio::time::Instant::now();
        while found.len() < count {
            let batch = self.next().await;
            match batch.entries.is_empty() {
                true => assert!(came.elapsed() < PATIENCE * 2, "positions alone, after {found:?}"),
                false => came = tokio::time::Instant::now(),
            }
            let records: Vec<_> = batch.entries.iter().map(|entry| record(entry).clone()).collect();
            found.extend(payloads(&records));
            self.confirm(&batch.position, records.len()).await;
        }
        found
    }

    /// Confirms what comes within a while, which must be positions alone.
    pub(crate) async fn nothing_within(&mut self, time: Duration) {
        let deadline = tokio::time::Instant::now() + time;
        loop {
            let limit = BatchLimit { records: 512, bytes: 1 << 20 };
            let next = tokio::time::timeout_at(deadline, self.reader.next(limit)).await;
            let Ok(outcome) = next else { return };
            match outcome {
                Ok(ReadOutcome::Batch(batch)) => {
                    assert_eq!(batch.entries.len(), 0, "something came again");
                    self.confirm(&batch.position, 0).await;
                }
                Ok(ReadOutcome::Ended(_)) => panic!("the log never ends"),
                Err(error) => assert_eq!(error.kind(), ErrorKind::Transient, "{error}"),
            }
        }
    }
}
