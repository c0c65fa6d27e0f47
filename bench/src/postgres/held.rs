//! Transactions that stay open: what the others' events notice of them.
//!
//! What lives here: the same load beside two open transactions and without them. What does not: the
//! proof that their own events arrive in order, which is a test of the store.
//! Invariant: one of them has written an event, the other elsewhere; both are open from before the
//! first event to after the last.

use std::time::Duration;

use anyhow::{Result, ensure};
use postrider_core::EventId;
use postrider_servers::postgres::Database;
use postrider_store_postgres::PostgresStore;
use tokio_util::sync::CancellationToken;

use super::Setting;
use super::paced::{APPEND, Attached, Writers};
use super::server::{Measured, Session, store};
use crate::figure::{Goal, Report, Samples};

/// Index entries and rows that were read in the outbox.
const READ: &str = "SELECT (
        (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes
            WHERE schemaname = 'postrider' AND relname ~ '^outbox_s[0-9]+$')
        + (SELECT sum(seq_tup_read) FROM pg_stat_user_tables
            WHERE schemaname = 'postrider' AND relname ~ '^outbox_s[0-9]+$'))::bigint";

const TICKS: &str = "SELECT count(*) FROM postrider.outbox_tick";

const DEAD: &str = "SELECT sum(n_dead_tup)::bigint FROM pg_stat_user_tables
    WHERE schemaname = 'postrider' AND relname ~ '^outbox_s[0-9]+$'";

/// For so long events come before their waits are counted.
const WARM: Duration = Duration::from_secs(1);

/// What a run showed.
struct Side {
    p99: f64,
    ticks: f64,
    /// Read for each tick, in the first and in the second half.
    read: (f64, f64),
}

pub(crate) async fn measure(
    report: &mut Report,
    measured: &Measured,
    setting: &Setting,
) -> Result<()> {
    let half = Duration::from_millis(if setting.smoke { 500 } else { setting.held_seconds * 500 });
    let database = measured.database()?;
    let store = store(&database).await?;
    let session = Session::open(&database).await?;
    session.run("CREATE TABLE elsewhere (n bigint)").await?;
    let writers = Writers::connect(&database).await?;
    let (mut p99, mut ticks, mut read) = (Vec::new(), Vec::new(), Vec::new());
    for run in 0..setting.runs {
        let world = World { database: &database, store: &store, session: &session };
        let with_first = run % 2 == 0;
        let first = world.side(&writers, with_first, half).await?;
        let second = world.side(&writers, !with_first, half).await?;
        let (with, without) = if with_first { (first, second) } else { (second, first) };
        p99.push((with.p99, without.p99));
        ticks.push((with.ticks, without.ticks));
        read.push((with.read.1, with.read.0));
    }
    let dead = f64::from(u32::try_from(session.number(DEAD).await?)?);
    let most = Goal::AtMost(1.1);
    report.ratio("held open: p99 of others, against without", &p99, "ms", most);
    report.ratio("held open: ticks, against without", &ticks, "", most);
    report.ratio("held open: read a tick, late against early", &read, "rows", most);
    let dead = Samples(vec![dead]);
    report.absolute("held open: dead rows in the outbox", &dead, "", Some(Goal::AtMost(0.0)));
    Ok(())
}

struct World<'a> {
    database: &'a Database,
    store: &'a PostgresStore,
    session: &'a Session,
}

impl World<'_> {
    async fn side(&self, writers: &Writers, hold: bool, half: Duration) -> Result<Side> {
        let never = CancellationToken::new();
        let relay = Attached::to(self.store)?;
        let warm = writers.append(WARM, &never).await?;
        relay.waits(&warm).await?;
        let held = if hold { Some(Held::open(self.database).await?) } else { None };
        let mut counts = vec![self.counts().await?];
        let mut appended = Vec::new();
        for _ in 0..2 {
            // After a pause a relay looks seldom: what its first look costs is not asked here.
            writers.append(WARM, &never).await?;
            appended.extend(writers.append(half, &never).await?);
            counts.push(self.counts().await?);
        }
        let waits = relay.waits(&appended).await?;
        if let Some(held) = held {
            let id = held.commit().await?;
            relay.confirms(id).await?;
        }
        relay.end().await?;
        let read = |from: usize| {
            (counts[from + 1].0 - counts[from].0) / (counts[from + 1].1 - counts[from].1)
        };
        Ok(Side {
            p99: waits.percentile(99),
            ticks: counts[2].1 - counts[0].1,
            read: (read(0), read(1)),
        })
    }

    /// What was read so far, and the ticks.
    async fn counts(&self) -> Result<(f64, f64)> {
        // Sessions tell their counts once a second.
        tokio::time::sleep(Duration::from_millis(1_200)).await;
        let as_float = |count: i64| u32::try_from(count).map(f64::from);
        let read = as_float(self.session.number(READ).await?)?;
        Ok((read, as_float(self.session.number(TICKS).await?)?))
    }
}

/// The two open transactions.
struct Held {
    writer: Session,
    elsewhere: Session,
    event: EventId,
}

impl Held {
    async fn open(database: &Database) -> Result<Self> {
        let (writer, elsewhere) = (Session::open(database).await?, Session::open(database).await?);
        writer.run("BEGIN").await?;
        let payload = b"late".as_slice();
        let row = writer.query_one(APPEND, &[&"a key of its own", &payload]).await?;
        elsewhere.run("BEGIN; INSERT INTO elsewhere VALUES (1)").await?;
        Ok(Self { writer, elsewhere, event: EventId::from_uuid(row.get(0)) })
    }

    /// Ends both; the event's id.
    async fn commit(self) -> Result<EventId> {
        let open = "SELECT count(*) FROM pg_locks WHERE locktype = 'transactionid'
            AND pid = pg_backend_pid() AND granted";
        ensure!(self.elsewhere.number(open).await? == 1, "the transaction was ended early");
        ensure!(self.writer.number(open).await? == 1, "the transaction was ended early");
        self.elsewhere.run("COMMIT").await?;
        self.writer.run("COMMIT").await?;
        Ok(self.event)
    }
}
