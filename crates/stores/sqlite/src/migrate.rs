//! Creating and upgrading the tables.
//!
//! What lives here: the embedded migrations and their versions. What does not: the SQL itself,
//! which stands in `migrations/`.
//! Invariant: migrations only ever grow, run under the write lock, and a database of a newer
//! version is never touched.

use postrider_core::{Error, Result};
use rusqlite::{Connection, OptionalExtension, Transaction, TransactionBehavior};

use crate::clock::wall_ms;
use crate::error::failed;
use crate::partitions;

/// In order; a version is the place in this list, counted from 1.
const MIGRATIONS: &[&str] = &[
    include_str!("../migrations/0001_outbox.sql"),
    include_str!("../migrations/0002_append_by_sql.sql"),
];

/// The version that this program writes and reads.
pub(crate) const VERSION: i64 = MIGRATIONS.len() as i64;

/// The version of the tables that this program writes and reads, for `status`.
pub const SCHEMA_VERSION: i64 = VERSION;

const VERSIONS_TABLE: &str = "CREATE TABLE IF NOT EXISTS postrider_migration (
    version    INTEGER PRIMARY KEY,
    applied_ms INTEGER NOT NULL
) STRICT;
";

/// All SQL that [`SqliteStore::open`](crate::SqliteStore::open) runs on a new database, for
/// review.
pub fn schema_sql() -> String {
    let mut text = String::from(VERSIONS_TABLE);
    MIGRATIONS.iter().for_each(|sql| {
        text.push('\n');
        text.push_str(sql);
    });
    text
}

/// The version found: 0 when there are no tables.
pub(crate) fn version(connection: &Connection) -> Result<i64> {
    let place = "read the schema version";
    let known = connection
        .query_row(
            "SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = 'postrider_migration'",
            [],
            |_| Ok(()),
        )
        .optional()
        .map_err(failed(place))?;
    if known.is_none() {
        return Ok(0);
    }
    connection
        .query_row("SELECT ifnull(max(version), 0) FROM postrider_migration", [], |row| row.get(0))
        .map_err(failed(place))
}

/// Refuses a database of another version than this program's.
pub(crate) fn require(connection: &Connection) -> Result<()> {
    let found = version(connection)?;
    refuse_newer(found)?;
    if found < VERSION {
        return Err(Error::permanent(format!(
            "Postrider's tables have version {found}, this program needs {VERSION}; run \
             `postrider init` first"
        )));
    }
    Ok(())
}

fn refuse_newer(found: i64) -> Result<()> {
    if found > VERSION {
        return Err(Error::corrupt(format!(
            "Postrider's tables have version {found}, this program knows {VERSION}; install the \
             newer program, never the older one over newer tables"
        )));
    }
    Ok(())
}

/// Brings the tables to [`VERSION`]. Idempotent; several processes may call it at once.
pub(crate) fn migrate(connection: &mut Connection, partition_count: u32) -> Result<()> {
    // Looked at without the write lock first: opening a finished database waits for no writer.
    let found = version(connection)?;
    refuse_newer(found)?;
    if found == VERSION {
        return Ok(());
    }
    let place = "create Postrider's tables";
    let tx = connection
        .transaction_with_behavior(TransactionBehavior::Immediate)
        .map_err(failed(place))?;
    let found = version(&tx)?;
    refuse_newer(found)?;
    apply(&tx, found, partition_count)?;
    tx.commit().map_err(failed(place))
}

fn apply(tx: &Transaction<'_>, found: i64, partition_count: u32) -> Result<()> {
    let place = "create Postrider's tables";
    tx.execute_batch(VERSIONS_TABLE).map_err(failed(place))?;
    for (number, sql) in (1i64..).zip(MIGRATIONS) {
        if number <= found {
            continue;
        }
        tx.execute_batch(sql).map_err(failed(place))?;
        tx.execute(
            "INSERT INTO postrider_migration (version, applied_ms) VALUES (?1, ?2)",
            (number, wall_ms()),
        )
        .map_err(failed(place))?;
        if number == 1 {
            partitions::create_first(tx, partition_count)?;
        }
    }
    Ok(())
}
