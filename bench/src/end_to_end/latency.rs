//! From commit into NATS at a fixed rate.
//!
//! What lives here: the writers, a subscriber that notes what arrives, and the sink that notes
//! confirmations. What does not: draining.
//! Invariant: both sides are measured by the same subscriber from the answer to the commit on, and
//! every wait counts once a side is in the stream; a late writer slows no other down.

use std::collections::HashMap;
use std::process::Child;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use async_trait::async_trait;
use futures_util::StreamExt;
use postrider_core::{Capabilities, Outcome, Publish, Result as SeamResult, Sink};
use postrider_relay::Relay;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::Setting;
use super::places::{self, JetStream, Place};
use crate::figure::{Goal, Report, Samples};
use crate::postgres::server::{Measured, Session};
use crate::wal::backlog::Backlog;
use crate::wal::child;
use crate::world::PAYLOAD_BYTES;

pub(super) const FIGURE: &str = "log to NATS JetStream at 1,000/s";
/// Events a second.
const RATE: u32 = 1_000;
/// Each appends an event in 8 ms: several times what a commit takes.
const WRITERS: u32 = 8;
const GIVE_UP: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(20);
const APPEND: &str = "SELECT postrider.append($1, 'orders', 'OrderPlaced', $2::text::json)::text";

/// When something happened to an event, by its id.
type Times = HashMap<String, Instant>;

/// The same, noted by others.
#[derive(Default, Clone)]
struct Noted(Arc<Mutex<Times>>);

impl Noted {
    fn times(&self) -> std::sync::MutexGuard<'_, Times> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From each commit to what was noted first, in milliseconds, shortest first.
    async fn waits(&self, committed: &Times) -> Result<Vec<f64>> {
        let give_up = Instant::now() + GIVE_UP;
        while !committed.keys().all(|id| self.times().contains_key(id)) {
            let missing = committed.keys().filter(|id| !self.times().contains_key(*id)).count();
            ensure!(Instant::now() < give_up, "{missing} events did not come");
            tokio::time::sleep(LOOK_EVERY).await;
        }
        let times = self.times();
        let wait = |(id, at): (&String, &Instant)| times[id].saturating_duration_since(*at);
        let mut waits: Vec<_> =
            committed.iter().map(|one| wait(one).as_secs_f64() * 1_000.0).collect();
        waits.sort_by(f64::total_cmp);
        Ok(waits)
    }
}

fn percentile(sorted: &[f64], percent: usize) -> f64 {
    let at = (sorted.len() * percent / 100).min(sorted.len().saturating_sub(1));
    sorted.get(at).copied().unwrap_or(f64::NAN)
}

/// Passes calls on, and notes what is confirmed.
struct Noting {
    sink: Arc<dyn Sink>,
    confirmed: Noted,
}

#[async_trait]
impl Sink for Noting {
    fn capabilities(&self) -> Capabilities {
        self.sink.capabilities()
    }

    async fn publish(&self, batch: Publish<'_>) -> Vec<Outcome> {
        let ids: Vec<_> = batch.records().iter().map(|one| one.event.id().to_string()).collect();
        let outcomes = self.sink.publish(batch).await;
        let now = Instant::now();
        let mut confirmed = self.confirmed.times();
        for (id, outcome) in ids.into_iter().zip(&outcomes) {
            if matches!(outcome, Outcome::Confirmed | Outcome::Duplicate) {
                confirmed.entry(id).or_insert(now);
            }
        }
        outcomes
    }

    async fn check(&self) -> SeamResult<()> {
        self.sink.check().await
    }

    async fn close(&self) -> SeamResult<()> {
        self.sink.close().await
    }
}

/// A side at work. It ends with this value, or by [`Side::end`].
enum Side {
    Ours { stop: CancellationToken, tasks: JoinSet<SeamResult<()>> },
    Theirs(Child),
}

impl Side {
    async fn end(mut self) -> Result<()> {
        if let Self::Ours { stop, tasks } = &mut self {
            stop.cancel();
            while let Some(ended) = tasks.join_next().await {
                ended??;
            }
        }
        Ok(())
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        if let Self::Theirs(process) = self {
            // It fails only if the process has ended.
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// Percentiles of the waits of one run.
#[derive(Default)]
struct Waits {
    p50: Vec<f64>,
    p99: Vec<f64>,
}

impl Waits {
    fn add(&mut self, sorted: &[f64]) {
        self.p50.push(percentile(sorted, 50));
        self.p99.push(percentile(sorted, 99));
    }
}

struct World<'a> {
    backlog: Backlog,
    server: JetStream,
    setting: &'a Setting,
    confirmed: Noted,
}

pub(super) async fn measure(
    report: &mut Report,
    measured: &Measured,
    setting: &Setting,
) -> Result<()> {
    let world = World {
        backlog: super::outbox(measured).await?,
        server: JetStream::start()?,
        setting,
        confirmed: Noted::default(),
    };
    let (mut ours, mut theirs, mut confirms) = Default::default();
    for round in 0..setting.runs {
        if round % 2 == 1 {
            world.round(round, true, &mut theirs, &mut confirms).await?;
        }
        world.round(round, false, &mut ours, &mut confirms).await?;
        if round % 2 == 0 {
            world.round(round, true, &mut theirs, &mut confirms).await?;
        }
    }
    tell(report, (ours, theirs), confirms);
    Ok(())
}

fn tell(report: &mut Report, (ours, theirs): (Waits, Waits), confirms: Waits) {
    let named = |what: &str| format!("{FIGURE}, {what}");
    for (what, values) in [("p50", confirms.p50), ("p99", confirms.p99)] {
        let name = named(&format!("commit to confirm, {what}"));
        report.absolute(&name, &Samples(values), "ms", None);
    }
    let both = [("p50", ours.p50, theirs.p50), ("p99", ours.p99, theirs.p99)];
    for (what, ours, theirs) in both {
        let name = named(&format!("commit to a subscriber, {what}"));
        if theirs.is_empty() {
            report.absolute(&name, &Samples(ours), "ms", None);
        } else {
            let pairs: Vec<_> = ours.into_iter().zip(theirs).collect();
            report.ratio(&name, &pairs, "ms", Goal::AtMost(1.0));
        }
    }
}

impl World<'_> {
    async fn round(
        &self,
        round: usize,
        is_peer: bool,
        waits: &mut Waits,
        confirms: &mut Waits,
    ) -> Result<()> {
        if is_peer && self.setting.peer.is_none() {
            return Ok(());
        }
        let name = format!("{}-{round}", if is_peer { "theirs" } else { "ours" });
        self.server.make(&name).await?;
        let (arrived, mut listening) = self.listen(&name).await?;
        let side = if is_peer { self.theirs(&name).await? } else { self.ours(&name).await? };
        // In the stream, and warm.
        arrived.waits(&self.append(Duration::from_secs(1)).await?).await?;
        let how_long = Duration::from_secs(if self.setting.smoke { 1 } else { 6 });
        let committed = self.append(how_long).await?;
        waits.add(&arrived.waits(&committed).await?);
        if !is_peer {
            confirms.add(&self.confirmed.waits(&committed).await?);
        }
        side.end().await?;
        listening.shutdown().await;
        self.server.remove(&name).await
    }

    /// Notes what is published to a stream's subjects.
    async fn listen(&self, name: &str) -> Result<(Noted, JoinSet<()>)> {
        let client = self.server.client().await?;
        let mut subscriber = client.subscribe(format!("{name}.>")).await?;
        client.flush().await?;
        let noted = Noted::default();
        let noting = noted.clone();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            while let Some(message) = subscriber.next().await {
                let now = Instant::now();
                let headers = message.headers.as_ref();
                let header = headers.and_then(|all| all.get("Nats-Msg-Id")).map(AsRef::as_ref);
                if let Ok(id) = places::id(header, &message.payload) {
                    noting.times().entry(id).or_insert(now);
                }
            }
        });
        Ok((noted, tasks))
    }

    async fn ours(&self, name: &str) -> Result<Side> {
        let database = &self.backlog.database;
        let wal = child::wal(&database.url(), &self.backlog.ours).await?;
        let sink = places::sink(&self.server.url(name))?;
        let sink = Noting { sink, confirmed: self.confirmed.clone() };
        let relay = child::relay(&wal, Arc::new(sink))?;
        let (stop, mut tasks) = (CancellationToken::new(), JoinSet::new());
        tasks.spawn(Relay::run(relay, stop.clone()));
        Ok(Side::Ours { stop, tasks })
    }

    async fn theirs(&self, name: &str) -> Result<Side> {
        let peer = self.setting.peer.as_ref().context("there is no peer")?;
        let slot = format!("{}_live", self.backlog.ours);
        self.backlog.drop_slot(&slot).await?;
        let made = format!("SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')");
        self.backlog.session.run(&made).await?;
        let (url, output) = (self.backlog.database.url(), self.server.output(name));
        Ok(Side::Theirs(peer.route(&url, &slot, &output).spawn().context("start mq-bridge")?))
    }

    /// Appends at the rate; when each commit was answered.
    async fn append(&self, how_long: Duration) -> Result<Times> {
        let mut writers = JoinSet::new();
        let mut sessions = Vec::new();
        for _ in 0..WRITERS {
            sessions.push(Session::open(&self.backlog.database).await?);
        }
        let began = Instant::now();
        for (first, session) in (0..).zip(sessions) {
            writers.spawn(write(session, began, how_long, first));
        }
        let mut committed = Times::new();
        while let Some(done) = writers.join_next().await {
            committed.extend(done??);
        }
        Ok(committed)
    }
}

async fn write(
    session: Session,
    began: Instant,
    how_long: Duration,
    first: u32,
) -> Result<Vec<(String, Instant)>> {
    let statement = session.prepare(APPEND).await?;
    let payload = format!("{{\"text\":\"{}\"}}", "x".repeat(PAYLOAD_BYTES - 11));
    let mut committed = Vec::new();
    for n in (first..).step_by(WRITERS as usize) {
        let offset = Duration::from_secs(1) / RATE * n;
        if offset >= how_long {
            break;
        }
        tokio::time::sleep_until((began + offset).into()).await;
        let key = format!("key-{}", n % 10_000);
        let row = session.query_one(&statement, &[&key, &payload]).await.context("append")?;
        committed.push((row.get(0), Instant::now()));
    }
    Ok(committed)
}
