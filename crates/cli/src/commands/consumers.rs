//! `consumers list` and `consumers remove`.
//!
//! What lives here: who reads the feed, and forgetting one that is dead. What does not: lag and
//! warnings (`status.rs`).
//! Invariant: removing asks first; what is removed is said to be gone for good.

use std::process::ExitCode;

use anyhow::{Result, bail};
use postrider_core::{ConsumerName, ConsumerProgress, Feed};
use serde_json::json;

use super::dead_letters::confirm;
use super::{block_on, open, source_config};
use crate::args::{ConsumersCommand, Global};
use crate::exit::SourceContext;
use crate::output::{Cell, Output, escape, time};

/// Runs the subcommand.
///
/// # Errors
/// When the database fails, or the consumer is unknown or in use.
pub(super) fn run(global: &Global, command: ConsumersCommand, output: Output) -> Result<ExitCode> {
    let config = source_config(global)?;
    block_on(async {
        match command {
            ConsumersCommand::List => {
                let opened = open(&config).await?;
                let progress = opened.store.progress().await.source_context("read checkpoints")?;
                list(&progress, &*opened.feed, output)
            }
            ConsumersCommand::Remove { name, yes } => {
                let question = format!(
                    "forget consumer {}: its checkpoints and its dead letters, for good?",
                    escape(name.as_str())
                );
                confirm(&question, yes)?;
                let opened = open(&config).await?;
                remove(&*opened.store, &name, output).await
            }
        }
    })
}

fn list(progress: &[ConsumerProgress], feed: &dyn Feed, output: Output) -> Result<ExitCode> {
    if output.json {
        let list = progress.iter().map(super::status::progress_json).collect::<Vec<_>>();
        output.json_document(&json!({ "consumers": list }))?;
        return Ok(ExitCode::SUCCESS);
    }
    if progress.is_empty() {
        output.line("no consumer yet: a sink becomes one at its first checkpoint")?;
        return Ok(ExitCode::SUCCESS);
    }
    let rows: Vec<_> = progress
        .iter()
        .map(|one| {
            vec![
                Cell::plain(one.consumer.as_str()),
                Cell::plain(one.partition.as_str()),
                Cell::plain(feed.describe(&one.checkpoint.position)),
                Cell::plain(time(one.checkpoint.updated_at)),
                Cell::number(one.pending),
                Cell::plain(if one.ended { "ended" } else { "" }),
            ]
        })
        .collect();
    output.table(&["CONSUMER", "PARTITION", "CHECKPOINT", "WRITTEN", "PENDING", ""], &rows)?;
    Ok(ExitCode::SUCCESS)
}

async fn remove(
    store: &dyn postrider_core::RelayStore,
    name: &ConsumerName,
    output: Output,
) -> Result<ExitCode> {
    if !store.remove_consumer(name).await.source_context("remove the consumer")? {
        bail!("there is no consumer {}; see postrider consumers list", escape(name.as_str()));
    }
    if output.json {
        output.json_line(&json!({ "removed": name.as_str() }))?;
    } else {
        output.line(format!("consumer {} is forgotten", escape(name.as_str())))?;
    }
    Ok(ExitCode::SUCCESS)
}
