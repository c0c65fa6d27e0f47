//! The shared suites, on this store, against both server versions.
//!
//! The application's transaction lives on a task with a connection of its own, because
//! `tokio-postgres`'s borrows its connection: each step is sent there and answered.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use postrider_conformance::store::{Prunes, StoreFeatures, StoreHarness, Supports, Times, Writers};
use postrider_core::{EventId, Feed, NewEvent, PartitionId, Result};
use postrider_servers::postgres::Version;
use postrider_store_postgres::{OnDuplicate, PostgresStore, postgres_error};
use tokio::sync::{mpsc, oneshot};
use tokio_postgres::{Client, Transaction};

use crate::support::World;

type Step = Box<dyn for<'a> FnOnce(&'a Transaction<'_>) -> BoxFuture<'a, ()> + Send>;

/// An open transaction; dropping it ends the channels, upon which its task rolls back.
pub(crate) struct Open {
    steps: mpsc::UnboundedSender<Step>,
    end: oneshot::Sender<End>,
    done: oneshot::Receiver<std::result::Result<(), tokio_postgres::Error>>,
}

enum End {
    Commit,
    Rollback,
}

impl Open {
    fn on(mut client: Client) -> Self {
        let (steps, mut to_do) = mpsc::unbounded_channel::<Step>();
        let (end, ended) = oneshot::channel();
        let (finished, done) = oneshot::channel();
        tokio::spawn(async move {
            let tx = client.transaction().await.expect("begin");
            while let Some(step) = to_do.recv().await {
                step(&tx).await;
            }
            let result = match ended.await {
                Ok(End::Commit) => tx.commit().await,
                Ok(End::Rollback) | Err(_) => tx.rollback().await,
            };
            // A dropped transaction's owner may be gone.
            let _ = finished.send(result);
        });
        Self { steps, end, done }
    }

    async fn run<T: Send + 'static>(
        &self,
        step: impl for<'a> FnOnce(&'a Transaction<'_>) -> BoxFuture<'a, T> + Send + 'static,
    ) -> T {
        let (answer, answered) = oneshot::channel();
        let step: Step = Box::new(move |tx| {
            Box::pin(async move {
                // Nobody listens any more when the asking test has failed.
                let _ = answer.send(step(tx).await);
            })
        });
        assert!(self.steps.send(step).is_ok(), "its task runs");
        answered.await.expect("its task runs")
    }

    async fn end(self, how: End) -> std::result::Result<(), tokio_postgres::Error> {
        assert!(self.end.send(how).is_ok(), "its task runs");
        drop(self.steps);
        self.done.await.expect("its task runs")
    }
}

/// A store in a database of its own. The number is the server's major version.
pub(crate) struct PostgresHarness<const VERSION: u32>(World, PartitionId);

#[async_trait]
impl<const VERSION: u32> StoreHarness for PostgresHarness<VERSION> {
    type Store = PostgresStore;
    type Transaction = Open;

    async fn fresh(partitions: u32) -> Self {
        let version = Version::ALL.into_iter().find(|version| version.major() == VERSION);
        let world = World::new(version.expect("one that is installed"), partitions).await;
        let table = "CREATE TABLE application (id text PRIMARY KEY, value text NOT NULL)";
        world.session().await.batch_execute(table).await.expect("table");
        Self(world, PartitionId::numbered(0, partitions))
    }

    fn store(&self) -> Arc<PostgresStore> {
        Arc::new(self.0.store.clone())
    }

    fn features(&self) -> StoreFeatures {
        StoreFeatures {
            writers: Writers::Concurrent,
            documents: Supports::Yes,
            raising: Supports::Yes,
            pruning: Prunes::Segments,
            times: Times::OfTheLook,
        }
    }

    async fn begin(&self) -> Open {
        Open::on(self.0.session().await)
    }

    async fn append(&self, open: &mut Open, events: &[NewEvent]) -> Result<Vec<EventId>> {
        let (outbox, events) = (self.0.store.outbox(), events.to_vec());
        open.run(move |tx| Box::pin(async move { outbox.append(tx, &events).await })).await
    }

    async fn append_ignoring_repeats(
        &self,
        open: &mut Open,
        events: &[NewEvent],
    ) -> Result<Vec<EventId>> {
        let (outbox, events) = (self.0.store.outbox(), events.to_vec());
        open.run(move |tx| {
            Box::pin(async move { outbox.append_with(tx, &events, OnDuplicate::Ignore).await })
        })
        .await
    }

    async fn write_row(&self, open: &mut Open, id: &str, value: &str) {
        let (id, value) = (id.to_owned(), value.to_owned());
        open.run(move |tx| {
            Box::pin(async move {
                let insert = "INSERT INTO application VALUES ($1, $2)";
                tx.execute(insert, &[&id, &value]).await.map(drop)
            })
        })
        .await
        .expect("insert");
    }

    async fn read_row(&self, id: &str) -> Option<String> {
        let select = "SELECT value FROM application WHERE id = $1";
        let found = self.0.session().await.query_opt(select, &[&id]).await.expect("read");
        found.map(|row| row.get(0))
    }

    async fn commit(&self, open: Open) -> Result<()> {
        open.end(End::Commit).await.map_err(|error| postgres_error("commit", error))
    }

    async fn rollback(&self, open: Open) {
        open.end(End::Rollback).await.expect("rollback");
    }

    async fn pass_time(&self, duration: Duration) {
        // The time of what was appended until now is that of this look at the latest.
        self.0.store.head(&self.1).await.expect("readable");
        tokio::time::sleep(duration).await;
    }

    async fn raise_partitions(&self, count: u32) -> Result<()> {
        self.0.store.raise_partitions(count).await
    }
}

mod on_15 {
    type Harness = super::PostgresHarness<15>;
    postrider_conformance::store_suite!(Harness);
    postrider_conformance::source_suite!(postrider_conformance::source::FeedHarness<Harness>);
}

mod on_18 {
    type Harness = super::PostgresHarness<18>;
    postrider_conformance::store_suite!(Harness);
    postrider_conformance::source_suite!(postrider_conformance::source::FeedHarness<Harness>);
}
