//! What an event costs its writer: the same transaction with and without it.
//!
//! What lives here: the pair of transactions. What does not: the relay.
//! Invariant: both sides write the same business row, in WAL mode with `synchronous = FULL`, to a
//! file of their own, in turn.

use std::path::Path;
use std::time::Instant;

use anyhow::Result;
use rusqlite::{Connection, TransactionBehavior};

use crate::figure::{Goal, Report};
use crate::world::{Maker, PAYLOAD_BYTES};

pub(crate) fn measure(report: &mut Report, runs: usize, transactions: u32) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let maker = Maker::new()?;
    let mut with_event = open(&folder.path().join("with.db"))?;
    let mut alone = open(&folder.path().join("alone.db"))?;
    let mut pairs = Vec::new();
    for run in 0..=runs {
        let value = timed(&mut with_event, transactions, Some(&maker))?;
        let base = timed(&mut alone, transactions, None)?;
        // The first pair warms the files up.
        if run > 0 {
            pairs.push((value, base));
        }
    }
    let goal = Goal::AtMost(1.3);
    report.ratio("append in the same transaction", &pairs, "us/transaction", goal);
    Ok(())
}

fn open(path: &Path) -> Result<Connection> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let options = postrider_store_sqlite::SqliteOptions::new(path);
        postrider_store_sqlite::SqliteStore::open(options).await.map(drop)
    })?;
    let connection = Connection::open(path)?;
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.execute_batch(
        "CREATE TABLE invoice (id INTEGER PRIMARY KEY, customer TEXT NOT NULL, total INTEGER,
                               note TEXT)",
    )?;
    Ok(connection)
}

/// Microseconds for each transaction.
fn timed(connection: &mut Connection, transactions: u32, maker: Option<&Maker>) -> Result<f64> {
    let note = "x".repeat(PAYLOAD_BYTES);
    let began = Instant::now();
    for n in 0..transactions {
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        tx.prepare_cached("INSERT INTO invoice (customer, total, note) VALUES (?1, ?2, ?3)")?
            .execute((format!("customer-{n}"), n, &note))?;
        if let Some(maker) = maker {
            let event = maker.event(&format!("customer-{n}"))?;
            postrider_store_sqlite::append(&tx, &[event])?;
        }
        tx.commit()?;
    }
    Ok(began.elapsed().as_secs_f64() * 1e6 / f64::from(transactions))
}
