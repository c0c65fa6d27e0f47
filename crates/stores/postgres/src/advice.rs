//! What a person should look at: transactions that were left open, and bounds that are missing.
//!
//! What lives here: the looks, and a sentence with the remedy for each finding. What does not: lag
//! and dead consumers, which are the same on every store; tables as feeds, whose look is SQL
//! (`migrations/0002_any_table.sql`). Invariant: reads only, in one statement each; needs no
//! privilege beyond a relay's, so where the server hides another role's sessions, the age of a
//! transaction is taken from the ticks.

use std::time::Duration;

use postrider_core::Result;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use crate::PostgresStore;
use crate::names::{identifier, literal};

/// A transaction that has locked keys or holds rows uncommitted for longer was left behind.
const LEFT_BEHIND: Duration = Duration::from_secs(300);

/// Transactions with rows in a segment, or with locks of keys, that are older than so many
/// milliseconds, prepared ones among them. Takes no lock.
///
/// A session's begin is hidden from other roles; that it drew its id before a tick's own is not.
const LEFT_OPEN: &str = "WITH since AS (
        SELECT t.own, t.stamp FROM {schema}.{outbox_tick} AS t
        WHERE t.stamp <= (floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint - $1) << 16
            AND t.system = (SELECT system_identifier FROM pg_control_system())
        ORDER BY t.stamp DESC LIMIT 1
    ), holder AS (
        SELECT DISTINCT l.virtualtransaction, l.pid FROM pg_locks AS l
        WHERE l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
            AND l.granted AND (l.locktype = 'relation' AND l.mode = 'RowExclusiveLock'
                    AND l.relation IN (SELECT i.inhrelid FROM pg_inherits AS i WHERE i.inhparent
                        = format('%I.%I', {schema_text}::text, {outbox_text}::text)::regclass
                        UNION ALL SELECT a.source::regclass FROM {schema}.adopted AS a
                        WHERE a.outbox = {outbox_text})
                OR l.locktype = 'advisory'
                    AND l.classid::bigint = {lock_class}::bigint & 4294967295)
    )
    SELECT h.pid, a.application_name, a.usename::text, p.gid, p.owner::text,
        (extract(epoch FROM clock_timestamp() - coalesce(p.prepared, a.xact_start)) * 1000)::bigint
    FROM holder AS h
    JOIN pg_locks AS x ON x.virtualtransaction = h.virtualtransaction
        AND x.locktype = 'transactionid' AND x.mode = 'ExclusiveLock'
        AND x.pid IS NOT DISTINCT FROM h.pid
    LEFT JOIN pg_stat_activity AS a ON a.pid = h.pid
    LEFT JOIN pg_prepared_xacts AS p ON h.pid IS NULL AND p.transaction = x.transactionid
    WHERE clock_timestamp() - coalesce(p.prepared, a.xact_start) > $1 * interval '1 millisecond'
        OR coalesce(p.prepared, a.xact_start) IS NULL
            AND age(x.transactionid) > age((SELECT s.own::xid FROM since AS s))
    ORDER BY 6 DESC NULLS LAST, 1, 4
    LIMIT 20";

/// Missing bounds of the roles that append and are no superuser's; of the outbox's owner where
/// there is none. What this connection can't see is left out.
const BOUNDS: &str = "WITH appended_to AS (
        SELECT c.oid, c.relowner FROM pg_class AS c
        WHERE c.oid = coalesce((SELECT a.source FROM {schema}.adopted AS a
                WHERE a.outbox = {outbox_text}),
            format('%I.%I', {schema_text}::text, {outbox_text}::text))::regclass
    ), writer AS (
        SELECT r.rolname FROM pg_roles AS r, appended_to AS t
        WHERE r.rolcanlogin AND NOT r.rolsuper
            AND has_any_column_privilege(r.oid, t.oid, 'INSERT')
    )
    SELECT w.rolname::text, string_agg(c.setting || ' is ' || c.value, ', ' ORDER BY c.setting)
    FROM (SELECT rolname FROM writer UNION ALL
        SELECT pg_get_userbyid(t.relowner) FROM appended_to AS t
        WHERE NOT EXISTS (SELECT FROM writer)) AS w
    CROSS JOIN LATERAL {schema}.check_settings(w.rolname) AS c
    WHERE c.value <> 'not to be seen from this connection'
    GROUP BY 1 ORDER BY 1 LIMIT 20";

/// Tables whose changes are no events as things are. Reads the catalogue, takes no lock.
const LOST_CHANGES: &str = "SELECT {schema}.table_feed_warnings($1)";

impl PostgresStore {
    /// What is in trouble now, a sentence each, with the remedy: transactions that were left open
    /// for minutes with locked keys or uncommitted events, prepared ones among them; and tables
    /// whose changes `setup_feed` made events of this outbox, and of which some are lost.
    ///
    /// # Errors
    /// `Transient` when the database can't be reached.
    pub async fn warnings(&self) -> Result<Vec<String>> {
        let mut found = self.transactions_left_open(LEFT_BEHIND).await?;
        let names = &self.inner.names;
        let params: [crate::connections::Param<'_>; 1] = [(&names.outbox(), Type::TEXT)];
        let place = "look at the tables that are feeds";
        let lost = self.inner.connections.query(place, &names.fill(LOST_CHANGES), &params).await?;
        found.extend(lost.iter().map(|row| row.get::<_, String>(0)));
        Ok(found)
    }

    /// [`PostgresStore::warnings`] with another time than five minutes.
    ///
    /// # Errors
    /// `Transient` when the database can't be reached.
    pub async fn transactions_left_open(&self, longest: Duration) -> Result<Vec<String>> {
        let ms = i64::try_from(longest.as_millis()).unwrap_or(i64::MAX);
        let sql = self.inner.names.fill(LEFT_OPEN);
        let rows = self
            .inner
            .connections
            .query("look for transactions that were left open", &sql, &[(&ms, Type::INT8)])
            .await?;
        Ok(rows.iter().map(|row| left_open(row, longest)).collect())
    }

    /// Bounds that the server should set to the roles that append, a sentence for each role:
    /// without them a client that vanished keeps its keys locked.
    ///
    /// # Errors
    /// `Transient` when the database can't be reached.
    pub async fn missing_bounds(&self) -> Result<Vec<String>> {
        let sql = self.inner.names.fill(BOUNDS);
        // The store's own connections ask for bounds of their own, which hide the server's.
        let rows = self.inner.connections.query_plainly("check the settings", &sql).await?;
        let sentence = |row: &Row| {
            let (role, found): (&str, &str) = (row.get(0), row.get(1));
            format!(
                "a client of the role {role:?}, which appends, can vanish and keep its keys \
                 locked for long: {found}; what to set by ALTER ROLE … SET …: SELECT * FROM \
                 {}.check_settings({})",
                identifier(self.inner.names.schema()),
                literal(role)
            )
        };
        Ok(rows.iter().map(sentence).collect())
    }
}

/// One transaction as a sentence.
fn left_open(row: &Row, longest: Duration) -> String {
    let pid: Option<i32> = row.get(0);
    let ms = row.get::<_, Option<i64>>(5).and_then(|ms| u64::try_from(ms).ok());
    let age = ms.map_or(longest, Duration::from_millis).as_secs() / 60;
    let effect = "its events, later ones of the same keys, and the emptying of its segment wait";
    if let Some(gid) = row.get::<_, Option<&str>>(3) {
        let owner: Option<&str> = row.get(4);
        return format!(
            "the prepared transaction {gid:?} of the role {:?} was left for {age} min: {effect}; \
             COMMIT PREPARED or ROLLBACK PREPARED it",
            owner.unwrap_or_default()
        );
    }
    let of = match (row.get::<_, Option<&str>>(1), row.get::<_, Option<&str>>(2)) {
        (Some(application), Some(role)) if !application.is_empty() => {
            format!(" ({application:?}, role {role:?})")
        }
        (_, Some(role)) => format!(" (role {role:?})"),
        (_, None) => String::new(),
    };
    let pid = pid.map_or_else(|| "unknown".to_owned(), |pid| pid.to_string());
    format!(
        "the transaction of process {pid}{of} has been open for {age} min or more: {effect}; if \
         its client is gone, SELECT pg_terminate_backend({pid})"
    )
}
