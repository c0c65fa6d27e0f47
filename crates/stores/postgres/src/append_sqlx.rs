//! Appending inside a transaction of `sqlx`.
//!
//! What lives here: `Outbox::append_sqlx`. What does not: what an append is (`append.rs`).
//! Invariant: the same statements with the same parameters as for `tokio-postgres`.

use postrider_core::{EventId, NewEvent, Result};
use sqlx::postgres::{PgArguments, PgConnection};
use sqlx::query::Query;
use sqlx::{Acquire as _, AssertSqlSafe, Postgres};

use crate::append::{
    APPEND_ALL, APPEND_ONE, Columns, Identified, LOCK_KEYS, OnDuplicate, Outbox, check_count,
    identified, ids_of, keys_of, parts,
};
use crate::error::append_sqlx_error;
use crate::row::headers_text;

impl Outbox {
    /// [`Outbox::append`] inside a transaction of `sqlx`: pass `&mut tx`, or the connection on
    /// which one was begun. On a connection without a transaction the events are committed at once.
    ///
    /// # Errors
    /// As [`Outbox::append`].
    ///
    /// # Cancellation
    /// As [`Outbox::append`].
    pub async fn append_sqlx(
        &self,
        connection: &mut PgConnection,
        events: &[NewEvent],
    ) -> Result<Vec<EventId>> {
        self.append_sqlx_with(connection, events, OnDuplicate::Fail).await
    }

    /// [`Outbox::append_sqlx`], with a choice for ids that were appended before.
    ///
    /// # Errors
    /// As [`Outbox::append`].
    pub async fn append_sqlx_with(
        &self,
        connection: &mut PgConnection,
        events: &[NewEvent],
        on_duplicate: OnDuplicate,
    ) -> Result<Vec<EventId>> {
        check_count(events)?;
        let events = identified(events);
        match &events[..] {
            [] => {}
            [event] => {
                run(connection, one(self.names.fill(APPEND_ONE), event, on_duplicate)).await?;
            }
            _ => {
                let sql = self.names.fill(APPEND_ALL);
                let parts = parts(&events);
                if let [part] = parts[..] {
                    run(connection, all(sql, Columns::of(part), on_duplicate)).await?;
                    return Ok(ids_of(&events));
                }
                // On a connection without a transaction, all parts or none; else a savepoint.
                let mut whole = connection.begin().await.map_err(append_sqlx_error)?;
                let lock = sqlx::query(AssertSqlSafe(self.names.fill(LOCK_KEYS)));
                run(&mut whole, lock.bind(keys_of(&events))).await?;
                for part in parts {
                    run(&mut whole, all(sql.clone(), Columns::of(part), on_duplicate)).await?;
                }
                whole.commit().await.map_err(append_sqlx_error)?;
            }
        }
        Ok(ids_of(&events))
    }
}

type Statement<'q> = Query<'q, Postgres, PgArguments>;

fn one(
    sql: String,
    Identified { event, given }: &Identified,
    on_duplicate: OnDuplicate,
) -> Statement<'_> {
    sqlx::query(AssertSqlSafe(sql))
        .bind(*event.id().as_uuid())
        .bind(*given)
        .bind(event.key().as_str())
        .bind(event.topic().as_str())
        .bind(event.event_type().as_str())
        .bind(event.content_type().as_str())
        .bind(headers_text(event.headers()))
        .bind(event.payload().as_ref())
        .bind(on_duplicate.as_sql())
}

fn all(sql: String, columns: Columns<'_>, on_duplicate: OnDuplicate) -> Statement<'_> {
    sqlx::query(AssertSqlSafe(sql))
        .bind(columns.ids)
        .bind(columns.given)
        .bind(columns.keys)
        .bind(columns.topics)
        .bind(columns.types)
        .bind(columns.content_types)
        .bind(columns.headers)
        .bind(columns.payloads)
        .bind(on_duplicate.as_sql())
}

async fn run(connection: &mut PgConnection, statement: Statement<'_>) -> Result<()> {
    statement.execute(connection).await.map_err(append_sqlx_error)?;
    Ok(())
}
