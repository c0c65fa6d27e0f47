//! `replay`: publish a part of the feed to one sink again.
//!
//! What lives here: choosing the sink and the range, progress, the report. What does not: sending
//! (the relay's `Replay`).
//! Invariant: no checkpoint moves and no lease is taken, so that it can run beside a relay.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result};
use postrider_core::{ConsumerName, EventId, StartFrom};
use postrider_relay::{Replay, ReplayReport, SystemClock};
use serde_json::json;

use super::run::{OpenSink, open_sinks};
use super::{block_on, full_config, open};
use crate::args::{Global, ReplayArgs};
use crate::config::Config;
use crate::exit::{SourceContext, Usage};
use crate::output::{Output, Tone, escape};

/// Replays, or counts with `--dry-run`.
///
/// # Errors
/// When the range is refused or the database fails. Exit code 1 when the sink refused an event.
pub(super) fn run(global: &Global, args: &ReplayArgs, output: Output) -> Result<ExitCode> {
    let config = full_config(global)?;
    let (to_time, to_position) = match args.to.clone() {
        StartFrom::Now => (Some(postrider_core::Clock::now(&SystemClock)), None),
        StartFrom::Time(time) => (Some(time), None),
        StartFrom::After(position) => (None, Some(position)),
        StartFrom::Oldest => {
            return Err(Usage("--to oldest is before every event; name a later end".into()).into());
        }
    };
    let name = chosen(&config, args.sink.as_ref())?;
    let (sink_config, sink) = only(open_sinks(&config)?, &name);
    block_on(async {
        let opened = open(&config).await?;
        let replay = Replay {
            feed: Arc::clone(&opened.feed),
            sink: (!args.dry_run).then(|| Arc::clone(&sink)),
            clock: Arc::new(SystemClock),
            from: args.from.clone(),
            to_time,
            to_position,
            key: args.key.clone(),
            new_ids: args.new_ids.then(|| {
                let fresh = || EventId::from_uuid(uuid::Uuid::now_v7());
                Box::new(fresh) as Box<dyn Fn() -> EventId + Send + Sync>
            }),
            retry: sink_config.retry,
        };
        let bar = output.progress(if args.dry_run { "events counted" } else { "events published" });
        let consumer = ConsumerName::new("postrider-replay")?;
        let report = tokio::select! {
            report = replay.run(&consumer, |progress| {
                bar.set_position(if args.dry_run { progress.matched } else { progress.published });
            }) => report.source_context("replay")?,
            interrupted = tokio::signal::ctrl_c() => {
                interrupted.context("listen for SIGINT")?;
                anyhow::bail!("interrupted; what was published until now stays published");
            }
        };
        bar.finish_and_clear();
        sink.close().await.context("close the sink")?;
        print(&report, &name, args, output)
    })
}

fn chosen(config: &Config, asked: Option<&ConsumerName>) -> Result<ConsumerName> {
    let names: Vec<_> = config.sinks.iter().map(|sink| sink.name.as_str()).collect();
    let names = names.join(", ");
    match (asked, config.sinks.as_slice()) {
        (Some(name), sinks) if sinks.iter().any(|sink| sink.name == *name) => Ok(name.clone()),
        (Some(name), _) => {
            let text = format!("there is no sink {}; there are {names}", escape(name.as_str()));
            Err(Usage(text).into())
        }
        (None, [only]) => Ok(only.name.clone()),
        (None, _) => Err(Usage(format!("say which sink with --sink: {names}")).into()),
    }
}

fn only(sinks: Vec<OpenSink>, name: &ConsumerName) -> OpenSink {
    let found = sinks.into_iter().find(|(config, _)| config.name == *name);
    found.expect("the name was chosen among these sinks")
}

fn print(
    report: &ReplayReport,
    name: &ConsumerName,
    args: &ReplayArgs,
    output: Output,
) -> Result<ExitCode> {
    let progress = &report.progress;
    if output.json {
        let failed = report.failed.iter().map(
            |(position, reason)| json!({ "position": position.to_string(), "reason": reason }),
        );
        output.json_line(&json!({
            "sink": name.as_str(),
            "read": progress.read,
            "matching": progress.matched,
            "published": progress.published,
            "duplicates": progress.duplicates,
            "failures": report.failures,
            "failed": failed.collect::<Vec<_>>(),
            "dryRun": args.dry_run,
        }))?;
    } else if args.dry_run {
        output.line(format!(
            "{} of {} events match; nothing was published",
            progress.matched, progress.read
        ))?;
    } else {
        for (position, reason) in &report.failed {
            let text = format!("not published: {position}: {}", escape(reason));
            output.line(output.paint(Tone::Bad, text))?;
        }
        let had = match progress.duplicates {
            0 => String::new(),
            some => format!("; {some} of them the broker had already, see --new-ids"),
        };
        output.line(format!(
            "{} of {} matching events published to {}{had}",
            progress.published,
            progress.matched,
            escape(name.as_str())
        ))?;
    }
    Ok(if report.failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
