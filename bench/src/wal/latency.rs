//! From commit to confirmation through the log, at a fixed rate.
//!
//! What lives here: the two rates and their goals. What does not: the writers (`paced.rs`).
//! Invariant: every wait counts, once the relay is in the stream.

use std::time::Duration;

use anyhow::Result;
use tokio_util::sync::CancellationToken;

use super::{Setting, child};
use crate::figure::{Goal, Report, Samples};
use crate::postgres::paced::{Attached, Writers, writers_waits};
use crate::postgres::server::Measured;

/// A rate, and what is asked of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pace {
    pub(super) figure: &'static str,
    /// Events a second.
    rate: u32,
    /// In milliseconds.
    p50: Option<f64>,
    p99: f64,
}

pub(super) const PACES: [Pace; 2] = [
    Pace { figure: "latency at 1,000/s", rate: 1_000, p50: Some(1.0), p99: 5.0 },
    Pace { figure: "latency at 5,000/s", rate: 5_000, p50: None, p99: 20.0 },
];

pub(super) async fn measure(
    report: &mut Report,
    measured: &Measured,
    setting: &Setting,
    pace: Pace,
) -> Result<()> {
    let how_long = Duration::from_secs(if setting.smoke { 1 } else { 6 });
    let database = measured.database()?;
    let wal = child::wal(&database.url(), database.name()).await?;
    let writers = Writers::at(pace.rate, &database).await?;
    let relay = Attached::with(|sink| child::relay(&wal, sink))?;
    let never = CancellationToken::new();
    let warm = writers.append(Duration::from_secs(1), &never).await?;
    relay.waits(&warm).await?;
    let (mut medians, mut tails, mut commits) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..setting.runs {
        let appended = writers.append(how_long, &never).await?;
        let waits = relay.waits(&appended).await?;
        medians.push(waits.percentile(50));
        tails.push(waits.percentile(99));
        commits.push(writers_waits(&appended).percentile(99));
    }
    relay.end().await?;
    let most = |goal| Some(Goal::AtMost(goal));
    let named = |what| format!("{}, commit to confirm, {what}", pace.figure);
    report.absolute(&named("p50"), &Samples(medians), "ms", pace.p50.and_then(most));
    report.absolute(&named("p99"), &Samples(tails), "ms", most(pace.p99));
    let writers = format!("{}, due to commit, p99", pace.figure);
    report.absolute(&writers, &Samples(commits), "ms", None);
    Ok(())
}
