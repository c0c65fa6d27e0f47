//! What the log needs before it can be read: made by `init`, looked for by `run`.
//!
//! What lives here: the SQL for review, making the publication, and a look at all that a stream
//! needs. What does not: the stream's own looks (`session.rs`), and advice (`advice.rs`).
//! Invariant: the look changes nothing, and what is missing is one sentence with its remedy.

use postrider_core::{Error, Result};

use super::slot::{self, Publication, SlotState};
use super::wire::Walsender;
use super::{PostgresWal, Wal, WalOptions};
use crate::config::PostgresOptions;
use crate::names::{Names, identifier, literal};

/// Tables of the outbox whose rows are not in the log.
pub(super) const UNLOGGED: &str =
    "(SELECT string_agg(c.oid::regclass::text, ', ' ORDER BY c.relname)
        FROM pg_class AS c WHERE c.relpersistence = 'u'
            AND c.oid IN (SELECT {schema}.log_table({outbox_text}) UNION ALL
                SELECT p.relid FROM pg_partition_tree({schema}.log_table({outbox_text})) AS p))";
/// Whether there is room for one more slot.
const ROOM: &str = "(SELECT count(*) FROM pg_replication_slots)
    < current_setting('max_replication_slots')::integer";

/// Tables in which a relay keeps what it knows, and this role may not.
const NOT_KEPT: &str = "SELECT string_agg(c.relname::text, ', ' ORDER BY c.relname),
        current_user::text
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE n.nspname = {schema_text} AND c.relname IN ('lease', 'relay', 'checkpoint',
            'dead_letter', 'wal_base', 'wal_after', 'wal_recovery', 'wal_seal')
        AND NOT (has_table_privilege(c.oid, 'SELECT') AND has_table_privilege(c.oid, 'INSERT')
            AND has_table_privilege(c.oid, 'UPDATE') AND has_table_privilege(c.oid, 'DELETE'))";

/// The statement that makes the publication of a table, or of messages alone.
pub(super) fn publication_sql(publication: &str, table: Option<&str>) -> String {
    let publication = identifier(publication);
    let Some(table) = table else { return format!("CREATE PUBLICATION {publication}") };
    format!(
        "CREATE PUBLICATION {publication} FOR TABLE ONLY {table} WITH (publish = 'insert', \
         publish_via_partition_root = true)"
    )
}

/// All SQL that makes an outbox that is read from the log, for review: [`crate::schema_sql`], and
/// the publication. It may be run by hand, by the owner.
///
/// # Errors
/// `Permanent` for impossible options.
pub fn wal_schema_sql(options: &PostgresOptions, wal: &WalOptions) -> Result<String> {
    let wal = wal.clone().checked(&options.outbox)?;
    let names = Names::new(&options.schema, &options.outbox, options.payload);
    let schema = crate::schema_sql(options);
    let table = wal.messages.is_none().then(|| names.fill("{schema}.{outbox}"));
    Ok(format!("{schema}\n{};\n", publication_sql(&wal.publication, table.as_deref())))
}

impl WalOptions {
    /// Refuses impossible options of this outbox without connecting.
    ///
    /// # Errors
    /// `Permanent`, naming the option.
    pub fn check(&self, outbox: &str) -> Result<()> {
        self.clone().checked(outbox).map(drop)
    }
}

impl PostgresWal {
    /// The slot's name.
    pub fn slot(&self) -> &str {
        &self.wal.options.slot
    }

    /// The publication's name.
    pub fn publication(&self) -> &str {
        &self.wal.options.publication
    }

    /// Makes the publication unless it is there. The role must own the outbox, and needs CREATE on
    /// the database. The slot is made when it is first read.
    ///
    /// # Errors
    /// `Permanent` with the remedy when it can't be made, or one of this name would pass events
    /// over; `Transient` when the database can't be reached.
    pub async fn prepare(&self) -> Result<()> {
        self.wal.logged().await?;
        self.wal.publication().ensure().await?;
        self.wal.mirrored().await
    }

    /// Whether everything is there that reading the log needs: the server's settings, the
    /// publication, the privileges, room for a connection and a slot, no slot of somebody else
    /// under the name, and a copy of the checkpoints that can be written, if one was asked for:
    /// its table is made. A slot that is missing, lost or read by another process is no reason.
    ///
    /// # Errors
    /// `Permanent` with the remedy for what is missing; `Transient` when the database can't be
    /// reached, or has no room at this moment.
    ///
    /// # Cancellation
    /// Safe: it changes nothing else.
    pub async fn ready(&self) -> Result<()> {
        let Publication { connections, names, .. } = self.wal.publication();
        let room = self.wal.logged().await?;
        self.wal.keeps().await?;
        self.wal.publication().check().await?;
        if let Some(adopted) = self.wal.adopted().await? {
            adopted.check(connections, names, self.publication()).await?;
        }
        match slot::look(connections, self.slot()).await? {
            SlotState::Foreign(text) => return Err(Error::permanent(text)),
            SlotState::Missing if !room => {
                return Err(Error::permanent(
                    "all replication slots of the server are in use; drop one that nobody needs \
                     (SELECT * FROM pg_replication_slots), or raise max_replication_slots and \
                     restart it",
                ));
            }
            _ => {}
        }
        // A second connection, besides that of a relay that is at work: it asks and ends.
        Walsender::connect(connections.servers()).await.map(drop)?;
        self.wal.mirrored().await
    }
}

impl Wal {
    /// Refuses a role that may not write a checkpoint: it would deliver all of it again and again.
    async fn keeps(&self) -> Result<()> {
        let place = "look at what a relay keeps";
        let rows = self.store.query(place, NOT_KEPT, &[]).await?;
        let row =
            rows.first().ok_or_else(|| Error::corrupt("the server says nothing of itself"))?;
        let Some(tables) = row.get::<_, Option<&str>>(0) else { return Ok(()) };
        let grant = self.store.inner.names.fill("{schema}.grant_relay");
        Err(Error::permanent(format!(
            "the role may not read and write {tables}; as the outbox's owner run SELECT \
             {grant}({})",
            literal(row.get(1))
        )))
    }

    /// Refuses a copy of the checkpoints that can't be written; makes the table that it needs.
    async fn mirrored(&self) -> Result<()> {
        match &self.mirror {
            Some(mirror) => mirror.ready(self).await,
            None => Ok(()),
        }
    }

    /// Refuses an outbox whose rows are not all in the log; says whether a slot can be made.
    async fn logged(&self) -> Result<bool> {
        let Publication { connections, names, .. } = self.publication();
        let sql = names.fill(&format!("SELECT {UNLOGGED}, {ROOM}"));
        let rows = connections.query("look at the outbox", &sql, &[]).await?;
        let row =
            rows.first().ok_or_else(|| Error::corrupt("the server says nothing of itself"))?;
        match row.get::<_, Option<&str>>(0) {
            None => Ok(row.get(1)),
            Some(tables) => Err(Error::permanent(format!(
                "what is appended to {tables} is not written to the log: UNLOGGED; run ALTER TABLE \
                 … SET LOGGED for each"
            ))),
        }
    }
}
