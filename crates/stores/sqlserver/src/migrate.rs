//! Creating and upgrading the tables.
//!
//! What lives here: the embedded scripts, cut into batches, and when they run. What does not: the
//! SQL itself, which stands in `migrations/`.
//! Invariant: the scripts can be run again at any time; several processes that do so at once wait
//! for each other; a database of a newer version is never touched.

use postrider_core::{Error, Result};

use crate::config::{SchemaOnOpen, SqlServerOptions};
use crate::connections::{Connections, Param};
use crate::leases::short_answer;
use crate::names::Names;
use crate::row::number;
use crate::sql;

/// In order: feeds on any table, then what a relay needs.
const SCRIPTS: [&str; 2] = [
    include_str!("../migrations/0001_changefeed.sql"),
    include_str!("../migrations/0002_relay.sql"),
];

/// The version of the tables that this program writes and reads, for `status`.
pub const SCHEMA_VERSION: i64 = 2;

/// All SQL that [`SqlServerStore::open`](crate::SqlServerStore::open) runs on a new database, for
/// review: for `sqlcmd`, or any tool that ends a batch at a line `go`.
pub fn schema_sql(options: &SqlServerOptions) -> String {
    let names = Names::new(&options.schema);
    let scripts = SCRIPTS.map(|script| names.fill(script).into_owned()).join("\n");
    let first = sql::PARTITION_FIRST.replace("@P1", &options.partitions.to_string());
    format!("{scripts}\n{}go\n", names.fill(&first))
}

/// The batches of a script: what stands between lines that say `go` alone.
pub(crate) fn batches(script: &str) -> impl Iterator<Item = &str> {
    let mut rest = script;
    std::iter::from_fn(move || {
        loop {
            if rest.trim().is_empty() {
                return None;
            }
            let (batch, after) = cut(rest);
            rest = after;
            if !batch.trim().is_empty() {
                return Some(batch);
            }
        }
    })
}

/// What stands before the first line `go`, and after it.
fn cut(script: &str) -> (&str, &str) {
    let mut at = 0;
    for line in script.split_inclusive('\n') {
        if line.trim().eq_ignore_ascii_case("go") {
            return (&script[..at], &script[at + line.len()..]);
        }
        at += line.len();
    }
    (script, "")
}

async fn version(connections: &Connections, names: &Names) -> Result<i64> {
    let place = "read the schema version";
    let sets = connections.run(place, &names.fill(sql::VERSION), &[]).await?;
    let row = sets.last().and_then(|set| set.first()).ok_or_else(|| short_answer(place))?;
    number(row, 0, "version")
}

fn refuse_newer(found: i64) -> Result<()> {
    if found > SCHEMA_VERSION {
        return Err(Error::corrupt(format!(
            "Postrider's tables have version {found}, this program knows {SCHEMA_VERSION}; install \
             the newer program, never the older one over newer tables"
        )));
    }
    Ok(())
}

/// Looks at the tables, and makes them if the options ask for it.
pub(crate) async fn open(
    connections: &Connections,
    options: &SqlServerOptions,
    names: &Names,
) -> Result<()> {
    let found = version(connections, names).await?;
    refuse_newer(found)?;
    if found == SCHEMA_VERSION {
        return Ok(());
    }
    if options.on_open == SchemaOnOpen::Require {
        return Err(Error::permanent(format!(
            "Postrider's tables have version {found}, this program needs {SCHEMA_VERSION}; run \
             `postrider init` first"
        )));
    }
    let place = "create Postrider's tables";
    let scripts = [sql::INIT_LOCK, SCRIPTS[0], SCRIPTS[1]];
    connections.run_scripts(place, &scripts.map(|script| names.fill(script).into_owned())).await?;
    let partitions = i32::try_from(options.partitions).unwrap_or(i32::MAX);
    let params: [Param<'_>; 1] = [&partitions];
    connections.run(place, &names.fill(sql::PARTITION_FIRST), &params).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_end_at_lines_that_say_go_alone() {
        let script = "a\ngo\n\n  GO  \nb -- go on\nlet it go\n\ngo\r\nc";
        let found: Vec<&str> = batches(script).map(str::trim).collect();
        assert_eq!(found, ["a", "b -- go on\nlet it go", "c"]);
        assert_eq!(batches("go\n \ngo").count(), 0);
    }

    #[test]
    fn the_schemas_name_is_the_users() {
        let options = SqlServerOptions::new("").schema("mail");
        let text = schema_sql(&options);
        assert!(text.contains("[mail].[feed]") && !text.contains("[changefeed]"));
        assert!(text.ends_with("exec [mail].[create_partitions] 8;\ngo\n"), "the last batch");
    }
}
