//! One large transaction, with a relay in the stream while it is written.
//!
//! What lives here: these figures, from one run. What does not: savepoints, which the store's tests
//! show.
//! Invariant: the server waits five seconds for its reader and no longer.

use anyhow::Result;

use super::Setting;
use super::backlog::Backlog;
use super::child;
use crate::figure::{Goal, Report, Samples};
use crate::postgres::server::Measured;

/// Against the other figures' events.
const TIMES: u64 = 5;

pub(super) async fn measure(
    report: &mut Report,
    measured: &Measured,
    setting: &Setting,
) -> Result<()> {
    let events = setting.events * TIMES;
    let mut backlog = Backlog::before(measured).await?;
    backlog.session.run("ALTER SYSTEM SET wal_sender_timeout = '5s'").await?;
    backlog.session.run("SELECT pg_reload_conf()").await?;
    let (url, slot) = (backlog.database.url(), backlog.ours.clone());
    let (drained, loaded) = tokio::join!(
        child::drained(&url, &slot, events),
        // Its last COMMIT is the only one.
        backlog.load(events, events, 1),
    );
    loaded?;
    let drained = drained?;
    backlog.session.run("ALTER SYSTEM RESET wal_sender_timeout").await?;
    backlog.session.run("SELECT pg_reload_conf()").await?;
    let most = |goal| Some(Goal::AtMost(goal));
    let one = |value| Samples(vec![value]);
    report.absolute("large: resident memory", &one(drained.peak_mib), "MiB", most(128.0));
    let reconnects = f64::from(u32::try_from(drained.reconnects)?);
    report.absolute("large: reconnects", &one(reconnects), "", most(0.0));
    let flowing = (drained.all - drained.first).as_secs_f64();
    report.absolute("large: first event to last", &one(flowing), "s", None);
    Ok(())
}
