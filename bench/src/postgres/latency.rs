//! From commit to confirmation at 1,000 events a second, and what the ticks take of the disk.
//!
//! What lives here: these figures of a quiet server. What does not: the same beside open
//! transactions (`held.rs`).
//! Invariant: every wait counts, also those of the first events.

use std::time::Duration;

use anyhow::Result;
use tokio_util::sync::CancellationToken;

use super::Setting;
use super::paced::{Attached, Writers};
use super::server::{Measured, Session, store};
use crate::figure::{Goal, Report, Samples};

/// Bytes of the ticks with their index, and of the outbox with its indexes, in thousandths.
const SHARE: &str = "SELECT pg_total_relation_size('postrider.outbox_tick') * 1000
        / sum(pg_total_relation_size(inhrelid))::bigint
    FROM pg_inherits WHERE inhparent = 'postrider.outbox'::regclass";

pub(crate) async fn measure(
    report: &mut Report,
    measured: &Measured,
    setting: &Setting,
) -> Result<()> {
    let how_long = Duration::from_secs(if setting.smoke { 1 } else { 6 });
    let database = measured.database()?;
    let store = store(&database).await?;
    let writers = Writers::connect(&database).await?;
    let (mut medians, mut tails) = (Vec::new(), Vec::new());
    let relay = Attached::to(&store)?;
    for _ in 0..setting.runs {
        let appended = writers.append(how_long, &CancellationToken::new()).await?;
        let waits = relay.waits(&appended).await?;
        medians.push(waits.percentile(50));
        tails.push(waits.percentile(99));
    }
    relay.end().await?;
    let session = Session::open(&database).await?;
    let share = f64::from(u32::try_from(session.number(SHARE).await?)?) / 10.0;
    let most = |goal| Some(Goal::AtMost(goal));
    report.absolute("latency commit to confirm, p50", &Samples(medians), "ms", most(15.0));
    report.absolute("latency commit to confirm, p99", &Samples(tails), "ms", most(50.0));
    report.absolute("ticks beside the outbox", &Samples(vec![share]), "%", most(5.0));
    Ok(())
}
