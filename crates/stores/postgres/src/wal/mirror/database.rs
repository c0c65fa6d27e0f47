//! The copy in a second database.
//!
//! What lives here: its table, made when it is missing, and a row for each consumer. What does not:
//! what a row says (`kept.rs`), and when it is written.
//! Invariant: a row never moves back on one timeline of one system; whoever is further is left.

use std::time::Duration;

use postrider_core::{Error, Result};
use tokio_postgres::types::Type;

use super::kept::Kept;
use super::{Owner, Update};
use crate::config::PostgresOptions;
use crate::connections::{Connections, Param};
use crate::error::code_of;

/// The table that [`MirrorDatabase`] needs, for whoever makes it by hand.
const TABLE: &str = "CREATE SCHEMA IF NOT EXISTS postrider;
CREATE TABLE IF NOT EXISTS postrider.wal_checkpoint_mirror (
    system_identifier bigint  NOT NULL,
    database          text    NOT NULL COLLATE \"C\",
    schema            text    NOT NULL COLLATE \"C\",
    outbox            text    NOT NULL COLLATE \"C\",
    consumer          text    NOT NULL COLLATE \"C\",
    identity          text    NOT NULL,
    seal              uuid    NOT NULL,
    timeline          integer NOT NULL,
    lsn               pg_lsn  NOT NULL,
    ordinal           bigint  NOT NULL,
    format            integer NOT NULL,
    standing          json    NOT NULL,
    written_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (system_identifier, database, schema, outbox, consumer)
) WITH (fillfactor = 50)";

/// The form of `standing`.
const FORMAT: i32 = 1;
/// A copy that takes longer is late, and is tried again.
const WITHIN: Duration = Duration::from_secs(5);

/// What is there, and whether this role may use it.
const LOOK: &str = "SELECT s.system_identifier, current_database()::text, t.oid IS NOT NULL,
        has_schema_privilege(t.relnamespace, 'USAGE') AND has_table_privilege(t.oid, 'SELECT')
        AND has_table_privilege(t.oid, 'INSERT') AND has_table_privilege(t.oid, 'UPDATE')
        AND has_table_privilege(t.oid, 'DELETE')
    FROM pg_control_system() AS s LEFT JOIN (SELECT c.oid, c.relnamespace FROM pg_class AS c
        JOIN pg_namespace AS n ON n.oid = c.relnamespace
        WHERE n.nspname = 'postrider' AND c.relname = 'wal_checkpoint_mirror') AS t ON true";

const LIST: &str = "SELECT consumer, format, standing::text FROM postrider.wal_checkpoint_mirror
    WHERE database = $1 AND schema = $2 AND outbox = $3 ORDER BY consumer, system_identifier";

const WRITE: &str = "INSERT INTO postrider.wal_checkpoint_mirror AS m (system_identifier, database,
        schema, outbox, consumer, identity, seal, timeline, lsn, ordinal, format, standing)
    VALUES ($1, $2, $3, $4, $5, $6, $7::text::uuid, $8, $9::text::pg_lsn, $10, $11,
        $12::text::json)
    ON CONFLICT (system_identifier, database, schema, outbox, consumer) DO UPDATE SET
        identity = excluded.identity, seal = excluded.seal, timeline = excluded.timeline,
        lsn = excluded.lsn, ordinal = excluded.ordinal, format = excluded.format,
        standing = excluded.standing, written_at = clock_timestamp()
    WHERE m.seal = $13::text::uuid OR m.identity <> excluded.identity
        OR (m.timeline, m.lsn, m.ordinal) <= (excluded.timeline, excluded.lsn, excluded.ordinal)
    RETURNING 1";

const FORGET: &str = "DELETE FROM postrider.wal_checkpoint_mirror
    WHERE database = $1 AND schema = $2 AND outbox = $3 AND consumer = $4 RETURNING 1";

pub(crate) struct MirrorDatabase {
    connections: Connections,
    shown: String,
}

impl MirrorDatabase {
    /// # Errors
    /// `Permanent` for an address that is none.
    pub(crate) fn new(options: &PostgresOptions) -> Result<Self> {
        let options = options.clone().connections(2).statement_timeout(WITHIN);
        let options = options.connect_timeout(WITHIN);
        let names = options.address()?.places.into_iter().map(|place| place.name);
        let shown = format!("the database at {}", names.collect::<Vec<_>>().join(", "));
        Ok(Self { connections: Connections::new(&options)?, shown })
    }

    pub(crate) fn shown(&self) -> &str {
        &self.shown
    }

    /// Makes the table unless it is there.
    pub(crate) async fn ready(&self, owner: &Owner, system: u64) -> Result<()> {
        let place = "look at the copy's table";
        let row = self.look(place).await?;
        let (its_system, its_database): (i64, &str) = (row.get(0), row.get(1));
        if (its_system.cast_unsigned(), its_database) == (system, owner.database.as_str()) {
            return Err(Error::permanent(
                "mirror_url is the source's own database, whose loss would take the copy along; \
                 name another one",
            ));
        }
        let mut usable = row.get::<_, Option<bool>>(3).unwrap_or(false);
        if !row.get::<_, bool>(2) {
            let made = self
                .connections
                .transaction("make the copy's table", |tx| {
                    Box::pin(async move {
                        tx.batch_execute(TABLE)
                            .await
                            .map_err(crate::error::failed("make the copy's table"))
                    })
                })
                .await;
            usable = match made {
                Ok(()) => true,
                // Another was quicker.
                Err(error) if matches!(code_of(&error), Some("42P07" | "42P06" | "23505")) => {
                    self.look(place).await?.get::<_, Option<bool>>(3).unwrap_or(false)
                }
                Err(error) => return Err(error),
            };
        }
        match usable {
            true => Ok(()),
            false => Err(Error::permanent(
                "the role may not use postrider.wal_checkpoint_mirror there; run GRANT USAGE ON \
                 SCHEMA postrider, and GRANT SELECT, INSERT, UPDATE, DELETE ON \
                 postrider.wal_checkpoint_mirror",
            )),
        }
    }

    async fn look(&self, place: &'static str) -> Result<tokio_postgres::Row> {
        let rows = self.connections.query(place, LOOK, &[]).await?;
        rows.into_iter().next().ok_or_else(|| Error::corrupt("the server says nothing of itself"))
    }

    pub(crate) async fn list(&self, owner: &Owner) -> Result<Vec<(String, Kept)>> {
        let params: [Param<'_>; 3] = [
            (&owner.database, Type::TEXT),
            (&owner.schema, Type::TEXT),
            (&owner.outbox, Type::TEXT),
        ];
        let rows = match self.connections.query("read the copy", LIST, &params).await {
            Err(error) if is_missing(&error) => return Ok(Vec::new()),
            listed => listed?,
        };
        let kept = |row: &tokio_postgres::Row| {
            let consumer: String = row.get(0);
            let wrong = |why: String| {
                Error::permanent(format!(
                    "the copy of {consumer:?} in postrider.wal_checkpoint_mirror {why}; remove its \
                     row there, and it is made anew"
                ))
            };
            match row.get::<_, i32>(1) {
                FORMAT => {}
                other => return Err(wrong(format!("has format {other}, not {FORMAT}"))),
            }
            let kept = serde_json::from_str(row.get(2))
                .map_err(|error| wrong(format!("can't be read: {error}")))?;
            Ok((consumer, kept))
        };
        rows.iter().map(kept).collect()
    }

    /// As `MirrorFile::write`.
    pub(crate) async fn write(&self, owner: &Owner, entries: &[Update]) -> Result<Vec<usize>> {
        let mut left = Vec::new();
        for (at, entry) in entries.iter().enumerate() {
            if !self.write_one(owner, entry).await? {
                left.push(at);
            }
        }
        Ok(left)
    }

    async fn write_one(&self, owner: &Owner, entry: &Update) -> Result<bool> {
        let (kept, place) = (&entry.kept, entry.kept.place()?);
        let timeline = i32::try_from(place.timeline).unwrap_or(i32::MAX);
        let standing = serde_json::to_string(kept)
            .map_err(|error| Error::corrupt("write the copy").with_source(error))?;
        let params: [Param<'_>; 13] = [
            (&place.system.cast_signed(), Type::INT8),
            (&owner.database, Type::TEXT),
            (&owner.schema, Type::TEXT),
            (&owner.outbox, Type::TEXT),
            (&entry.consumer, Type::TEXT),
            (&kept.identity, Type::TEXT),
            (&kept.seal.to_string(), Type::TEXT),
            (&timeline, Type::INT4),
            (&place.lsn.to_string(), Type::TEXT),
            (&i64::from(place.ordinal), Type::INT8),
            (&FORMAT, Type::INT4),
            (&standing, Type::TEXT),
            (&entry.over.map(|seal| seal.to_string()), Type::TEXT),
        ];
        let rows = self.connections.query("write the copy", WRITE, &params).await?;
        Ok(!rows.is_empty())
    }

    pub(crate) async fn forget(&self, owner: &Owner, consumer: &str) -> Result<bool> {
        let params: [Param<'_>; 4] = [
            (&owner.database, Type::TEXT),
            (&owner.schema, Type::TEXT),
            (&owner.outbox, Type::TEXT),
            (&consumer, Type::TEXT),
        ];
        match self.connections.query("remove from the copy", FORGET, &params).await {
            Ok(rows) => Ok(!rows.is_empty()),
            Err(error) if is_missing(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Whether there is no table, and so no copy.
fn is_missing(error: &Error) -> bool {
    matches!(code_of(error), Some("42P01" | "3F000"))
}
