//! What a person should know of a database before it costs them.
//!
//! What lives here: the settings that make a difference, and their remedies. What does not: what a
//! status tells of consumers.
//! Invariant: nothing here is an error; what can't work at all is refused by what needs it.

use postrider_core::Result;

use crate::SqlServerStore;
use crate::row::number;
use crate::sql;

/// The first level that has `openjson`: SQL Server 2016's.
const LEAST_COMPATIBILITY: i64 = 130;

impl SqlServerStore {
    /// What keeps appends and the relay from working, a sentence each, with the remedy.
    ///
    /// # Errors
    /// As any statement.
    pub async fn warnings(&self) -> Result<Vec<String>> {
        let settings = self.settings().await?;
        let low = settings.filter(|(_, level)| *level < LEAST_COMPATIBILITY);
        Ok(low.map(|(_, level)| too_low(level)).into_iter().collect())
    }

    /// What is weaker than it could be, a sentence each, with the remedy.
    ///
    /// # Errors
    /// As any statement.
    pub async fn weaker(&self) -> Result<Vec<String>> {
        let waits = self.settings().await?.is_some_and(|(snapshots, _)| snapshots == 0);
        let text = "READ_COMMITTED_SNAPSHOT is off: a reader may wait for a writer that is still \
            open, up to statement_timeout; ALTER DATABASE … SET READ_COMMITTED_SNAPSHOT ON";
        Ok(waits.then(|| text.to_owned()).into_iter().collect())
    }

    /// Whether readers see versions, and the level of compatibility.
    async fn settings(&self) -> Result<Option<(i64, i64)>> {
        let sets = self.run("read the database's settings", sql::ADVICE, &[]).await?;
        let Some(row) = sets.first().and_then(|set| set.first()) else { return Ok(None) };
        Ok(Some((number(row, 0, "snapshots")?, number(row, 1, "compatibility")?)))
    }
}

fn too_low(level: i64) -> String {
    format!(
        "the database's compatibility level is {level}: appends and leases need \
         {LEAST_COMPATIBILITY} (SQL Server 2016) or above; ALTER DATABASE … SET \
         COMPATIBILITY_LEVEL = {LEAST_COMPATIBILITY}"
    )
}
