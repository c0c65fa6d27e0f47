//! Tables of the application that are read as outboxes.
//!
//! What lives here: what such a table does not give. What does not: adopting it, which is SQL
//! (`migrations/0002_adopted_table.sql`), and reading it, which is as for any other outbox.
//! Invariant: an ordinary outbox has nothing to be warned of here.

use postrider_core::Result;
use tokio_postgres::types::Type;

use crate::PostgresStore;

/// Reads the catalogue; takes no lock that a writer would meet.
const WARNINGS: &str = "SELECT {schema}.adopted_warnings($1, $2)";

impl PostgresStore {
    /// What is lost or weaker because the outbox is an application's own table and is read as a
    /// feed, in words, for the start of a relay and for `status`. Empty for an outbox that
    /// Postrider made.
    ///
    /// # Errors
    /// `Transient` when the server can't be asked.
    pub async fn adopted_warnings(&self) -> Result<Vec<String>> {
        self.adopted_warnings_of(false).await
    }

    /// The same where it is read from the log.
    pub(crate) async fn adopted_warnings_of(&self, log: bool) -> Result<Vec<String>> {
        let (connections, names) = (&self.inner.connections, &self.inner.names);
        let params: [crate::connections::Param<'_>; 2] =
            [(&names.outbox(), Type::TEXT), (&log, Type::BOOL)];
        let place = "look at an adopted table";
        let rows = connections.query(place, &names.fill(WARNINGS), &params).await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }
}
