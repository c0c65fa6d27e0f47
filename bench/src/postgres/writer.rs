//! What an append costs its writer: pgbench with 16 clients.
//!
//! What lives here: the two transactions, and pgbench. What does not: Rust's append, which calls
//! the same function of the database.
//! Invariant: both transactions write the same business row and the same event, once into the
//! outbox, once into a plain table with the same indexes, in turn, for the same time.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use postrider_servers::postgres::Database;

use super::paced::Attached;
use super::server::{Measured, Session, store};
use super::{Setting, tables};
use crate::figure::{Goal, Report};
use crate::world::PAYLOAD_BYTES;

const CLIENTS: &str = "16";
const THREADS: &str = "2";

const BUSINESS: &str = "CREATE TABLE invoice (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, customer bigint NOT NULL,
    total bigint NOT NULL, note text NOT NULL)";

/// The transaction around `event`.
fn script(event: &str) -> String {
    let payload = "x".repeat(PAYLOAD_BYTES);
    format!(
        "\\set customer random(1, 1000000)
BEGIN;
INSERT INTO invoice (customer, total, note) VALUES (:customer, 100, '{payload}');
{}
END;
",
        event.replace("PAYLOAD", &format!("'{payload}'::bytea"))
    )
}

/// The key is another one nearly each time, so that clients don't wait for each other's keys.
const APPEND: &str = "SELECT postrider.append('customer-' || :customer, 'orders', 'OrderPlaced', \
     PAYLOAD, content_type => 'application/json');";

const PLAIN: &str = "INSERT INTO plain_outbox (key, topic, type, content_type, payload) VALUES \
     ('customer-' || :customer, 'orders', 'OrderPlaced', 'application/json', PAYLOAD);";

pub(crate) async fn measure(
    report: &mut Report,
    measured: &Measured,
    setting: &Setting,
) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (append, plain) = (folder.path().join("append.sql"), folder.path().join("plain.sql"));
    std::fs::write(&append, script(APPEND))?;
    std::fs::write(&plain, script(PLAIN))?;
    let database = measured.database()?;
    let store = store(&database).await?;
    let session = Session::open(&database).await?;
    session.run(BUSINESS).await?;
    session.run(&tables::plain("plain_outbox")).await?;
    for attached in [false, true] {
        let mut pairs = Vec::new();
        for run in 0..setting.runs {
            // Which side goes first alternates.
            let (mut value, mut base) = (0.0, 0.0);
            for side in [run % 2 == 0, run % 2 == 1] {
                if !side {
                    base = pgbench(&database, &plain, setting.smoke).await?;
                    continue;
                }
                let relay = attached.then(|| Attached::to(&store)).transpose()?;
                value = pgbench(&database, &append, setting.smoke).await?;
                if let Some(relay) = relay {
                    relay.end().await?;
                }
            }
            pairs.push((value, base));
        }
        let figure = match attached {
            false => "writer: append against a plain insert",
            true => "writer: append with a relay at the head",
        };
        report.ratio(figure, &pairs, "transactions/s", Goal::AtLeast(0.95));
    }
    Ok(())
}

/// Transactions a second.
async fn pgbench(database: &Database, script: &Path, smoke: bool) -> Result<f64> {
    let mut command = Command::new(database.version().program("pgbench")?);
    let seconds = if smoke { "1" } else { "10" };
    command.args(["--no-vacuum", "--protocol=prepared", "--client", CLIENTS, "--jobs", THREADS]);
    command.args(["--time", seconds, "--file"]).arg(script).arg(database.url());
    // The relay beside it needs this thread.
    let output = tokio::task::spawn_blocking(move || command.output()).await?;
    let output = output.context("run pgbench")?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "pgbench: {}", String::from_utf8_lossy(&output.stderr));
    let rate = text.lines().find_map(|line| line.strip_prefix("tps = "));
    let rate = rate.and_then(|line| line.split(' ').next()).context("pgbench tells no rate")?;
    Ok(rate.parse()?)
}
