//! The shared suites, on this store.
//!
//! The application's transaction lives on a thread with a connection of its own, because
//! `rusqlite`'s borrows its connection: each step is sent there and answered.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use async_trait::async_trait;
use postrider_conformance::store::{Prunes, StoreFeatures, StoreHarness, Supports, Times, Writers};
use postrider_core::{EventId, NewEvent, Result};
use postrider_store_sqlite::{OnDuplicate, SqliteStore, sqlite_error};
use rusqlite::{OptionalExtension, Transaction, TransactionBehavior};

use crate::support::World;

pub(crate) struct SqliteHarness(World);

type Step = Box<dyn FnOnce(&Transaction<'_>) + Send>;

/// An open transaction; dropping it ends the channel, upon which its thread rolls back.
pub(crate) struct Open {
    steps: Option<Sender<Step>>,
    end: Option<Sender<End>>,
    done: Receiver<rusqlite::Result<()>>,
}

enum End {
    Commit,
    Rollback,
}

impl Open {
    fn run<T: Send + 'static>(
        &self,
        step: impl FnOnce(&Transaction<'_>) -> T + Send + 'static,
    ) -> T {
        let (answer, answered) = channel();
        let step: Step = Box::new(move |tx| {
            // Nobody listens any more when the asking test has failed.
            let _ = answer.send(step(tx));
        });
        let steps = self.steps.as_ref().expect("open");
        steps.send(step).expect("its thread runs");
        answered.recv().expect("its thread runs")
    }

    fn end(mut self, how: End) -> rusqlite::Result<()> {
        self.end.take().expect("open").send(how).expect("its thread runs");
        self.steps = None;
        self.done.recv().expect("its thread runs")
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.steps = None;
        if self.end.take().is_some() {
            // Waits for the rollback, so that the next transaction need not.
            let _ = self.done.recv();
        }
    }
}

#[async_trait]
impl StoreHarness for SqliteHarness {
    type Store = SqliteStore;
    type Transaction = Open;

    async fn fresh(partitions: u32) -> Self {
        let world = World::new(partitions).await;
        let table = "CREATE TABLE application (id TEXT PRIMARY KEY, value TEXT NOT NULL)";
        world.connection().execute_batch(table).expect("table");
        Self(world)
    }

    fn store(&self) -> Arc<SqliteStore> {
        Arc::new(self.0.store.clone())
    }

    fn features(&self) -> StoreFeatures {
        StoreFeatures {
            writers: Writers::OneAtATime,
            documents: Supports::Yes,
            raising: Supports::Yes,
            pruning: Prunes::Events,
            times: Times::OfTheAppend,
        }
    }

    async fn begin(&self) -> Open {
        let mut connection = self.0.connection();
        let (steps, to_do) = channel::<Step>();
        let (end, ended) = channel();
        let (finished, done) = channel();
        std::thread::spawn(move || {
            let tx = connection
                .transaction_with_behavior(TransactionBehavior::Immediate)
                .expect("the write lock comes free");
            to_do.iter().for_each(|step| step(&tx));
            let result = match ended.try_recv() {
                Ok(End::Commit) => tx.commit(),
                Ok(End::Rollback) | Err(_) => tx.rollback(),
            };
            // A dropped transaction's owner may be gone.
            let _ = finished.send(result);
        });
        Open { steps: Some(steps), end: Some(end), done }
    }

    async fn append(&self, open: &mut Open, events: &[NewEvent]) -> Result<Vec<EventId>> {
        let (store, events) = (self.0.store.clone(), events.to_vec());
        open.run(move |tx| store.append(tx, &events, OnDuplicate::Fail))
    }

    async fn append_ignoring_repeats(
        &self,
        open: &mut Open,
        events: &[NewEvent],
    ) -> Result<Vec<EventId>> {
        let (store, events) = (self.0.store.clone(), events.to_vec());
        open.run(move |tx| store.append(tx, &events, OnDuplicate::Ignore))
    }

    async fn write_row(&self, open: &mut Open, id: &str, value: &str) {
        let values = (id.to_owned(), value.to_owned());
        open.run(move |tx| tx.execute("INSERT INTO application VALUES (?1, ?2)", values))
            .expect("insert");
    }

    async fn read_row(&self, id: &str) -> Option<String> {
        let select = "SELECT value FROM application WHERE id = ?1";
        self.0.connection().query_row(select, [id], |row| row.get(0)).optional().expect("read")
    }

    async fn commit(&self, open: Open) -> Result<()> {
        open.end(End::Commit).map_err(|error| sqlite_error("commit", error))
    }

    async fn rollback(&self, open: Open) {
        open.end(End::Rollback).expect("rollback");
    }

    async fn pass_time(&self, duration: Duration) {
        self.0.clock.advance(duration);
    }

    async fn raise_partitions(&self, count: u32) -> Result<()> {
        self.0.store.raise_partitions(count).await
    }
}

postrider_conformance::store_suite!(SqliteHarness);
postrider_conformance::source_suite!(postrider_conformance::source::FeedHarness<SqliteHarness>);
