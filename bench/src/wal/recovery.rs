//! A slot that was lost: all rows that were missed come from the table.
//!
//! What lives here: the time of it, and its rate against COPY. What does not: that exactly the
//! missed rows come, which the store's tests show.
//! Invariant: the checkpoint is from before the first row; the time ends with the last event.

use anyhow::{Result, ensure};

use super::Setting;
use super::backlog::Backlog;
use super::child;
use crate::figure::{Goal, Report, Samples};
use crate::postgres::server::Measured;
use crate::postgres::tables;
use crate::world::per_second;

/// As they are committed hardly changes how the table is read.
const PER_TRANSACTION: u64 = 100;

pub(super) async fn measure(
    report: &mut Report,
    measured: &Measured,
    setting: &Setting,
) -> Result<()> {
    let backlog = Backlog::make(measured, setting.events, PER_TRANSACTION).await?;
    let (mut pairs, mut times, mut peaks) = (Vec::new(), Vec::new(), Vec::new());
    for run in 0..setting.runs {
        let copied = || tables::copied(&backlog.session, backlog.events);
        let before = if run % 2 == 1 { Some(copied().await?) } else { None };
        backlog.put_back().await?;
        backlog.drop_slot(&backlog.ours).await?;
        let url = backlog.database.url();
        let drained = child::drained(&url, &backlog.ours, backlog.events).await?;
        ensure!(drained.catch_ups == 1, "{} catch-ups instead of one", drained.catch_ups);
        let copied = match before {
            Some(before) => before,
            None => copied().await?,
        };
        let rate = |took| per_second(backlog.events, took);
        pairs.push((rate(drained.all), rate(copied)));
        times.push(drained.all.as_secs_f64());
        peaks.push(drained.peak_mib);
    }
    report.ratio("recovery against COPY", &pairs, "events/s", Goal::AtLeast(0.3));
    let most = |goal| Some(Goal::AtMost(goal));
    report.absolute("recovery, all missed rows", &Samples(times), "s", most(60.0));
    report.absolute("recovery: resident memory", &Samples(peaks), "MiB", None);
    Ok(())
}
