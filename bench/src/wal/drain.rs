//! Draining a backlog from the log: the relay against pg_recvlogical, which does nothing with it.
//!
//! What lives here: the rounds. What does not: the two readers (`backlog.rs`).
//! Invariant: both read the same log in the same round, the relay first or last in turn.

use anyhow::Result;

use super::Setting;
use super::backlog::Backlog;
use crate::figure::{Goal, Report, Samples};
use crate::postgres::server::Measured;
use crate::world::per_second;

/// How the events were committed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) figure: &'static str,
    memory: &'static str,
    per_transaction: u64,
    /// The relay's events a second against pg_recvlogical's.
    goal: f64,
}

pub(super) const SHAPES: [Shape; 2] = [
    Shape {
        figure: "drain1: one-row transactions",
        memory: "drain1: resident memory",
        per_transaction: 1,
        goal: 0.9,
    },
    Shape {
        figure: "drain1000: 1,000-row transactions",
        memory: "drain1000: resident memory",
        per_transaction: 1_000,
        goal: 0.8,
    },
];

pub(super) async fn measure(
    report: &mut Report,
    measured: &Measured,
    setting: &Setting,
    shape: Shape,
) -> Result<()> {
    let backlog = Backlog::make(measured, setting.events, shape.per_transaction).await?;
    if !setting.smoke {
        // The first one finds the log cold.
        backlog.received().await?;
    }
    let (mut pairs, mut peaks) = (Vec::new(), Vec::new());
    for run in 0..setting.runs {
        let before = if run % 2 == 1 { Some(backlog.received().await?) } else { None };
        let relayed = backlog.relayed().await?;
        let received = match before {
            Some(before) => before,
            None => backlog.received().await?,
        };
        let rate = |took| per_second(backlog.events, took);
        pairs.push((rate(relayed.all), rate(received)));
        peaks.push(relayed.peak_mib);
    }
    report.ratio(shape.figure, &pairs, "events/s", Goal::AtLeast(shape.goal));
    report.absolute(shape.memory, &Samples(peaks), "MiB", Some(Goal::AtMost(64.0)));
    Ok(())
}
