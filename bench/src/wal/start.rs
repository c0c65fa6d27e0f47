//! From the start of a process to its first event, with events waiting in the log.
//!
//! What lives here: this one figure. What does not: the process (`child.rs`).
//! Invariant: the slot and the checkpoint are there; the process before it stopped in order.

use anyhow::Result;

use super::Setting;
use super::backlog::Backlog;
use crate::figure::{Goal, Report, Samples};
use crate::postgres::server::Measured;

const EVENTS: u64 = 1_000;

pub(super) async fn measure(
    report: &mut Report,
    measured: &Measured,
    setting: &Setting,
) -> Result<()> {
    let backlog = Backlog::make(measured, EVENTS, 1).await?;
    let mut waits = Vec::new();
    for _ in 0..setting.runs {
        waits.push(backlog.relayed().await?.first.as_secs_f64());
    }
    report.absolute("start to first event", &Samples(waits), "s", Some(Goal::AtMost(1.0)));
    Ok(())
}
