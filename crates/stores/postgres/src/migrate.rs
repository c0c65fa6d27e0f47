//! Creating and upgrading the tables, and refusing a database on which the feed would not hold.
//!
//! What lives here: the embedded migrations and their versions. What does not: the SQL itself,
//! which stands in `migrations/`.
//! Invariant: migrations only ever grow, run in one transaction under an advisory lock, and tables
//! of a newer version are never touched.

use postrider_core::{Error, Result};
use tokio_postgres::Transaction;
use tokio_postgres::types::Type;

use crate::config::{PayloadType, PostgresOptions};
use crate::connections::Connections;
use crate::error::failed;
use crate::names::Names;

/// What all outboxes of a schema share. In order; a version is the place in this list, from 1.
const OF_SCHEMA: &[&str] = &[
    include_str!("../migrations/0001_schema.sql"),
    include_str!("../migrations/0002_read_by_sql.sql"),
    include_str!("../migrations/0002_serialised_writers.sql"),
    include_str!("../migrations/0002_adopted_table.sql"),
    include_str!("../migrations/0002_any_table.sql"),
    include_str!("../migrations/0002_emit.sql"),
    include_str!("../migrations/0002_roles.sql"),
    include_str!("../migrations/0004_wal.sql"),
    include_str!("../migrations/0005_wal_seal.sql"),
];

/// What each outbox has. In order; a version is the place in this list, from 1.
const OF_OUTBOX: &[&str] = &[
    include_str!("../migrations/0001_outbox.sql"),
    include_str!("../migrations/0002_append.sql"),
    include_str!("../migrations/0003_retention.sql"),
];

/// The version of the tables that this program writes and reads, for `status`.
pub const SCHEMA_VERSION: i64 = (OF_SCHEMA.len() + OF_OUTBOX.len()) as i64;

/// The oldest server that has what the migrations use: SQL-standard function bodies.
const OLDEST_SERVER: i32 = 140_000;

const VERSIONS: &str = "CREATE SCHEMA IF NOT EXISTS {schema};
CREATE TABLE IF NOT EXISTS {schema}.migration (
    -- An outbox's name, or empty for what all outboxes share.
    part       text    NOT NULL COLLATE \"C\",
    version    integer NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (part, version)
);
-- Routines that others keep in this schema are not touched.
DO $do$ BEGIN
    PERFORM set_config('postrider.routines_before', ARRAY(SELECT p.oid FROM pg_proc AS p
        WHERE p.pronamespace = to_regnamespace({schema_ident_text}))::text, true);
END $do$;
";

/// Ends every migration: the routines that it made are known as Postrider's own, and roles have
/// what they were granted, of the new tables and functions too.
const GRANTS: &str = "DO $do$ BEGIN
    PERFORM {schema}.note_routines(current_setting('postrider.routines_before')::oid[]);
    PERFORM {schema}.apply_grants();
END $do$;
";

/// All SQL that opening runs on a database without the tables, for review. It may be run by hand.
pub fn schema_sql(options: &PostgresOptions) -> String {
    let names = Names::new(&options.schema, &options.outbox, options.payload);
    let mut text = format!("BEGIN;\n{}", names.fill(VERSIONS));
    for (part, list) in [("", OF_SCHEMA), (names.outbox(), OF_OUTBOX)] {
        for (version, sql) in (1..).zip(list) {
            text.push('\n');
            text.push_str(&step(&names, part, version, sql, options.partitions));
        }
    }
    text.push_str(&names.fill(GRANTS));
    text.push_str("COMMIT;\n");
    text
}

/// One migration with its mark; the first one of an outbox registers it.
fn step(names: &Names, part: &str, version: i32, sql: &str, partitions: u32) -> String {
    let mut text = String::new();
    if version == 1 && !part.is_empty() {
        text.push_str(&names.fill(&format!(
            "INSERT INTO {{schema}}.feed (outbox, payload) VALUES ({{outbox_text}}, \
             {{payload_type_text}});\nINSERT INTO {{schema}}.generation (outbox, number, \
             partitions, after_stamp) VALUES ({{outbox_text}}, 0, {partitions}, 0);\n"
        )));
    }
    text.push_str(&names.fill(sql));
    // Not the name itself: it may hold what looks like a placeholder.
    let part = if part.is_empty() { "''" } else { "{outbox_text}" };
    text.push_str(&names.fill(&format!(
        "INSERT INTO {{schema}}.migration (part, version) VALUES ({part}, {version});\n"
    )));
    text
}

/// What an outbox's tables are found to be.
struct Found {
    of_schema: i32,
    of_outbox: i32,
    payload: Option<PayloadType>,
    /// The sequence of an application's own table that was adopted.
    adopted: Option<String>,
}

async fn found(tx: &Transaction<'_>, names: &Names) -> Result<Found> {
    let place = "read the schema version";
    let mut found = Found { of_schema: 0, of_outbox: 0, payload: None, adopted: None };
    let there = tx
        .query_typed(
            "SELECT c.relname = 'adopted' FROM pg_class c JOIN pg_namespace n
                 ON n.oid = c.relnamespace
             WHERE n.nspname = $1 AND c.relname IN ('migration', 'adopted')",
            &[(&names.schema(), Type::TEXT)],
        )
        .await
        .map_err(failed(place))?;
    if there.is_empty() {
        return Ok(found);
    }
    let sql = "SELECT part, max(version) FROM {schema}.migration WHERE part IN ('', $1) GROUP BY 1";
    let rows = tx.query_typed(&names.fill(sql), &[(&names.outbox(), Type::TEXT)]).await;
    for row in rows.map_err(failed(place))? {
        let version: i32 = row.get(1);
        match row.get::<_, &str>(0).is_empty() {
            true => found.of_schema = version,
            false => found.of_outbox = version,
        }
    }
    if there.iter().any(|row| row.get(0)) {
        found.adopted = adopted(tx, names).await?;
    }
    if found.adopted.is_some() {
        // adopt_table made what it has, and makes it anew.
        found.of_outbox = i32::try_from(OF_OUTBOX.len()).unwrap_or(i32::MAX);
    }
    if found.of_outbox > 0 {
        let sql = "SELECT payload FROM {schema}.feed WHERE outbox = $1";
        let rows = tx.query_typed(&names.fill(sql), &[(&names.outbox(), Type::TEXT)]).await;
        found.payload = rows.map_err(failed(place))?.first().map(|row| match row.get(0) {
            "json" => PayloadType::Json,
            _ => PayloadType::Bytea,
        });
    }
    Ok(found)
}

/// The sequence of the table that was adopted as this outbox.
async fn adopted(tx: &Transaction<'_>, names: &Names) -> Result<Option<String>> {
    let sql = "SELECT sequence FROM {schema}.adopted WHERE outbox = $1";
    let rows = tx.query_typed(&names.fill(sql), &[(&names.outbox(), Type::TEXT)]).await;
    let rows = rows.map_err(failed("look for an adopted table"))?;
    Ok(rows.first().map(|row| row.get(0)))
}

fn check_versions(found: &Found) -> Result<()> {
    for (version, list) in [(found.of_schema, OF_SCHEMA), (found.of_outbox, OF_OUTBOX)] {
        if usize::try_from(version).unwrap_or(usize::MAX) > list.len() {
            return Err(Error::corrupt(format!(
                "Postrider's tables have version {version}, this program knows {}; install the \
                 newer program, never the older one over newer tables",
                list.len()
            )));
        }
    }
    Ok(())
}

fn is_current(found: &Found) -> bool {
    let same = |version: i32, list: &[&str]| usize::try_from(version) == Ok(list.len());
    same(found.of_schema, OF_SCHEMA) && same(found.of_outbox, OF_OUTBOX)
}

/// Refuses a server on which the feed would lose events or could not be made.
async fn check_server(tx: &Transaction<'_>) -> Result<()> {
    let sql = "SELECT current_setting('server_version_num')::integer,
        current_setting('server_encoding'), current_setting('server_version')";
    let rows = tx.query_typed(sql, &[]).await.map_err(failed("read the server's version"))?;
    let row = &rows[0];
    let (number, encoding, text): (i32, &str, &str) = (row.get(0), row.get(1), row.get(2));
    if number < OLDEST_SERVER {
        return Err(Error::permanent(format!(
            "the server is PostgreSQL {text}; Postrider needs 14 or newer"
        )));
    }
    if encoding != "UTF8" {
        return Err(Error::permanent(format!(
            "the database's encoding is {encoding}; Postrider needs UTF8: create the database \
             with ENCODING 'UTF8' TEMPLATE template0"
        )));
    }
    Ok(())
}

/// Refuses a sequence that hands out numbers in another order than they are drawn.
async fn check_sequence(tx: &Transaction<'_>, sequence: &str) -> Result<()> {
    let sql = "SELECT s.seqcache, s.seqincrement, s.seqcycle FROM pg_sequence s
         WHERE s.seqrelid = $1::text::regclass";
    let rows = tx.query_typed(sql, &[(&sequence, Type::TEXT)]).await;
    let rows = rows.map_err(failed("check the outbox's sequence"))?;
    let (cache, increment, cycles): (i64, i64, bool) =
        rows.first().map_or((0, 0, true), |row| (row.get(0), row.get(1), row.get(2)));
    if cache == 1 && increment == 1 && !cycles {
        return Ok(());
    }
    Err(Error::permanent(format!(
        "the outbox's sequence has CACHE {cache} INCREMENT {increment}: sessions would draw \
         numbers ahead of their transactions, and events would be lost; run ALTER SEQUENCE \
         {sequence} CACHE 1 INCREMENT 1 NO CYCLE"
    )))
}

/// Brings the tables to this program's version, or refuses, as the options ask; returns the names
/// with the payload type found. Idempotent; several processes may do so at once.
pub(crate) async fn open(connections: &Connections, options: &PostgresOptions) -> Result<Names> {
    let options = options.clone();
    connections.transaction("open the outbox", |tx| Box::pin(open_in(tx, options))).await
}

async fn open_in(tx: &Transaction<'_>, options: PostgresOptions) -> Result<Names> {
    use crate::config::SchemaOnOpen::{Migrate, Require};
    let place = "create Postrider's tables";
    let mut names = Names::new(&options.schema, &options.outbox, options.payload);
    check_server(tx).await?;
    let mut present = found(tx, &names).await?;
    check_versions(&present)?;
    if !is_current(&present) {
        match options.on_open {
            Require => {
                return Err(Error::permanent(format!(
                    "outbox {:?} in schema {:?} is missing or of an older version; run \
                     `postrider init`",
                    options.outbox, options.schema
                )));
            }
            Migrate => {
                // Two at once would both find nothing; the lock ends with the transaction.
                let lock = i64::from(Names::new("", "", options.payload).lock_class());
                tx.query_typed("SELECT pg_advisory_xact_lock($1)", &[(&lock, Type::INT8)])
                    .await
                    .map_err(failed(place))?;
                present = found(tx, &names).await?;
                check_versions(&present)?;
                names = names_of(&options, &present);
                apply(tx, &names, &present, options.partitions).await?;
            }
        }
    }
    names = names_of(&options, &present);
    let own = || names.fill("{schema}.{outbox_seq}");
    check_sequence(tx, &present.adopted.unwrap_or_else(own)).await?;
    Ok(names)
}

fn names_of(options: &PostgresOptions, found: &Found) -> Names {
    let payload = found.payload.unwrap_or(options.payload);
    Names::new(&options.schema, &options.outbox, payload)
}

async fn apply(tx: &Transaction<'_>, names: &Names, found: &Found, partitions: u32) -> Result<()> {
    let place = "create Postrider's tables";
    tx.batch_execute(&names.fill(VERSIONS)).await.map_err(failed(place))?;
    let parts = [("", found.of_schema, OF_SCHEMA), (names.outbox(), found.of_outbox, OF_OUTBOX)];
    for (part, have, list) in parts {
        for (version, sql) in (1..).zip(list).filter(|(version, _)| *version > have) {
            let sql = step(names, part, version, sql, partitions);
            tx.batch_execute(&sql).await.map_err(failed(place))?;
        }
    }
    tx.batch_execute(&names.fill(GRANTS)).await.map_err(failed(place))
}
