//! `dead-letters list|show|requeue|skip|drop`.
//!
//! What lives here: showing them and settling them. What does not: their rules (core, stores).
//! Invariant: payloads are shown only when asked for; deleting asks first.

use std::io::Write;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use postrider_core::{
    DeadLetter, DeadLetterFilter, DeadLetterId, DeadLetterState, Entry, RelayStore,
};
use serde_json::{Value as Json, json};

use super::tail::{headers_json, insert_payload};
use super::{block_on, open, source_config};
use crate::args::{DeadLettersCommand, Global, SettleArgs};
use crate::exit::{SourceContext, Usage};
use crate::output::{Cell, Output, Tone, escape, is_interactive, time};

/// Runs the subcommand.
///
/// # Errors
/// When the database fails, or nothing matches what was named.
pub(super) fn run(
    global: &Global,
    command: DeadLettersCommand,
    output: Output,
) -> Result<ExitCode> {
    let config = source_config(global)?;
    let prepared = Prepared::of(command)?;
    block_on(async {
        let opened = open(&config).await?;
        let store = &*opened.store;
        match prepared {
            Prepared::List(filter, limit) => list(store, &filter, limit, output).await,
            Prepared::Show(id, payload) => show(store, id, payload, output).await,
            Prepared::Settle(verb, filter) => settle(store, verb, &filter, output).await,
        }
    })
}

/// A command whose questions were answered.
enum Prepared {
    List(DeadLetterFilter, usize),
    Show(DeadLetterId, bool),
    Settle(Verb, DeadLetterFilter),
}

#[derive(Clone, Copy)]
enum Verb {
    Requeue,
    Skip,
    Drop,
}

impl Prepared {
    fn of(command: DeadLettersCommand) -> Result<Self> {
        match command {
            DeadLettersCommand::List { filter, limit } => Ok(Self::List(filter.filter(), limit)),
            DeadLettersCommand::Show { id, payload } => {
                Ok(Self::Show(DeadLetterId::new(id), payload))
            }
            DeadLettersCommand::Requeue(args) => Self::settle(Verb::Requeue, &args),
            DeadLettersCommand::Skip(args) => {
                Self::settle_asked(Verb::Skip, &args, "give up what matches?")
            }
            DeadLettersCommand::Drop(args) => {
                Self::settle_asked(Verb::Drop, &args, "delete what matches, for good?")
            }
        }
    }

    fn settle(verb: Verb, args: &SettleArgs) -> Result<Self> {
        let filter = args.filter.filter();
        if filter == DeadLetterFilter::default() && !args.all {
            let text = "this would mean every dead letter; give a filter (--id, --sink, --key, \
                        --state), or --all";
            return Err(Usage(text.to_owned()).into());
        }
        Ok(Self::Settle(verb, filter))
    }

    fn settle_asked(verb: Verb, args: &SettleArgs, question: &str) -> Result<Self> {
        let prepared = Self::settle(verb, args)?;
        confirm(question, args.yes)?;
        Ok(prepared)
    }
}

/// Asks a person; without one, `--yes` is the only way on.
///
/// # Errors
/// When the answer is not yes, or nobody can be asked.
pub(super) fn confirm(question: &str, yes: bool) -> Result<()> {
    if yes {
        return Ok(());
    }
    if !is_interactive() {
        let text = format!("{question} There is no terminal to answer at: add --yes");
        return Err(Usage(text).into());
    }
    eprint!("{question} [y/N] ");
    std::io::stderr().flush().context("ask")?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer).context("read the answer")?;
    if !matches!(answer.trim().to_ascii_lowercase().as_str(), "y" | "yes") {
        bail!("nothing was changed");
    }
    Ok(())
}

/// Letters come with their payloads, so that a page is kept small.
const PAGE: usize = 16;

async fn list(
    store: &dyn RelayStore,
    filter: &DeadLetterFilter,
    limit: usize,
    output: Output,
) -> Result<ExitCode> {
    let (mut shown, mut after, mut rows) = (0, None, Vec::new());
    while shown < limit {
        let want = PAGE.min(limit - shown);
        let page = store.list(filter, after, want).await.source_context("list dead letters")?;
        let Some(last) = page.last() else { break };
        after = Some(last.id);
        shown += page.len();
        for letter in &page {
            if output.json {
                output.json_line(&letter_json(letter, false))?;
            } else {
                rows.push(row(letter));
            }
        }
    }
    if output.json {
        return Ok(ExitCode::SUCCESS);
    }
    if rows.is_empty() {
        output.line("no dead letters")?;
        return Ok(ExitCode::SUCCESS);
    }
    let heading = ["ID", "STATE", "SINK", "KEY", "TYPE", "PARKED", "TRIES", "REASON"];
    output.table(&heading, &rows)?;
    if shown == limit
        && !store.list(filter, after, 1).await.source_context("list dead letters")?.is_empty()
    {
        output.line(output.paint(Tone::Faint, "there are more; raise --limit"))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn row(letter: &DeadLetter) -> Vec<Cell> {
    let (key, event_type) = match &letter.entry {
        Entry::Record(record) => (record.event.key().as_str(), record.event.event_type().as_str()),
        Entry::Malformed(malformed) => {
            (malformed.key.as_ref().map_or("", |key| key.as_str()), "(unreadable)")
        }
    };
    vec![
        Cell::number(letter.id.get()),
        Cell::toned(state_name(letter.state), tone(letter.state)),
        Cell::plain(letter.consumer.as_str()),
        Cell::plain(key),
        Cell::plain(event_type),
        Cell::plain(time(letter.parked_at)),
        Cell::number(u64::from(letter.attempts)),
        Cell::plain(&letter.reason),
    ]
}

async fn show(
    store: &dyn RelayStore,
    id: DeadLetterId,
    payload: bool,
    output: Output,
) -> Result<ExitCode> {
    let filter = DeadLetterFilter { ids: vec![id], ..DeadLetterFilter::default() };
    let found = store.list(&filter, None, 1).await.source_context("read the dead letter")?;
    let Some(letter) = found.first() else {
        bail!("there is no dead letter {}; see postrider dead-letters list", id.get());
    };
    let document = letter_json(letter, payload);
    if output.json {
        output.json_document(&document)?;
        return Ok(ExitCode::SUCCESS);
    }
    for (name, value) in document.as_object().into_iter().flatten() {
        let value = match value {
            Json::String(text) => escape(text).into_owned(),
            Json::Null => continue,
            other => other.to_string(),
        };
        let name = output.paint(Tone::Strong, format!("{name:<13}"));
        output.line(format!("{name} {value}"))?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn settle(
    store: &dyn RelayStore,
    verb: Verb,
    filter: &DeadLetterFilter,
    output: Output,
) -> Result<ExitCode> {
    let (count, name) = match verb {
        Verb::Requeue => (store.requeue(filter).await.source_context("requeue")?, "requeued"),
        Verb::Skip => (store.skip(filter).await.source_context("skip")?, "skipped"),
        Verb::Drop => (store.discard(filter).await.source_context("drop")?, "dropped"),
    };
    if output.json {
        output.json_line(&json!({ name: count }))?;
    } else if count == 0 {
        let which = match verb {
            Verb::Requeue => "is parked or skipped",
            Verb::Skip => "is parked or requeued",
            Verb::Drop => "is there",
        };
        output.line(format!("0 {name}: nothing that matches {which}"))?;
    } else {
        output.line(format!("{count} {name}"))?;
    }
    // Numbers that were named and match nothing are a mistake worth a code of its own.
    let named = !filter.ids.is_empty();
    Ok(if named && count == 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn letter_json(letter: &DeadLetter, payload: bool) -> Json {
    let mut document = json!({
        "id": letter.id.get(),
        "state": state_name(letter.state),
        "sink": letter.consumer.as_str(),
        "partition": letter.partition.as_str(),
        "position": letter.entry.position().to_string(),
        "key": letter.entry.key().map(|key| key.as_str()),
        "attempts": letter.attempts,
        "parkedAt": time(letter.parked_at),
        "updatedAt": time(letter.updated_at),
        "reason": letter.reason,
    });
    match &letter.entry {
        Entry::Record(record) => {
            let event = &record.event;
            document["eventId"] = Json::from(event.id().to_string());
            document["topic"] = Json::from(event.topic().as_str());
            document["type"] = Json::from(event.event_type().as_str());
            document["contentType"] = Json::from(event.content_type().as_str());
            document["payloadBytes"] = Json::from(event.payload().len());
            document["appendedAt"] = Json::from(time(record.appended_at));
            if payload {
                document["headers"] = headers_json(event.headers());
                insert_payload(&mut document, event.payload());
            }
        }
        Entry::Malformed(malformed) => {
            document["malformed"] = Json::from(malformed.reason.as_str());
            document["payloadBytes"] = Json::from(malformed.raw.len());
            document["appendedAt"] = Json::from(time(malformed.appended_at));
            if payload {
                insert_payload(&mut document, &malformed.raw);
            }
        }
    }
    document
}

fn state_name(state: DeadLetterState) -> &'static str {
    match state {
        DeadLetterState::Parked => "parked",
        DeadLetterState::Waiting => "waiting",
        DeadLetterState::Requeued => "requeued",
        DeadLetterState::Skipped => "skipped",
    }
}

fn tone(state: DeadLetterState) -> Tone {
    match state {
        DeadLetterState::Parked => Tone::Bad,
        DeadLetterState::Waiting | DeadLetterState::Requeued => Tone::Warn,
        DeadLetterState::Skipped => Tone::Faint,
    }
}
