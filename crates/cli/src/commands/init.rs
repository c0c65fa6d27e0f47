//! `init`: create the outbox and everything beside it.
//!
//! What lives here: asking for it and saying what stands now. What does not: the SQL (each store).
//! Invariant: running it again changes nothing.

use std::process::ExitCode;

use anyhow::Result;
use postrider_core::ConsumerName;
use serde_json::json;

use super::{block_on, open_with, source_config};
use crate::args::{Global, InitArgs};
use crate::compose::{self, OnSchema};
use crate::exit::SourceContext;
use crate::output::{Output, Tone, escape};

/// Creates or upgrades the schema, or prints its SQL.
///
/// # Errors
/// When the database can't be opened or changed.
pub(super) fn run(global: &Global, args: &InitArgs, output: Output) -> Result<ExitCode> {
    let config = source_config(global)?;
    if args.sql {
        let sql = compose::schema_sql(&config.source)?;
        if output.json {
            output.json_line(&json!({ "sql": sql }))?;
        } else {
            output.line(sql.trim_end())?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    block_on(async {
        let opened = open_with(&config, OnSchema::Create).await?;
        let partitions = opened.source.partitions(&ConsumerName::new("init")?).await;
        let partitions = partitions.source_context("list partitions")?.len();
        if output.json {
            output.json_line(&json!({
                "source": opened.shown,
                "identity": opened.source.identity(),
                "partitions": partitions,
            }))?;
        } else {
            let text = match &opened.log {
                Some(log) => format!("{} is ready: {}", opened.shown, log.made()),
                None => format!("{} is ready, with {partitions} partitions", opened.shown),
            };
            output.line(output.paint(Tone::Good, text))?;
            let asked = compose::partitions_asked(&config.source);
            if let Some(asked) = asked.filter(|asked| *asked != partitions as u64) {
                let text = format!(
                    "[source] partitions = {asked} changes nothing: an outbox that exists keeps \
                     its number"
                );
                output.line(output.paint(Tone::Warn, text))?;
            }
            for text in opened.advice().await.weaker {
                let word = output.paint(Tone::Faint, "advice:");
                output.line(format!("{word} {}", escape(&text)))?;
            }
        }
        Ok(ExitCode::SUCCESS)
    })
}
