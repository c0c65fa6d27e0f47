//! What is pending in the log: counted by SQL, compared with what was confirmed.

use std::collections::BTreeSet;
use std::time::Duration;

use postrider_core::*;
use postrider_servers::postgres::Version;
use postrider_store_postgres::{PostgresWal, WalOptions};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use tokio_postgres::Client;

use crate::support::{self, *};
use crate::wal_support::*;

on_both_versions! {
    what_is_pending_in_the_log_is_what_was_not_confirmed
    late_rows_are_pending
    counting_at_the_head_of_the_log_reads_no_old_rows
}

struct World {
    cluster: Cluster,
    own: Client,
    rider: Option<Rider>,
    open: Vec<Client>,
    /// Events that were handed out and not confirmed, with their positions.
    handed: Vec<(Position, String)>,
    confirmed: BTreeSet<String>,
    appended: u32,
}

impl World {
    async fn append(&mut self, which: Option<usize>) {
        self.appended += 1;
        let writer = which.map_or(&self.own, |which| &self.open[which]);
        let sql =
            "SELECT postrider.append(pg_backend_pid()::text, 'orders', 'OrderPlaced', $1::bytea)";
        let payload = self.appended.to_string().into_bytes();
        writer.execute(sql, &[&payload]).await.expect("appended");
    }

    /// What comes soon; while writers are open nothing may.
    async fn read(&mut self, soon: Duration) {
        if self.rider.is_none() {
            self.rider = Some(self.cluster.rider("sink").await);
        }
        let rider = self.rider.as_mut().expect("there");
        let limit = BatchLimit { records: 3, bytes: 1 << 20 };
        let Ok(outcome) = tokio::time::timeout(soon, rider.reader.next(limit)).await else {
            return;
        };
        match outcome {
            Ok(ReadOutcome::Batch(batch)) => {
                for entry in &batch.entries {
                    let payload = payloads(&[record(entry).clone()]).remove(0);
                    assert!(!self.confirmed.contains(&payload), "{payload} comes again");
                    self.handed.push((entry.position().clone(), payload));
                }
                if batch.entries.is_empty() && self.handed.is_empty() {
                    rider.confirm(&batch.position, 0).await;
                }
            }
            Ok(ReadOutcome::Ended(_)) => panic!("the log never ends"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Transient, "{error}"),
        }
    }

    async fn confirm(&mut self, which: usize) {
        if let (Some(rider), false) = (&mut self.rider, self.handed.is_empty()) {
            let count = which % self.handed.len() + 1;
            rider.confirm(&self.handed[count - 1].0, count).await;
            self.confirmed.extend(self.handed.drain(..count).map(|(_, payload)| payload));
        }
    }

    fn crash(&mut self) {
        self.rider = None;
        self.handed.clear();
    }

    async fn lose_slot(&mut self) {
        self.crash();
        let sql = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots
            WHERE slot_name = 'postrider_outbox'";
        let deadline = tokio::time::Instant::now() + PATIENCE;
        while self.own.execute(sql, &[]).await.is_err() {
            assert!(tokio::time::Instant::now() < deadline, "the slot is still read");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn compare(&self, step: usize) {
        let wal = self.cluster.wal(WalOptions::new()).await;
        let standings = wal.progress().await.expect("readable");
        let feed = Checkpoints::progress(&self.cluster.store).await.expect("readable");
        assert_eq!(feed, [], "no consumer of the feed");
        let Some(standing) = standings.first() else {
            assert!(self.confirmed.is_empty(), "step {step}");
            return;
        };
        let sql = "SELECT convert_from(payload, 'UTF8'),
                floor(extract(epoch FROM created_at) * 1000)::bigint FROM postrider.outbox";
        let rows = self.own.query(sql, &[]).await.expect("readable");
        let left = rows.iter().filter(|row| !self.confirmed.contains(row.get::<_, &str>(0)));
        let left: Vec<i64> = left.map(|row| row.get(1)).collect();
        assert_eq!(standing.pending, left.len() as u64, "step {step}: {standing:?}");
        assert_eq!(standing.checkpoint.published, self.confirmed.len() as u64, "step {step}");
        let oldest = standing.oldest_pending_at.map(|at| at.as_millis());
        let expected = left.iter().min().map(|at| at.unsigned_abs());
        // Rounded on one side, cut off on the other.
        let differ = oldest.zip(expected).map_or(0, |(one, other)| one.abs_diff(other));
        assert!(oldest.is_some() == expected.is_some() && differ <= 1, "step {step}");
    }
}

/// Transactions that stay open, roll back and end late; checkpoints within and between them;
/// crashes, and a slot that is dropped.
async fn what_is_pending_in_the_log_is_what_was_not_confirmed(version: Version) {
    let cluster = Cluster::new(version).await;
    let own = cluster.session().await;
    let (open, handed, confirmed) = (Vec::new(), Vec::new(), BTreeSet::new());
    let mut world = World { cluster, own, rider: None, open, handed, confirmed, appended: 0 };
    world.read(PATIENCE).await;
    let mut dice = StdRng::seed_from_u64(11);
    for step in 0..60 {
        match dice.random_range(0..20) {
            0 | 1 if world.open.len() < 3 => {
                let writer = world.cluster.session().await;
                writer.batch_execute("BEGIN").await.expect("begun");
                world.open.push(writer);
            }
            0..=4 if !world.open.is_empty() => {
                let which = dice.random_range(0..world.open.len());
                world.append(Some(which)).await;
            }
            5 | 6 if !world.open.is_empty() => {
                let writer = world.open.swap_remove(dice.random_range(0..world.open.len()));
                let end = if dice.random_range(0..4) == 0 { "ROLLBACK" } else { "COMMIT" };
                writer.batch_execute(end).await.expect("ended");
            }
            7..=9 => world.append(None).await,
            10 => world.crash(),
            11 => world.lose_slot().await,
            12..=15 => world.read(Duration::from_millis(150)).await,
            _ => world.confirm(dice.random_range(0..8)).await,
        }
        world.compare(step).await;
    }
    for writer in world.open.drain(..) {
        writer.batch_execute("COMMIT").await.expect("committed");
    }
    let sql = "SELECT count(*) FROM postrider.outbox";
    let all = usize::try_from(one::<i64>(&world.own, sql).await).expect("a count");
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while world.confirmed.len() < all {
        assert!(tokio::time::Instant::now() < deadline, "{} of {all}", world.confirmed.len());
        world.read(Duration::from_millis(500)).await;
        world.confirm(usize::MAX - 1).await;
    }
    world.compare(usize::MAX).await;
    let consumer = consumer("sink");
    world.crash();
    let sql = "UPDATE postrider.lease SET released = true";
    world.own.batch_execute(sql).await.expect("released");
    assert!(world.cluster.store.remove_consumer(&consumer).await.expect("removed"));
    let kept = "SELECT (SELECT count(*) FROM postrider.wal_base)
        + (SELECT count(*) FROM postrider.wal_after)
        + (SELECT count(*) FROM postrider.wal_recovery)
        + (SELECT count(*) FROM postrider.wal_seal)";
    assert_eq!(one::<i64>(&world.own, kept).await, 0, "nothing is kept of it");
}

/// What is pending for a consumer with such a base, written as a checkpoint writes it.
async fn pending_with(session: &Client, wal: &PostgresWal, snapshot: &str, numbers: &str) -> u64 {
    let sql = format!(
        "INSERT INTO postrider.checkpoint (outbox, consumer, partition, position)
         VALUES ('outbox', 'sink', 'wal', decode(repeat('01', 22), 'hex')) ON CONFLICT DO NOTHING;
         DELETE FROM postrider.wal_base;
         INSERT INTO postrider.wal_base (outbox, consumer, snapshot, lsn, timeline, publication,
            seq, floor, system)
         SELECT 'outbox', 'sink', '{snapshot}', '0/1', 1, 'p', {numbers}
         FROM pg_control_system() AS s"
    );
    session.batch_execute(&sql).await.expect("written");
    wal.progress().await.expect("readable")[0].pending
}

/// A transaction draws a number, a base is taken, and only then it commits: listed as open in the
/// base, or beyond its end. A dump's rows are neither, once a tick has settled them.
async fn late_rows_are_pending(version: Version) {
    let world = support::World::new(version, 1).await;
    let store = open_store(&world.database.url()).await;
    let wal = PostgresWal::new(store, WalOptions::new()).expect("options");
    let (session, late) = (world.session().await, world.session().await);
    let append = "SELECT postrider.append('k' || pg_backend_pid(), 'orders', 'T', '1'::bytea)";
    late.batch_execute("BEGIN").await.expect("begun");
    late.batch_execute(append).await.expect("appended");
    let id: String = one(&late, "SELECT pg_current_xact_id()::text").await;
    session.batch_execute(append).await.expect("appended");
    late.batch_execute("COMMIT").await.expect("committed");
    let end: String = one(&session, "SELECT pg_snapshot_xmax(pg_current_snapshot())::text").await;
    let listed = format!("{id}:{end}:{id}");
    let beyond = format!("{id}:{id}:");
    assert_eq!(pending_with(&session, &wal, &listed, "2, 0, s.system_identifier").await, 1);
    assert_eq!(pending_with(&session, &wal, &beyond, "1, 0, s.system_identifier").await, 2);
    assert_eq!(pending_with(&session, &wal, &beyond, "2, 0, s.system_identifier").await, 2);
    assert_eq!(pending_with(&session, &wal, &beyond, "2, 1, s.system_identifier").await, 1);
    assert_eq!(pending_with(&session, &wal, &listed, "2, 1, s.system_identifier").await, 0);
    // Of another cluster: what was numbered before, and seen.
    assert_eq!(pending_with(&session, &wal, &listed, "1, 0, 1").await, 2);
    assert_eq!(pending_with(&session, &wal, &listed, "2, 0, 1").await, 1);
}

/// As `counting_at_the_head_reads_no_old_rows`: the count is made every few seconds.
async fn counting_at_the_head_of_the_log_reads_no_old_rows(version: Version) {
    let world = support::World::new(version, 1).await;
    let store = open_store(&world.database.url()).await;
    let wal = PostgresWal::new(store, WalOptions::new()).expect("options");
    let session = world.session().await;
    session.batch_execute(FILL).await.expect("filled");
    let open = open_two(&world).await;
    let append = "SELECT postrider.append('k', 'orders', 'T', '1'::bytea)";
    let snapshot: String = one(&session, "SELECT pg_current_snapshot()::text").await;
    session.batch_execute(append).await.expect("appended");
    let numbers = "pg_sequence_last_value('postrider.outbox_seq') - 1, 0, s.system_identifier";
    for statistics in [false, true] {
        if statistics {
            session.batch_execute("ANALYZE postrider.outbox").await.expect("analysed");
        }
        let counts = async {
            for _ in 0..20 {
                assert_eq!(pending_with(&session, &wal, &snapshot, numbers).await, 1);
            }
        };
        let read = rows_read(&session, counts).await;
        assert!(read < 2_000, "{read} rows read, with statistics: {statistics}");
    }
    drop(open);
}
