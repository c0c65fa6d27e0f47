//! What an idle relay asks of the database.
//!
//! What lives here: counting statements and writes after a time of quiet. What does not: CPU.
//! Invariant: every statement of the relay counts; the server itself writes them down.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio_util::sync::CancellationToken;

use super::Setting;
use super::paced::{Attached, Writers};
use super::server::{Measured, Session, store};
use crate::figure::{Goal, Report, Samples};

/// How often a relay renews its leases: 0.3 of their time to live of 5 s.
const RENEW_EVERY_S: f64 = 1.5;

/// What a statement that renews leases has in it.
const RENEWAL: &str = "UPDATE \"postrider\".lease";

/// Rows written to any table of the schema but those of the leases.
const WRITTEN: &str = "SELECT sum(n_tup_ins + n_tup_upd + n_tup_del)::bigint
    FROM pg_stat_user_tables WHERE schemaname = 'postrider' AND relname NOT IN ('lease', 'relay')";

pub(crate) async fn measure(
    report: &mut Report,
    measured: &Measured,
    setting: &Setting,
) -> Result<()> {
    let quiet = Duration::from_secs(if setting.smoke { 2 } else { 60 });
    let window = Duration::from_secs(if setting.smoke { 3 } else { 30 });
    let database = measured.database()?;
    let store = store(&database).await?;
    let session = Session::open(&database).await?;
    let relay = Attached::to(&store)?;
    let writers = Writers::connect(&database).await?;
    let appended = writers.append(Duration::from_millis(200), &CancellationToken::new()).await?;
    relay.waits(&appended).await?;
    drop(writers);
    tokio::time::sleep(quiet).await;
    let written = session.number(WRITTEN).await?;
    let before = std::fs::read_to_string(measured.log())?.len();
    session.run("ALTER SYSTEM SET log_statement = 'all'").await?;
    session.run("SELECT pg_reload_conf()").await?;
    tokio::time::sleep(window).await;
    session.run("ALTER SYSTEM RESET log_statement").await?;
    session.run("SELECT pg_reload_conf()").await?;
    let log = std::fs::read_to_string(measured.log())?;
    // So that the sessions' own counts have arrived.
    let written = session.number(WRITTEN).await? - written;
    relay.end().await?;
    let asked = statements(log.get(before..).context("the log was cut")?);
    tell(&asked);
    let seconds = window.as_secs_f64();
    let count = |of: &dyn Fn(&String) -> bool| {
        f64::from(u32::try_from(asked.iter().filter(|text| of(text)).count()).unwrap_or(u32::MAX))
    };
    let one = |value| Samples(vec![value]);
    let all = count(&|_| true) / seconds;
    report.absolute("idle: statements", &one(all), "/s", Some(Goal::AtMost(2.0)));
    let renewals = (seconds / RENEW_EVERY_S).ceil();
    // A statement that keeps the relay on the list of live ones writes only when it must.
    let leases = count(&|text| text.contains(RENEWAL)) / renewals;
    report.absolute("idle: lease statements", &one(leases), "a renewal", most(1.0));
    let written = one(f64::from(u32::try_from(written)?));
    report.absolute("idle: rows written beside leases", &written, "", most(0.0));
    Ok(())
}

/// Which statements they were, to standard error: the first thing to know when a goal is missed.
fn tell(asked: &[String]) {
    let mut counts = BTreeMap::<String, u32>::new();
    for statement in asked {
        let words: Vec<&str> = statement.split_whitespace().skip(2).take(12).collect();
        *counts.entry(words.join(" ")).or_default() += 1;
    }
    for (statement, count) in counts {
        eprintln!("{count:>6} x {statement}");
    }
}

fn most(goal: f64) -> Option<Goal> {
    Some(Goal::AtMost(goal))
}

/// The statements of the relay's sessions in a log, each with all its lines.
fn statements(log: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut inside = false;
    for line in log.lines() {
        if line.starts_with('\t') {
            if let (true, Some(last)) = (inside, found.last_mut()) {
                last.push_str(line);
            }
            continue;
        }
        let text = line.split_once(" postrider LOG:  ").map(|(_, text)| text);
        let text = text.filter(|text| text.starts_with("execute") || text.starts_with("statement"));
        inside = text.is_some();
        found.extend(text.map(str::to_owned));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_relays_statements_are_told_from_other_lines() {
        let log = "2026-11-28 02:00:00.000 UTC [7] postrider LOG:  execute <unnamed>: WITH a AS (\n\
                   \t\tUPDATE lease SET x = 1)\n\
                   2026-11-28 02:00:00.000 UTC [7] postrider LOG:  statement: SELECT 1\n\
                   2026-11-28 02:00:00.000 UTC [7] postrider DETAIL:  parameters: $1 = '2'\n\
                   \t'of a parameter'\n\
                   2026-11-28 02:00:00.000 UTC [8] [unknown] LOG:  statement: SELECT 2\n";
        let found = statements(log);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("UPDATE lease"));
        assert!(!found[1].contains("parameter"));
    }
}
