//! The replication slot and the publication: what is there, and what is wrong with it.
//!
//! What lives here: looking at both, making and removing them, and a sentence for each trouble.
//! What does not: the stream (`hub.rs`), and what a consumer has had (`ledger.rs`).
//! Invariant: the publication is there before the slot is made: a slot that is older than its
//! publication can never be read.

use postrider_core::{Error, ErrorKind, Result};
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::adopted;
use super::ledger::Base;
use super::lsn::Lsn;
use super::snapshot::Snapshot;
use crate::connections::{Connections, Param};
use crate::error::code_of;
use crate::names::{Names, identifier};

/// What a slot is found to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SlotState {
    /// There is none.
    Missing,
    /// It is being made at this moment, and waits for transactions that were open.
    Forming,
    /// It can be read from here on; who reads it now.
    Ready { confirmed: Lsn, reader: Option<i32> },
    /// The server has removed log that it still needed; why.
    Lost(String),
    /// It is not ours to use; why.
    Foreign(String),
}

const LOOK: &str = "SELECT s.slot_type, coalesce(s.plugin, ''), coalesce(s.database, ''),
        current_database()::text, s.active_pid, coalesce(s.wal_status, ''),
        s.restart_lsn::text, s.confirmed_flush_lsn::text,
        coalesce(to_jsonb(s) ->> 'invalidation_reason', ''), s.temporary
    FROM pg_replication_slots AS s WHERE s.slot_name = $1";

fn state(name: &str, row: &Row) -> Result<SlotState> {
    let (kind, plugin): (&str, &str) = (row.get(0), row.get(1));
    let (database, own): (&str, &str) = (row.get(2), row.get(3));
    let foreign = |why: String| {
        SlotState::Foreign(format!(
            "replication slot {name} is not Postrider's: {why}; give `slot` another name, or drop \
             that one: SELECT pg_drop_replication_slot('{name}')"
        ))
    };
    if kind != "logical" {
        return Ok(foreign(format!("it is {kind}")));
    }
    if plugin != "pgoutput" {
        return Ok(foreign(format!("its plugin is {plugin}")));
    }
    if database != own {
        return Ok(foreign(format!("it belongs to database {database}")));
    }
    if row.get(9) {
        return Ok(foreign("it is temporary".to_owned()));
    }
    let (status, reason): (&str, &str) = (row.get(5), row.get(8));
    let lsn = |number| row.get::<_, Option<&str>>(number).map(Lsn::parse).transpose();
    let (restart, confirmed) = (lsn(6)?, lsn(7)?);
    let lost = || match reason {
        "" => SlotState::Lost(format!("wal_status {status}")),
        _ => SlotState::Lost(reason.to_owned()),
    };
    Ok(match (restart, confirmed) {
        _ if status == "lost" || !reason.is_empty() => lost(),
        (Some(_), Some(confirmed)) => SlotState::Ready { confirmed, reader: row.get(4) },
        (None, Some(_)) => lost(),
        (_, None) => SlotState::Forming,
    })
}

/// Looks at the slot.
pub(crate) async fn look(connections: &Connections, slot: &str) -> Result<SlotState> {
    let rows = connections.query("look at the slot", LOOK, &[(&slot, Type::TEXT)]).await?;
    rows.first().map_or(Ok(SlotState::Missing), |row| state(slot, row))
}

/// Drops the slot, unless it is gone already.
pub(crate) async fn drop_slot(connections: &Connections, slot: &str) -> Result<()> {
    let sql = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots
        WHERE slot_name = $1";
    connections.query("drop the slot", sql, &[(&slot, Type::TEXT)]).await.map(drop)
}

/// Names the publication and its membership as they are now, or is NULL while rows of the outbox
/// would be passed over. It changes whenever either is made anew or altered, so that two looks
/// with the same text mean: nothing was passed over in between.
macro_rules! fingerprint {
    () => {
        "(SELECT p.oid || ':' || p.xmin || ':' || coalesce(r.oid || ':' || r.xmin, 'all') || ':'
                || c.oid
            FROM pg_publication AS p
            JOIN pg_class AS c ON c.oid = {schema}.log_table({outbox_text})
            LEFT JOIN pg_publication_rel AS r ON r.prpubid = p.oid AND r.prrelid = c.oid
            WHERE p.pubname = $1 AND p.pubinsert AND (p.puballtables OR r.oid IS NOT NULL)
                AND (p.pubviaroot OR c.relkind <> 'p')
                AND to_jsonb(r) ->> 'prqual' IS NULL AND to_jsonb(r) ->> 'prattrs' IS NULL)"
    };
}

/// All that a base is made of, in one statement: its snapshot is taken before the list is worked
/// out from left to right, so the commit record of every transaction that it sees lies below the
/// second value, and every row above the third was written by a transaction that it does not see.
const BASE: &str = concat!(
    "SELECT pg_current_snapshot()::text, pg_current_wal_insert_lsn()::text,
        {schema}.log_numbers({outbox_text}), s.system_identifier,
        ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::integer, ",
    fingerprint!(),
    ", coalesce((SELECT t.floor FROM {schema}.{outbox_tick} AS t
            WHERE t.system = s.system_identifier ORDER BY t.own DESC LIMIT 1), 0),
        (SELECT a.xmin::text FROM {schema}.adopted AS a WHERE a.outbox = {outbox_text})
        FROM pg_control_system() AS s"
);

/// The same where messages are read: they pass through any publication.
const BASE_OF_MESSAGES: &str =
    "SELECT pg_current_snapshot()::text, pg_current_wal_insert_lsn()::text, 0::bigint,
        s.system_identifier,
        ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::integer,
        (SELECT 'messages:' || p.oid FROM pg_publication AS p WHERE p.pubname = $1), 0::bigint,
        NULL::text
    FROM pg_control_system() AS s";

/// The statement that takes a base; `$1` is the publication.
pub(crate) fn base_sql(names: &Names, of_messages: bool) -> String {
    names.fill(if of_messages { BASE_OF_MESSAGES } else { BASE })
}

/// Reads what [`base_sql`] returns: the base, unless the publication passes rows over.
pub(crate) fn base(row: &Row) -> Result<Option<Base>> {
    let Some(publication) = row.get::<_, Option<String>>(5) else { return Ok(None) };
    Ok(Some(Base {
        snapshot: Snapshot::parse(row.get(0))?,
        lsn: Lsn::parse(row.get(1))?,
        seq: row.get(2),
        floor: row.get(6),
        system: row.get::<_, i64>(3).cast_unsigned(),
        timeline: row.get::<_, i32>(4).cast_unsigned(),
        publication,
    }))
}

/// Names the mapping of an adopted table: another one after each change.
pub(crate) fn mapping(row: &Row) -> Option<String> {
    row.get(7)
}

/// Why the publication would pass rows of the outbox over, one column for each reason.
const EXPLAIN: &str = "SELECT p.oid IS NOT NULL, p.pubinsert,
        p.puballtables OR r.oid IS NOT NULL, p.pubviaroot OR c.relkind <> 'p',
        to_jsonb(r) ->> 'prqual' IS NULL AND to_jsonb(r) ->> 'prattrs' IS NULL,
        current_setting('wal_level'), pg_is_in_recovery(), format('%I.%I', n.nspname, c.relname)
    FROM pg_class AS c
    JOIN pg_namespace AS n ON n.oid = c.relnamespace
    LEFT JOIN pg_publication AS p ON p.pubname = $1
    LEFT JOIN pg_publication_rel AS r ON r.prpubid = p.oid AND r.prrelid = c.oid
    WHERE c.oid = {schema}.log_table({outbox_text})";

/// The publication as the slot's stream needs it.
pub(crate) struct Publication<'a> {
    pub(crate) connections: &'a Connections,
    pub(crate) names: &'a Names,
    pub(crate) name: &'a str,
    /// Whether messages are read, and no table is needed in it.
    pub(crate) of_messages: bool,
}

impl Publication<'_> {
    /// The statement that makes it, for a table.
    fn create_sql(&self, table: &str) -> String {
        let table = (!self.of_messages).then_some(table);
        super::setup::publication_sql(self.name, table)
    }

    /// Makes it unless it is there, and says what is wrong with it otherwise.
    ///
    /// # Errors
    /// `Permanent` with the remedy.
    pub(crate) async fn ensure(&self) -> Result<()> {
        match self.check().await {
            Err(error) if error.kind() == ErrorKind::Transient => Err(error),
            Err(missing) => {
                let found = self.explain().await?;
                if found.get(0) {
                    return Err(missing);
                }
                let sql = self.create_sql(found.get(7));
                match self.connections.query("create the publication", &sql, &[]).await {
                    // Another was quicker.
                    Err(error) if code_of(&error) == Some("42710") => self.check().await,
                    Err(error) => Err(missing.with_source(error)),
                    Ok(_) => self.check().await,
                }
            }
            Ok(()) => Ok(()),
        }
    }

    /// The same while a relay runs: what is wrong is told as something that passes, for whoever
    /// took the outbox out of the publication may put it back, and the stream goes on then.
    ///
    /// # Errors
    /// `Transient` with the remedy.
    pub(crate) async fn stands(&self) -> Result<()> {
        self.ensure().await.map_err(|error| match error.kind() {
            ErrorKind::Permanent => Error::transient(error.chain()),
            _ => error,
        })
    }

    async fn explain(&self) -> Result<Row> {
        let sql = self.names.fill(EXPLAIN);
        let params: [Param<'_>; 1] = [(&self.name, Type::TEXT)];
        let rows = self.connections.query("look at the publication", &sql, &params).await?;
        if let Some(row) = rows.into_iter().next() {
            return Ok(row);
        }
        // An adopted table says by which name it is missed.
        let adopted = adopted::load(self.connections, self.names).await?;
        Err(Error::permanent(match adopted {
            None => "the outbox is gone",
            Some(_) => "the table of the outbox was changed at this moment",
        }))
    }

    /// # Errors
    /// `Permanent` when no row, or not every row, of the outbox would come through.
    pub(crate) async fn check(&self) -> Result<()> {
        let row = self.explain().await?;
        let name = identifier(self.name);
        let table: &str = row.get(7);
        let is = |number| row.get::<_, Option<bool>>(number).unwrap_or(false);
        let level: &str = row.get(5);
        let covers = |number| self.of_messages || is(number);
        let text = if row.get(6) {
            "the server is a standby, which decodes no log for Postrider; name the primary"
                .to_owned()
        } else if level != "logical" {
            format!(
                "the server's wal_level is {level}; run ALTER SYSTEM SET wal_level = logical and \
                 restart it"
            )
        } else if !is(0) {
            format!(
                "there is no publication {name}; as the outbox's owner run `postrider init`, or: \
                 {}",
                self.create_sql(table)
            )
        } else if !covers(2) {
            format!(
                "publication {name} is without the outbox; run ALTER PUBLICATION {name} ADD TABLE \
                 ONLY {table}; what it passed over is then read from the table"
            )
        } else if !covers(1) {
            format!(
                "publication {name} passes inserts over; run ALTER PUBLICATION {name} SET \
                 (publish = 'insert')"
            )
        } else if !covers(3) {
            format!(
                "publication {name} names the outbox's parts instead of it; run ALTER PUBLICATION \
                 {name} SET (publish_via_partition_root = true)"
            )
        } else if !covers(4) {
            format!(
                "publication {name} shows the outbox through a WHERE or a list of columns; run \
                 ALTER PUBLICATION {name} DROP TABLE {table}, then ADD TABLE ONLY {table}"
            )
        } else {
            return Ok(());
        };
        Err(Error::permanent(text))
    }
}
