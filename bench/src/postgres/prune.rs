//! Pruning: how long it takes, and what writers notice of it.
//!
//! What lives here: pruning a backlog of sent rows beside writers, also while a long transaction
//! has the outbox open. What does not: what may be pruned, which is the store's.
//! Invariant: writers, a relay and retention run as in production; only the checkpoint over the
//! backlog is set by hand, because delivering it is not what is measured here. Times with and
//! without pruning take turns and are equally long, because a disk's own pauses come in bursts:
//! they lie above the 99th percentile of a short time and below that of a long one.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use postrider_core::{Retention, RetentionPolicy};
use postrider_servers::postgres::Database;
use postrider_store_postgres::PostgresStore;
use tokio_util::sync::CancellationToken;

use super::paced::{Appended, Attached, Waits, Writers, writers_waits};
use super::server::{Measured, Session, store};
use super::{Setting, tables};
use crate::figure::{Goal, Report, Samples};

/// Everything that is passed goes at once.
const POLICY: RetentionPolicy =
    RetentionPolicy { keep: Duration::ZERO, batch: 10_000, dry_run: false };
/// As many segments as are in use where events are kept for a time.
const SEGMENTS: u64 = 8;
/// Between two calls, for each second that the last one took and at most: as a relay does.
const PAUSE_FOR_EACH: u32 = 149;
const MAX_PAUSE: Duration = Duration::from_secs(30);
/// To see that everything runs takes no such pauses.
const SMOKE_PAUSE: Duration = Duration::from_millis(50);
/// Before a call is made again that found all of it in use.
const AGAIN: Duration = Duration::from_millis(100);
/// The first turn without pruning, and each while the outbox is held open: enough events for a
/// 99th percentile.
const WINDOW: Duration = Duration::from_secs(2);
const SMOKE_WINDOW: Duration = Duration::from_millis(500);
/// Turns of trying to prune what is held open.
const HELD_TURNS: u32 = 5;
const GIVE_UP: Duration = Duration::from_secs(900);

/// The consumer has passed the newest tick.
const PASS: &str = "INSERT INTO postrider.checkpoint (outbox, consumer, partition, position)
    SELECT 'outbox', 'paced', i || '/8', int8send(t.stamp) || int8send(t.seq_hi)
    FROM generate_series(0, 7) AS i,
        (SELECT stamp, seq_hi FROM postrider.outbox_tick ORDER BY stamp DESC LIMIT 1) AS t
    ON CONFLICT (outbox, consumer, partition) DO UPDATE SET position = excluded.position";

/// What one pruning showed.
struct Pruning {
    work: f64,
    turns: f64,
    p99: (f64, f64),
    longest: f64,
}

pub(crate) async fn measure(
    report: &mut Report,
    measured: &Measured,
    setting: &Setting,
) -> Result<()> {
    let database = measured.database()?;
    let store = store(&database).await?;
    let session = Session::open(&database).await?;
    // Every wait of a writer for a lock of more than a millisecond is written to the log.
    session
        .run(&format!("ALTER DATABASE {} SET deadlock_timeout = '1ms'", database.name()))
        .await?;
    let writers = Writers::connect(&database).await?;
    let window = if setting.smoke { SMOKE_WINDOW } else { WINDOW };
    let longest = if setting.smoke { SMOKE_PAUSE } else { MAX_PAUSE };
    let bench = Bench { measured, database: &database, store, session, writers, window, longest };
    let (rows, less) = (setting.prune_rows(), setting.prune_rows() / 10);
    let most = |goal| Some(Goal::AtMost(goal));
    let (mut work, mut turns) = (Vec::new(), Vec::new());
    for _ in 0..setting.runs.min(3) {
        let pruning = bench.prune(rows, false).await?;
        work.push(pruning.work);
        turns.push(pruning.turns);
    }
    report.absolute("prune: work for all rows", &Samples(work), "s", most(2.0));
    report.absolute("prune: time of all turns", &Samples(turns), "s", None);
    for (hold, with) in [(false, ""), (true, ", outbox held open")] {
        let (mut p99, mut longest) = (Vec::new(), Vec::new());
        for _ in 0..setting.runs {
            let pruning = bench.prune(less, hold).await?;
            p99.push(pruning.p99);
            longest.push(pruning.longest);
        }
        let figure = format!("prune: p99 of writers, against rests between{with}");
        report.ratio(&figure, &p99, "ms", Goal::AtMost(1.1));
        // The longest of all, not their median.
        let longest = Samples(vec![longest.into_iter().fold(0.0, f64::max)]);
        let figure = format!("prune: longest wait of a writer{with}");
        report.absolute(&figure, &longest, "ms", most(50.0));
    }
    Ok(())
}

/// A stretch of time.
struct Turn {
    began: Instant,
    ended: Instant,
}

impl Turn {
    fn since(began: Instant) -> Self {
        Self { began, ended: Instant::now() }
    }

    fn len(&self) -> Duration {
        self.ended - self.began
    }
}

/// When it was pruned, with the pauses that pruning makes, and when not.
#[derive(Default)]
struct Turns {
    pruning: Vec<Turn>,
    resting: Vec<Turn>,
    /// The time of the calls that emptied a segment.
    work: Duration,
}

impl Turns {
    /// As long a time without pruning as the next one with it is expected to be.
    async fn rest(&mut self, how_long: Duration) {
        let began = Instant::now();
        tokio::time::sleep(how_long).await;
        self.resting.push(Turn::since(began));
    }
}

/// What writers of events waited that were due in these turns.
fn waits_during(appended: &[Appended], turns: &[Turn]) -> Waits {
    writers_waits(
        appended.iter().filter(|event| {
            turns.iter().any(|turn| event.due >= turn.began && event.due < turn.ended)
        }),
    )
}

struct Bench<'a> {
    measured: &'a Measured,
    database: &'a Database,
    store: PostgresStore,
    session: Session,
    writers: Writers,
    window: Duration,
    /// Longest pause between two calls.
    longest: Duration,
}

impl Bench<'_> {
    async fn prune(&self, rows: u64, hold: bool) -> Result<Pruning> {
        for _ in 0..SEGMENTS {
            tables::fill(&self.session, rows.div_ceil(SEGMENTS), 100_000).await?;
            self.session.run("SELECT postrider.outbox_rotate(0)").await?;
        }
        self.session.run("SELECT postrider.outbox_tick(0)").await?;
        self.session.run(PASS).await?;
        let last = self.session.number("SELECT max(seq) FROM postrider.outbox").await?;
        // Rows are long vacuumed when they are old enough to go.
        self.session.run("VACUUM ANALYZE postrider.outbox").await?;
        self.session.run("CHECKPOINT").await?;
        let relay = Attached::to(&self.store)?;
        let warm = self.writers.append(Duration::from_secs(1), &CancellationToken::new()).await?;
        relay.waits(&warm).await?;
        let log = std::fs::read_to_string(self.measured.log())?.len();
        let stop = CancellationToken::new();
        let (appended, turns) =
            tokio::join!(self.writers.append(GIVE_UP, &stop), self.turns(last, hold, &stop));
        let (appended, turns) = (appended?, turns?);
        relay.end().await?;
        let p99 = |during| waits_during(&appended, during).percentile(99);
        let log = std::fs::read_to_string(self.measured.log())?.split_off(log);
        Ok(Pruning {
            work: turns.work.as_secs_f64(),
            turns: turns.pruning.iter().map(|turn| turn.len().as_secs_f64()).sum(),
            p99: (p99(&turns.pruning), p99(&turns.resting)),
            longest: log.lines().filter_map(waited_ms).fold(0.0, f64::max),
        })
    }

    /// Prunes in turns until the rows up to `last` are gone, then stops the writers.
    async fn turns(&self, last: i64, hold: bool, stop: &CancellationToken) -> Result<Turns> {
        let _stop = stop.clone().drop_guard();
        let mut turns = Turns::default();
        if hold {
            let held = self.hold().await?;
            for _ in 0..HELD_TURNS {
                turns.rest(self.window).await;
                let began = Instant::now();
                while began.elapsed() < self.window {
                    let pruned = self.store.prune(None, &POLICY).await?;
                    ensure!(pruned.events == 0, "rows were pruned under an open transaction");
                    tokio::time::sleep(AGAIN).await;
                }
                turns.pruning.push(Turn::since(began));
            }
            held.run("COMMIT").await?;
        }
        let left = format!(
            "SELECT count(*) FROM (SELECT FROM postrider.outbox WHERE seq <= {last} LIMIT 1) AS r"
        );
        let (all, mut pause) = (Instant::now(), self.window);
        while self.session.number(&left).await? > 0 {
            ensure!(all.elapsed() < GIVE_UP, "rows up to {last} were not pruned");
            turns.rest(pause).await;
            let began = Instant::now();
            let pruned = self.store.prune(None, &POLICY).await?;
            let took = began.elapsed();
            pause = AGAIN;
            if pruned.events > 0 {
                turns.work += took;
                pause = self.longest.min(took * PAUSE_FOR_EACH);
            }
            tokio::time::sleep(pause).await;
            turns.pruning.push(Turn::since(began));
        }
        Ok(turns)
    }

    /// A transaction that has read the outbox and stays open.
    async fn hold(&self) -> Result<Session> {
        let session = Session::open(self.database).await?;
        session.run("BEGIN; SELECT FROM postrider.outbox LIMIT 1").await?;
        Ok(session)
    }
}

/// How long a writer waited for a table, if this line of the log tells that.
fn waited_ms(line: &str) -> Option<f64> {
    let wait = line.split_once(" acquired RowExclusiveLock on relation ")?.1;
    // A place in the statement may follow.
    wait.split_once(" after ")?.1.split_once(" ms")?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_writers_waits_for_tables_count() {
        let line = |what: &str| format!("UTC [7] [unknown] LOG:  process 7 acquired {what}");
        let waited = |what: &str| waited_ms(&line(what));
        let of = "relation 16385 of database 5 after 35.220 ms";
        assert_eq!(waited(&format!("RowExclusiveLock on {of}")), Some(35.22));
        let of = format!("{of} at character 13");
        assert_eq!(waited(&format!("RowExclusiveLock on {of}")), Some(35.22));
        assert_eq!(waited(&format!("AccessExclusiveLock on {of}")), None);
        assert_eq!(waited("ExclusiveLock on advisory lock [5,1,2,2] after 35.220 ms"), None);
    }
}
