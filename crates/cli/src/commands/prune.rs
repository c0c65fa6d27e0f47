//! `prune`: delete events that every consumer has passed.
//!
//! What lives here: repeating the store's batches with progress. What does not: deciding what may
//! go, which is the store's.
//! Invariant: nothing beyond the slowest consumer's checkpoint is deleted; the store holds it.

use std::process::ExitCode;

use anyhow::Result;
use postrider_core::RetentionPolicy;
use serde_json::json;

use super::{block_on, open, source_config};
use crate::args::{Global, PruneArgs};
use crate::config::value::show_duration;
use crate::exit::{SourceContext, Usage};
use crate::output::Output;

/// Prunes until nothing is left to prune.
///
/// # Errors
/// When the database refuses; what was deleted before stays deleted.
pub(super) fn run(global: &Global, args: &PruneArgs, output: Output) -> Result<ExitCode> {
    let config = source_config(global)?;
    let keep = args.keep.or(config.relay.retention).ok_or_else(|| {
        Usage("[relay] retention is off; say how much to keep with --keep".to_owned())
    })?;
    let policy = RetentionPolicy {
        keep,
        // A dry run deletes nothing, so one look may count everything.
        batch: if args.dry_run { u32::MAX } else { config.relay.prune_batch },
        dry_run: args.dry_run,
    };
    block_on(async {
        let opened = open(&config).await?;
        let progress = output.progress("events pruned");
        let (mut events, mut horizon) = (0, None);
        loop {
            let pruned = opened.store.prune(None, &policy).await.source_context("prune")?;
            events += pruned.events;
            horizon = pruned.horizon.or(horizon);
            progress.set_position(events);
            if !pruned.more || args.dry_run {
                break;
            }
        }
        progress.finish_and_clear();
        let horizon = horizon.map(|position| position.to_string());
        if output.json {
            output.json_line(
                &json!({ "events": events, "horizon": horizon, "dryRun": args.dry_run }),
            )?;
        } else {
            let verb = if args.dry_run { "could be pruned" } else { "pruned" };
            // A store may free their room later than it forgets them.
            let unread = match horizon {
                Some(horizon) if args.dry_run => format!("; the oldest place would be {horizon}"),
                Some(horizon) => format!("; the oldest place to read from is now {horizon}"),
                None => String::new(),
            };
            output.line(format!(
                "{events} events {verb}: older than {} and passed by every consumer{unread}",
                show_duration(keep)
            ))?;
        }
        Ok(ExitCode::SUCCESS)
    })
}
