//! A backlog in the log that can be drained again and again: slots and a checkpoint from before it.
//!
//! What lives here: making it, putting slot and checkpoint back, and pg_recvlogical on another slot
//! of the same place. What does not: judging.
//! Invariant: the relay and pg_recvlogical read the same log, each from a slot that was made before
//! the first event and is a fresh copy for each run.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use postrider_servers::postgres::Database;
use postrider_sink_memory::MemorySink;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::child::{self, CONSUMER, Drained};
use crate::postgres::server::{Measured, Session};
use crate::world::{PAYLOAD_BYTES, clock};

/// Sessions that load.
const LOADERS: u64 = 4;
/// Of all of them together.
const KEYS: u64 = 10_000;
/// Longest wait for what takes a moment.
const GIVE_UP: Duration = Duration::from_secs(60);

/// All that a consumer has in the database.
const KEPT: [&str; 4] = ["checkpoint", "wal_base", "wal_after", "wal_recovery"];

pub(crate) struct Backlog {
    pub(crate) database: Database,
    pub(crate) session: Session,
    /// The relay's slot.
    pub(crate) ours: String,
    pub(crate) events: u64,
    /// Where the log ends that has them, as the server writes it.
    end: String,
}

impl Backlog {
    /// Appends while no relay is at work.
    pub(super) async fn make(
        measured: &Measured,
        events: u64,
        per_transaction: u64,
    ) -> Result<Self> {
        let mut made = Self::before(measured).await?;
        made.load(events, per_transaction, LOADERS).await?;
        made.settle().await?;
        Ok(made)
    }

    /// The slots and the checkpoint, and nothing else yet.
    pub(super) async fn before(measured: &Measured) -> Result<Self> {
        Self::of(measured.database()?).await
    }

    /// The same of a database that may have its outbox already.
    pub(crate) async fn of(database: Database) -> Result<Self> {
        // Slots belong to the server, and one that is read a moment longer keeps its database.
        let ours = format!("{}_ours", database.name());
        begin(&database.url(), &ours).await?;
        let session = Session::open(&database).await?;
        for table in KEPT {
            session
                .run(&format!("CREATE TABLE kept_{table} AS SELECT * FROM postrider.{table}"))
                .await?;
        }
        let made = Self { database, session, ours, events: 0, end: "0/0".to_owned() };
        made.copy(&made.ours, &made.named("origin")).await?;
        Ok(made)
    }

    /// Appends, by calls of the outbox's own function.
    pub(super) async fn load(
        &mut self,
        events: u64,
        per_transaction: u64,
        loaders: u64,
    ) -> Result<()> {
        let mut tasks = JoinSet::new();
        for loader in 0..loaders {
            let session = Session::open(&self.database).await?;
            let (from, to) = (events * loader / loaders, events * (loader + 1) / loaders);
            // No key belongs to two of them, so that none waits for another.
            let keys = KEYS / loaders;
            let script = loading(from, to, per_transaction, (loader * keys, keys));
            tasks.spawn(async move {
                session.run("SET synchronous_commit = off").await?;
                session.run(&script).await
            });
        }
        while let Some(done) = tasks.join_next().await {
            done??;
        }
        self.events += events;
        Ok(())
    }

    /// Leaves the server nothing to do of what was loaded.
    pub(crate) async fn settle(&mut self) -> Result<()> {
        self.session.run("VACUUM ANALYZE postrider.outbox").await?;
        self.session.run("CHECKPOINT").await?;
        let sql = "SELECT pg_current_wal_lsn()::text";
        self.end = self.session.query_one(sql, &[]).await?.get(0);
        let loaded = self.session.number("SELECT count(*) FROM postrider.outbox").await?;
        ensure!(u64::try_from(loaded)? == self.events, "{loaded} events of {}", self.events);
        Ok(())
    }

    /// The consumer stands again where it stood before the first event.
    pub(super) async fn put_back(&self) -> Result<()> {
        for table in KEPT {
            self.session
                .run(&format!(
                    "DELETE FROM postrider.{table};
                    INSERT INTO postrider.{table} SELECT * FROM kept_{table}"
                ))
                .await?;
        }
        Ok(())
    }

    fn named(&self, slot: &str) -> String {
        format!("{}_{slot}", self.database.name())
    }

    async fn copy(&self, from: &str, to: &str) -> Result<()> {
        let sql = format!("SELECT pg_copy_logical_replication_slot('{from}', '{to}')");
        self.session.run(&sql).await
    }

    /// Once nobody reads it.
    pub(crate) async fn drop_slot(&self, slot: &str) -> Result<()> {
        let sql = format!(
            "SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{slot}' AND active"
        );
        let give_up = Instant::now() + GIVE_UP;
        while self.session.number(&sql).await? > 0 {
            ensure!(Instant::now() < give_up, "slot {slot} is still read");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        self.session
            .run(&format!(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots
                WHERE slot_name = '{slot}'"
            ))
            .await
    }

    /// Slot and consumer stand again where they stood before the first event.
    pub(crate) async fn begin_again(&self) -> Result<()> {
        self.put_back().await?;
        self.drop_slot(&self.ours).await?;
        self.copy(&self.named("origin"), &self.ours).await
    }

    /// A slot before the first event for another reader, a fresh one each time.
    pub(crate) async fn theirs(&self) -> Result<String> {
        let slot = self.named("theirs");
        self.drop_slot(&slot).await?;
        self.copy(&self.named("origin"), &slot).await?;
        Ok(slot)
    }

    /// A relay in a process of its own drains all by the slot.
    pub(super) async fn relayed(&self) -> Result<Drained> {
        self.begin_again().await?;
        let drained = child::drained(&self.database.url(), &self.ours, self.events).await?;
        ensure!(drained.catch_ups == 0, "the relay read from the table, not from the log");
        Ok(drained)
    }

    /// pg_recvlogical writes all to /dev/null.
    pub(super) async fn received(&self) -> Result<Duration> {
        let slot = self.theirs().await?;
        let version = self.database.version();
        let mut command = Command::new(version.program("pg_recvlogical")?);
        command.args(["--dbname", &self.database.url(), "--slot", &slot, "--start"]);
        command.args(["--option", "proto_version=1"]);
        command.args(["--option", "publication_names=postrider_outbox"]);
        command.args(["--no-loop", "--endpos", &self.end, "--file", "/dev/null"]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let began = Instant::now();
        let output = tokio::task::spawn_blocking(move || command.output()).await?;
        let (took, output) = (began.elapsed(), output.context("run pg_recvlogical")?);
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "pg_recvlogical: {said}");
        Ok(took)
    }
}

/// Lets a relay make the slot and the first checkpoint, and stops it.
async fn begin(url: &str, slot: &str) -> Result<()> {
    let wal = child::wal(url, slot).await?;
    let stop = CancellationToken::new();
    let mut tasks = JoinSet::new();
    let relay = child::relay(&wal, Arc::new(MemorySink::counting(clock())))?;
    tasks.spawn(relay.run(stop.clone()));
    let give_up = Instant::now() + GIVE_UP;
    loop {
        let report = wal.report().await?;
        let own = |one: &&postrider_store_postgres::WalConsumer| one.consumer.as_str() == CONSUMER;
        if report.consumers.iter().find(own).is_some_and(|own| !own.catches_up) {
            break;
        }
        ensure!(Instant::now() < give_up, "the relay does not come into the log");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    stop.cancel();
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    Ok(())
}

/// Appends events `from..to`, with `keys.1` keys from number `keys.0` on.
fn loading(from: u64, to: u64, per_transaction: u64, keys: (u64, u64)) -> String {
    let (first, count) = keys;
    format!(
        "DO $body$
        DECLARE
            payload bytea := convert_to('{{\"text\":\"' || repeat('x', {}) || '\"}}', 'UTF8');
        BEGIN
            FOR n IN {from}..{to} - 1 LOOP
                PERFORM postrider.append('key-' || {first} + n % {count}, 'orders', 'OrderPlaced',
                    payload, 'application/json');
                IF (n + 1) % {per_transaction} = 0 THEN
                    COMMIT;
                END IF;
            END LOOP;
        END
        $body$",
        PAYLOAD_BYTES - 11
    )
}
