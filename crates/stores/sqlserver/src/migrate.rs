//! Creating and upgrading the tables.
//!
//! What lives here: the embedded scripts, cut into batches, and when they run. What does not: the
//! SQL itself, which stands in `migrations/`.
//! Invariant: the scripts can be run again at any time; several processes that do so at once wait
//! for each other; a database of a newer version is never touched.

use postrider_core::{Error, Result};
use uuid::Uuid;

use crate::config::{SchemaOnOpen, SqlServerOptions};
use crate::connections::{Connections, Param, Sets};
use crate::leases::short_answer;
use crate::names::Names;
use crate::row::{number, uuid};
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

fn version(sets: &Sets) -> Result<i64> {
    let row = sets.last().and_then(|set| set.first()).ok_or_else(|| short_answer(LOOK))?;
    let found = number(row, 0, "version")?;
    if found > SCHEMA_VERSION {
        return Err(Error::corrupt(format!(
            "Postrider's tables have version {found}, this program knows {SCHEMA_VERSION}; install \
             the newer program, never the older one over newer tables"
        )));
    }
    Ok(found)
}

const LOOK: &str = "read the schema version";
const MAKE: &str = "create Postrider's tables";
const KNOW: &str = "read the outbox's identity";

/// Makes the tables, unless another program has while its lock was waited for.
async fn make(connections: &Connections, names: &Names) -> Result<()> {
    let fill = |text| names.fill(text).into_owned();
    let (lock, look, scripts) = (fill(sql::INIT_LOCK), fill(sql::VERSION), SCRIPTS.map(fill));
    let work = connections.once(MAKE, move |once| {
        Box::pin(async move {
            once.say(&lock).await?;
            if version(&once.ask(&look).await?)? == SCHEMA_VERSION {
                return Ok(());
            }
            for batch in scripts.iter().flat_map(|script| batches(script)) {
                once.say(batch).await?;
            }
            Ok(())
        })
    });
    work.await
}

/// Which store this is; nothing before it has partitions.
async fn identity(connections: &Connections, names: &Names) -> Result<Option<Uuid>> {
    let sets = connections.run(KNOW, &names.fill(sql::IDENTITY), &[]).await?;
    let row = sets.last().and_then(|set| set.first());
    row.map(|row| uuid(row, 0, "store_id")).transpose()
}

/// Looks at the tables, makes them and the first partitions if the options ask for it, and tells
/// which store this is.
pub(crate) async fn open(
    connections: &Connections,
    options: &SqlServerOptions,
    names: &Names,
) -> Result<Uuid> {
    let asked = options.on_open == SchemaOnOpen::Migrate;
    let found = version(&connections.run(LOOK, &names.fill(sql::VERSION), &[]).await?)?;
    if found < SCHEMA_VERSION && !asked {
        return Err(Error::permanent(format!(
            "Postrider's tables have version {found}, this program needs {SCHEMA_VERSION}; run \
             `postrider init` first"
        )));
    }
    if found < SCHEMA_VERSION {
        make(connections, names).await?;
    }
    // What was cut short behind the tables is made up for.
    if let Some(id) = identity(connections, names).await? {
        return Ok(id);
    }
    if !asked {
        return Err(Error::permanent(
            "the outbox has no partitions yet; run `postrider init`, or call create_partitions of \
             its schema once",
        ));
    }
    let partitions = i32::try_from(options.partitions).unwrap_or(i32::MAX);
    let params: [Param<'_>; 1] = [&partitions];
    connections.run(MAKE, &names.fill(sql::PARTITION_FIRST), &params).await?;
    identity(connections, names).await?.ok_or_else(|| short_answer(KNOW))
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
